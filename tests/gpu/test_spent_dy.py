"""A backward pass that writes dz over dy gives the bits of one that does not: hard inputs, memory.

tests/cuda/test_spent_dy.py says which do.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from epinorm.backends.cuda.runtime.native import native, settle
from epinorm.capture.backend import compile_graph
from epinorm.chain import Chain
from epinorm.operator import dispatch
from epinorm.operator.schema import (
    linear_norm_backward,
    linear_norm_backward_begin,
    linear_norm_backward_end,
    linear_norm_forward,
    spending_dy,
)

pytestmark = pytest.mark.gpu


def ordinary(*size: int) -> Tensor:
    return torch.randn(size, device="cuda")


def with_outliers(*size: int) -> Tensor:
    """Values that planes do not hold: the range guard reads dz in fp32."""
    made = torch.randn(size, device="cuda")
    made.flatten()[:: 7 * size[-1] + 1] *= 1e-30
    made.flatten()[3 :: 31 * size[-1] + 5] = float("nan")
    return made


def step(m: int, k: int, n: int, chain: str, values: Any) -> tuple[Any, ...]:
    """What a backward pass is given."""
    parsed = Chain.parse(chain)
    facts = ("single" if parsed.norm is None else "planes", False, None)
    kinds = {"element": (m, n), "channel": (n,)}
    sizes = ((m, k), (n, k), (n,), *([(n,)] * 2 if parsed.norm is not None else []))
    x, weight, *vectors = (values(*size) for size in sizes)
    operands = [ordinary(*kinds[kind]) for kind in parsed.operand_kinds]
    tensors = (x, weight, *vectors, *[None] * (3 - len(vectors)), operands)
    y, *kept = linear_norm_forward(*tensors, chain, *facts)
    kept[0] = y if parsed.saves_y else kept[0]
    wanted = [*(t is not None for t in tensors[:5]), *[False] * len(operands)]
    return values(m, n), *tensors, *kept, chain, *facts, wanted


def bits(tensors: Any) -> list[Tensor]:
    return [t.contiguous().view(torch.int32) for t in tensors]


def are_same(found: Any, expected: Any) -> bool:
    """dX and dW have the same bits; sums over rows are made of as many parts as blocks of a kernel
    fit the GPU, which takes more registers where it owns dy."""
    pairs = [*zip(found, expected, strict=True)]
    for sums in [pair for pair in pairs if pair[0].dim() == 1]:
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-4, equal_nan=True)
    return all(torch.equal(*bits(pair)) for pair in pairs if pair[0].dim() == 2)


# dz as planes and by itself, split afterwards, for a library product; rows in warps, in blocks, and
# in blocks that share a row, whose sums are another kernel's.
CASES = (
    (2048, 1024, 512, "relu"),
    (2048, 1024, 512, "gelu"),
    (2048, 512, 1024, "layer_norm(1e-05)|silu"),
    (1280, 512, 512, "layer_norm(1e-05)|mish"),
    (1024, 1024, 1024, "rms_norm(1e-05)|silu"),
    (300, 64, 96, "group_norm(8)|gelu"),
    (40, 64, 768, "add_residual|layer_norm(1e-05)"),
    (129, 72, 33, "mul_channel|gelu"),
    (16, 40, 6000, "layer_norm(1e-05)|relu"),
    (9, 40, 40000, "rms_norm(1e-05)|silu"),
)


@pytest.mark.parametrize("values", [ordinary, with_outliers])
@pytest.mark.parametrize("m, k, n, chain", CASES)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_bits(precision: str, m: int, k: int, n: int, chain: str, values: Any) -> None:
    """Run, recorded and repeated."""
    native(wait=True)
    torch.set_float32_matmul_precision(precision)
    for _ in range(5):
        dy, *rest = step(m, k, n, chain, values)
        expected = linear_norm_backward(dy, *rest)
        before = dy.clone()
        found = spending_dy()[linear_norm_backward, len(expected)](dy, *rest)
        assert are_same(found, expected)
    if values is with_outliers:  # else no guard wants it in fp32
        assert not torch.equal(*bits([dy, before]))


@pytest.mark.parametrize("values", [ordinary, with_outliers])
@pytest.mark.parametrize("m, k, n, chain", [case for case in CASES if case[0] > case[2]])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_bits_of_halves(precision: str, m: int, k: int, n: int, chain: str, values: Any) -> None:
    """Some wait for others to be begun."""
    native(wait=True)
    torch.set_float32_matmul_precision(precision)
    for _ in range(3):
        waiting = []
        for _ in range(3):
            dy, *rest = step(m, k, n, chain, values)
            expected = linear_norm_backward(dy, *rest)
            begin = spending_dy()[linear_norm_backward_begin, len(expected)]
            waiting.append((rest[1], expected, *begin(dy, *rest)))
            del dy
        for weight, expected, *found, token in reversed(waiting):
            dx = linear_norm_backward_end(token, weight, m, k)
            assert are_same([dx, *found], expected)


@pytest.mark.alone
@pytest.mark.parametrize("m, n, norm", [(2560, 512, nn.LayerNorm), (8192, 768, nn.Identity)])
def test_models(m: int, n: int, norm: Any) -> None:
    """A compiled model's gradients have the same bits as without, in less memory."""
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    wide = nn.Linear(n, 4 * n), norm(4 * n), nn.SiLU()
    model = nn.Sequential(*wide, nn.Linear(4 * n, 64), nn.LayerNorm(64)).cuda()
    x, dy = ordinary(m, n).requires_grad_(), ordinary(m, 64)
    found, peaks = [], []
    for devices in ((), dispatch.SPENDING):
        torch._dynamo.reset()
        with fresh_cache(), mock.patch.object(dispatch, "SPENDING", devices):
            made: Any = torch.compile(copy.deepcopy(model), backend=compile_graph, dynamic=False)
            for _ in range(8):
                made.zero_grad()
                settle()
                torch.cuda.reset_peak_memory_stats()
                made(x).backward(dy)
        peaks.append(torch.cuda.max_memory_allocated())
        found.append([p.grad.cpu() for p in made.parameters()])
        del made
    assert are_same(*found)
    assert peaks[1] <= peaks[0] - 0.5 * 4 * x.nbytes
