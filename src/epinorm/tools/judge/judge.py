"""Judge a solution (``ModelNew``) against the problem that it claims to solve.

The protocol is KernelBench's (Ouyang et al., 2025, arXiv 2502.10517, section 4) made strict: the
solution runs in a process of its own, values are compared in the judge's, and what a solution could
do besides computing is looked for. docs/judging.md describes each check, and says who is trusted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from epinorm.tools.bench import fp32_precision_set
from epinorm.tools.judge.checks import CHECKS, NamedCheck
from epinorm.tools.judge.facts import Check, JudgeOptions, Timing, Verdict
from epinorm.tools.judge.process import SolutionError, SolutionGone, SolutionProcess
from epinorm.tools.judge.session import Session
from epinorm.tools.judge.source import remarks
from epinorm.tools.judge.timing import EagerTimes, time_eager, time_solution
from epinorm.tools.kernelbench.problem import ProblemError, load_problem
from epinorm.tools.progress import Notify, silent
from epinorm.tools.results import commit, device_name, today

_NOT_HELD = {
    "orphans": "a process that it leaves behind is not found",
    "no new privileges": "it may run programs with more rights than it has",
    "no capabilities": "it keeps the capabilities of its user",
    "no access to other processes": "it can read and change its user's other processes, save this "
    "one",
    "no signals": "it can stop or kill its user's processes, this one among them",
}
_AS_ROOT = "the judge runs as root, and so the solution, which may change the machine"


def judge(problem: Path, solution: Path, options: JudgeOptions, notify: Notify = silent) -> Verdict:
    """Judge the solution file; raises ProblemError for what is wrong with the problem file.

    Whatever is wrong with the solution is a line of the verdict. ``notify`` is told what is checked
    and the share of the whole that is done.
    """
    try:
        text = solution.read_bytes()
    except OSError:
        raise ProblemError(
            f"{solution} does not exist; expected a Python file with ModelNew"
        ) from None
    notes = remarks(solution)
    loaded = load_problem(problem, options.scale)
    with fp32_precision_set(options.precision):
        process = SolutionProcess(options.time_limit, solution)
        session = Session.start(loaded, options, process)
        passes = () if not options.timing else (False, True) if options.training else (False,)
        eager = _eager_times(session, passes, notify)
        with process:
            checks = _run_checks(session, notify)
            timings: tuple[Timing, ...] = ()
            if not any(c.status == "failed" for c in checks):
                timings, more = _time(session, eager, notify)
                checks += more
        if process.left_behind:
            checks.append(Check("processes", "failed", "started what could not be ended"))
        if timings:
            timings = _with_eager_of_afterwards(session, timings, eager)
        facts = {
            "gpu": device_name(session.device),
            "dtype": options.dtype,
            "precision": options.precision,
            "seed": options.seed,
            "scale": options.scale,
            "solution_sha256": hashlib.sha256(text).hexdigest(),
            "torch": torch.__version__,
            "commit": commit(),
            "date": today(),
        }
    not_held = tuple(said for name, said in _NOT_HELD.items() if name not in process.held)
    if os.geteuid() == 0:
        not_held += (_AS_ROOT,)
    return Verdict(problem.name, solution.name, tuple(checks), timings, notes, facts, not_held)


def _eager_times(
    session: Session, passes: Sequence[bool], notify: Notify
) -> dict[bool, EagerTimes]:
    """Eager's times, before anything of the solution has run."""
    if passes:
        notify("timing eager", 0.0)
    return {training: time_eager(session, training) for training in passes}


def _with_eager_of_afterwards(
    session: Session, timings: Sequence[Timing], before: dict[bool, EagerTimes]
) -> tuple[Timing, ...]:
    """Eager once more, after all of the solution has ended; the faster time counts."""
    found = []
    for timing in timings:
        training = timing.pass_ == "training"
        found.append(before[training].best(time_eager(session, training)).against(timing))
    return tuple(found)


def _run_checks(session: Session, notify: Notify) -> list[Check]:
    checks: list[Check] = []
    stopped: str | None = None
    for index, named in enumerate(CHECKS):
        if named.needs_gradients and not session.options.training:
            continue
        notify(named.names[0], 0.1 + 0.7 * index / len(CHECKS))
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
        ends = named.vital or named.errors_end
        stopped = f"not reached: {named.names[0]} failed" if ends else None
        return _failed(named, str(error)), stopped
    except SolutionGone as error:
        return _failed(named, str(error)), "not reached: its process is gone"
    except Exception as error:  # what the solution answered broke the judge: that is no pass
        return _failed(named, _broken(error)), None
    checks = [Check(name, *result) for name, result in zip(named.names, results, strict=True)]
    wrong = named.vital and checks[0].status == "failed"
    return checks, f"not reached: {named.names[0]} failed" if wrong else None


def _broken(error: Exception) -> str:
    detail = " ".join(str(error).split())[:200]
    return f"the judge could not finish this: {type(error).__name__}: {detail}"


def _failed(named: NamedCheck, reason: str) -> list[Check]:
    first, *others = named.names
    left = [Check(name, "skipped", f"not reached: {first} failed") for name in others]
    return [Check(first, "failed", reason), *left]


def _time(
    session: Session, eager: dict[bool, EagerTimes], notify: Notify
) -> tuple[tuple[Timing, ...], list[Check]]:
    """Times, of a solution that is right so far; what is wrong has no speed."""
    timings, checks = list[Timing](), list[Check]()
    for training, times in eager.items():
        label = f"timing {'training' if training else 'forward'}"
        notify(label, 0.8 + 0.1 * training)
        try:
            timing, found = time_solution(session, training, times)
        except (SolutionError, SolutionGone) as error:
            return (), [*checks, Check(label, "failed", str(error))]
        except Exception as error:
            return (), [*checks, Check(label, "failed", _broken(error))]
        timings += [timing] if timing else []
        checks += found
    if eager:  # functions and settings once more: timing may be what they were changed for
        checks += [c for c in _run_check(session, CHECKS[-1])[0] if c.status == "failed"]
    failed = any(c.status == "failed" for c in checks)
    return (() if failed else tuple(timings)), checks
