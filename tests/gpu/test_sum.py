"""What enters the norm as a second result, on a GPU: both results and all gradients."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from epinorm.backends import memo
from epinorm.backends.engine import plan_for
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.operator import calls
from epinorm.operator.dispatch import Caller
from epinorm.operator.functional import apply_chain
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.verify import poisoned_memory

RESIDUAL = "add_residual|layer_norm(1e-05)|returns(sum)"
SCALED = "mul_channel|add_residual|rms_norm(1e-06)|returns(sum)"
GROUPS = "silu|add_residual|group_norm(16,1e-05)|gelu|add_residual|returns(sum)"
CASES = [
    (300, 96, 768, RESIDUAL, ("planes", "epilogue", "auto")),
    (130, 1024, 1024, SCALED, ("planes", "epilogue")),
    (257, 256, 256, RESIDUAL, ("single", "epilogue")),
    (200, 128, 256, GROUPS, ("epilogue", "planes")),
    (130, 64, 128, "group_norm(16)|silu|returns(sum)", ("single", "planes")),
    (33, 40, 75, "rms_norm(1e-06)|returns(sum)", ("epilogue",)),
    (5, 512, 16384, RESIDUAL, ("epilogue",)),
    (0, 64, 128, RESIDUAL, ("epilogue",)),
]
KINDS = {
    "highest": torch.float32,
    "high": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def tensors_of(m: int, k: int, n: int, text: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    kinds = Chain.parse(text).operand_kinds
    x, weight, bias = draw(m, k), draw(n, k) / math.sqrt(k), draw(n) / 2
    operands = [1 + draw(n) / 4 if kind == "channel" else draw(m, n) for kind in kinds]
    every = [x, weight, bias, 1 + draw(n) / 4, draw(n) / 2, *operands]
    return [t.to(dtype) for t in every]


def step(
    tensors: list[Tensor], gradients: list[Tensor | None], text: str, how: str
) -> list[Tensor]:
    """Both results and all gradients by a strategy, by "eager" or in "float64"."""
    dtype = torch.float64 if how == "float64" else tensors[0].dtype
    leaves = [t.to(dtype).detach().clone().requires_grad_() for t in tensors]
    if how in ("eager", "float64"):
        results = linear_norm(*leaves[:3], Chain.parse(text), *leaves[3:5], leaves[5:])
    else:
        with poisoned_memory([tensors[0], tensors[1]]):
            results = apply_chain(*leaves[:5], leaves[5:], text, how)
    pairs = [(r, g.to(dtype)) for r, g in zip(results, gradients, strict=True) if g is not None]
    outputs, given = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
    zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True))
    return [*(r.detach() for r in results), *zeros]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_and_gradients(case: int, kind: str) -> None:
    m, k, n, text, strategies = CASES[case]
    dtype = KINDS[kind]
    torch.set_float32_matmul_precision("high" if kind == "high" else "highest")
    tensors = tensors_of(m, k, n, text, dtype)
    both = [torch.randn(m, n, device="cuda").to(dtype) for _ in range(2)]
    for gradients in (both, [both[0], None], [None, both[1]]):
        eager = step(tensors, gradients, text, "eager")
        truth = step(tensors, gradients, text, "float64")
        for how in strategies:
            chosen = how
            if kind not in ("high", "highest") and how == "planes":
                continue
            if kind == "fp64" and how == "single":
                chosen = "epilogue"
            if how == "single" and Chain.parse(text).keeps_z:
                continue
            for rounding in ("", "|rounding(eager)")[: 1 + (dtype.itemsize == 2)]:
                found = step(tensors, gradients, text + rounding, chosen)
                for i, (ours, theirs, true) in enumerate(zip(found, eager, truth, strict=True)):
                    assert ours.dtype == theirs.dtype
                    if not true.numel() or not true.any():
                        assert not ours.any(), (how, i)
                        continue
                    limit = allowed_error(relative_error(theirs, true), dtype)
                    assert relative_error(ours, true) <= limit, (how, rounding, i)


@pytest.mark.parametrize("kind", ["highest", "bf16"])
def test_on_the_portable_core(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPINORM_CORE", "portable")
    memo.clear()
    test_results_and_gradients(4, kind)
    monkeypatch.undo()
    memo.clear()


@pytest.mark.parametrize("text", [RESIDUAL, "layer_norm(1e-05)|returns(sum)"])
def test_under_autocast(text: str) -> None:
    tensors = tensors_of(300, 96, 768, text, torch.float32)
    gradients: list[Tensor | None] = [torch.randn(300, 768, device="cuda") for _ in range(2)]
    with torch.autocast("cuda", torch.bfloat16):
        found = step(tensors, gradients, text, "auto")
        eager = step(tensors, gradients, text, "eager")
    truth = step(tensors, gradients, text, "float64")
    for ours, theirs, true in zip(found, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype
        limit = allowed_error(relative_error(theirs, true), torch.bfloat16)
        assert relative_error(ours, true) <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_the_sum_is_kept_and_no_residual(dtype: torch.dtype) -> None:
    """As eager keeps what its norm reads; z and a residual in fp32 would be half as much again."""
    m, k, n = 4096, 768, 768
    text = RESIDUAL.removesuffix("|returns(sum)")
    chain, caller = Chain.parse(text), Caller(text)
    ways = {
        "ours": lambda x, w, b, g, s, r: caller(x, w, b, g, s, (r,)),
        "eager": lambda x, w, b, g, s, r: linear_norm(x, w, b, chain, g, s, [r]),
    }
    held, found = {}, {}
    tensors = [t.requires_grad_() for t in tensors_of(m, k, n, text, torch.float32)]
    dy = torch.randn(m, n, device="cuda")
    for name, way in ways.items():
        for _ in range(6):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                y = way(*tensors[:5], tensors[5].to(dtype) * 1)  # a result that nothing else holds
            held[name] = torch.cuda.memory_allocated() - before
            found[name] = [y.detach(), *torch.autograd.grad(y, tensors, dy)]
            del y
    assert held["ours"] <= held["eager"] + 2**20
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    true = ways["eager"](*doubles)
    truth = [true, *torch.autograd.grad(true, doubles, dy.double())]
    for ours, theirs, value in zip(found["ours"], found["eager"], truth, strict=True):
        limit = allowed_error(relative_error(theirs, value), torch.bfloat16)
        assert relative_error(ours, value) <= limit


def test_inference_and_memory() -> None:
    """No more memory at the peak than with one result, but the second one."""
    m, k, n = 16384, 768, 768
    single = RESIDUAL.removesuffix("|returns(sum)")
    for dtype in (torch.float32, torch.bfloat16):
        tensors = tensors_of(m, k, n, RESIDUAL, dtype)
        peaks = {}
        for training in (False, True):
            for text in (single, RESIDUAL):
                given = [t.detach().requires_grad_(training) for t in tensors]
                for _ in range(2):
                    gc.collect()  # what earlier tests left would be given back in between
                    # And what autograd's thread holds of the last step until it runs again.
                    torch.ones((), device="cuda", requires_grad=True).backward()
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                    results = apply_chain(*given[:5], given[5:], text)
                    if training:
                        leaves = (results,) if isinstance(results, Tensor) else results
                        torch.autograd.grad(leaves, given, [torch.ones_like(t) for t in leaves])
                    del results
                    peak = torch.cuda.max_memory_allocated() - before
                peaks[text] = peak
            # The sum; in training its gradient, and dz, which is written over no result.
            extra = m * n * dtype.itemsize * (3 if training else 1)
            assert peaks[RESIDUAL] <= peaks[single] + extra + 2**21, (dtype, training, peaks)


def test_a_flagged_row_is_computed_again_in_both_results() -> None:
    torch.set_float32_matmul_precision("highest")
    tensors = tensors_of(257, 256, 256, RESIDUAL, torch.float32)
    tensors[0][3] *= torch.logspace(-20, 15, 256, device="cuda")
    gradients: list[Tensor | None] = [torch.randn(257, 256, device="cuda") for _ in range(2)]
    eager, truth = (step(tensors, gradients, RESIDUAL, how) for how in ("eager", "float64"))
    for how in ("single", "planes"):
        found = step(tensors, gradients, RESIDUAL, how)
        for ours, theirs, true in zip(found[:2], eager, truth, strict=False):
            assert relative_error(ours, true) <= allowed_error(
                relative_error(theirs, true), ours.dtype
            )
        del found


def test_the_plan_is_what_a_profile_shows() -> None:
    torch.set_float32_matmul_precision("highest")
    tensors = tensors_of(16384, 768, 768, RESIDUAL, torch.float32)
    given = [t.requires_grad_() for t in tensors]
    problems: list[object] = []
    calls.forget_plans()
    calls.planned.append(lambda problem, _: problems.append(problem))
    apply_chain(*given[:5], given[5:], RESIDUAL)
    calls.planned.pop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        apply_chain(*given[:5], given[5:], RESIDUAL)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    plan = plan_for(problems[0])  # type: ignore[arg-type]
    assert {step.kernel for step in plan.forward} <= names
