"""What is done to the graphs that AOTAutograd hands to TorchInductor, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from epinorm.capture import casts, spent
from epinorm.chain import dropout
from epinorm.chain.dropout import draw_operator
from epinorm.operator import dispatch, halves, schema

schema.spending_dy()  # graphs out of Inductor's cache hold them


class KeepsSeeds(CustomGraphPass):
    """Inductor's ``joint_custom_pre_pass``, of forward and backward together: a seed that is drawn
    is saved, where a budget for activations would have it drawn again, and another one."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=draw_operator):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)

    def uuid(self) -> Any:
        """As below."""
        return get_hash_for_files((__file__, str(dropout.__file__)))


class AfterAutograd(CustomGraphPass):
    """Inductor's ``post_grad_custom_post_pass``: once for a forward graph, once for a backward."""

    def __call__(self, graph: fx.Graph) -> None:
        casts.cast_together(graph)  # first: casts are not moved across what writes
        spent.let_operators_spend(graph)

    def uuid(self) -> Any:
        """What Inductor's cache of graphs tells this pass from others by."""
        files = [module.__file__ for module in (casts, spent, dispatch, halves, schema)]
        return get_hash_for_files((__file__, *map(str, files)))
