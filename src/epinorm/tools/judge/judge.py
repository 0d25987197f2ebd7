"""Judge a solution (``ModelNew``) against the problem that it claims to solve.

The protocol is KernelBench's (Ouyang et al., 2025, arXiv 2502.10517, section 4) made strict: the
solution runs in a process of its own, values are compared in the judge's, and what a solution could
do besides computing is looked for. docs/judging.md describes each check, and says who is trusted.
"""

from __future__ import annotations

import hashlib
import os
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
_DROPPED = "ran with dropout off, p = 0 in its modules and Model's: what it drops is not judged"
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
    loaded = load_problem(problem, options.scale)
    with fp32_precision_set(options.precision):
        process = SolutionProcess(options.time_limit, solution)
        session = Session.start(loaded, options, process)
        notes = (*remarks(solution), *([_DROPPED] if session.dropped else []))
        passes = () if not options.timing else (False, True) if options.training else (False,)
        if passes:
            notify("timing eager", 0.0)
        # Before anything of the solution runs, and again when all of it has ended.
        eager = {training: time_eager(session, training) for training in passes}
        with process:
            checks = _run_checks(session, notify)
            timings: list[Timing] = []
            if not any(c.status == "failed" for c in checks):
                timings, more = _time(session, eager, notify)
                checks += more
        if process.left_behind:
            checks.append(Check("processes", "failed", "started what could not be ended"))
        for index, timing in enumerate(timings):
            before = eager[timing.pass_ == "training"]
            again = time_eager(session, timing.pass_ == "training")
            timings[index] = before.best(again).against(timing)
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
    return Verdict(
        problem.name, solution.name, tuple(checks), tuple(timings), notes, facts, not_held
    )


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
    first, *others = named.names
    ended = f"not reached: {first} failed"
    try:
        results = named.run(session)
    except Exception as error:
        checks = [Check(first, "failed", _said(error))]
        checks += [Check(name, "skipped", ended) for name in others]
        if isinstance(error, SolutionGone):
            return checks, "not reached: its process is gone"
        raised = isinstance(error, SolutionError) and (named.vital or named.errors_end)
        return checks, ended if raised else None
    checks = [Check(name, *result) for name, result in zip(named.names, results, strict=True)]
    wrong = named.vital and checks[0].status == "failed"
    return checks, ended if wrong else None


def _said(error: Exception) -> str:
    """What the solution did; or that what it answered broke the judge, which is no pass."""
    if isinstance(error, (SolutionError, SolutionGone)):
        return str(error)
    detail = " ".join(str(error).split())[:200]
    return f"the judge could not finish this: {type(error).__name__}: {detail}"


def _time(
    session: Session, eager: dict[bool, EagerTimes], notify: Notify
) -> tuple[list[Timing], list[Check]]:
    """Times, of a solution that is right so far; what is wrong has no speed."""
    timings, checks = list[Timing](), list[Check]()
    for training, times in eager.items():
        label = f"timing {'training' if training else 'forward'}"
        notify(label, 0.8 + 0.1 * training)
        try:
            timing, found = time_solution(session, training, times)
        except Exception as error:
            return [], [*checks, Check(label, "failed", _said(error))]
        timings += [timing] if timing else []
        checks += found
    if eager:  # functions and settings once more: timing may be what they were changed for
        checks += [c for c in _run_check(session, CHECKS[-1])[0] if c.status == "failed"]
    failed = any(c.status == "failed" for c in checks)
    return ([] if failed else timings), checks
