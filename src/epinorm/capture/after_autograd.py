"""What is done to the graphs that AOTAutograd hands to TorchInductor, forward and backward."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from epinorm.capture import casts, spent
from epinorm.operator import dispatch, schema


class AfterAutograd(CustomGraphPass):
    """Inductor's ``post_grad_custom_post_pass``: once for a forward graph, once for a backward."""

    def __call__(self, graph: fx.Graph) -> None:
        casts.cast_together(graph)  # first: casts are not moved across what writes
        spent.let_operators_spend(graph)

    def uuid(self) -> Any:
        """What Inductor's cache of graphs tells this pass from others by."""
        files = [module.__file__ for module in (casts, spent, dispatch, schema)]
        return get_hash_for_files((__file__, *map(str, files)))
