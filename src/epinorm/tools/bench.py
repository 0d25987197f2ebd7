"""Verify a fused model, then time it against what PyTorch offers (docs/measuring.md).

Verification comes first, and again after timing: a row that fails has no times.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from epinorm.problem import Strategy
from epinorm.tools.accuracy import Verification
from epinorm.tools.progress import Notify, Progress, in_a_line, silent
from epinorm.tools.results import Row, measured_on
from epinorm.tools.timing import (
    DEFAULT_SETTINGS,
    Runner,
    Settings,
    gpu_times,
    peak_memory_mb,
    sample_interleaved,
    wall_times,
)
from epinorm.tools.verdict import spreads
from epinorm.tools.verify import draw_dy, of_floats, verify

COMPETITORS = {"compile": None, "compile_autotune": "max-autotune-no-cudagraphs"}
"""What can be timed besides ours, eager and the linear alone: modes of torch.compile."""

WALL_BLOCK_US = 20_000.0
"""Of calls in a loop, if five of the longest fit: fewer of long ones say as much."""


@dataclass(frozen=True)
class Case:
    """What one row measures: ``model`` and ``candidate`` on ``inputs``.

    ``asked``: the strategy that the candidate was fused with, ``strategy`` those it took; ``facts``
    are the row's m, k, n, groups, norm and chain as far as they are known.
    """

    name: str
    model: nn.Module
    candidate: nn.Module
    inputs: tuple[Any, ...]
    dtype: torch.dtype
    precision: Literal["highest", "high", "native"]
    device: torch.device
    training: bool
    strategy: str | None
    asked: Strategy = "auto"
    facts: Mapping[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def fp32_precision_set(precision: str) -> Iterator[None]:
    """Compute fp32 products as ``precision`` ("highest", "high") says, and set it back."""
    if precision == "native":
        yield
        return
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(saved)


def bench(
    case: Case,
    settings: Settings = DEFAULT_SETTINGS,
    competitors: Sequence[str] = ("compile",),
    notify: Notify = silent,
) -> tuple[Row, Verification]:
    """Verify, time and verify again; the row has times only if both verifications pass.

    ``competitors``: of COMPETITORS.
    """
    with fp32_precision_set(case.precision):
        verification = verify_case(case, progress=lambda share: notify("verifying", 0.1 * share))
        row = _row(case, verification)
        if not verification.passed:
            return row, verification
        runners, reasons = _runners(case, competitors, notify)
        measured = _measure(case, runners, settings, notify)
        again = verify_case(case, 1, lambda share: notify("verifying again", 0.9 + 0.1 * share))
        if not again.passed:
            return _row(case, again), again
        return replace(row, **measured, **reasons), verification


def verify_case(case: Case, seed: int = 0, progress: Progress = silent) -> Verification:
    """``verify`` the case's candidate against its model."""
    models, training = (case.model, case.candidate), case.training
    return verify(*models, case.inputs, training=training, seed=seed, progress=progress)


def _row(case: Case, verification: Verification) -> Row:
    worst = verification.worst
    facts: dict[str, Any] = {
        name: case.facts.get(name) for name in ("m", "k", "n", "groups", "norm", "chain")
    }
    return Row(
        shape=case.name,
        dtype=str(case.dtype).removeprefix("torch."),
        precision=case.precision,
        pass_="training" if case.training else "forward",
        verified=verification.passed,
        strategy=case.strategy,
        ours_error=worst.ours,
        eager_error=worst.eager,
        error_of=f"{worst.what}, {worst.inputs}",
        reason=None if verification.passed else str(worst),
        **facts,
        **measured_on(case.device),
    )


def _measure(
    case: Case, runners: Mapping[str, Runner], settings: Settings, notify: Notify
) -> dict[str, Any]:
    def timing(share: float) -> None:
        notify("timing", 0.5 + 0.4 * share)

    # What the verification left behind would be counted, or be collected during a timed run.
    gc.collect()
    samples = sample_interleaved(runners, case.device, settings, timing)
    measured: dict[str, Any] = {f"{n}_us": statistics.median(t) for n, t in samples.items()}
    measured |= {"runs": len(samples["ours"]), "spreads": spreads(samples)}
    gpus = "the GPU's time, " * (case.device.type == "cuda")
    notify(f"measuring {gpus}the host's and memory", 0.9)
    on_gpu = gpu_times(runners, case.device, settings)
    measured |= {f"{name}_gpu_us": value for name, value in on_gpu.items()}
    on_host = {n: runners[n] for n in ("ours", "eager", "linear") if n in runners}
    longest = max((on_gpu[name] or 0.0 for name in on_host), default=0.0)
    calls = min(settings.wall_calls, max(5, round(WALL_BLOCK_US / max(longest, 1.0))))
    settings = replace(settings, wall_calls=calls)
    for name, value in wall_times(on_host, case.device, settings).items():
        measured[f"{name}_wall_us"] = value
    for name in ("ours", "eager", "compile"):
        if name in runners:
            measured[f"{name}_peak_mb"] = peak_memory_mb(runners[name], case.device)
    return measured


def _runners(
    case: Case, competitors: Sequence[str], notify: Notify
) -> tuple[dict[str, Runner], dict[str, Any]]:
    """All that can be timed, and a reason for each competitor that cannot."""
    runners = {
        "ours": model_runner(case.candidate, case.inputs, case.training),
        "eager": model_runner(case.model, case.inputs, case.training),
    }
    linear = linear_runner(case.model, case.inputs, case.training)
    if linear is not None:
        runners["linear"] = linear
    reasons: dict[str, Any] = {}
    # Compilations of earlier rows would count towards dynamo's limit for this model's code.
    torch._dynamo.reset()
    for index, (name, mode) in enumerate(COMPETITORS.items()):
        if name not in competitors:
            continue
        notify(f"torch.compile{' max-autotune' if mode else ''} is compiling", 0.1 + 0.2 * index)
        result = _compiled_runner(case, mode)
        if isinstance(result, Runner):
            runners[name] = result
        else:
            reasons[f"{name}_reason"] = result
    prepacked = _prepacked(case)
    if prepacked is not None:
        runners["ours_prepacked"] = model_runner(prepacked, case.inputs, case.training)
    return runners, reasons


def _compiled_runner(case: Case, mode: str | None) -> Runner | str:
    """The model under torch.compile, run once; or, in one line, why it does not run."""
    try:
        compiled = torch.compile(case.model, mode=mode, dynamic=False)
        runner = model_runner(case.model, case.inputs, case.training, call=compiled)
        runner.prepare()
        runner.run()
        runner.prepare()
    except Exception as error:
        # Whatever a compiler raises, from a missing g++ to an internal error, costs this column
        # alone; the row says it.
        return in_a_line(error)
    return runner


def _prepacked(case: Case) -> nn.Module | None:
    """The candidate with its weights converted once, verified; None where that does not exist."""
    if case.dtype != torch.float32 or case.training or case.device.type != "cuda":
        return None
    packed = packed_copy(case)
    return packed if verify_case(replace(case, candidate=packed), 2).passed else None


def packed_copy(case: Case) -> nn.Module:
    """A copy of the candidate, fused as it is (a copy is plain), with its weights prepacked."""
    from epinorm import fuse, prepack  # here: the judge imports this file, and needs no operator

    return prepack(fuse(copy.deepcopy(case.candidate), strategy=case.asked))


def model_runner(
    model: nn.Module,
    inputs: Sequence[Any],
    training: bool,
    call: Callable[..., Any] | None = None,
) -> Runner:
    """Forward under no_grad, or forward and backward to every input and parameter.

    ``call``: what runs in the model's place, on its parameters. In training, ``prepare`` sets all
    gradients to None, so that none is accumulated into.
    """
    call = model if call is None else call
    if not training:
        values = tuple(inputs)

        def forward() -> Any:
            with torch.no_grad():
                return call(*values)

        return Runner(forward)

    fresh = of_floats(inputs, lambda v: v.detach().clone().requires_grad_())
    leaves = [*model.parameters(), *(v for v in fresh if isinstance(v, Tensor))]
    dys: list[Tensor] = []

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    def step() -> Any:
        tensors = [v for v in tree_leaves(call(*fresh)) if isinstance(v, Tensor)]
        # Some outputs of a model may have no gradient. If none has one, autograd says so.
        outputs = [v for v in tensors if v.requires_grad] or tensors
        if not dys:
            dys.extend(draw_dy(outputs, seed=0))
        torch.autograd.backward(outputs, dys)
        return outputs

    return Runner(step, clear)


class _Linears(nn.Module):
    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [linear(x) for linear, x in zip(self.linears, inputs, strict=True)]


def linear_calls(model: nn.Module, inputs: Sequence[Any]) -> list[tuple[nn.Linear, Tensor]]:
    """The linear layers that the model calls and the input (..., K) of each, in order."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def remember(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Linear)
        calls.append((module, arguments[0].detach().clone()))

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(remember) for module in linears]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def linear_runner(model: nn.Module, inputs: Sequence[Any], training: bool) -> Runner | None:
    """The model's linear layers alone, on their own inputs; None if it has none."""
    calls = linear_calls(model, inputs)
    if not calls:
        return None
    linears = _Linears([linear for linear, _ in calls])
    return model_runner(linears, [x for _, x in calls], training)
