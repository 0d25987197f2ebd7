"""What of a problem's Model is to be exported: its chains, and where each value comes from.

The exported file reads weights and constants from the module that it constructs, so that it serves
other constructor arguments too. ``Recipe`` holds Python expressions for them.
"""

from __future__ import annotations

import ast
import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from epinorm.capture.chains import Search
from epinorm.capture.dynamo import run_without_values
from epinorm.capture.found import Found
from epinorm.capture.purity import tensor_of, value_of
from epinorm.capture.spelling import is_dropout
from epinorm.chain import Chain
from epinorm.chain.pointwise import of_module
from epinorm.tools.export.statements import Body, Span, parameters_of
from epinorm.tools.kernelbench.protocol import NoChainError


@dataclass(frozen=True)
class Recipe:
    """One chain and the statements of ``forward`` that compute it. From ``x`` on, all are Python
    expressions, as they read where the first of these statements begins.

    ``has``: is there a bias, a norm weight, a norm bias as the problem file constructs it; dims: of
    x, whose first ones are folded to m.

    ``facts`` are expressions of what the chain was read with and the model could change, and their
    values.
    """

    chain: Chain
    span: Span
    m_k_n: tuple[int, int, int]
    dims: int
    has: tuple[bool, bool, bool]
    x: str
    weight: str
    bias: str
    norm_weight: str
    norm_bias: str
    operands: tuple[str, ...]
    facts: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Reading:
    """One captured graph, and where the tensors and modules of its nodes come from.

    paths: of each placeholder that is a tensor of the model; names: of each that is an input or a
    local variable.
    """

    model: nn.Module
    graph: fx.Graph
    body: Body
    paths: Mapping[fx.Node, str]
    names: Mapping[fx.Node, str]
    modules: Mapping[str, str]

    def module_of(self, node: fx.Node | None) -> tuple[nn.Module, str] | None:
        """The PyTorch layer that a node comes from, and what reads it from self."""
        stack = {} if node is None else node.meta.get("nn_module_stack") or {}
        path = self.modules.get(str(next(reversed(stack), None)))
        if path is None:
            return None
        module = self.model.get_submodule(path)
        leaf = type(module).__module__.startswith("torch.nn.modules")
        return (module, path_expression(self.model, path)) if leaf else None

    def expression(self, node: fx.Node | None) -> str | None:
        """What reads a node's tensor from self or the arguments; None: it is computed."""
        if node is None:
            return "None"
        if node in self.names:
            return self.names[node]
        return path_expression(self.model, self.paths[node]) if node in self.paths else None


def refusal(path: Path, reason: str) -> NoChainError:
    """Why nothing of a problem file can be exported."""
    return NoChainError(f"{path.name} cannot be exported: {reason}")


def read_recipes(
    path: Path, forward: ast.FunctionDef, model: nn.Module, inputs: Sequence[Any]
) -> tuple[list[Recipe], list[str]]:
    """The chains that whole statements of ``forward`` compute, in their order, and why others are
    left to PyTorch; raises NoChainError with the reason where none can be exported."""
    of = path, forward, model, inputs
    train, evaluate = _read_mode(*of, training=True), _read_mode(*of, training=False)
    ends: set[int] | None = None
    for reading in (train, evaluate, train):  # what is in one mode a chain's end is so in the other
        chains, left = _chains(reading, ends)
        ends = {span.last for _, span in chains}
    same = {(str(found.chain), span.first, span.last) for found, span in _chains(evaluate, ends)[0]}
    recipes = []
    for found, span in chains:
        if (str(found.chain), span.first, span.last) not in same:
            left.append(f"{found.chain}: it is another chain in eval()")
            continue
        try:
            recipes.append(_recipe(train, found, span))
        except NoChainError as error:
            left.append(f"{found.chain}: {error}")
    if not recipes:
        raise refusal(path, "; ".join(left) or "there is no Linear in it")
    return recipes, left


def _chains(reading: _Reading, ends: set[int] | None) -> tuple[list[tuple[Found, Span]], list[str]]:
    """The chains that whole statements compute (that end with one of ``ends``, if given), and why
    other Linears are in none.

    None holds a dropout: an evaluator may compare its mask, which is PyTorch's own."""
    refused: dict[fx.Node, str] = {}

    def accept(found: Found) -> bool:
        span = reading.body.span(found)
        why = span if isinstance(span, str) else ""
        if found.kept is not None or found.views or found.moves:
            why = "its value is needed on the way, or its rows are reshaped"
        elif any(is_dropout(node) is not None for node in found.nodes):
            why = "dropout is left to PyTorch"
        elif found.norm_node is not None and found.norm_node.target is F.instance_norm:
            why = "its norm is InstanceNorm, whose weights another model may have for each sample"
        elif found.chain.returns_statistics:
            why = "BatchNorm in training is PyTorch's own"
        elif "row" in found.chain.operand_kinds:
            why = "it multiplies rows by a number each"
        elif _has_one_for_all(found):
            why = "one number stands for those of all channels"
        elif not why and ends is not None and span.last not in ends:  # type: ignore[union-attr]
            why = "it ends elsewhere in train() than in eval()"
        if why:
            refused[found.linear.nodes[0]] = why
        return not why

    search = Search(reading.graph, accept=accept)
    # A Linear whose chain cannot end behind its norm may be one without.
    places = [*search.places(), *search.linears()]
    found = {p.linear: p.found for p in places if p.found is not None}
    left = {p.linear: refused.get(p.linear, p.obstacle) for p in places if p.linear not in found}
    pairs = [(each, reading.body.span(each)) for each in found.values()]
    spans = [(each, span) for each, span in pairs if isinstance(span, Span)]
    ordered = sorted(spans, key=lambda pair: pair[1].first)
    return ordered, [f"{node.name}: {why}" for node, why in left.items()]


def _has_one_for_all(found: Found) -> bool:
    """Whether a tensor of the chain is repeated for its channels."""
    tensors = map(value_of, (found.bias, found.norm.weight, found.norm.bias, *found.operands))
    n = tensor_of(found.linear.nodes[-1]).shape[-1]
    return any(tensor.numel() < n for tensor in tensors if tensor is not None)


def _read_mode(
    path: Path,
    forward: ast.FunctionDef,
    model: nn.Module,
    inputs: Sequence[Any],
    training: bool,
) -> _Reading:
    """Capture the model's call in one mode; of several graphs the first, in which the arguments are
    what they are called."""
    graphs: list[tuple[fx.GraphModule, dict[fx.Node, str], dict[str, str]]] = []
    before = model.training

    def backend_for(twin: nn.Module) -> Any:
        tensors = dict(twin.named_parameters()) | dict(twin.named_buffers())
        of_model = {id(tensor): path for path, tensor in tensors.items()}
        modules = {str(id(module)): path for path, module in twin.named_modules()}

        def backend(gm: fx.GraphModule, given: Sequence[Any]) -> Any:
            nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
            paths = {
                n: of_model[id(t)] for n, t in zip(nodes, given, strict=True) if id(t) in of_model
            }
            graphs.append((gm, paths, modules))
            return gm.forward

        return backend

    try:
        run_without_values(model.train(training), backend_for, tuple(inputs), {})
    except Exception as error:
        raise refusal(path, f"its forward cannot be captured: {error}") from error
    finally:
        model.train(before)
    if not graphs:
        raise refusal(path, "nothing of its forward was captured")
    (gm, paths, of_modules), *others = graphs
    rest = [n for n in gm.graph.nodes if n.op == "placeholder" and n not in paths]
    rest = [node for node in rest if value_of(node) is not None]
    arguments = dict(zip(parameters_of(forward), rest, strict=False))
    broken = [n.meta.get("stack_trace") or "" for other, *_ in others for n in other.graph.nodes]
    reasons = [getattr(one, "compile_subgraph_reason", None) for one, *_ in graphs]
    broken += ["".join(traceback.format_list(r.user_stack or ())) for r in reasons if r and others]
    body = Body(str(path), forward, gm.graph, arguments, broken)
    return _Reading(model, gm.graph, body, paths, {}, of_modules)


def _recipe(reading: _Reading, found: Found, span: Span) -> Recipe:
    reading = dataclasses.replace(reading, names=span.names)

    def text(node: fx.Node | None) -> str:
        expression = reading.expression(node)
        if expression is None:
            raise NoChainError(f"{node}, which takes part in it, is no variable where it begins")
        return expression

    x, weight = value_of(found.linear.x), value_of(found.linear.weight)
    assert x is not None
    assert weight is not None
    norm = found.norm
    return Recipe(
        chain=found.chain,
        span=span,
        m_k_n=(x.shape[:-1].numel(), x.shape[-1], weight.shape[0]),
        dims=x.dim(),
        has=(found.bias is not None, norm.weight is not None, norm.bias is not None),
        x=text(found.linear.x),
        weight=text(found.linear.weight),
        bias=_tensor(reading, found.linear.nodes[-1], found.bias, "bias", text),
        norm_weight=_tensor(reading, found.norm_node, norm.weight, "weight", text),
        norm_bias=_tensor(reading, found.norm_node, norm.bias, "bias", text),
        operands=tuple(text(node) for node in found.operands),
        facts=(*_numbers(reading, found), *_checks(reading, found).items()),
    )


def _tensor(
    reading: _Reading, layer: fx.Node | None, tensor: fx.Node | None, name: str, text: Any
) -> str:
    """What reads a layer's tensor: of its module also where this one has none, as others may."""
    owner = reading.module_of(layer)
    if tensor is not None or owner is None:
        return text(tensor)
    module, expression = owner
    return f"{expression}.{name}" if hasattr(module, name) else "None"


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


def _numbers(reading: _Reading, found: Found) -> list[tuple[str, float]]:
    """Where the chain's numbers stand in its layers, in its order: pre, eps, post."""
    numbers: list[list[tuple[str, float]]] = []
    for node, operation in zip(found.spelt, (*found.pre, *found.post), strict=True):
        module, owner = reading.module_of(node) or (reading.model, "")
        names = operation.definition.modules.get(type(module), ())
        pairs = zip(names, operation.constants, strict=True) if names else ()
        numbers.append([(f"{owner}.{name}", v) for name, v in pairs if isinstance(v, float)])
    norm, layer = found.norm.norm, reading.module_of(found.norm_node)
    if norm is not None and norm.eps is not None and layer is not None:
        numbers.insert(len(found.chain.pre), [(f"{layer[1]}.eps", norm.eps)])
    return [pair for pairs in numbers for pair in pairs]


def _checks(reading: _Reading, found: Found) -> dict[str, Any]:
    """Plain attributes that ``forward`` reads and that the text therefore depends on."""
    kept: dict[str, Any] = {}
    for module, owner in filter(None, map(reading.module_of, found.spelt)):
        operation = of_module(module)
        for name, value in operation.definition.where.items() if operation else ():
            kept[f"{owner}.{name}"] = value
    code: Any = type(reading.model).forward
    for name in code.__code__.co_names:
        value = vars(reading.model).get(name, reading)
        if isinstance(value, (bool, int, float, str, type(None))) and name != "training":
            kept[f"self.{name}"] = value
    return kept
