"""What of a problem's Model is to be exported: its one chain, and where each value comes from.

The exported file reads weights and constants from the module that it constructs, so that it serves
other constructor arguments too. ``Recipe`` holds Python expressions for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from epinorm.capture.chains import Found, Place, Search
from epinorm.capture.dynamo import run_without_values
from epinorm.capture.purity import value_of
from epinorm.chain import Chain, GroupNorm
from epinorm.chain.pointwise import Pointwise, of_module
from epinorm.tools.kernelbench.protocol import NoChainError

__all__ = ["Constant", "Recipe", "read_recipe"]


@dataclass(frozen=True)
class Constant:
    """A number of the chain; ``expression`` reads it from ``self``, None: it never changes."""

    value: float
    expression: str | None


@dataclass(frozen=True)
class Recipe:
    """One chain over the whole of ``forward``. From ``x`` on, all are Python expressions.

    ``has``: is there a bias, a norm weight, a norm bias as the problem file constructs it.

    ``operations`` pairs each pointwise operation, pre before post, with its constants. ``checks``
    are expressions that the chain was read with, and the values that they must keep.
    """

    chain: Chain
    operations: tuple[tuple[Pointwise, tuple[Constant, ...]], ...]
    eps: Constant | None
    m_k_n: tuple[int, int, int]
    has: tuple[bool, bool, bool]
    x: str
    weight: str
    bias: str
    norm_weight: str
    norm_bias: str
    groups: str
    operands: tuple[str, ...]
    checks: Mapping[str, Any]

    @property
    def facts(self) -> tuple[Any, ...]:
        """What the text was read with and the model could change."""
        return (*(c.value for c in self.constants if c.expression), *self.checks.values())

    @property
    def fact_expressions(self) -> tuple[str, ...]:
        """What reads ``facts`` from self."""
        return (*(c.expression for c in self.constants if c.expression), *self.checks)

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Every number of the chain in its order: pre, eps, post."""
        before = len(self.chain.pre)
        flat = [c for _, constants in self.operations[:before] for c in constants]
        flat += [] if self.eps is None else [self.eps]
        return (*flat, *(c for _, constants in self.operations[before:] for c in constants))


@dataclass(frozen=True)
class _Reading:
    """One captured graph: its chain, and where the tensors and modules of its nodes come from.

    paths: of each placeholder that is a tensor of the model; names: of each that is an input.
    """

    model: nn.Module
    places: tuple[Place, ...]
    output: Any
    paths: Mapping[fx.Node, str]
    names: Mapping[fx.Node, str]
    modules: Mapping[str, str]

    def module_of(self, node: fx.Node) -> str | None:
        """The path of the PyTorch layer that a node comes from."""
        key = next(reversed(node.meta.get("nn_module_stack") or {}), None)
        path = self.modules.get(str(key))
        leaf = path is not None and type(self.model.get_submodule(path)).__module__
        return path if leaf and leaf.startswith("torch.nn.modules") else None

    def expression(self, node: fx.Node | None) -> str | None:
        """What reads a node's tensor from self or the arguments; None: it is computed."""
        if node is None:
            return "None"
        if node in self.names:
            return self.names[node]
        return path_expression(self.model, self.paths[node]) if node in self.paths else None


def read_recipe(name: str, model: nn.Module, inputs: Sequence[Any]) -> Recipe:
    """Read the model; raises NoChainError with the reason where it cannot be exported."""

    def refuse(reason: str) -> NoChainError:
        return NoChainError(f"{name} cannot be exported: {reason}")

    readings = [_read_mode(model, inputs, training, refuse) for training in (True, False)]
    chains = [_whole_chain(reading, refuse) for reading in readings]
    if len({str(found.chain) for found in chains}) > 1:
        raise refuse("its chain in train() is not that in eval()")
    return _recipe(readings[0], chains[0], inputs, refuse)


def _read_mode(model: nn.Module, inputs: Sequence[Any], training: bool, refuse: Any) -> _Reading:
    """Capture the model's call in one mode, which has to be one graph."""
    readings: list[_Reading] = []
    before = model.training
    parameters = list(inspect.signature(model.forward).parameters)

    def backend_for(twin: nn.Module) -> Any:
        tensors = dict(twin.named_parameters()) | dict(twin.named_buffers())
        of_model = {id(tensor): path for path, tensor in tensors.items()}
        modules = {str(id(module)): path for path, module in twin.named_modules()}

        def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Any:
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            paths = {
                n: of_model[id(t)] for n, t in zip(nodes, given, strict=True) if id(t) in of_model
            }
            rest = [n for n in nodes if n not in paths and value_of(n) is not None]
            names = dict(zip(rest, parameters, strict=False))
            output = next(node for node in gm.graph.nodes if node.op == "output").args[0]
            places = tuple(Search(gm.graph, drops=False).places())
            readings.append(_Reading(model, places, output, paths, names, modules))
            return gm.forward

        return backend

    try:
        run_without_values(model.train(training), backend_for, tuple(inputs), {})
    except Exception as error:
        raise refuse(f"its forward cannot be captured: {error}") from error
    finally:
        model.train(before)
    if len(readings) != 1:
        found = "no graph" if not readings else f"{len(readings)} graphs"
        raise refuse(f"Model holds no chain that can be fused: its forward is {found}")
    return readings[0]


def _whole_chain(reading: _Reading, refuse: Any) -> Found:
    """The chain that is all of ``forward``."""
    chains = [place.found for place in reading.places if place.found]
    obstacles = [place.obstacle for place in reading.places if not place.found]
    if not chains:
        reason = obstacles[0] if obstacles else "there is no Linear → pointwise* → norm in it"
        raise refuse(f"Model holds no chain that can be fused: {reason}")
    if len(reading.places) > 1:
        raise refuse("Model holds several chains, and an exported file holds one")
    (found,) = chains
    if found.linear.x not in reading.names:
        raise refuse(f"{found.linear.x} is computed before the linear layer, outside the chain")
    last = found.nodes[-1]
    if list(reading.output) != [last] or len(last.users) != 1:
        after = ", ".join(str(user) for user in last.users)
        raise refuse(
            f"its forward goes on after the chain {found.chain}: the result is used by {after}"
        )
    if found.kept is not None:
        raise refuse("what enters its norm is read outside the chain too")
    if found.views:
        raise refuse("its rows are reshaped within the chain")
    return found


def _recipe(reading: _Reading, found: Found, inputs: Sequence[Any], refuse: Any) -> Recipe:
    def text(node: fx.Node | None) -> str:
        expression = reading.expression(node)
        if expression is None:
            raise refuse(f"{node}, which takes part in the chain, is computed outside it")
        return expression

    x, weight = value_of(found.linear.x), value_of(found.linear.weight)
    assert x is not None
    assert weight is not None
    groups, eps = _norm(reading, found)
    norm = found.norm
    return Recipe(
        chain=found.chain,
        operations=_operations(reading, found),
        eps=eps,
        m_k_n=(x.shape[:-1].numel(), x.shape[-1], weight.shape[0]),
        has=(found.bias is not None, norm.weight is not None, norm.bias is not None),
        x=text(found.linear.x),
        weight=text(found.linear.weight),
        bias=_tensor(reading, found.linear.nodes[-1], found.bias, "bias", text),
        norm_weight=_tensor(reading, found.norm_node, norm.weight, "weight", text),
        norm_bias=_tensor(reading, found.norm_node, norm.bias, "bias", text),
        groups=groups,
        operands=tuple(text(node) for node in found.operands),
        checks=_checks(reading, found),
    )


def _tensor(
    reading: _Reading, layer: fx.Node | None, tensor: fx.Node | None, name: str, text: Any
) -> str:
    """What reads a layer's tensor: of its module also where this one has none, as others may."""
    path = None if layer is None else reading.module_of(layer)
    if tensor is not None or path is None:
        return text(tensor)
    module = reading.model.get_submodule(path)
    return f"{path_expression(reading.model, path)}.{name}" if hasattr(module, name) else "None"


def path_expression(root: nn.Module, path: str) -> str:
    """``net.0.weight`` as Python: ``self.net[0].weight``."""
    expression, owner = "self", root
    for name in path.split("."):
        if isinstance(owner, (nn.Sequential, nn.ModuleList)) and name.isdigit():
            expression += f"[{name}]"
        elif isinstance(owner, nn.ModuleDict):
            expression += f"[{name!r}]"
        else:
            expression += f".{name}"
        owner = getattr(owner, name)
    return expression


def _norm(reading: _Reading, found: Found) -> tuple[str, Constant | None]:
    norm = found.norm.norm
    assert norm is not None
    assert found.norm_node is not None
    path = reading.module_of(found.norm_node)
    owner = None if path is None else path_expression(reading.model, path)
    eps = None
    if norm.eps is not None:
        eps = Constant(norm.eps, None if owner is None else f"{owner}.eps")
    if not isinstance(norm, GroupNorm):
        return "1", eps
    return (str(norm.num_groups) if owner is None else f"{owner}.num_groups"), eps


def _operations(
    reading: _Reading, found: Found
) -> tuple[tuple[Pointwise, tuple[Constant, ...]], ...]:
    """Each operation with where its constants come from, in the chain's order."""
    paired = []
    for node, operation in zip(found.spelt, (*found.pre, *found.post), strict=True):
        path = reading.module_of(node)
        names: Sequence[str] = ()
        if path is not None:
            module = reading.model.get_submodule(path)
            names = operation.definition.modules.get(type(module), ())
        owner = "" if path is None else path_expression(reading.model, path)
        expressions: list[str | None] = [f"{owner}.{name}" for name in names]
        expressions = expressions or [None] * len(operation.constants)
        constants = tuple(
            Constant(value, text)
            for value, text in zip(operation.constants, expressions, strict=True)
            if isinstance(value, float)
        )
        paired.append((operation, constants))
    return tuple(paired)


def _checks(reading: _Reading, found: Found) -> dict[str, Any]:
    """Plain attributes that ``forward`` reads and that the text therefore depends on."""
    kept: dict[str, Any] = {}
    for node in found.spelt:
        path = reading.module_of(node)
        if path is None:
            continue
        operation = of_module(reading.model.get_submodule(path))
        for name, value in operation.definition.where.items() if operation else ():
            kept[f"{path_expression(reading.model, path)}.{name}"] = value
    code: Any = type(reading.model).forward
    for name in code.__code__.co_names:
        value = vars(reading.model).get(name, reading)
        if isinstance(value, (bool, int, float, str, type(None))) and name != "training":
            kept[f"self.{name}"] = value
    return kept
