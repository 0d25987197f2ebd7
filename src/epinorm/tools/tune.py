"""Measure every way that a Hopper GPU can compute a problem, and remember the fastest.

A way counts only if it is right: everything that its forward pass gives is compared with float64,
on outputs that held NaN before. A tile may be no further off than the plan's own choice; a library
product with one kernel no further than eager, the promise on which `auto` takes it today.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from epinorm.backends import memo
from epinorm.backends import reference as reference_backend
from epinorm.backends.cuda.gemm import forward as single
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_cost import cycles
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.plan.strategy import CORE_VARIABLE, largest_guarded_group, wanted_core
from epinorm.backends.cuda.plan.tuned import Choice
from epinorm.backends.cuda.runtime.device import HOPPER, capability, sm_count
from epinorm.backends.engine import executable_for, plan_for
from epinorm.operator import calls
from epinorm.problem import Forward, Inputs, Layout, Plan, Problem
from epinorm.tools.accuracy import FLOOR_ULPS, allowed_error, relative_error
from epinorm.tools.progress import Notify, silent
from epinorm.tools.timing import DEFAULT_SETTINGS, Runner, Settings, time_interleaved
from epinorm.tools.verify import of_floats, poisoned_memory

MOST_TILES = 12
"""Tiles that are tried, the model's best: each is a kernel to compile."""
ERROR_SLACK = 1.05
"""A tile's error over the plan's choice's: sums in another order differ in their last bits."""
WORTHWHILE = 0.99
"""Another way's time over the plan's choice's: medians of equal kernels differ by 1 %."""

Way = tuple[str, Tile | None]
"""A strategy, and its tile where it has one."""
Run = Callable[[Inputs], Forward]


@dataclass(frozen=True)
class Trial:
    """One way and what came of it: its error of y, its time, or why it has none."""

    strategy: str
    tile: Tile | None
    error: float | None
    microseconds: float | None
    refused: str | None

    @property
    def way(self) -> Way:
        return self.strategy, self.tile


@dataclass(frozen=True)
class Tuning:
    """What was measured for one problem, the plan's own choice first. ``not_kept``: why it is not
    on disk; None if it is."""

    problem: Problem
    trials: tuple[Trial, ...]
    best: Trial
    not_kept: str | None

    @property
    def before(self) -> Way:
        return self.trials[0].way

    @property
    def before_microseconds(self) -> float:
        time = self.trials[0].microseconds
        assert time is not None
        return time

    def as_json(self) -> dict[str, Any]:
        """Plain values: the problem's key, the choice before, every trial, the best."""
        return {
            "problem": tuned.key_of(self.problem),
            "chain": str(self.problem.chain),
            "gpu": tuned.gpu_name(self.problem.device),
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
            "before": 0,
            "best": self.trials.index(self.best),
            "not_kept": self.not_kept,
        }


def why_not(device: torch.device) -> str | None:
    """Why nothing can be tuned on this device, in a sentence; None where it can."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "epinorm tune measures tiles of the Hopper kernel, and there is no CUDA GPU here"
    found = capability(device)
    if found != HOPPER:
        name = torch.cuda.get_device_name(device)
        return (
            "epinorm tune measures tiles of the Hopper kernel (compute capability 9.0), "
            f"but {name} has {found[0]}.{found[1]}"
        )
    if wanted_core() == "portable":
        return f"epinorm tune measures Hopper's tiles, but {CORE_VARIABLE}=portable is set"
    return None


@contextmanager
def recorded() -> Iterator[list[tuple[Problem, Inputs]]]:
    """Within, note each different problem that is computed, with its tensors."""
    found: dict[Problem, Inputs] = {}
    result: list[tuple[Problem, Inputs]] = []

    def note(problem: Problem, inputs: Inputs) -> None:
        if problem.chain.returns_statistics:
            return  # no tile of the single kernel has all rows
        if problem.spends_x:
            inputs = inputs._replace(x=inputs.x.clone())
        problem = dataclasses.replace(problem, whole_step=False, spends_x=False, spends_dy=False)
        if problem not in found:
            found[problem] = inputs
            result.append((problem, inputs))

    calls.forget_plans()  # a call that is planned already would not be told of
    calls.planned.append(note)
    try:
        yield result
    finally:
        calls.planned.remove(note)


def _before(problem: Problem) -> Way:
    plan = plan_for(problem)
    if plan.strategy != "single":
        return plan.strategy, None
    return "single", hopper_plan.choose_tile(problem, sm_count(problem.device))


def ways_of(problem: Problem, most: int = MOST_TILES) -> list[Way]:
    """The plan's choice first; then the model's ``most`` best tiles, and ``epilogue``."""
    before = _before(problem)
    ways = [before]
    if hopper_plan.why_not(problem) is None:
        sms = sm_count(problem.device)
        tiles = [tile for tile in hopper_plan.candidates(problem) if _guarded(problem, tile)]
        tiles.sort(key=lambda tile: cycles(problem, tile, sms))
        ways += [("single", tile) for tile in tiles[:most]]
    ways.append(("epilogue", None))
    return list(dict.fromkeys(ways))


def _guarded(problem: Problem, tile: Tile) -> bool:
    """fp32 in planes needs the range guard, which takes groups up to a size (strategy.py)."""
    channels = problem.chain.channels_per_group(problem.n)
    return problem.dtype != torch.float32 or tile.tf32 or channels <= largest_guarded_group(problem)


def _run_of(problem: Problem, inputs: Inputs, way: Way) -> Run:
    layout = Layout(inputs.x.stride(0), inputs.weight.stride(0), (problem.m, problem.n))
    if way[1] is not None:
        return single.launch_with(problem, way[1], layout)
    epilogue = executable_for(problem, Plan("epilogue", "measured by name"), layout)
    return lambda inputs: epilogue.forward(*inputs)


def tune(
    problem: Problem,
    inputs: Inputs,
    most: int = MOST_TILES,
    settings: Settings = DEFAULT_SETTINGS,
    notify: Notify = silent,
) -> Tuning | None:
    """Try the ways of ``ways_of``, verify and time them, remember the fastest that is right.

    ``inputs``: the call's tensors, in the shapes and dtypes that ``problem`` says; gamma and beta
    are drawn at random, since a new layer's ones and zeros would hide a wrong kernel. Times are
    medians in microseconds by CUDA events, all ways interleaved, the L2 cache flushed before each.
    None where there is no choice: no rows, or nothing but one way. Raises RuntimeError where the
    plan's own choice cannot be compiled or gives NaN.
    """
    ways = ways_of(problem, most) if problem.m else []
    if len(ways) < 2 or ways[0][0] not in ("single", "epilogue"):
        return None
    with torch.no_grad():
        inputs = _with_random_parameters(inputs)
        runs, errors, refused = _verified(problem, inputs, ways, notify)
        runners = {str(i): Runner(lambda run=run: run(inputs)) for i, run in runs.items()}  # type: ignore[misc]
        times = time_interleaved(
            runners, problem.device, settings, lambda share: notify("timing", 0.7 + 0.3 * share)
        )
    trials = tuple(
        Trial(*way, errors.get(i), times.get(str(i)), refused.get(i)) for i, way in enumerate(ways)
    )
    best = _fastest(trials)
    assert best.microseconds is not None
    strategy = "single" if best.tile is not None else "epilogue"
    not_kept = tuned.remember(problem, Choice(strategy, best.tile, best.microseconds))  # type: ignore[arg-type]
    memo.clear()
    return Tuning(problem, trials, best, not_kept)


def _fastest(trials: tuple[Trial, ...]) -> Trial:
    """The fastest trial, the first (the plan's choice) unless another is worth a change."""
    first = trials[0]
    timed = {t.microseconds: t for t in trials if t.microseconds is not None}
    assert first.microseconds is not None
    return timed[min(timed)] if min(timed) < WORTHWHILE * first.microseconds else first


def _with_random_parameters(inputs: Inputs) -> Inputs:
    weight, bias = inputs.norm_weight, inputs.norm_bias
    return inputs._replace(
        norm_weight=None if weight is None else torch.rand_like(weight) + 0.5,
        norm_bias=None if bias is None else torch.randn_like(bias),
    )


def _verified(
    problem: Problem, inputs: Inputs, ways: list[Way], notify: Notify
) -> tuple[dict[int, Run], dict[int, float], dict[int, str]]:
    """By number of the way: what may be timed, errors of y, and why the others may not."""
    truth = _truth(problem, inputs)
    layers = reference_backend.forward(problem, inputs)
    eager = _errors(layers, truth, None)
    runs: dict[int, Run] = {}
    errors: dict[int, float] = {}
    refused: dict[int, str] = {}
    first: Mapping[str, float] = {}
    for i, way in enumerate(ways):
        notify("compiling and verifying", 0.7 * i / len(ways))
        try:
            run = _run_of(problem, inputs, way)
        except RuntimeError as error:
            if i == 0:
                raise
            refused[i] = f"it cannot be compiled: {' '.join(str(error).split())[:200]}"
            continue
        bias = None if problem.bias_in_z else inputs.bias
        found = _errors(_on_poisoned_memory(problem, run, inputs), truth, bias)
        errors[i] = found["y"]
        if i == 0:
            first = found
        allowed = _allowed(problem, first, eager, epilogue=way[1] is None)
        wrong = [name for name, error in found.items() if not error <= allowed[name]]
        if not wrong:
            runs[i] = run
        elif i == 0:
            raise RuntimeError(f"the plan's own choice gives {wrong[0]} with NaN or Inf: {problem}")
        else:
            name = wrong[0]
            refused[i] = f"error of {name} {found[name]:.2e}, allowed {allowed[name]:.2e}"
    return runs, errors, refused


def _allowed(
    problem: Problem, first: Mapping[str, float], eager: Mapping[str, float], epilogue: bool
) -> dict[str, float]:
    """Of each result. Statistics are fp32, of few values: below some ulps an error is luck."""
    floor = FLOOR_ULPS[torch.float32] * torch.finfo(torch.float32).eps
    allowed = {}
    for name, error in first.items():
        limit = min(ERROR_SLACK * error, torch.finfo(torch.float64).max)  # inf is never allowed
        if epilogue:
            limit = max(limit, allowed_error(eager[name], problem.dtype))
        allowed[name] = max(limit, floor) if name in ("mean", "rstd") else limit
    return allowed


def _truth(problem: Problem, inputs: Inputs) -> Forward:
    double = torch.float64
    exact = dataclasses.replace(
        problem, dtype=double, norm_dtype=double, out_dtype=double, precision="native"
    )
    tensors, operands = (of_floats(ts, torch.Tensor.double) for ts in (inputs[:5], inputs.operands))
    return reference_backend.forward(exact, Inputs(*(*tensors, operands, inputs.constants)))


def _on_poisoned_memory(problem: Problem, run: Run, inputs: Inputs) -> Forward:
    p = problem
    like = [torch.empty(p.m, p.n, dtype=t, device=p.device) for t in (p.out_dtype, p.dtype)]
    like.append(torch.empty(p.m, p.groups, dtype=p.stats_dtype, device=p.device))
    with poisoned_memory(like):
        return run(inputs)


def _errors(found: Forward, truth: Forward, bias: torch.Tensor | None) -> dict[str, float]:
    """Relative errors. ``bias``: what z still lacks; the reference's holds it already."""
    errors = {}
    for name in Forward._fields:
        ours, exact = getattr(found, name), getattr(truth, name)
        if exact is None or exact.numel() == 0:
            continue
        if name == "z" and bias is not None:
            ours = ours.double() + bias.double()
        errors[name] = relative_error(ours, exact)
    return errors
