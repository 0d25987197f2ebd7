"""The checks of a judgement, each a function of the session that says passed, failed or skipped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.tools.accuracy import Comparison, Outcome, differences
from epinorm.tools.judge.conduct import conduct, untouched
from epinorm.tools.judge.facts import Result
from epinorm.tools.judge.process import SolutionError
from epinorm.tools.judge.session import LARGE_MEAN_FLOOR_64, Session, outside_public_tolerance
from epinorm.tools.verify import draw_inputs, is_floating, of_floats, run_model

PUBLIC_TRIALS = 5
MAGNITUDES = (0.01, 100.0)
OTHER_BATCHES = (0, 1, 3)
OUTLIER = 1e12


@dataclass(frozen=True)
class NamedCheck:
    """A check and the names of the lines that it adds to the verdict.

    Nothing can follow a ``vital`` one that failed, nor, where ``errors_end``, one that raised.
    """

    names: tuple[str, ...]
    run: Callable[[Session], Sequence[Result]]
    needs_gradients: bool = False
    vital: bool = False
    errors_end: bool = False


def from_comparisons(comparisons: Sequence[Comparison]) -> Result:
    """Passed with the one closest to its limit, or failed with the worst ones."""
    if not comparisons:
        return "skipped", "eager itself has no finite result there"
    failed = sorted((c for c in comparisons if not c.passed), key=lambda c: -c.strain)
    if failed:
        more = f" (and {len(failed) - 2} more)" if len(failed) > 2 else ""
        return "failed", "; ".join(str(c) for c in failed[:2]) + more
    worst = max(comparisons, key=lambda c: c.strain)
    return "passed", f"closest to its limit: {worst}"


def _file(session: Session) -> list[Result]:
    options = session.options
    session.process.ask(
        "load",
        path=session.process.solution,
        device=str(session.device),
        dtype=options.dtype,
        precision=options.precision,
        most=session.process.most,
    )
    return [("passed", f"defines ModelNew, loaded in {session.process.seconds:.1f} s")]


def _parameters(session: Session) -> list[Result]:
    state, trained = session.process.construct(session.init, session.options.seed, session.dropped)
    ours = {name: (tuple(t.shape), t.dtype) for name, t in state.items()}
    model = session.model
    theirs = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    trained_there = [n for n, p in model.named_parameters() if p.requires_grad]
    wrong = _differs(ours, theirs, trained, trained_there)
    values = [
        name
        for name, tensor in model.state_dict().items()
        if name in state and not torch.equal(tensor, state[name])
    ]
    if not wrong:
        model.load_state_dict(state, strict=True)  # the way back; the worker goes the other way
    model.to(device=session.device, dtype=session.dtype)
    equal: Result = ("passed", f"all of {len(theirs)} tensors equal under one seed")
    if values:
        equal = ("failed", f"under one seed these differ from Model's: {', '.join(values)}")
    if wrong:
        return [("failed", wrong), equal if values else ("skipped", "the state_dict is another")]
    session.process.set_state(model.state_dict())
    return [("passed", f"{len(theirs)} tensors, loads both ways, strictly"), equal]


def _differs(
    ours: dict[str, Any], theirs: dict[str, Any], trained: list[str], trained_there: list[str]
) -> str:
    """What of names, shapes, dtypes and trained parameters is not as Model has it."""
    parts = []
    if missing := [n for n in theirs if n not in ours]:
        parts.append(f"its state_dict lacks {', '.join(missing)}")
    if extra := [n for n in ours if n not in theirs]:
        parts.append(f"its state_dict has, and Model's has not, {', '.join(extra)}")
    parts += [
        f"{name} is {ours[name]}, Model's is {theirs[name]}"
        for name in theirs
        if name in ours and ours[name] != theirs[name]
    ]
    if not parts and sorted(trained) != sorted(trained_there):
        odd = sorted(set(trained) ^ set(trained_there))
        parts.append(f"requires_grad differs for {', '.join(odd)}")
    return "; ".join(parts)


def _public(session: Session) -> list[Result]:
    """As constructed, on what get_inputs gives: the public protocol."""
    worst, excused = 0.0, 0
    for trial in range(PUBLIC_TRIALS):
        inputs = session.fresh_inputs(session.options.seed + 1 + trial)
        eager = run_model(session.model, inputs, False)
        session.process.take_inputs(inputs)
        ours = session.process.run()
        if len(ours.outputs) != len(eager.outputs):
            return [("failed", f"{len(ours.outputs)} outputs, eager has {len(eager.outputs)}")]
        for mine, theirs in zip(ours.outputs, eager.outputs, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                what = f"shape {tuple(mine.shape)} and {mine.dtype}"
                return [("failed", f"{what}, eager has {tuple(theirs.shape)} and {theirs.dtype}")]
            outside, difference = outside_public_tolerance(mine, theirs, session.tolerance)
            worst = max(worst, difference)
            if outside and _further_than_eager(session, inputs, ours, eager):
                return [
                    (
                        "failed",
                        f"{outside} of {mine.numel()} elements differ from eager by more than "
                        f"{session.tolerance:g} (at most {difference:.2e}), trial {trial + 1}",
                    )
                ]
            excused += outside
        session.earlier.append((f"trial {trial + 1}", ours.outputs[0]))
    said = f"{PUBLIC_TRIALS} trials, no element outside {session.tolerance:g}"
    if excused:
        said = (
            f"{PUBLIC_TRIALS} trials, {excused} elements outside {session.tolerance:g} of eager, "
            "but no more outside it of float64 than eager's own"
        )
    return [("passed", f"{said}; largest difference {worst:.1e}")]


def _further_than_eager(
    session: Session, inputs: Sequence[Any], ours: Outcome, eager: Outcome
) -> bool:
    """Whether more elements lie outside the tolerance around float64 than of eager's own.

    In 16 bit eager itself leaves the public tolerance, so that a better result can differ from it.
    """
    exact = session.expected(inputs).exact
    counts = [
        sum(
            outside_public_tolerance(t, right, session.tolerance)[0]
            for t, right in zip(outcome.outputs, exact.outputs, strict=True)
        )
        for outcome in (ours, eager)
    ]
    return counts[0] > counts[1]


def _accuracy(session: Session) -> list[Result]:
    session.randomize(session.options.seed + 11)
    found = session.compared_over_draws("rand", 1000)
    found += session.compared_over_draws("randn", 2000)
    return [from_comparisons(found)]


def _gradients(session: Session) -> list[Result]:
    found = session.compared_over_draws("rand", 3000, training=True)
    found += session.compared_over_draws("randn", 6000, training=True)
    return [from_comparisons(found)]


def _magnitudes(session: Session) -> list[Result]:
    found = []
    for index, factor in enumerate(MAGNITUDES, 1):
        inputs = of_floats(session.drawn(500 * index), partial(torch.mul, other=factor))
        found += session.compared(f"randn × {factor:g}", inputs, stress=True)
    if session.dtype != torch.float16:
        inputs = of_floats(session.drawn(5000), _rows_apart)
        found += session.compared("rows of 1e-4 to 1e4", inputs, stress=True)
    return [from_comparisons(found)]


def _rows_apart(v: Tensor) -> Tensor:
    if not v.dim():
        return v
    powers = torch.linspace(-4, 4, v.shape[0], device=v.device, dtype=torch.float64)
    return (v.double() * (10**powers).view(-1, *[1] * (v.dim() - 1))).to(v.dtype)


def _large_mean(session: Session) -> list[Result]:
    session.randomize(session.options.seed + 12, large_mean=True)
    inputs = session.drawn(6000, "rand")
    floor = LARGE_MEAN_FLOOR_64 if session.dtype == torch.float64 else 0.0
    found = session.compared("rand, biases far from zero", inputs, stress=True, floor=floor)
    session.randomize(session.options.seed + 11)
    return [from_comparisons(found)]


def _outliers(session: Session) -> list[Result]:
    """A huge value against weights of zero: an fp32 product does not see it, scaled fp16 does."""
    if session.dtype == torch.float16:
        return [("skipped", f"float16 does not hold {OUTLIER:g}")]
    state = copy.deepcopy(session.model.state_dict())
    inputs = session.with_a_silent_feature(session.drawn(6500), OUTLIER)
    if inputs is None:
        return [("skipped", "no input goes into a linear layer")]
    try:
        found = session.compared(f"{OUTLIER:g} in x against zeros in W", inputs, stress=True)
    finally:
        session.restore(state)
    return [from_comparisons(found)]


def _not_finite(session: Session) -> list[Result]:
    inputs = session.drawn(7000)
    for value in inputs:
        if is_floating(value) and value.numel():
            flat = value.view(value.shape[0], -1) if value.dim() > 1 else value.view(1, -1)
            flat[0, 0] = torch.nan
            flat[-1, -1] = torch.inf
    eager = run_model(session.model, inputs, False)
    session.process.take_inputs(inputs)
    ours = session.process.run()
    if len(ours.outputs) != len(eager.outputs):
        return [("failed", f"{len(ours.outputs)} outputs, eager has {len(eager.outputs)}")]
    for mine, theirs in zip(ours.outputs, eager.outputs, strict=True):
        if mine.shape != theirs.shape:
            return [("failed", f"has shape {tuple(mine.shape)}, not {tuple(theirs.shape)}")]
        wrong = int((mine.isfinite() != theirs.isfinite()).sum())
        if wrong:
            said = f"{wrong} of {mine.numel()} elements are NaN or Inf where eager's are not"
            return [("failed", f"{said}, or the other way round, for one NaN and one Inf in x")]
    return [("passed", "one NaN and one Inf in x spoil what they spoil in PyTorch, no more")]


def _other_batches(session: Session) -> list[Result]:
    rows = {v.shape[0] if v.dim() else None for v in session.inputs if is_floating(v)}
    if len(rows) != 1 or None in rows:
        return [("skipped", "the inputs share no batch dimension")]
    (batch,) = rows
    found, tried = [], []
    for size in (*OTHER_BATCHES, (batch or 0) + 1):
        sized = of_floats(session.inputs, partial(_of_rows, rows=size))
        inputs = draw_inputs(sized, "randn", session.options.seed + 8000 + size)
        try:
            run_model(session.model, inputs, False)
        except (RuntimeError, ValueError):
            continue  # the original does not take this size either
        tried.append(size)
        label = f"batch {size}"
        try:
            found += session.compared(label, inputs, session.options.training, stress=True)
        except SolutionError as error:
            return [("failed", f"{label}: {error}")]
    if not tried:
        return [("skipped", "the original takes no other batch size")]
    return [from_comparisons(found)]


def _of_rows(v: Tensor, rows: int) -> Tensor:
    return v.new_empty((rows, *v.shape[1:]))


def _layout(session: Session) -> list[Result]:
    def other(v: Tensor) -> Tensor:
        return v if v.dim() < 2 else v.transpose(0, 1).contiguous().transpose(0, 1)

    inputs = of_floats(session.drawn(9000), other)
    try:
        found = session.compared("transposed memory", inputs, stress=True)
    except SolutionError as error:
        return [("skipped", f"refuses inputs that are not contiguous: {error}")]
    return [from_comparisons(found)]


def _new_inputs(session: Session) -> list[Result]:
    found = session.compared("input A", session.drawn(101))
    fresh = session.drawn(102)
    found += session.compared("new values in the memory of input A", fresh, into_old=True)
    return [from_comparisons(found)]


def _new_weights(session: Session) -> list[Result]:
    inputs = session.drawn(103)
    found = session.compared("first weights", inputs)
    session.randomize(session.options.seed + 13)
    found += session.compared("new weights by load_state_dict", inputs)
    session.randomize(session.options.seed + 14, behind=True)
    found += session.compared("new weights through .data", inputs, stress=True)
    session.change_one_weight_a_row()
    found += session.compared("one weight in each row changed through .data", inputs, stress=True)
    session.randomize(session.options.seed + 14, behind=True)
    return [from_comparisons(found)]


def _repeatable(session: Session) -> list[Result]:
    training, seed = session.options.training, session.options.seed
    inputs = session.drawn(104)
    eager = [run_model(session.model, inputs, training, seed) for _ in range(2)]
    session.process.take_inputs(inputs)
    ours = [session.process.run(training, seed) for _ in range(2)]
    changing = {c.what for c in differences(eager[0], eager[1], "randn")}
    found = [c for c in differences(ours[0], ours[1], "randn") if c.what not in changing]
    if found:
        return [("failed", "; ".join(str(c) for c in found[:2]))]
    if session.process.ask("keeps").get("kept") is not True:
        return [("failed", "a second call wrote into the output of the first")]
    return [("passed", "a second run gives the same bits, and leaves the first one's output")]


CHECKS = (
    NamedCheck(("file",), _file, vital=True),
    NamedCheck(("parameters", "initial values"), _parameters, vital=True),
    NamedCheck(("public protocol",), _public, errors_end=True),
    NamedCheck(("accuracy",), _accuracy),
    NamedCheck(("gradients",), _gradients, needs_gradients=True),
    NamedCheck(("magnitudes",), _magnitudes),
    NamedCheck(("large mean",), _large_mean),
    NamedCheck(("outliers",), _outliers),
    NamedCheck(("NaN and Inf",), _not_finite),
    NamedCheck(("batch sizes",), _other_batches),
    NamedCheck(("memory layout",), _layout),
    NamedCheck(("new inputs",), _new_inputs),
    NamedCheck(("new weights",), _new_weights),
    NamedCheck(("repeatable",), _repeatable),
    NamedCheck(
        ("inputs unchanged", "no aliases", "plain tensors", "streams", "threads"),
        conduct,
    ),
    NamedCheck(("functions untouched", "settings untouched", "processes"), untouched),
)
