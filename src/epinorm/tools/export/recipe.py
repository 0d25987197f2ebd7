"""What of a problem's Model is to be exported: its one chain, and where each value comes from.

The exported file reads weights and constants from the module that it constructs, so that it serves
other constructor arguments too. ``Recipe`` holds Python expressions for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from epinorm.chain import Chain, GroupNorm
from epinorm.chain.pointwise import Pointwise, of_module
from epinorm.rewrite.match import Candidate
from epinorm.rewrite.program import Analysis
from epinorm.rewrite.replace import analyse_modes
from epinorm.rewrite.spelling import arguments, read
from epinorm.rewrite.trace import Untraceable
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
    def constants(self) -> tuple[Constant, ...]:
        """Every number of the chain in its order: pre, eps, post."""
        before = len(self.chain.pre)
        flat = [c for _, constants in self.operations[:before] for c in constants]
        flat += [] if self.eps is None else [self.eps]
        return (*flat, *(c for _, constants in self.operations[before:] for c in constants))


def read_recipe(name: str, model: nn.Module, inputs: Sequence[Any]) -> Recipe:
    """Read the model; raises NoChainError with the reason where it cannot be exported."""

    def refuse(reason: str) -> NoChainError:
        return NoChainError(f"{name} cannot be exported: {reason}")

    try:
        analyses = analyse_modes(model)
    except Untraceable as error:
        raise refuse(f"its forward cannot be traced: {error}") from error
    analysis, candidate = analyses[0], None
    for one in analyses:
        obstacles = [c.obstacle for c in one.candidates if c.obstacle]
        if not one.fusable:
            found = obstacles[0] if obstacles else "there is no Linear → pointwise* → norm in it"
            raise refuse(f"Model holds no chain that can be fused: {found}")
        if len(one.fusable) > 1 or obstacles:
            raise refuse("Model holds several chains, and an exported file holds one")
        if candidate is not None and str(candidate.chain) != str(one.fusable[0].chain):
            raise refuse("its chain in train() is not that in eval()")
        candidate = one.fusable[0]
    assert candidate is not None
    candidate = analysis.fusable[0]
    _check_whole(candidate, refuse)
    return _read(analysis, candidate, inputs, refuse)


def _check_whole(candidate: Candidate, refuse: Any) -> None:
    first = arguments(candidate.linear, "input", "weight", "bias")["input"]
    if first.op != "placeholder":
        raise refuse(f"{first} is computed before the linear layer, outside the chain")
    users = list(candidate.nodes[-1].users)
    whole = len(users) == 1 and users[0].op == "output" and users[0].args[0] is candidate.nodes[-1]
    if not whole:
        after = candidate.stopped_by or f"the result is used by {', '.join(map(str, users))}"
        raise refuse(f"its forward goes on after the chain {candidate.chain}: {after}")


def _read(analysis: Analysis, candidate: Candidate, inputs: Sequence[Any], refuse: Any) -> Recipe:
    x_node = arguments(candidate.linear, "input", "weight", "bias")["input"]
    placeholders = [n for n in analysis.trace.graph.nodes if n.op == "placeholder"]
    x = inputs[placeholders.index(x_node)]
    weight, bias = _parameters(analysis, candidate.linear, None, None)
    norm = candidate.norm
    norm_weight, norm_bias = _parameters(analysis, candidate.norm_node, norm.weight, norm.bias)
    groups, eps = _norm(analysis, candidate)
    if isinstance(candidate.chain.norm, GroupNorm) and x.dim() != 2:
        raise refuse(f"GroupNorm needs a matrix, and the input has {x.dim()} dimensions")
    bias_there, *norm_there = (
        eval(text, {"self": analysis.module}) is not None for text in (bias, norm_weight, norm_bias)
    )
    value = eval(weight, {"self": analysis.module})
    return Recipe(
        chain=candidate.chain,
        operations=_operations(analysis, candidate),
        eps=eps,
        m_k_n=(x.shape[:-1].numel(), x.shape[-1], value.shape[0]),
        has=(bias_there, norm_there[0], norm_there[1]),
        x=str(x_node.target),
        weight=weight,
        bias=bias,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        groups=groups,
        operands=tuple(_value(analysis, node, refuse) for node in candidate.operands),
        checks=_checks(analysis),
    )


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


def _parameters(
    analysis: Analysis, node: fx.Node, weight: fx.Node | None, bias: fx.Node | None
) -> tuple[str, str]:
    """Expressions for weight and bias of a linear or norm node; "None" for what is not there."""
    if node.op == "call_module":
        path = path_expression(analysis.module, str(node.target))
        has_bias = hasattr(analysis.modules[str(node.target)], "bias")
        return f"{path}.weight", f"{path}.bias" if has_bias else "None"
    if node is not None and weight is None and bias is None:
        given = arguments(node, "input", "weight", "bias")
        weight, bias = given.get("weight"), given.get("bias")
    texts = [
        path_expression(analysis.module, str(t.target)) if isinstance(t, fx.Node) else "None"
        for t in (weight, bias)
    ]
    return texts[0], texts[1]


def _norm(analysis: Analysis, candidate: Candidate) -> tuple[str, Constant | None]:
    node, norm = candidate.norm_node, candidate.chain.norm
    assert norm is not None  # it is what a candidate was found by
    path = None
    if node.op == "call_module":
        path = path_expression(analysis.module, str(node.target))
    eps = None
    if norm.eps is not None:
        eps = Constant(norm.eps, None if path is None else f"{path}.eps")
    if not isinstance(norm, GroupNorm):
        return "1", eps
    return (str(norm.num_groups) if path is None else f"{path}.num_groups"), eps


def _operations(
    analysis: Analysis, candidate: Candidate
) -> tuple[tuple[Pointwise, tuple[Constant, ...]], ...]:
    """Each operation with where its constants come from, in the chain's order."""
    found = []
    for before, node in zip(candidate.nodes, candidate.nodes[1:], strict=False):
        if node is candidate.norm_node:
            continue
        applied = read(node, before, analysis.modules, analysis.training)
        if applied is None or applied.operation is None:
            continue
        found.append((node, applied.operation))
    chain = (*candidate.chain.pre, *candidate.chain.post)
    paired = []
    for (node, _), operation in zip(found, chain, strict=True):
        names: Sequence[str] = ()
        path = ""
        if node.op == "call_module":
            module = analysis.modules[str(node.target)]
            names = operation.definition.modules.get(type(module), ())
            path = path_expression(analysis.module, str(node.target))
        expressions: list[str | None] = [f"{path}.{name}" for name in names]
        expressions = expressions or [None] * len(operation.constants)
        constants = tuple(
            Constant(value, text)
            for value, text in zip(operation.constants, expressions, strict=True)
            if isinstance(value, float)
        )
        paired.append((operation, constants))
    return tuple(paired)


def _value(analysis: Analysis, node: fx.Node, refuse: Any) -> str:
    if node.op == "placeholder":
        return str(node.target)
    if node.op == "get_attr":
        return path_expression(analysis.module, str(node.target))
    raise refuse(f"{node}, which takes part in the chain, is computed outside it")


def _checks(analysis: Analysis) -> dict[str, Any]:
    """Plain attributes that the trace read and that the text therefore depends on."""
    kept: dict[str, Any] = {}
    for path, module in analysis.modules.items():
        operation = of_module(module)
        for name, value in operation.definition.where.items() if operation else ():
            kept[f"{path_expression(analysis.module, path)}.{name}"] = value
    for name, value in analysis.trace.attributes.items():
        plain = isinstance(value, (bool, int, float, str, type(None)))
        if plain and re.fullmatch(r"[A-Za-z]\w*", name) and name != "training":
            kept[f"self.{name}"] = value
    return kept
