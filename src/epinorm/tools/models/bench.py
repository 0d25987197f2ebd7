"""Verify a whole model's four ways to run, time them interleaved, and say where the time went."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import epinorm
from epinorm.capture.backend import compile_graph
from epinorm.tools.accuracy import DRAWS, more_draws
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.models.families import families_of
from epinorm.tools.models.rows import AGAINST, OURS, ModelRow
from epinorm.tools.models.subject import Setting, Subject, dropout_off, most_dropout
from epinorm.tools.models.verify import Judged, compare_candidate, judge, truth_of
from epinorm.tools.progress import Notify, in_a_line, silent
from epinorm.tools.results import measured_on
from epinorm.tools.timing import (
    Settings,
    peak_memory_mb,
    sample_interleaved,
    wall_times,
    workspace_mb,
)
from epinorm.tools.verdict import spreads

FEW_RUNS = Settings(runs=12, warmup=3, cpu_runs=3, cpu_seconds=4.0, wall_calls=30, wall_blocks=3)
LONGEST_WALL_MS = 10.0
"""Longer calls' time does not depend on the host: events say it."""
SHORT_CALLS = 5
"""Times as many rounds and blocks where all calls are shorter: there the host's noise decides."""


@dataclass(frozen=True)
class _Way:
    """One way to run the model: ``call`` takes the inputs, ``model`` has the parameters."""

    model: nn.Module
    call: Callable[..., Any]


def bench_model(
    subject: Subject,
    setting: Setting,
    training: bool,
    device: torch.device,
    competitors: Sequence[str] = ("compile", "backend"),
    timing: Settings = FEW_RUNS,
    notify: Notify = silent,
) -> ModelRow:
    """Make, verify and time the model in one setting and pass.

    ``competitors``: of "compile" and "backend", those to run beside eager and fused. Forward is in
    eval mode without gradients, training in train mode with all gradients. A way that does not run,
    or whose verification fails, has no times and a reason.
    """
    with fp32_precision_set(setting.precision):
        notify("making the model", 0.0)
        model, inputs = subject.make(setting, device)
        model.train(training)
        torch._dynamo.reset()  # earlier rows' compilations count towards its limits
        ways = _ways(model, setting, competitors)
        judged, reasons = _verify(ways, inputs, setting, training, notify)
        explained = epinorm.explain(ways["fused"].model)
        good = {name: way for name, way in ways.items() if name not in reasons}
        measured = _measure(good, inputs, training, device, timing, notify)
    return ModelRow(
        model=subject.name,
        setting=setting.name,
        dtype=str(setting.dtype).removeprefix("torch."),
        precision=setting.precision,
        pass_="training" if training else "forward",
        verified=reasons.keys().isdisjoint(OURS),
        places=len(explained.rows),
        fused_places=explained.fused,
        linears=len(explained.linears),
        fused_linears=sum(row.fused for row in explained.linears),
        dropout=most_dropout(model) if training else 0.0,
        reasons=reasons or None,
        **_errors(judged.get("fused")),
        **measured,
        **measured_on(device),
    )


def _ways(model: nn.Module, setting: Setting, competitors: Sequence[str]) -> dict[str, _Way]:
    fused = epinorm.fuse(copy.deepcopy(model))
    functions: dict[str, tuple[nn.Module, Any]] = {"eager": (model, model)}
    if "compile" in competitors:
        functions["compile"] = (model, torch.compile(model, dynamic=False))
    functions["fused"] = (fused, fused)
    if "backend" in competitors:
        functions["backend"] = (model, torch.compile(model, backend=compile_graph, dynamic=False))
    return {
        name: _Way(owner, partial(setting.call, function))
        for name, (owner, function) in functions.items()
    }


def _verify(
    ways: Mapping[str, _Way],
    inputs: tuple[Any, ...],
    setting: Setting,
    training: bool,
    notify: Notify,
) -> tuple[dict[str, Judged], dict[str, str]]:
    """How exact each way is, and for those that are wrong or do not run the reason."""
    model, fused = ways["eager"].model, ways["fused"].model
    draws: dict[str, list[Any]] = {name: [] for name in ways if name != "eager"}
    reasons: dict[str, str] = {}
    seed, count = 0, DRAWS if training else 1
    with dropout_off(model, fused):
        while seed < count:
            notify("running it in float64", 0.05 + 0.4 * seed / count)
            truth = truth_of(model, inputs, setting, training, seed)
            fused.load_state_dict(model.state_dict())
            for name in [name for name in draws if name not in reasons]:
                if name not in OURS and seed:
                    continue  # its exactness is its own matter: once shows whether it runs
                way = ways[name]
                notify(f"verifying {name}", 0.1 + 0.4 * seed / count)
                of = (truth, way.model, way.call, inputs, setting, training)
                try:
                    draws[name].append(compare_candidate(*of))
                except Exception as error:  # a compiler's costs its column alone; the row says it
                    reasons[name] = in_a_line(error)
            del truth  # of the next draw there is one more
            seed += 1
            if seed == count:
                ours = [draws[name] for name in OURS if name in draws and name not in reasons]
                found = [judge(each, setting).comparisons for each in ours]
                count += max((more_draws(each, seed) for each in found), default=0)
    judged = {name: judge(each, setting) for name, each in draws.items() if name not in reasons}
    for name in OURS:
        if name in judged and (reason := judged[name].reason):
            reasons[name] = reason
    return judged, reasons


def _longest_ms(samples: Mapping[str, list[float]]) -> float:
    """The longest of the ways' medians."""
    return max(map(statistics.median, samples.values())) / 1000


def _errors(fused: Judged | None) -> dict[str, Any]:
    """Ours and eager's, of the output and of all gradients, as far as they were compared."""
    found = {} if fused is None else {"error": fused.output, "gradient_error": fused.pooled}
    return {
        f"{whose}_{what}": getattr(comparison, whose)
        for what, comparison in found.items()
        for whose in ("ours", "eager")
        if comparison is not None
    }


def _measure(
    ways: Mapping[str, _Way],
    inputs: tuple[Any, ...],
    training: bool,
    device: torch.device,
    timing: Settings,
    notify: Notify,
) -> dict[str, Any]:
    runners = {
        name: model_runner(way.model, inputs, training, call=way.call) for name, way in ways.items()
    }
    gc.collect()  # what the verification left behind would be collected during a timed run
    notify("timing", 0.5)

    def sampled(settings: Settings) -> dict[str, list[float]]:
        return sample_interleaved(
            runners, device, settings, lambda share: notify("timing", 0.5 + 0.3 * share)
        )

    samples = sampled(timing)
    if device.type == "cuda" and _longest_ms(samples) < LONGEST_WALL_MS:
        more = SHORT_CALLS * timing.runs, SHORT_CALLS * timing.wall_blocks
        timing = replace(timing, runs=more[0], wall_blocks=more[1])
        samples = sampled(timing)
    medians = {name: statistics.median(times) / 1000 for name, times in samples.items()}
    values: dict[str, Any] = {f"{name}_ms": time for name, time in medians.items()}
    found = spreads(samples, "eager")
    if "compile" in samples:
        over = spreads(samples, "compile")
        found |= {AGAINST.format(way, "compile"): over[way] for way in OURS if way in over}
    values |= {"runs": len(samples["eager"]), "spreads": found or None}
    notify("measuring the host's time and memory", 0.85)
    if _longest_ms(samples) < LONGEST_WALL_MS:
        for name, wall in wall_times(runners, device, timing).items():
            values[f"{name}_wall_ms"] = None if wall is None else wall / 1000
    for name, runner in runners.items():
        values[f"{name}_peak_mb"] = peak_memory_mb(runner, device)
    for name, runner in runners.items():  # last: the next run allocates it again
        values[f"{name}_workspace_mb"] = workspace_mb(runner, device)
    shown = {name: runners[name] for name in ("eager", *OURS) if name in runners}
    values["families"] = families_of(shown, device)
    return values
