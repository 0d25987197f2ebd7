"""Inputs of a graph that share memory at a later call in another way than when it was captured.

What the pass moves, it moves across changes of memory that was another one at capture. Dynamo
guards which inputs are one tensor, not which are views of one memory. So where a graph changes an
input in place, each call looks at that, and one whose inputs share memory in another way runs the
graph as it was written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

from epinorm.capture.purity import changes, running_statistics, storage_of, value_of
from epinorm.capture.spelling import checkpoints
from epinorm.capture.unwinding import leave_what_is_entered, running
from epinorm.said import log_once

Run = Callable[..., Any]


def changed_inputs(gm: fx.GraphModule, with_statistics: bool = True) -> frozenset[int]:
    """The places of arguments that the graph changes; with_statistics: a BatchNorm's too."""
    changed: list[Any] = []
    for node in gm.graph.nodes:
        left_out = [] if with_statistics else running_statistics(node)
        changed += [tensor for tensor in changes(node) if tensor not in left_out]
    for node, inner in checkpoints(gm):
        changed += [node.args[1 + i] for i in changed_inputs(inner, with_statistics)]
    memory = {storage_of(node) for node in changed if isinstance(node, fx.Node)} - {None}
    arguments = enumerate(gm.graph.find_nodes(op="placeholder"))
    return frozenset(i for i, node in arguments if storage_of(node) in memory)


class AsCaptured:
    """Which inputs of a graph share memory, taken down before the pass rewrites it.

    A BatchNorm's running statistics and what counts its batches are taken to share it with no other
    input: to look at them costs each step of such a model.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        changed = [
            i
            for i in sorted(changed_inputs(gm, with_statistics=False))
            if (value := value_of(inputs[i])) is not None
            and (value.dim() or value.is_floating_point())
        ]
        memory = [storage_of(node) for node in inputs]
        self._changed = tuple(
            tuple(i for i, each in enumerate(memory) if each == one)
            for one in dict.fromkeys(memory[i] for i in changed)
        )
        known = {None, *(memory[i] for i in changed)}
        self._others = tuple(i for i, each in enumerate(memory) if each not in known)
        may_share = bool(changed) and len(memory) - memory.count(None) > 1
        self._written = copy.deepcopy(gm) if may_share else None
        if self._written is not None:
            leave_what_is_entered(self._written)

    def guarded(self, run: Run) -> Run:
        """``run`` of the rewritten graph, for calls whose inputs share memory as they did."""
        if self._written is None:
            return run
        as_written = running(self._written)

        def call(*args: Any) -> Any:
            if self._fits(args):
                return run(*args)
            log_once(
                "a call runs its own code, unfused: a tensor that it changes in place shares "
                "memory with other tensors than in the call that was captured"
            )
            return as_written(*args)

        return call

    def _fits(self, args: tuple[Any, ...]) -> bool:
        known: set[int] = set()
        for alike in self._changed:
            memory = _memory(args, alike)
            if len(memory) != 1 or not memory.isdisjoint(known):
                return False
            known |= memory
        return known.isdisjoint(_memory(args, self._others))


def _memory(args: tuple[Any, ...], places: tuple[int, ...]) -> set[int]:
    tensors: Iterable[Tensor] = (args[i] for i in places)
    return {t.untyped_storage()._cdata for t in tensors}
