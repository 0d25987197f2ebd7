"""A function of PyTorch's, run once more on a graph's example values, as nodes of the graph."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

PART = "epinorm_part"
"""In the meta of a node that was opened: the module within its own whose parameters it reads."""


class StaysWhole(Exception):
    """Why a function is not opened."""


class Trace(TorchFunctionMode):
    """Notes, before a node of a graph, each operation that makes a tensor.

    parts: names of modules by the node's arguments; reads: what it may read besides those.
    """

    def __init__(
        self,
        graph: fx.Graph,
        node: fx.Node,
        parts: Mapping[Any, str],
        reads: Sequence[fx.Node] = (),
    ) -> None:
        super().__init__()
        self.graph, self.of, self.before = graph, node, node.prev
        self._known: dict[int, fx.Node] = {}
        self._alive: list[Any] = []  # so that no other value gets a known one's id
        self._sizes: dict[Any, tuple[fx.Node, int]] = {}
        for given in (*node.all_input_nodes, *reads):
            self._know(given.meta.get("example_value"), given)
        named: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        self._parts: dict[Any, str] = {
            named[place]: part for place, part in parts.items() if named.get(place) is not None
        }

    @property
    def nodes(self) -> list[fx.Node]:
        """What was noted, in order."""
        nodes, node = list[fx.Node](), self.before.next
        while node is not self.of:
            nodes.append(node)
            node = node.next
        return nodes

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Within, the graph is written before the node; where the node is to stay whole, what was
        noted is taken out again."""
        try:
            with self.graph.inserting_before(self.of):
                yield
        except StaysWhole:
            erase(self.graph, self.nodes)
            raise

    def run(self, body: Callable[..., Any]) -> Any:
        """What the body makes of the node's example values."""
        args, kwargs = map_aggregate(
            (self.of.args, self.of.kwargs),
            lambda a: a.meta.get("example_value") if isinstance(a, fx.Node) else a,
        )
        mode = next(value.fake_mode for value in self._alive if isinstance(value, FakeTensor))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with mode, enable_python_dispatcher(), self:
                result = body(*args, **kwargs)
        if warned:
            raise StaysWhole(f"it warns ({warned[0].message})")
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            op, target = _spelt(func)
            given = map_aggregate(args, self.node_of), map_aggregate(kwargs, self.node_of)
            node = self._note(op, target, *given, result)
            if not isinstance(result, Tensor):
                for index, part in enumerate(result):
                    self._note("call_function", operator.getitem, (node, index), {}, part)
        return result

    def node_of(self, value: Any) -> Any:
        """What stands for a tensor or a size in the graph; other values as they are."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Tensor):
            raise StaysWhole("it reads a tensor from elsewhere")
        return self._size(value) if isinstance(value, torch.SymInt) else value

    def _know(self, value: Any, node: fx.Node) -> None:
        if not isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
            return
        self._known[id(value)] = node
        self._alive.append(value)
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if isinstance(size, torch.SymInt):
                self._sizes.setdefault(size.node.expr, (node, dim))

    def _note(self, op: str, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        kept = ("nn_module_stack", "stack_trace")
        node.meta = {key: self.of.meta[key] for key in kept if key in self.of.meta}
        for part in {self._parts[given] for given in node.all_input_nodes if given in self._parts}:
            node.meta[PART] = part
            if args[0] in self._parts:  # it is a part of a weight
                self._parts[node] = part
        node.meta["example_value"] = value
        self._know(value, node)
        return node

    def _size(self, size: torch.SymInt) -> Any:
        """A size that is only known at the call, by the dimensions that it is made of."""
        expression = size.node.expr
        parts = [expression] if expression in self._sizes else expression.free_symbols
        if any(part not in self._sizes for part in parts):
            raise StaysWhole("its sizes are made of others that it does not see")
        known: dict[Any, Any] = {
            part: fx.Proxy(self.graph.call_method("size", self._sizes[part])) for part in parts
        }
        made = known.get(expression)
        if made is None:
            made = sympy_interp(PythonReferenceAnalysis, known, expression)
        if not isinstance(made, fx.Proxy):
            return int(made)
        made.node.meta["example_value"] = size
        return made.node


def check_alike(value: Any, expected: Any, layout: bool = True) -> None:
    """Raise unless two example values agree in all that a reader could see, layout: in that too;
    they do not where a mode was changed before, such as autocast within the model."""
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        raise StaysWhole("its results are not those of its operations")
    facts = [(t.shape, t.dtype, t.device, t.requires_grad) for t in (value, expected)]
    if facts[0] != facts[1] or (layout and value.stride() != expected.stride()):
        raise StaysWhole("modes that are changed within the model, or a layout, decide its result")


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Take nodes that nothing else reads out of a graph; they come in its order."""
    for node in reversed(nodes):
        graph.erase_node(node)


def _spelt(func: Any) -> tuple[str, Any]:
    """An operation as Dynamo writes it: a method's name, or a function."""
    name = func.__name__
    if name == "__get__":
        raise StaysWhole("it reads an attribute that is a tensor")
    if name.startswith("__"):
        return "call_function", getattr(operator, name.strip("_"))
    if getattr(Tensor, name, None) is func:
        return "call_method", name
    return "call_function", func
