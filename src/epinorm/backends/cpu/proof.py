"""A freshly loaded library computes something known before it is believed, or kept on disk.

A few values of three rows, forward and backward, within a few percent of PyTorch's: what a compiler
that lies, a C library of another version or a wrong processor does is off by far more.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cpu import abi
from epinorm.backends.cpu.blocks import choose_blocks
from epinorm.chain import GroupNorm
from epinorm.chain.pointwise import Argument, complement
from epinorm.chain.reference import epilogue
from epinorm.problem import Problem

ROWS, GROUPS, WIDTH, DEPTH = 3, 2, 8, 5
SEED = 0x123456789ABCDEF0
TOLERANCE = 0.03
"""Of a value and of the mean value: bf16 rounds to 0.004."""
SHARE = 0.9
"""Of the values that must be right: an operation may jump where one of them happens to lie."""

_NUMBERS = {"power_of_two": 2.0, "min": -0.75, "max": 1.25, "min_val": -0.75, "max_val": 1.25}
"""What constants are taken to be where the kernel is for any; others are 0.5."""

_FORWARD = CFUNCTYPE(None, c_void_p, *[c_int64] * 2, *[c_void_p, c_int64] * 2, c_void_p)
_BACKWARD = CFUNCTYPE(None, c_void_p, *[c_int64] * 2, *[c_void_p, c_int64] * 3, *[c_void_p] * 2)
_FOLD = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)


class Disproved(RuntimeError):
    """A library computes something else than it should."""


def _apart(check: Callable[[], None]) -> None:
    """Run it in a thread of its own, where none of the caller's modes and transforms hold."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            check()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="epinorm proof")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _values(seed: int, *shape: int) -> Tensor:
    """Numbers between -2 and 2 that look drawn at random."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64, device="cpu")
    return 2 * torch.cos(count * (seed + 1) * 1.7).reshape(shape)


def _require(found: Tensor, exact: Tensor, single: Tensor) -> None:
    """Compare where fp32 would come near to the truth."""
    sound = exact.isfinite() & (exact.abs() < 1e30)
    scale = exact[sound].abs().mean()
    error = (single.double() - exact).abs()
    sound &= error <= TOLERANCE / 10 * (exact.abs() + scale)
    right = (found.double() - exact).abs() <= TOLERANCE * (exact.abs() + scale)
    if sound.any() and right[sound].double().mean() < SHARE:
        raise Disproved("what it computes is not what PyTorch computes")


def prove_kernel(library: ctypes.CDLL, problem: Problem) -> None:
    """Raise Disproved unless the library computes the problem's chain and its gradients."""
    _apart(lambda: _prove_kernel(library, problem))


def _prove_kernel(library: ctypes.CDLL, problem: Problem) -> None:
    norm, groups = problem.chain.norm, 1
    assert norm is not None  # else there is no kernel
    eps = torch.finfo(problem.stats_dtype).eps if norm.eps is None else norm.eps
    norm = dataclasses.replace(norm, eps=eps)
    if problem.chain.has_groups:
        norm, groups = dataclasses.replace(norm, num_groups=GROUPS), GROUPS
    places = problem.chain.arguments
    numbers = [_NUMBERS.get(c.name, 0.5) if isinstance(c, Argument) else c for c in places]
    named = [v for v, c in zip(numbers, places, strict=True) if isinstance(c, Argument)]
    chain, n = dataclasses.replace(problem.chain.filled(named), norm=norm), groups * WIDTH
    constants = (c_double * max(1, len(numbers)))(*complement(numbers, chain.complemented))
    kinds = chain.operand_kinds
    z, dy = _values(0, ROWS, n).to(problem.dtype), _values(1, ROWS, n).to(problem.out_dtype)
    of_kind = {"channel": (n,), "row": (ROWS, 1)}
    shapes = [(n,), (n,), *(of_kind.get(kind, (ROWS, n)) for kind in kinds)]
    parameters = [_values(i + 2, *s).to(problem.norm_dtype) for i, s in enumerate(shapes)]
    for i, kind in enumerate(kinds):
        if kind == "seed":
            parameters[i + 2] = torch.tensor([SEED])
    mean, rstd = (torch.empty(ROWS, groups, dtype=problem.stats_dtype) for _ in range(2))
    total, dsum = (_values(i, ROWS, n).to(problem.sum_dtype) for i in (11, 12))
    returns_sum = chain.returns_sum

    kernel = abi.Kernel()
    library.epinorm_describe(n, groups, ctypes.byref(kernel))
    pointers = (c_void_p * max(1, len(kinds)))(*(t.data_ptr() for t in parameters[2:]))
    strides = (c_int64 * max(1, len(kinds)))(*({"element": n, "row": 1}.get(k, 0) for k in kinds))
    gradients = (c_void_p * max(1, len(kinds)))()
    call = abi.Call(
        *(n, groups, eps, ctypes.addressof(constants)),
        *(parameters[0].data_ptr(), parameters[1].data_ptr()),
        *(ctypes.addressof(pointers), ctypes.addressof(strides), ctypes.addressof(gradients)),
        *(mean.data_ptr() if norm.centred else None, rstd.data_ptr()),
        *((total.data_ptr(), dsum.data_ptr(), n) if returns_sum else (None, None, 0)),
    )
    scratch = torch.zeros(kernel.scratch_bytes, dtype=torch.uint8)
    sums = torch.zeros(kernel.sums_bytes, dtype=torch.uint8)
    totals = torch.zeros(kernel.totals, n, dtype=torch.float64)
    y, dz, at = torch.empty_like(dy), torch.empty_like(z), ctypes.addressof(call)
    _FORWARD(kernel.forward)(at, 0, ROWS, z.data_ptr(), n, y.data_ptr(), n, scratch.data_ptr())
    saved = total if chain.saves_sum else z
    _BACKWARD(kernel.backward)(
        *(at, 0, ROWS, saved.data_ptr(), n, dy.data_ptr(), n, dz.data_ptr(), n),
        *(sums.data_ptr(), scratch.data_ptr()),
    )
    _FOLD(kernel.fold)(at, sums.data_ptr(), totals.data_ptr())

    def truth(dtype: torch.dtype) -> list[Tensor]:
        leaves = [
            t.to(dtype).detach().requires_grad_() if t.is_floating_point() else t
            for t in (z, *parameters)
        ]
        results = epilogue(leaves[0], chain, leaves[1], leaves[2], leaves[3:])
        exact = results if isinstance(results, tuple) else (results,)
        given = [dy.to(dtype), dsum.to(dtype)][: len(exact)]
        gradients = torch.autograd.grad(exact, leaves[:3], given)
        return [*gradients, *(t.detach() for t in exact)]

    found = [dz, totals[1], totals[2], y, *[total] * returns_sum]
    for one, exact, single in zip(found, truth(torch.float64), truth(torch.float32), strict=True):
        _require(one, exact, single)


def prove_runner(library: ctypes.CDLL, problem: Problem) -> None:
    """Raise Disproved unless the library multiplies, with a kernel that copies what it is given."""
    _apart(lambda: _prove_runner(library, problem))


def _prove_runner(library: ctypes.CDLL, problem: Problem) -> None:
    n = WIDTH
    dtypes: Any = dict.fromkeys(("dtype", "norm_dtype", "out_dtype"), torch.float32)
    chain = dataclasses.replace(problem.chain, norm=GroupNorm(1))
    small = dataclasses.replace(problem, m=ROWS, k=DEPTH, n=n, chain=chain, **dtypes)
    x, weight, bias = (
        _values(i, *s).float() for i, s in enumerate([(ROWS, DEPTH), (n, DEPTH), (n,)])
    )
    y = torch.empty(ROWS, n, dtype=torch.float32)

    def copy(
        _: int, __: int, rows: int, z: int, z_stride: int, y: int, y_stride: int, ___: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(y + row * y_stride * 4, z + row * z_stride * 4, n * 4)

    forward, blocks = _FORWARD(copy), choose_blocks(small, False)
    call = abi.Problem(
        abi.Call(n, 1, 0.0),
        abi.Kernel(ctypes.cast(forward, c_void_p), None, None, 64, 64, 0),
        abi.Blocks(
            *(blocks.rows, blocks.columns, blocks.inner, blocks.outer, blocks.chunks),
            *(blocks.dx_rows, blocks.packed),
        ),
        *(ROWS, DEPTH, *[abi.DTYPE_CODES[torch.float32]] * 3),
        *(x.data_ptr(), DEPTH, weight.data_ptr(), DEPTH, bias.data_ptr(), None, y.data_ptr(), n),
    )
    if library.epinorm_forward(call):
        raise Disproved(library.epinorm_message().decode(errors="replace"))
    exact = x.double() @ weight.double().T + bias.double()
    _require(y, exact, exact)
