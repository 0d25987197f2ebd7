"""Judge a solution (``ModelNew``) against the problem that it claims to solve.

The protocol is KernelBench's (Ouyang et al., 2025, arXiv 2502.10517, section 4) made strict: the
solution runs in a process of its own, values are compared in the judge's, and what a solution could
do besides computing is looked for. docs/judging.md describes each check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from epinorm.tools.bench import fp32_precision_set
from epinorm.tools.judge.checks import CHECKS, NamedCheck
from epinorm.tools.judge.facts import Check, JudgeOptions, Timing, Verdict
from epinorm.tools.judge.process import SolutionError, SolutionGone, SolutionProcess
from epinorm.tools.judge.session import Session
from epinorm.tools.judge.source import remarks
from epinorm.tools.judge.timing import time_pass
from epinorm.tools.kernelbench.problem import ProblemError, load_problem
from epinorm.tools.results import commit, device_name, today

__all__ = ["judge"]

Notify = Callable[[str, float], None]


def _silent(stage: str, share: float) -> None:
    pass


def judge(
    problem: Path, solution: Path, options: JudgeOptions, notify: Notify = _silent
) -> Verdict:
    """Judge the solution file; raises ProblemError for what is wrong with the problem file.

    Whatever is wrong with the solution is a line of the verdict. ``notify`` is told what is checked
    and the share of the whole that is done.
    """
    if not solution.is_file():
        raise ProblemError(f"{solution} does not exist; expected a Python file with ModelNew")
    loaded = load_problem(problem, options.scale)
    with (
        fp32_precision_set(options.precision),
        SolutionProcess(options.time_limit, str(solution.resolve())) as process,
    ):
        session = Session.start(loaded, options, process)
        checks = _run_checks(session, notify)
        timings, more = _time(session, checks, notify)
        facts = {
            "gpu": device_name(session.device),
            "dtype": options.dtype,
            "precision": options.precision,
            "seed": options.seed,
            "scale": options.scale,
            "torch": torch.__version__,
            "commit": commit(),
            "date": today(),
        }
    return Verdict(problem.name, solution.name, (*checks, *more), timings, remarks(solution), facts)


def _run_checks(session: Session, notify: Notify) -> list[Check]:
    checks: list[Check] = []
    stopped: str | None = None
    for index, named in enumerate(CHECKS):
        if named.needs_gradients and not session.options.training:
            continue
        notify(named.names[0], 0.8 * index / len(CHECKS))
        if stopped:
            checks += [Check(name, "skipped", stopped) for name in named.names]
            continue
        results, stopped = _run_check(session, named)
        checks += results
    return checks


def _run_check(session: Session, named: NamedCheck) -> tuple[list[Check], str | None]:
    """The lines of one check, and the reason why there can be no further ones."""
    try:
        results = named.run(session)
    except SolutionError as error:
        stopped = f"not reached: {named.names[0]} failed" if named.vital else None
        return _failed(named, str(error)), stopped
    except SolutionGone as error:
        return _failed(named, str(error)), "not reached: its process is gone"
    checks = [Check(name, *result) for name, result in zip(named.names, results, strict=True)]
    wrong = named.vital and checks[0].status == "failed"
    return checks, f"not reached: {named.names[0]} failed" if wrong else None


def _failed(named: NamedCheck, reason: str) -> list[Check]:
    first, *others = named.names
    left = [Check(name, "skipped", f"not reached: {first} failed") for name in others]
    return [Check(first, "failed", reason), *left]


def _time(
    session: Session, checks: Sequence[Check], notify: Notify
) -> tuple[tuple[Timing, ...], list[Check]]:
    """Times, of a solution that is right so far; what is wrong has no speed."""
    if not session.options.timing or any(c.status == "failed" for c in checks):
        return (), []
    timings, more = [], list[Check]()
    passes = (False, True) if session.options.training else (False,)
    for index, training in enumerate(passes):
        label = "training" if training else "forward"
        notify(f"timing {label}", 0.8 + 0.1 * index)
        try:
            timing, found = time_pass(session, training)
        except (SolutionError, SolutionGone) as error:
            return (), [*more, Check(f"timing {label}", "failed", str(error))]
        timings.append(timing)
        more += found
    more += [c for c in _again(session) if c.status == "failed"]
    failed = any(c.status == "failed" for c in more)
    return (() if failed else tuple(timings)), more


def _again(session: Session) -> list[Check]:
    """Functions and settings once more: timing may be what they were changed for."""
    checks, _ = _run_check(session, CHECKS[-1])
    return checks
