"""Which chains of a graph are faster in our operation than as they are, as their plans have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, statically_known_true

from epinorm.backends.engine import plan_for
from epinorm.capture.distributed import layout_of_found
from epinorm.capture.found import Found, Place
from epinorm.capture.purity import tensor_of
from epinorm.capture.sites import problem_of
from epinorm.capture.spelling import sizes_of
from epinorm.chain import GroupNorm, Rounding
from epinorm.problem import Plan, Strategy


@dataclass(frozen=True)
class Settings:
    """How fused chains are to be computed; see ``epinorm.linear_norm``."""

    strategy: Strategy = "auto"
    strict: bool = False
    rounding: Rounding = "once"

    def of(self, normed: bool) -> tuple[Strategy, bool]:
        """The strategy and strictness of a chain. Those without a norm follow their plans where a
        strategy is asked for by name, as what serves a norm need not serve them, and are not what
        ``strict`` is about; but for "reference", which serves everything."""
        if normed or self.strategy == "reference":
            return self.strategy, self.strict
        return "auto", False


_MANY_ROWS = 8192
"""For which a number of rows that changes from call to call is looked at too."""
_MOST_BITS = 24
"""Of numbers of rows that are told apart."""


def with_paying_dropout(place: Place, settings: Settings) -> Place:
    """A place with a norm as it is, but not taken where PyTorch's layers would compute dropout:
    they make the mask of our kernels in dozens of operations, and their own in one."""
    found = place.found
    if found is None or not found.drops or settings.strategy != "auto":
        return place
    plan = _plan_of_step(found)
    if plan is not None and plan.strategy != "reference":
        return place
    why = "its number of rows may not be looked at" if plan is None else plan.reason
    return replace(place, found=None, obstacle=f"its dropout is PyTorch's own here: {why}")


def may_pay(place: Place, settings: Settings) -> bool:
    """Whether a place with a norm is replaced: a chain that is PyTorch's own at the captured size,
    prepacked or not, stays as it is written, which costs nothing."""
    if settings.strategy != "auto" or settings.strict or place.found is None:
        return True
    if isinstance(place.found.norm.norm, GroupNorm) and layout_of_found(place.found) is not None:
        return True  # PyTorch's own fails in the backward pass where channels are split
    return pays(place, settings) or pays(place, settings, prepacked=True)


def why_left(found: Found, settings: Settings) -> str:
    """Why a chain with a BatchNorm is left to PyTorch, whose product may be ours all the same;
    empty where it is taken."""
    problem = problem_of(found)
    training = problem.training or found.drops  # as ``_plan_of_step``
    problem = replace(problem, training=training, whole_step=training)
    why = ""
    for each in (problem, replace(problem, m=_MANY_ROWS)) if _changes(found) else (problem,):
        try:
            plan = plan_for(each, settings.strategy)
        except RuntimeError as error:
            why = why or str(error)
            continue
        if plan.strategy != "reference" or settings.strategy == "reference":
            return ""
        why = why or f"its norm is BatchNorm, PyTorch's own here: {plan.reason}"
    return why


def pays(place: Place, settings: Settings, prepacked: bool = False) -> bool:
    """Whether a chain is faster in our operation than as it is, as its plan has it.

    Dynamo captures again where a device, a dtype or PyTorch's setting for fp32 products changes.
    """
    if place.found is None:
        return False
    if settings.of(False)[0] == "reference":
        return True
    if place.found.drops:
        plan = _plan_of_step(place.found)
        return plan is not None and plan.strategy != "reference"
    problem = problem_of(place.found)
    prepacked = prepacked and not problem.training
    problem = replace(problem, prepacked=prepacked, whole_step=problem.training)
    sizes = (problem, replace(problem, m=_MANY_ROWS)) if _changes(place.found) else (problem,)
    return any(plan_for(each).strategy != "reference" for each in sizes)


def _plan_of_step(found: Found) -> Plan | None:
    """The plan by which a chain that drops values is taken or left: that of a training step with
    the power of two below its number of rows. None where nothing may depend on that number, as the
    user has marked a size of it.

    Checkpointing runs a call again, perhaps by another of the graphs that were captured, and the
    first time perhaps without gradients: the masks are the same only if all graphs leave the same
    dropouts to PyTorch. So neither modes decide, nor the size that a graph was captured at; of
    sizes that change Dynamo guards those with the same outcome.
    """
    sizes = _rows_of(found)
    rows: Any = math.prod(sizes)
    hint = math.prod(sizes_of(sizes))
    problem = replace(problem_of(found), training=True, whole_step=True)
    parts = max(1, hint // max(1, problem.m))  # of rows that are split among processes

    def plan(bits: int) -> Plan:
        return plan_for(replace(problem, m=(1 << bits >> 1) // parts))

    bits = hint.bit_length()
    made = plan(bits)
    if not isinstance(rows, int):
        first = last = bits
        while first > 2 and plan(first - 1).strategy == made.strategy:
            first -= 1
        while last < _MOST_BITS and plan(last + 1).strategy == made.strategy:
            last += 1
        low, high = 1 << first >> 1, math.inf if last == _MOST_BITS else 1 << last
        if not _may_guard(rows, low, high):
            return None
        # To compare is to guard.
        bool(rows >= low)
        bool(high == math.inf or rows < high)
    return made


def _may_guard(rows: Any, low: int, high: float) -> bool:
    """Whether to guard low <= rows < high raises nothing: not for sizes that have no value while
    the graph is captured (``mark_unbacked``), nor within a range for which the user wants one graph
    (``mark_dynamic`` with min or max)."""
    if rows.node.hint is None:
        return False
    if statically_known_true(rows >= low) and (
        high == math.inf or statically_known_true(rows < high)
    ):
        return True
    for tracked in rows.node.shape_env.tracked_fakes or ():
        limits = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, limit in zip(getattr(tracked.fake, "shape", ()), limits, strict=False):
            has_range = isinstance(limit, StrictMinMaxConstraint) and isinstance(size, torch.SymInt)
            if has_range and size.node.expr.free_symbols & rows.node.expr.free_symbols:
                return False
    return True


def _rows_of(found: Found) -> tuple[Any, ...]:
    return tuple(tensor_of(found.linear.x).shape[:-1])


def _changes(found: Found) -> bool:
    """Whether the number of rows is another one from call to call."""
    return not all(isinstance(size, int) for size in _rows_of(found))
