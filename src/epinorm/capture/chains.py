"""Find Linear → pointwise* → norm → pointwise* in a captured graph, or say what is in its way; and
Linear → pointwise* where there is no norm, or none that can be reached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from epinorm.capture.attention import SWAPPED
from epinorm.capture.batch_norm import called
from epinorm.capture.found import Found, Place, Step, gather, unfit
from epinorm.capture.moves import can_move, moves_rows, turns_rows
from epinorm.capture.norms import NormRead, read_norm_function
from epinorm.capture.obstacles import (
    IN_DISGUISE,
    WHY_WHOLE,
    late,
    paths_to_norms,
    takes_apart,
    watched,
    why_columns,
    why_no_step,
)
from epinorm.capture.operands import (
    holds_channels,
    holds_one_each,
    holds_whole_rows,
    may_ask_gradient,
)
from epinorm.capture.purity import (
    changed_argument,
    changes,
    is_pure,
    storage_of,
    tensor_of,
    value_of,
)
from epinorm.capture.regions import exits, read_activation, read_norm
from epinorm.capture.running import statistics_met
from epinorm.capture.spelling import (
    Linear,
    is_cast,
    is_dropout,
    is_view_of_parts,
    is_view_of_rows,
    name_of,
    read_binary,
    read_linear,
    read_pointwise,
    read_scaled,
    same_shape,
    sizes_of,
)
from epinorm.chain import BatchNorm, GroupNorm, Rounding
from epinorm.chain.pointwise import Pointwise

_MOST_STEPS = 64
_DEPTH_OF_SEARCH = 8


class Search:
    """What a graph holds; no node is in two chains.

    rounding "eager": what is taken for one operation is one in the graph too, so that it is rounded
    where eager rounds. accept: says of a chain whether it may be as it is; a shorter one may.
    """

    def __init__(
        self,
        graph: fx.Graph,
        rounding: Rounding = "once",
        accept: Callable[[Found], bool] = lambda found: True,
    ) -> None:
        self.graph, self.rounding, self.accept = graph, rounding, accept
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        touched = ((node, changes(node)) for node in graph.nodes)
        self.effects = [(n, changed) for n, changed in touched if changed or not is_pure(n)]
        # Reentrant checkpointing runs a call without gradients, then with: what is dropped is the
        # same only if the same chains are found.
        self.drops = any(is_dropout(node) for node in graph.nodes)
        self.taken: set[fx.Node] = set()

    def places(self, of: Collection[fx.Node] | None = None) -> list[Place]:
        """Every place where a Linear's result reaches a norm, in order; ``of``: of these alone."""
        return self._all(lambda walk: walk.places(), of)

    def linears(self, of: Collection[fx.Node] | None = None) -> list[Place]:
        """Every Linear that ``places``, which is asked first, left; in order."""
        return self._all(lambda walk: [walk.without_norm()], of)

    def _all(
        self, places_of: Callable[[_Walk], list[Place]], of: Collection[fx.Node] | None = None
    ) -> list[Place]:
        places: list[Place] = []
        for node in self.graph.nodes if of is None else of:
            linear = None if node in self.taken else read_linear(node)
            for place in [] if linear is None else places_of(_Walk(self, node, linear)):
                self.taken.update(place.found.nodes if place.found else ())
                places.append(place)
        # What is an operand of another Linear's chain reaches that one's norm.
        return [p for p in places if p.found is not None or p.norm not in self.taken]


class _Walk:
    """From one Linear along its result, as far as a chain goes."""

    def __init__(self, search: Search, start: fx.Node, linear: Linear) -> None:
        self.start, self.linear, self.rounding = start, linear, search.rounding
        self.accept = search.accept
        self.order, self.effects, self.taken = search.order, search.effects, search.taken
        self.drops = search.drops
        value = value_of(start)
        self.n: Any = value.shape[-1] if value is not None and value.dim() else 0
        self.steps: list[Step] = []
        self.has_parts = True
        self.norm_at = -1
        self.kept_at = -1
        self.stopped = ""

    def places(self) -> list[Place]:
        """The chain as a place; without one, each norm that is reached."""
        current = self.start
        while len(self.steps) < _MOST_STEPS:
            step = self._step(current)
            steps = [step] if step is not None else self._to_norm(current)
            if not steps:
                break
            self.kept_at = self.kept_at if step is not None else len(self.steps)
            self.steps += steps
            if steps[-1].kind == "norm":
                self.norm_at = len(self.steps) - 1
            current = steps[-1].end
        if self.norm_at < 0:
            return self._beyond(current, self.start.meta.get(WHY_WHOLE) or self.stopped)
        found, why = self._found(len(self.steps))
        norm, path = self.steps[self.norm_at].end, tuple(step.end for step in self.steps)
        return [Place(self.start, norm, path, found, "" if found else why, why if found else "")]

    def without_norm(self) -> Place:
        """The Linear with the operations behind it, as far as they are a chain without a norm."""
        self.has_parts = False
        step = self._step(self.start)
        while step is not None and step.kind != "norm" and len(self.steps) < _MOST_STEPS:
            self.steps.append(step)
            step = self._step(step.end)
        while self.steps and self.steps[-1].kind in ("view", "cast", "swap"):
            self.steps.pop()
        found, why = self._found(len(self.steps))
        path = tuple(step.end for step in self.steps)
        return Place(self.start, None, path, found, "" if found else why)

    def _step(self, x: fx.Node) -> Step | None:
        """The next step of a chain whose value so far is x; None: ``stopped`` says why."""
        users = list(x.users)
        if len(users) != 1:
            return self._region(x, users) if users else None
        (node,) = users
        if node in self.taken:
            self.stopped = f"{name_of(node)} belongs to another chain"
            return None
        changed = changed_argument(node)
        if node.op == "output" or (changed is not None and changed is not x):
            self.stopped = "" if node.op == "output" else f"{name_of(node)} changes another tensor"
            return None
        norm = read_norm_function(node, x, self.rounding)
        if norm is not None:
            if self.norm_at >= 0:
                return None
            if isinstance(norm, NormRead):
                return self._norm([node], norm, x)
            self.stopped = norm
            return None
        if is_view_of_rows(node, x) or self._divides(node, x):
            return Step("view", (node,))
        turn, rows = self.start.meta.get(SWAPPED, (None, None))
        if node is turn and all(step.kind == "view" for step in self.steps):
            return Step("swap", (node,), operand=rows)
        if turns_rows(node, x) and self._turns_parts(x):
            return Step("turn", (node,))
        if moves_rows(node, x) and self._moves_whole_rows(x):
            return Step("move", (node,))
        if is_cast(node, x):
            return Step("cast", (node,))
        dropout = is_dropout(node)
        if dropout is False and node.args and node.args[0] is x:
            return Step("cast", (node,))
        operation = read_pointwise(node, x)
        if operation is not None:
            return Step("pointwise", (node,), operation)
        binary = read_binary(node, x)
        if binary is not None:
            return self._with_operand(node, x, *binary)
        scaled = read_scaled(node, x)
        if scaled is not None and (scaled[0] == -1 or self.rounding == "once"):
            return self._scaled(node, x, *scaled)
        self.stopped = why_no_step(node, x, self.n, dropout)
        return None

    def _to_norm(self, x: fx.Node) -> list[Step]:
        """From what several nodes read to the first norm among them, through views and casts."""
        if self.norm_at >= 0 or len(x.users) < 2:
            return []
        for user in x.users:
            value, node, steps = x, user, list[Step]()
            while node not in self.taken:
                norm = read_norm_function(node, value)
                if isinstance(norm, NormRead) and (step := self._norm([node], norm, value)):
                    return [] if isinstance(norm.norm, BatchNorm) else [*steps, step]
                kind: Literal["view", "cast"] = "view" if is_view_of_rows(node, value) else "cast"
                if changed_argument(node) or not (kind == "view" or is_cast(node, value)):
                    break
                steps.append(Step(kind, (node,)))
                value = node
                if len(value.users) != 1:
                    break
                (node,) = value.users
            region = self._norm_region(value)
            if region is not None:
                return [*steps, region]
        return []

    def _norm_region(self, x: fx.Node) -> Step | None:
        """A norm that is written out, of a value that others may read too."""
        if self.rounding == "eager":
            return None
        for nodes in exits(x, has_readers=True):
            norm = None if self.taken.intersection(nodes) else read_norm(nodes, x)
            if norm is not None:
                return self._norm(nodes, NormRead(norm), x)
        return None

    @property
    def _is_turned(self) -> bool:
        return any(step.kind == "turn" for step in self.steps)

    def _divides(self, node: fx.Node, x: fx.Node) -> bool:
        """Whether the node only divides rows into parts, or puts them together again."""
        return self.has_parts and not self._is_turned and is_view_of_parts(node, x, self.n)

    def _turns_parts(self, x: fx.Node) -> bool:
        """Whether parts of rows, or what leaves the norm, may come in another order: nothing of
        the chain but operands of one value an element depends on it."""
        value = tensor_of(x)
        return self.has_parts and (self.norm_at >= 0 or not same_shape(value.shape[-1:], (self.n,)))

    def _moves_whole_rows(self, x: fx.Node) -> bool:
        """Whether x's rows can be moved in the place of the result's, for no more than that."""
        value, given = tensor_of(x), tensor_of(self.linear.x)
        k, n = given.shape[-1], value.shape[-1]
        return (
            self.has_parts
            and self.norm_at < 0
            and all(isinstance(size, int) for size in (k, n, self.n))
            and k <= n == self.n
            and can_move([step.end for step in self.steps if step.kind == "view"], k)
            and not any(
                step.kind in ("swap", "turn")
                or (step.operation is not None and step.operation.operand in ("element", "row"))
                for step in self.steps
            )
        )

    def _norm(self, nodes: Sequence[fx.Node], read: NormRead, x: fx.Node) -> Step | None:
        """The step of a norm over the last dimension of x: a row, or each of its parts."""
        value, norm = tensor_of(x), read.norm
        assert norm is not None
        width = value.shape[-1]
        if not same_shape((width,), (self.n,)):
            if isinstance(norm, (GroupNorm, BatchNorm)):
                self.stopped = f"{type(norm).__name__} after a reshape to rows is not served"
                return None
            read = replace(read, norm=replace(norm, num_groups=self.n // width))
        return Step("norm", tuple(nodes), norm=read)

    def _region(self, x: fx.Node, users: Sequence[fx.Node]) -> Step | None:
        for nodes in exits(x):
            if self.rounding == "eager" or self.taken.intersection(nodes):
                break
            operation = read_activation(nodes, x)
            if operation is not None:
                return Step("pointwise", tuple(nodes), operation)
            norm = read_norm(nodes, x) if self.norm_at < 0 else None
            if norm is not None:
                return self._norm(nodes, NormRead(norm), x)
        if all(takes_apart(user, x, self.n) for user in users):
            self.stopped = why_no_step(users[0], x, self.n)
            return None
        names = list(dict.fromkeys("the output" if u.op == "output" else called(u) for u in users))
        self.stopped = (
            f"the result of {name_of(x)} is used more than once, by {', '.join(names)}: a chain's "
            "results are its last value and what enters its norm"
        )
        return None

    def _with_operand(self, node: fx.Node, x: fx.Node, kind: str, other: fx.Node) -> Step | None:
        value, given = tensor_of(x), tensor_of(other)
        shape = sizes_of(given.shape)
        by_element = Pointwise("mul_element" if kind == "mul" else "add_residual")
        if kind == "mul" and self._is_of_each_row(other, value):
            return Step("operand", (node,), Pointwise("mul_row"), other)
        if holds_channels(given, value, self.n, self._is_turned):
            return Step("operand", (node,), Pointwise(f"{kind}_channel"), other)
        if kind != "sub" and self._is_broadcast(given, value):
            if kind == "mul" and (torch.is_grad_enabled() or self.drops):
                self.stopped = (
                    f"it multiplies by a tensor of shape {shape}, which is expanded in inference "
                    "alone: backward would keep what is expanded, and eager does not"
                )
                return None
            return Step("operand", (node,), by_element, other, broadcasts=True)
        if kind == "sub":
            self.stopped = f"it subtracts a tensor of shape {shape}, not one value per channel"
            return None
        if not same_shape(given.shape, value.shape):
            self.stopped = (
                f"it {'adds' if kind == 'add' else 'multiplies by'} a tensor of shape {shape} to "
                f"one of shape {sizes_of(value.shape)}: operands are not broadcast (expand it "
                "before)"
            )
            return None
        if self._is_turned:
            self.stopped = f"{name_of(node)} reads a tensor in the order that heads were turned to"
            return None
        return Step("operand", (node,), by_element, other)

    def _scaled(self, node: fx.Node, x: fx.Node, c: float, other: float | fx.Node) -> Step | None:
        """The step to ``other + c x``, which eager rounds once; so does -1 as an operation."""
        if not isinstance(other, fx.Node):
            return Step("pointwise", (node,), Pointwise("add", (other,)), scaled=c)
        step = self._with_operand(node, x, "add", other)
        return None if step is None else replace(step, scaled=c)

    def _is_broadcast(self, given: Tensor, value: Tensor) -> bool:
        in_front = all(step.kind in ("pointwise", "operand", "cast") for step in self.steps)
        fixed = self.has_parts and self.norm_at < 0 and isinstance(self.n, int)
        return fixed and in_front and holds_whole_rows(given, value)

    def _is_of_each_row(self, other: fx.Node, value: Tensor) -> bool:
        given = tensor_of(other)
        asks_gradient = given.requires_grad or (self.drops and may_ask_gradient(other))
        placed = [step.end for step in self.steps if step.kind in ("move", "swap")]
        rows = tensor_of(placed[-1] if placed else self.start)
        alike = not self._is_turned and same_shape(value.shape, rows.shape)
        return alike and not asks_gradient and holds_one_each(given, value)

    def _found(self, count: int) -> tuple[Found | None, str]:
        """The longest chain of the first steps that is safe to fuse, and why it is no longer."""
        why = ""
        for end in range(count, self.norm_at, -1):
            found = gather(self.linear, self.steps[:end], self.rounding, self.kept_at)
            if not self.accept(found):
                why = "it was not to go on"
                continue
            why_not = self._disturbed(found) or unfit(found, self.steps[:end])
            if why_not is None and found.kept is not None:
                why_not = late(found, self.order) or watched(found.kept, self.drops)
            if why_not is None:
                return found, why
            why = why_not
        return None, why

    def _disturbed(self, found: Found) -> str | None:
        """What may change a tensor or a mode between the chain's first and last operation, or what
        changes a tensor later that only the fused operation's gradient needs as it was."""
        if (why := statistics_met(found)) is not None:
            return why
        inside = set(found.nodes)
        first, last = self.order[found.linear.nodes[0]], self.order[found.nodes[-1]]
        read: dict[int | None, int] = {}  # memory, with the place where it is first read
        if found.kept is not None:
            read[storage_of(found.kept)] = first
        for node in found.reads:
            at = min((self.order[user] for user in node.users if user in inside), default=first)
            read[storage_of(node)] = min(at, read.get(storage_of(node), at))
        for node, changed in self.effects:
            at = self.order[node]
            if at <= first or node in inside:
                continue
            memory = {storage_of(tensor) for tensor in changed}
            known = memory - {None} & read.keys()
            if any(at > read[one] for one in known) or (None in memory and at < last):
                return f"{name_of(node)} changes a tensor in place that takes part in it"
            if at < last and not changed and not is_pure(node):
                return f"{name_of(node)} in between may change tensors or modes"
        return None

    def _beyond(self, current: fx.Node, obstacle: str) -> list[Place]:
        """The places that chains would have, were it not for the obstacle at ``current``."""
        nodes, paths = tuple(step.end for step in self.steps), list[list[fx.Node]]()
        if IN_DISGUISE not in self.start.meta:
            paths = paths_to_norms(current, self.taken, _DEPTH_OF_SEARCH)
        return [
            Place(self.start, path[-1], (*nodes, *path), None, why_columns(path) or obstacle)
            for path in paths
        ]
