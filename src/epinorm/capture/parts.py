"""Parts of one Linear's rows, as the q, k and v of one weight, as Linears of their own.

So a norm of one part is the norm of a chain. A part's weight is a view of the whole one where its
channels lie side by side; autograd puts the gradients of all parts together in one operation, that
of ``split``. Done in fp32, where the chains are estimated to gain more than several products lose
(decisions/0033-parts.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.backends.cuda.plan import costs
from epinorm.backends.engine import plan_for
from epinorm.capture.chains import Search
from epinorm.capture.found import Place
from epinorm.capture.layouts import is_unseen
from epinorm.capture.obstacles import PARTING, WHY_WHOLE
from epinorm.capture.purity import storage_of, tensor_of, value_of
from epinorm.capture.sites import CHANNELS, problem_of
from epinorm.capture.spelling import name_of, same_shape, sizes_of
from epinorm.capture.trace import StaysWhole, Trace, check_alike, erase
from epinorm.chain import Chain, Rounding
from epinorm.problem import Problem

_DIVIDING = PARTING | {
    *("view", "reshape", "unflatten", "flatten", "permute", "transpose", "movedim", "swapaxes"),
    *("squeeze", "unsqueeze"),
}

_SEEN = "its parts lie between each other in memory, which a reader sees"


@dataclass(frozen=True)
class _Part:
    """What ``node`` holds of a Linear's rows of N: ``size`` channels from ``first`` on, of each of
    ``count`` stretches of N / count.

    dims: of the node's value, in the order in which they lie in memory.
    """

    node: fx.Node
    count: int
    first: int
    size: int
    dims: tuple[int, ...]

    @property
    def range(self) -> tuple[int, int]:
        """Its channels of each stretch."""
        return self.first, self.first + self.size

    def of(self, y: Tensor) -> Tensor:
        """The node's value of its channels alone, y (..., count * size)."""
        value = tensor_of(self.node)
        y = y.view([value.shape[dim] for dim in self.dims])
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return y if back == sorted(back) else y.permute(back)


def open_parts(graph: fx.Graph, rounding: Rounding, always: bool) -> None:
    """Put several Linears in the place of one of whose parts some reach norms, as chains.

    always: also where that is estimated to take longer.
    """
    for node in graph.find_nodes(op="call_function", target=F.linear):
        given = node.all_input_nodes if node.args else ()
        if not given or any(is_traceable_wrapper_subclass(value_of(n)) for n in given):
            continue
        views, ends = _divisions(node)
        if parts := _parts(node, ends):
            try:
                _open(graph, node, views, parts, rounding, always)
            except StaysWhole as why_not:
                node.meta[WHY_WHOLE] = str(why_not)


def _divisions(linear: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """All that is made of a Linear's result by views, as far as these hold all of it and then its
    parts, which come again by themselves; nothing where anything else reads it."""
    views, ends, whole = list[fx.Node](), list[fx.Node](), [linear]
    value, memory = value_of(linear), storage_of(linear)
    while whole:
        node = whole.pop()
        for user in node.users:
            made = value_of(user)
            divides = name_of(user) in _DIVIDING and user.args[:1] == (node,)
            if value is None or not divides or (made is not None and storage_of(user) != memory):
                return [], []
            views.append(user)
            holds_all = made is None or same_shape((made.numel(),), (value.numel(),))
            (whole if holds_all else ends).append(user)
    return views, ends


def _parts(linear: fx.Node, ends: Sequence[fx.Node]) -> list[_Part]:
    """The ends as parts, in order; none where they are no Linears' results."""
    y = value_of(linear)
    found = [_part(end, y) for end in ends if y is not None]
    parts = sorted((p for p in found if p is not None), key=lambda part: part.first)
    if len(parts) < max(2, len(ends)) or len({part.count for part in parts}) > 1:
        return []
    apart = (a.range == b.range or a.range[1] <= b.range[0] for a, b in pairwise(parts))
    return parts if all(apart) else []


def _part(end: fx.Node, y: Tensor) -> _Part | None:
    """What a view holds of y's rows (..., N), if it is channels of all of them."""
    value, n = value_of(end), y.shape[-1]
    if value is None or not isinstance(n, int) or 0 in sizes_of(value.shape):
        return None
    sizes, strides = sizes_of(value.shape), sizes_of(value.stride())
    dims = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    long = [dim for dim in dims if sizes[dim] > 1]
    rows, channels = ([d for d in long if (strides[d] < n) == inner] for inner in (False, True))

    def packed(dims: list[int], step: int) -> int:
        """How many lie side by side, each ``step`` from the one before; takes these out of dims."""
        count = 1
        while dims and strides[dims[-1]] == step * count:
            count *= sizes[dims.pop()]
        return count

    all_rows = [math.prod(value.shape[d] for d in rows), math.prod(y.shape[:-1])]
    if not all(isinstance(value.shape[d], int) for d in channels):
        return None
    size = packed(channels, 1)
    step = strides[channels[-1]] if channels else n
    count = packed(channels, step)
    packed(rows, n)
    (first,) = sizes_of([value.storage_offset()])
    whole = count * step == n and first + size <= step and same_shape(all_rows[:1], all_rows[1:])
    return None if rows or channels or not whole else _Part(end, count, first, size, tuple(dims))


def _open(
    graph: fx.Graph,
    node: fx.Node,
    views: Sequence[fx.Node],
    parts: Sequence[_Part],
    rounding: Rounding,
    always: bool,
) -> None:
    """Open one Linear; where that is not to be, leave all as it was, and a note why."""
    n, count, ranges = tensor_of(node).shape[-1], parts[0].count, {part.range for part in parts}
    edges = sorted({0, n // count}.union(*ranges))

    def split(whole: Tensor | None) -> Sequence[Tensor | None]:
        """A weight or bias as one for the channels between two edges each."""
        if whole is None:
            return [None] * (len(edges) - 1)
        sizes = tuple(b - a for a, b in pairwise(edges))
        if count == 1:
            return whole.split(sizes)
        stretches = whole.unflatten(0, (count, edges[-1])).split(sizes, 1)
        return [stretch.flatten(0, 1) for stretch in stretches]

    def body(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        given: Any = dict(zip(edges, zip(split(weight), split(bias), strict=True), strict=False))
        made = {first: F.linear(input, *given[first]) for first, _ in sorted(ranges)}
        return [part.of(made[part.first]) for part in parts]

    trace = Trace(graph, node, {})
    with trace.opening():
        made = trace.run(body)
        for value, part in zip(made, parts, strict=True):
            check_alike(value, value_of(part.node), layout=False)
        results = [trace.node_of(value) for value in made]
    new = trace.nodes
    linears = [each for each in new if each.target is F.linear]
    for linear, (first, end) in zip(linears, sorted(ranges), strict=True):
        linear.meta[CHANNELS] = f"[{first}:{end}]" if count == 1 else f"[{count} x {first}:{end}]"
    unseen = is_unseen({part.node: value_of(r) for part, r in zip(parts, results, strict=True)})  # type: ignore[misc]
    for part, result in zip(parts, results, strict=True):
        part.node.replace_all_uses_with(result)
    places = Search(graph, rounding).places(linears)
    why = _why_whole(places, linears, n, count, always) if unseen else _SEEN
    if why is None:
        gone = {node, *views}
        erase(graph, [each for each in graph.nodes if each in gone])
        return
    for part, result in zip(parts, results, strict=True):
        result.replace_all_uses_with(part.node)
    erase(graph, new)
    if places:
        node.meta[WHY_WHOLE] = why


def _why_whole(
    places: Sequence[Place], linears: Sequence[fx.Node], n: int, count: int, always: bool
) -> str | None:
    """Why one Linear is better than several of which some are chains; None where it is not."""
    found = {place.linear: place.found for place in places if place.found is not None}
    if not found:
        return next((place.obstacle for place in places), "")
    chains = [problem_of(each) for each in found.values()]
    plans = [plan_for(problem) for problem in chains]
    if always or any(plan.microseconds is None for plan in plans):
        pays = any(plan.strategy != "reference" for plan in plans)
        return None if always or pays else plans[0].reason
    whole = _without_norm(chains[0], n)
    if whole.out_dtype.itemsize == 2 or whole.out_dtype != whole.dtype:
        return "in 16 bit a Linear for each of its parts was measured to take longer"
    rest = [tensor_of(linear).shape[-1] for linear in linears if linear not in found]
    norms = sum(_eager(each) - _eager(_without_norm(each, each.n)) for each in chains)
    as_one = _time(whole) + norms
    apart = sum(map(_time, [*chains, *(_without_norm(whole, each) for each in rest)]))
    apart += costs.parts_of_weight(whole, copies=count > 1)
    if apart < as_one:
        return None
    return (
        f"a Linear for each of its parts would take longer: estimated {apart:.0f} us, one and "
        f"PyTorch's norms {as_one:.0f}"
    )


def _without_norm(problem: Problem, n: int) -> Problem:
    plain = replace(problem, chain=Chain(None), has_norm_weight=False, has_norm_bias=False)
    return replace(plain, n=n, whole_step=problem.training)


def _time(problem: Problem) -> float:
    return plan_for(problem).microseconds or 0.0


def _eager(problem: Problem) -> float:
    return _time(problem) * (plan_for(problem).gain or 1.0)
