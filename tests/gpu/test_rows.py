"""Norms of heads and numbers of whole rows on a GPU, by each kernel, with float64 as the truth."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epinorm
from epinorm import GroupNorm, LayerNorm, RMSNorm
from epinorm.capture.backend import compile_graph
from epinorm.tools.accuracy import DRAWS, allowed_error, relative_error
from epinorm.tools.models import SETTINGS
from epinorm.tools.models.verify import compare_candidate, judge, truth_of

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HEADS, ROWS, BOTH = ("", ""), ("mul_row|add_residual", "gelu"), ("silu|mul_row", "mul_row|silu")

# strategy, dtype and precision, m, k, n, norm, what is around it: each kernel of a chain.
CASES: list[Any] = [
    ("single", BF16, "highest", 1000, 512, 1024, RMSNorm(eps=1e-6, num_groups=8), HEADS),
    ("single", BF16, "highest", 300, 256, 512, LayerNorm(num_groups=8), BOTH),
    ("single", BF16, "highest", 300, 256, 256, LayerNorm(), ROWS),
    ("single", F16, "highest", 333, 128, 512, RMSNorm(num_groups=4), BOTH),
    ("single", F32, "high", 1000, 512, 1024, RMSNorm(num_groups=16), ROWS),
    ("single", F32, "highest", 1000, 512, 1024, RMSNorm(eps=1e-6, num_groups=64), ROWS),
    ("single", F32, "highest", 1000, 512, 1024, LayerNorm(num_groups=16), HEADS),
    ("single", F32, "highest", 17, 512, 1024, GroupNorm(64), BOTH),
    ("planes", F32, "highest", 1000, 2048, 2048, RMSNorm(eps=1e-6, num_groups=16), HEADS),
    ("planes", F32, "highest", 1000, 768, 768, LayerNorm(), ROWS),
    ("planes", F32, "high", 515, 768, 768, LayerNorm(num_groups=12), BOTH),
    ("epilogue", F32, "highest", 515, 64, 66, LayerNorm(num_groups=6), BOTH),
    ("epilogue", F32, "highest", 257, 64, 768, RMSNorm(num_groups=6), ROWS),
    ("epilogue", BF16, "highest", 1000, 2048, 2048, RMSNorm(num_groups=16), HEADS),
    ("epilogue", BF16, "highest", 30, 64, 20000, LayerNorm(), BOTH),
    ("epilogue", F64, "highest", 100, 64, 96, RMSNorm(num_groups=8), BOTH),
]


class Step:
    """A training step of one chain, by any strategy and in any dtype."""

    def __init__(self, dtype: torch.dtype, m: int, k: int, n: int, norm: Any, around: Any) -> None:
        self.norm, (self.pre, self.post) = norm, around
        kinds = epinorm.Chain.build(norm, self.pre, self.post).operand_kinds
        self.dy = self.draw(dtype, m, n)
        self.leaves = [self.draw(dtype, m, k), self.draw(dtype, n, k) / math.sqrt(k)]
        self.leaves += [self.draw(dtype, n) for _ in range(3)]
        self.operands = [self.draw(dtype, m, 1 if kind == "row" else n) for kind in kinds]
        self.trained = [kind != "row" for kind in kinds]

    @staticmethod
    def draw(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=F64).to(dtype)

    def run(self, strategy: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in self.leaves]
        given = zip(self.operands, self.trained, strict=True)
        operands = [t.detach().to(dtype).requires_grad_(asks) for t, asks in given]
        x, weight, bias, gamma, beta = leaves
        y = epinorm.linear_norm(
            *(x, weight, bias),
            **{"norm": self.norm, "norm_weight": gamma, "norm_bias": beta},
            **{"pre": self.pre, "post": self.post, "operands": operands, "strategy": strategy},
        )
        wanted = [t for t in (*leaves, *operands) if t.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, wanted, self.dy.to(dtype))]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_every_kernel_is_as_accurate_as_eager(case):
    strategy, dtype, precision, *facts = case
    torch.set_float32_matmul_precision(precision)
    step = Step(dtype, *facts)
    ours, again, theirs = (step.run(s, dtype) for s in (strategy, strategy, "reference"))
    torch.set_float32_matmul_precision("highest")
    for one, same, eager, exact in zip(
        ours, again, theirs, step.run("reference", F64), strict=True
    ):
        assert torch.equal(one, same)
        assert relative_error(one, exact) <= allowed_error(relative_error(eager, exact), dtype)


def test_a_row_that_planes_cannot_hold_has_its_number():
    """It is computed again, with what the chain takes."""
    step = Step(F32, 512, 512, 1024, RMSNorm(num_groups=64), ROWS)
    step.leaves[0][7, ::2] *= 2.0**-40
    step.leaves[0][9, 3] = float("inf")
    ours, theirs = (step.run(s, F32)[0] for s in ("single", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


class Block(nn.Module):
    """q and k of one Linear with norms, before and after they are turned, and a projection behind
    stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(256, 3 * 512), nn.Linear(512, 256)
        self.q_norm, self.k_norm = nn.RMSNorm(64, 1e-6), nn.RMSNorm(64, 1e-6)
        self.norm = nn.LayerNorm(256)
        self.register_buffer("mask", torch.tensor([0, 2, 2, 0, 0, 2, 2, 2.0]).view(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, -1, 64).unbind(2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k.transpose(1, 2))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2))
        y = self.proj(y.transpose(1, 2).flatten(2))
        x = x + y * self.mask.to(y.dtype)
        return x + F.gelu(self.norm(x))


@pytest.mark.parametrize("name", ["highest", "bf16-autocast"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_trains_as_in_eager(name, compiled):
    """As whole models are judged: over several draws (docs/measuring.md)."""
    setting, strategy = SETTINGS[name], "planes" if name == "highest" else "auto"
    model, given = Block().cuda(), (torch.randn(8, 256, 256, device="cuda"),)
    twin = copy.deepcopy(model)
    if compiled:
        run = torch.compile(twin, backend=compile_graph, options={"strategy": strategy})
    else:
        run = epinorm.fuse(twin, strategy=strategy)
    draws = []
    for seed in range(DRAWS):  # from the third step on it is a native node's
        truth = truth_of(model, given, setting, True, seed)
        twin.load_state_dict(model.state_dict())
        call = partial(setting.call, run)
        draws.append(compare_candidate(truth, twin, call, given, setting, True))
    assert judge(draws, setting).reason is None
