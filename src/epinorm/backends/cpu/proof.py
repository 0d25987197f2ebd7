"""A freshly loaded library computes something known before it is believed, or kept on disk.

A few values of three rows, forward and backward, within a few percent of PyTorch's: what a compiler
that lies, a C library of another version or a wrong processor does is off by far more.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cpu import abi
from epinorm.backends.cpu.blocks import choose_blocks
from epinorm.backends.reference import ReferenceExecutable
from epinorm.chain import GroupNorm
from epinorm.chain.pointwise import OF_16_BITS, Argument
from epinorm.problem import Executable, Inputs, Layout, Problem, Wanted

ROWS, GROUPS, WIDTH, DEPTH = 3, 2, 16, 5
SEED = 0x123456789ABCDEF0
TOLERANCE = 0.03
"""Of a value and of the mean value: bf16 rounds to 0.004."""
SHARE = 0.9
"""Of the values that must be right: an operation may jump where one of them happens to lie."""

_NUMBERS = {"power_of_two": 2.0, "min": -0.75, "max": 1.25, "min_val": -0.75, "max_val": 1.25}
"""What constants are taken to be where the kernel is for any; others are 0.5."""

_FORWARD = CFUNCTYPE(None, c_void_p, *[c_int64] * 2, *[c_void_p, c_int64] * 2, c_void_p)


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


def _require(found: Tensor, exact: Tensor, eager: Tensor) -> None:
    """Compare where PyTorch's own layers, at most in fp32, come near to the truth."""
    sound = exact.isfinite() & (exact.abs() < 1e30)
    scale = exact[sound].abs().mean()
    error = (eager.double() - exact).abs()
    sound &= error <= TOLERANCE / 2 * (exact.abs() + scale)
    right = (found.double() - exact).abs() <= TOLERANCE * (exact.abs() + scale)
    if sound.any() and right[sound].double().mean() < SHARE:
        raise Disproved("what it computes is not what PyTorch computes")


def small(problem: Problem) -> Problem:
    """The problem of a few values, and with a gradient, that ``prove_kernel`` tries."""
    norm, groups = problem.chain.norm, 1
    assert norm is not None  # else there is no kernel
    if problem.chain.has_groups:
        norm, groups = replace(norm, num_groups=GROUPS), GROUPS
    given: Any = dict.fromkeys(("has_bias", "has_norm_weight", "has_norm_bias", "training"), True)
    sizes: Any = {"m": ROWS, "k": DEPTH, "n": groups * WIDTH}
    return replace(problem, chain=replace(problem.chain, norm=norm), **sizes, **given)


def prove_kernel(executable: Executable) -> None:
    """Raise Disproved unless it computes its problem, and gradients, as PyTorch does."""
    _apart(lambda: _prove_kernel(executable))


def _prove_kernel(executable: Executable) -> None:
    problem, chain = executable.problem, executable.problem.chain
    m, k, n, kinds = problem.m, problem.k, problem.n, chain.operand_kinds
    names = (c.name for c in chain.arguments if isinstance(c, Argument))
    constants = tuple(_NUMBERS.get(name.removesuffix(OF_16_BITS), 0.5) for name in names)
    of_kind = {"channel": (n,), "row": (m, 1)}
    shapes = [(m, k), (n, k), (n,), (n,), (n,), *(of_kind.get(kind, (m, n)) for kind in kinds)]
    dtypes = [problem.dtype] * 3 + [problem.norm_dtype] * (2 + len(kinds))
    given = [_values(i, *s).to(d) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
    for i, kind in enumerate(kinds):
        if kind == "seed":
            given[5 + i] = torch.tensor([SEED])
    given += [_values(i, m, n).to(d) for i, d in ((11, problem.out_dtype), (12, problem.sum_dtype))]
    # Not of x: where an operation jumps, a whole row of it would differ.
    differentiable = tuple(kind in ("channel", "element") for kind in kinds)
    want = Wanted(False, True, True, True, True, differentiable)

    def results(made: Executable, dtype: torch.dtype | None = None) -> list[Tensor]:
        tensors: Any = [t if t.dtype == torch.int64 else t.to(dtype or t.dtype) for t in given]
        *tensors, dy, dsum = tensors
        inputs = Inputs(*(*tensors[:5], tuple(tensors[5:]), constants))
        kept = made.forward(*inputs)
        saved = kept._replace(z=kept.saved(chain))
        total = dsum if chain.returns_sum else None
        found = made.backward(inputs, [saved], dy, want, None, None, total)
        return [t for t in (kept.y, kept.second, *found[:5], *found.operands) if t is not None]

    def by_layers(dtype: torch.dtype | None) -> list[Tensor]:
        named: Any = dict.fromkeys(("dtype", "norm_dtype", "out_dtype"), dtype) if dtype else {}
        made = replace(problem, **named), executable.plan, Layout(k, k, (m, n))
        return results(ReferenceExecutable(*made), dtype)

    eager = by_layers(torch.float32 if problem.dtype == torch.float64 else None)
    for triple in zip(results(executable), by_layers(torch.float64), eager, strict=True):
        _require(*triple)


def prove_runner(library: ctypes.CDLL, problem: Problem) -> None:
    """Raise Disproved unless the library multiplies, with a kernel that copies what it is given."""
    _apart(lambda: _prove_runner(library, problem))


def _prove_runner(library: ctypes.CDLL, problem: Problem) -> None:
    n = WIDTH
    dtypes: Any = dict.fromkeys(("dtype", "norm_dtype", "out_dtype"), torch.float32)
    chain = replace(problem.chain, norm=GroupNorm(1))
    small = replace(problem, m=ROWS, k=DEPTH, n=n, chain=chain, **dtypes)
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
        abi.Blocks(*blocks[:-1]),
        *(ROWS, DEPTH, *[abi.DTYPE_CODES[torch.float32]] * 3),
        *(x.data_ptr(), DEPTH, weight.data_ptr(), DEPTH, bias.data_ptr(), None, y.data_ptr(), n),
    )
    if library.epinorm_forward(call):
        raise Disproved(library.epinorm_message().decode(errors="replace"))
    exact = x.double() @ weight.double().T + bias.double()
    _require(y, exact, exact)
