"""From a problem to its plan, and from a plan to what computes it; both are made once and kept.

Backends are registered here (backends/__init__.py); ``memo.clear`` forgets all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from epinorm.backends.memo import memo
from epinorm.problem import (
    CannotCompile,
    Executable,
    Layout,
    Plan,
    Problem,
    Strategy,
    check_strategy,
)
from epinorm.said import warn_once

Planner = Callable[[Problem, Strategy], Plan]
"""The plan for a strategy, "auto" among them; for what cannot be served, one of strategy
"reference" whose reason says why not."""

Compiler = Callable[[Problem, Plan, Layout], Executable]
"""What computes a plan for tensors of a layout; raises ``CannotCompile`` where that cannot be made
on this machine."""

_planners: dict[str, tuple[tuple[Strategy, ...], Planner]] = {}
_compilers: dict[Strategy, Compiler] = {}


def register(
    strategies: tuple[Strategy, ...],
    compile: Compiler,
    device_type: str = "",
    plan: Planner | None = None,
) -> None:
    """Let plans of these strategies be compiled so; plan: what decides on devices of this type."""
    _compilers.update(dict.fromkeys(strategies, compile))
    if plan is not None:
        _planners[device_type] = strategies, plan


@memo(4096)
def plan_for(problem: Problem, strategy: Strategy = "auto", strict: bool = False) -> Plan:
    """Decide how ``problem`` is computed; the same problem always gets the same plan.

    ``auto`` takes the fastest strategy that serves the problem, PyTorch's own layers where they
    are it. Where nothing else serves on a CUDA device it warns, once for each reason; under
    ``strict`` what is left to PyTorch is a RuntimeError. A strategy asked for by name that cannot
    serve the problem is a RuntimeError with the reason.
    """
    check_strategy(strategy)
    if strategy == "reference":
        return Plan("reference", "asked for by name")
    kind = problem.device.type
    strategies, planner = _planners.get(kind, ((), None))
    if planner is not None and strategy in ("auto", *strategies):
        plan = planner(problem, strategy)
    else:
        plan = Plan("reference", f"it does not run on a {kind} device")
    if plan.strategy != "reference":
        return plan
    if strategy != "auto":
        raise RuntimeError(f"strategy {strategy!r} cannot serve this chain: {plan.reason}")
    if strict:
        raise RuntimeError(f"strict=True, and nothing faster than PyTorch serves: {plan.reason}")
    if kind == "cuda" and not plan.chosen:
        warn_once(
            f"epinorm computes with PyTorch's own layers: {plan.reason} "
            "(strict=True makes this an error)"
        )
    return plan


def executable_for(problem: Problem, plan: Plan, layout: Layout) -> Executable:
    """What computes the plan for tensors of this layout.

    PyTorch's own layers where it cannot be made.
    """
    try:
        return _compilers[plan.strategy](problem, plan, layout)
    except CannotCompile:  # it has said so
        plan_for.cache_clear()  # so that the next plan, and explain, name the reason
        return _compilers["reference"](problem, plan, layout)
