"""How a solution is timed: in turns with eager, by events, device-wide, by the judge's clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from epinorm.tools.judge.checks import from_comparisons
from epinorm.tools.judge.facts import Check, Timing
from epinorm.tools.judge.observe import Samples, forward_step, sample
from epinorm.tools.judge.session import Session
from epinorm.tools.judge.worker import training_step
from epinorm.tools.verify import draw_inputs

__all__ = ["time_pass"]


@dataclass(frozen=True)
class _Plan:
    """Blocks of runs, solution and eager in turns; and how much may be outside the events."""

    blocks: int
    runs: int
    share: float
    slack_us: float
    outside_ratio: float
    outside_slack_us: float


_CUDA = _Plan(5, 8, share=0.1, slack_us=40.0, outside_ratio=1.5, outside_slack_us=300.0)
_CPU = _Plan(2, 3, share=1.0, slack_us=0.0, outside_ratio=3.0, outside_slack_us=20_000.0)
"""A CPU that others use too takes a process off it for milliseconds at a time."""

OUTSIDE_CALLS = 20
OUTSIDE_SECONDS = 1.5
OUTSIDE_TRIALS = 3
"""The fastest counts: others may use the machine meanwhile."""


def time_pass(session: Session, training: bool) -> tuple[Timing, list[Check]]:
    """Time the solution and eager; the checks that come with it are named after the pass."""
    pass_ = "training" if training else "forward"
    plan = _CUDA if session.device.type == "cuda" else _CPU
    session.process.take_inputs(session.inputs)
    step = training_step(session.model) if training else forward_step(session.model)
    device, seed = session.device, session.options.seed + 20_000
    session.process.time(seed, 2, training, device)  # warm-up
    sample(step, session.inputs, device, seed, 2)
    ours, eager = Samples([], []), Samples([], [])
    outcome = None
    for block in range(plan.blocks):
        start = seed + 1000 * (block + 1)
        answer, outcome = session.process.time(start, plan.runs, training, device)
        ours.times.extend(answer["times"])
        ours.device_wide.extend(answer["device_wide"])
        theirs, _ = sample(step, session.inputs, device, start, plan.runs)
        eager.times.extend(theirs.times)
        eager.device_wide.extend(theirs.device_wide)
    assert outcome is not None
    inputs = draw_inputs(session.inputs, "randn", start + 100 * (plan.runs - 1))
    truth, expected = session.expected_outputs(inputs)
    after = session.judged("a timed run", truth, expected, outcome, False)
    timing = Timing(
        pass_,  # type: ignore[arg-type]
        statistics.median(ours.times),
        statistics.median(eager.times),
        statistics.median(ours.device_wide),
        _outside(session, training, statistics.median(ours.device_wide)),
    )
    status, reason = from_comparisons(after)
    return timing, [
        Check(f"right in timed runs, {pass_}", status, reason),
        _hidden(timing, eager, plan, device),
    ]


def _outside(session: Session, training: bool, microseconds: float) -> float:
    """Microseconds a call by the judge's own clock, calls without pause."""
    calls = max(2, min(OUTSIDE_CALLS, int(OUTSIDE_SECONDS * 1e6 / max(microseconds, 1.0))))
    seconds: dict[int, float] = {}
    for _ in range(OUTSIDE_TRIALS):
        for count in (1, calls + 1):
            session.process.ask("spin", calls=count, training=training)
            took = session.process.seconds
            seconds[count] = min(took, seconds.get(count, took))
    return max(0.0, seconds[calls + 1] - seconds[1]) * 1e6 / calls


def _hidden(timing: Timing, eager: Samples, plan: _Plan, device: torch.device) -> Check:
    name = f"nothing hidden from the clock, {timing.pass_}"
    rest = timing.solution_wall_us - timing.solution_us
    usual = statistics.median(eager.device_wide) - statistics.median(eager.times)
    if rest > usual + plan.share * timing.solution_us + plan.slack_us:
        return Check(
            name,
            "failed",
            f"the device worked {rest:.0f} µs more after the {timing.solution_us:.0f} µs that "
            "events on the current stream saw: work is on other streams",
        )
    outside = timing.solution_outside_us or 0.0
    limit = plan.outside_ratio * timing.solution_wall_us + plan.outside_slack_us
    if outside > limit:
        return Check(
            name,
            "failed",
            f"a call takes {outside:.0f} µs by the judge's own clock, and says that it takes "
            f"{timing.solution_us:.0f} µs",
        )
    said = f"{timing.solution_us:.0f} µs by events, {timing.solution_wall_us:.0f} device-wide"
    if device.type != "cuda":
        said = f"{timing.solution_us:.0f} µs by its own clock"
    return Check(name, "passed", f"{said}, {outside:.0f} by the judge's clock")
