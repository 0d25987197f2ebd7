"""How a solution is timed: by its own clock, which counts only where the judge's confirms it.

Eager is timed before the solution's process exists and after it has ended: nothing that a solution
does can make it slow. A solution's times come from its own process and may be lies. The judge's
clock sees when a batch of runs was asked for and when its checksums arrived; what the loop itself
costs is known from eager. A batch whose times do not add up to what the judge saw is no evidence.
"""

from __future__ import annotations

import copy
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epinorm.tools.accuracy import Outcome
from epinorm.tools.judge.facts import Check, Timing
from epinorm.tools.judge.loop import Loop, Recipe, next_state
from epinorm.tools.judge.session import Session
from epinorm.tools.tf32 import RoundedOperands, allows_tf32
from epinorm.tools.verify import Truth, of_floats

BATCH_SECONDS = 0.08
"""A batch takes about this long, so that a message's cost is a few per cent of it at most."""
RUNS = (4, 2000)
MESSAGE_SECONDS = 0.001
WANTED, TRIES, MOST_TRIES = 3, 12, 36
"""Batches that must be confirmed, and how often it is tried, at most where some were: others may
use the machine, which is also why the fastest batch counts, by its mean: a median could hide half
of the runs."""
WAITED = 10.0
"""A run that says so many times the usual may have waited for a CPU, as far as its process did."""
CONFIRMED = {"cpu": (1.5, 1.25), "cuda": (1.15, 1.15)}
"""How many times what the solution says, and what the loop costs, its runs may take by the judge's
clock. The latter counts then: this is for noise, and no lie within it gains anything."""
COLD = 0.85
"""On CUDA times are reported with a cold L2 cache and confirmed with a warm one: at least so much
of the latter."""
HOST = 2.0
"""A solution may take this many times what eager takes to launch a run's kernels."""
SAMPLES = 3
FAR, USUAL, KINKED, GROSS = 10.0, 3.0, 0.1, 0.25
"""Checksums: one may be off by FAR times what the accuracy check allows, all by USUAL in the RMS.
In training, KINKED of the runs by more (one element on the other side of a kink is enough), but
none by GROSS of a part's own size, which a run that was not made exceeds four times out of five."""


@dataclass(frozen=True)
class EagerTimes:
    """Microseconds a run: as reported, by the judge's clock with all that the loop costs, to launch
    it (CUDA), and what the loop costs without the model; of the slowest batch, as reported."""

    us: float
    outside_us: float
    launch_us: float
    loop_us: float
    slowest_us: float

    def best(self, other: EagerTimes) -> EagerTimes:
        """The faster of two measurements; the loop's cost is the first one's."""
        return replace(
            self,
            us=min(self.us, other.us),
            outside_us=min(self.outside_us, other.outside_us),
            slowest_us=max(self.slowest_us, other.slowest_us),
        )

    def against(self, timing: Timing) -> Timing:
        """The timing with this as eager's."""
        mine = self.us if timing.clock == "its own" else self.outside_us
        return replace(timing, eager_us=mine, eager_spread=self.slowest_us / self.us)


def _recipe(session: Session, model: nn.Module, training: bool) -> tuple[Recipe, Loop]:
    """What both sides need to know of the problem, and the original's loop for it."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad] if training else []
    with torch.no_grad():
        loop = Loop(model, session.inputs, Recipe(0, False, [], [], 1))
        shapes = [list(t.shape) for t in loop.step(session.inputs)]
    sizes = [torch.Size(s).numel() for s in shapes]
    sizes += [v.numel() for v in session.inputs if isinstance(v, Tensor)]
    sizes += [p.numel() for p in model.parameters()]
    recipe = Recipe(secrets.randbelow(2**40), training, shapes, trained, max(sizes))
    return recipe, Loop(model, session.inputs, recipe)


def _state() -> int:
    return secrets.randbelow(2**63)


def _rms(part: Tensor | None) -> float:
    if part is None or not part.numel():
        return 0.0
    norm = torch.linalg.vector_norm(part.detach().double()).item()
    return norm / part.numel() ** 0.5 if norm < float("inf") else 0.0


def _made(loop: Loop, state: int | Tensor) -> tuple[list[Any], list[Tensor | None], Tensor]:
    """One run: its inputs, what it returned, and the mask of its checksums."""
    inputs, mask = loop.begin(torch.as_tensor(state, device=loop.device))
    return inputs, loop.parts(loop.step(inputs), inputs), mask


def _exact_parts(loop: Loop, inputs: Sequence[Any]) -> list[Tensor | None]:
    """The same run in float64."""
    exact = copy.copy(loop)
    exact.model = copy.deepcopy(loop.model).double()
    exact.dys = [dy.double() for dy in loop.dys]
    trained = loop.recipe.training
    given = of_floats(inputs, lambda v: v.detach().double().requires_grad_(trained))
    return exact.parts(exact.step(given), given)


def _runs(seconds: float) -> int:
    return max(RUNS[0], min(RUNS[1], int(BATCH_SECONDS / max(seconds, 1e-7))))


def time_eager(session: Session, training: bool) -> EagerTimes:
    """Time the original model in the judge's process, while no solution's process exists."""
    _, loop = _recipe(session, session.example, training)
    _eager_batch(loop, 2)
    runs = _runs(_eager_batch(loop, RUNS[0])[1] / 1e6)
    batches = [_eager_batch(loop, runs) for _ in range(WANTED)]
    outside = min(outside for _, outside in batches)
    if session.device.type == "cuda":
        cold = [statistics.fmean(loop.run(_state(), runs, True)[0]) for _ in range(WANTED)]
        loop_us = min(_loop_on_device(loop) for _ in range(WANTED))
        launch = min(_launch(loop) for _ in range(WANTED))
        return EagerTimes(min(cold), outside, launch, loop_us, max(cold))
    # By the CPU's clock where others use the machine, by the wall's where there are threads.
    loop_us = min(_loop_on_cpu(loop, runs) for _ in range(4 * WANTED))
    loop_us = min(loop_us, *(outside - said for said, outside in batches))
    reported = [max(said, outside - loop_us) for said, outside in batches]
    return EagerTimes(min(reported), outside, 0.0, loop_us, max(reported))


def _eager_batch(loop: Loop, runs: int) -> tuple[float, float]:
    """Microseconds a run, as a solution's process would say it and by the judge's clock."""
    start = time.perf_counter()
    times, _ = loop.run(_state(), runs, False)
    return statistics.fmean(times), 1e6 * (time.perf_counter() - start) / runs


def _loop_on_cpu(loop: Loop, batch: int) -> float:
    """Microseconds of a CPU that the loop takes for a run, without the model: the least of some
    measurements, which take about a quarter of a batch's time. What is said too much here, where
    others disturb, a solution could take for itself."""
    runs = 1 + min(batch // 32, 3)
    clock, loop.clock = loop.clock, time.process_time_ns
    found = []
    for _ in range(1 + min(batch // 8, 32)):
        start = time.process_time_ns()
        times, _ = loop.run(_state(), runs, False)
        found.append(((time.process_time_ns() - start) / 1e3 - sum(times)) / runs)
    loop.clock = clock
    return min(found)


def _loop_on_device(loop: Loop, runs: int = 20) -> float:
    """The same of the device, behind work that lets the host go ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(loop.device)
    torch.cuda._sleep(20_000_000)
    begin.record()
    marks, _ = loop.launch(_state(), runs)
    end.record()
    end.synchronize()
    return (1000 * begin.elapsed_time(end) - sum(loop.microseconds(marks))) / runs


def _launch(loop: Loop, runs: int = 10) -> float:
    """Microseconds of the host to launch a run."""
    torch.cuda.synchronize(loop.device)
    start = time.perf_counter()
    loop.launch(_state(), runs)
    return 1e6 * (time.perf_counter() - start) / runs


def time_solution(
    session: Session, training: bool, eager: EagerTimes
) -> tuple[Timing | None, list[Check]]:
    """Time the solution, comparing every run; the checks that come with it are named after the
    pass. No timing where one failed."""
    pass_: Literal["forward", "training"] = "training" if training else "forward"
    right, clock = f"right in timed runs, {pass_}", f"its times are confirmed, {pass_}"
    recipe, loop = _recipe(session, session.model, training)
    judge = _Checksums(session, loop)
    session.process.take_inputs(session.inputs)
    session.process.ask("prepare", **asdict(recipe))
    batch = _Batches(session, judge, eager)
    if wrong := batch.take():
        return None, [Check(right, "failed", wrong)]
    checks = [Check(right, "passed", f"{judge.runs} runs, each on inputs of its own: {judge.said}")]
    timing, check = batch.timing(pass_)
    return timing, [*checks, replace(check, name=clock)]


class _Checksums:
    """What the checksums of runs should be, and how far off they may be."""

    def __init__(self, session: Session, loop: Loop) -> None:
        self.loop, self.training = loop, loop.recipe.training
        self.runs, self.worst = 0, 0.0
        self.units, self.sizes = list[float](), list[float]()
        for _ in range(SAMPLES):
            self._calibrate(session)
            if allows_tf32(session.dtype, session.device):  # the library may not have taken it
                with RoundedOperands():
                    self._calibrate(session)

    @property
    def said(self) -> str:
        return f"checksums differ by at most {self.worst:.1f} times what is allowed for one"

    def _calibrate(self, session: Session) -> None:
        """Take eager's error on one more draw as the yardstick, as the accuracy check does."""
        inputs, parts, _ = _made(self.loop, _state())
        eager = [None if part is None else part.detach().clone() for part in parts]
        truth = _exact_parts(self.loop, inputs)
        self.units = self.units or [0.0] * len(parts)
        self.sizes = self.sizes or [0.0] * len(parts)
        named = [{str(i): t for i, t in enumerate(tensors)} for tensors in (truth, eager)]
        exact, theirs = (Outcome((), tensors) for tensors in named)
        for one in session.judged("", Truth(exact, theirs), theirs, False):
            index = int(one.what)
            size = _rms(truth[index])
            self.units[index] = max(self.units[index], (one.allowed + one.eager) * size)
            self.sizes[index] = max(self.sizes[index], size)

    def wrong(self, state: int, claimed: Sequence[Sequence[float]]) -> str | None:
        """What is wrong with the checksums of a batch that began so; None: nothing."""
        off = []
        now = torch.tensor(state, device=self.loop.device)
        for row in claimed:
            _, parts, mask = _made(self.loop, now)
            ours = mask.new_tensor(row)
            off.append([abs(d) for d in (ours - self.loop.checksums(parts, mask)).tolist()])
            now = next_state(now, ours)
        self.runs += len(claimed)
        kinked = math.ceil(KINKED * len(off)) if self.training else 0
        for part, (unit, size) in enumerate(zip(self.units, self.sizes, strict=True)):
            column = [row[part] for row in off]
            ranked = sorted(column)[: len(off) - kinked]
            usual = statistics.fmean(d * d for d in ranked) ** 0.5
            gross = max(FAR * unit, GROSS * size)
            limit = gross if self.training else FAR * unit
            bad = [i for i, d in enumerate(column) if not d <= limit]
            if not bad and usual <= USUAL * unit and ranked[-1] <= FAR * unit:
                self.worst = max(self.worst, usual / (USUAL * unit) if unit else 0.0)
                continue
            first = bad[0] if bad else column.index(ranked[-1])
            return (
                f"run {first + 1} of {len(off)}: the checksum of {self._name(part)} is off by "
                f"{column[first]:.2e}, at most {FAR * unit:.2e} is allowed (in the mean "
                f"{usual:.2e}, {USUAL * unit:.2e})"
            )
        return None

    def _name(self, part: int) -> str:
        outputs = len(self.loop.recipe.shapes)
        if part < outputs:
            return f"output {part}"
        inputs = len(self.units) - outputs - len(self.loop.recipe.trained)
        names = [*(f"input {i}" for i in range(inputs)), *self.loop.recipe.trained]
        return f"the gradient of {names[part - outputs]}"


@dataclass(frozen=True)
class _Batch:
    """Microseconds a run: as it says; without what it may have waited for a CPU; by the judge's
    clock; and of a CPU, as the kernel says."""

    said: float
    busy: float
    outside: float
    used: float


def _busy(times: Sequence[float], waited: float) -> float:
    """The mean of times without single long ones, which are no waits where the process did not wait
    so long, a run: what comes between a lie's two looks at the clock would confirm it."""
    most, said = WAITED * statistics.median(times), statistics.fmean(times)
    return max(said - max(0.0, waited), statistics.fmean([min(t, most) for t in times]))


class _Batches:
    """Batches of timed runs, and what follows from them."""

    def __init__(self, session: Session, judge: _Checksums, eager: EagerTimes) -> None:
        self.process, self.judge, self.eager = session.process, judge, eager
        self.kind = session.device.type
        self.runs, self.loop_us = RUNS[0], eager.loop_us
        self.cold: list[float] = []
        self.warm: list[_Batch] = []

    def _batch(self, cold: bool) -> tuple[_Batch, str | None]:
        """A batch, and what is wrong with a result, if anything."""
        state = _state()
        before = self.process.cpu_seconds()
        times, sums = self.process.time(state, self.runs, len(self.judge.units), cold)
        used = self.process.cpu_seconds() - before
        seconds = max(0.0, self.process.seconds - MESSAGE_SECONDS)
        outside, used = (1e6 * t / self.runs for t in (seconds, used))
        if self.kind == "cpu":  # its speed changes; who disturbs this makes it longer, in vain
            self.loop_us = min(self.loop_us, _loop_on_cpu(self.judge.loop, self.runs))
        busy = _busy(times, outside - used / torch.get_num_threads())
        made = _Batch(statistics.fmean(times), busy, outside, used)
        return made, self.judge.wrong(state, sums)

    def take(self) -> str | None:
        """Batches until WANTED of them are confirmed; what was wrong with a result, if anything."""
        tries = 0
        while (agreed := sum(map(self._agree, self.warm))) < WANTED:
            if tries >= (MOST_TRIES if agreed else TRIES):
                break
            batch, wrong = self._batch(False)
            if wrong:
                return wrong
            # A short batch is a warm-up: of it, a message is too large a part to confirm anything.
            if self.process.seconds < BATCH_SECONDS / 2 and self.runs < RUNS[1]:
                self.runs = min(2 * self.runs, RUNS[1])
                continue
            tries += 1
            if tries > 1 or self.process.seconds > BATCH_SECONDS:
                self.warm.append(batch)
        for _ in range(WANTED if self.kind == "cuda" else 0):
            batch, wrong = self._batch(True)
            if wrong:
                return wrong
            self.cold.append(batch.said)
        return None

    def _agree(self, batch: _Batch) -> bool:
        often, around = CONFIRMED[self.kind]
        said, loop = often * batch.said, around * self.loop_us
        if self.kind == "cuda":
            return batch.outside <= said + loop
        # Where others use the CPU, the loop waits for it as long as all the rest; but what the
        # process computes does not depend on others.
        waits = max(1.0, batch.outside / max(batch.used, 1e-3))
        computed = batch.used / torch.get_num_threads()
        return computed <= often * batch.busy + loop and batch.outside <= said + waits * loop

    def timing(self, pass_: Literal["forward", "training"]) -> tuple[Timing | None, Check]:
        """The times of record: the solution's where confirmed, or by the judge's clock."""
        loop = self.loop_us
        agreed = [batch for batch in self.warm if self._agree(batch)]
        few, agreed = len(agreed), agreed if len(agreed) >= WANTED else []
        # Within what CONFIRMED lets through, the longer of the two counts.
        best = min(agreed or self.warm, key=lambda b: max(b.said, b.outside - loop))
        said, outside = best.said, best.outside
        cold = min(self.cold or [said])
        facts = (
            f"{cold:.0f} µs by its clock, {outside:.0f} by the judge's with the loop's {loop:.0f}"
        )
        if agreed and cold >= COLD * said:
            ours = cold * max(1.0, (outside - loop) / said)
            timing = Timing(pass_, ours, 0.0, outside, loop)
        elif outside <= HOST * self.eager.launch_us:
            timing = Timing(pass_, outside, 0.0, outside, loop, "the judge's")
            facts += "; launching takes longer than computing, so the judge's clock counts"
        elif agreed:
            reason = f"says {cold:.0f} µs with a cold cache and {said:.0f} with a warm one"
            return None, Check("", "failed", reason)
        else:
            reason = f"a run takes {outside:.0f} µs by the judge's clock, and it says {said:.0f}"
            reason += f" (the loop takes {loop:.0f})"
            reason += f"; {few} of {len(self.warm)} batches are confirmed" * (few > 0)
            return None, Check("", "failed", reason)
        counted = self.cold or [b.outside for b in self.warm]
        timing = replace(timing, solution_spread=max(counted) / min(counted))
        return self.eager.against(timing), Check("", "passed", facts)
