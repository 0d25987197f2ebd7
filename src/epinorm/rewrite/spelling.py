"""How PyTorch code spells a pointwise operation: modules, functions, operators and methods.

``read`` turns one node of a traced graph into the operation that it applies to its input, or None
for anything that a chain cannot hold.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from epinorm.chain.pointwise import Pointwise, of_call, of_module

__all__ = ["Applied", "arguments", "is_dropout", "may_mutate", "plain_type", "read", "target_name"]


@dataclass(frozen=True)
class Applied:
    """One pointwise step: ``operation`` (None: it changes no value) and its tensor operand.

    A tensor operand is read as ``add_residual`` or ``mul_channel``; the matcher, which knows the
    operand's shape where it is a parameter, makes it ``add_channel`` or refuses it.
    """

    operation: Pointwise | None
    operand: fx.Node | None = None


_BINARY: Mapping[Any, str] = {
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    operator.sub: "sub",
    operator.isub: "sub",
    torch.sub: "sub",
    torch.subtract: "sub",
    operator.mul: "mul",
    operator.imul: "mul",
    torch.mul: "mul",
    torch.multiply: "mul",
    operator.truediv: "div",
    operator.itruediv: "div",
    torch.div: "div",
    torch.divide: "div",
    torch.true_divide: "div",
    "add": "add",
    "sub": "sub",
    "subtract": "sub",
    "mul": "mul",
    "multiply": "mul",
    "div": "div",
    "divide": "div",
    "true_divide": "div",
}

_NEGATIONS = (operator.neg, torch.neg, torch.negative)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_FUNCTIONS = (F.dropout, torch.dropout)


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without what ``fuse`` puts on top of it."""
    cls = type(module)
    return cls.__dict__.get("_epinorm_original", cls)  # not that of a class made from it since


def target_name(node: fx.Node) -> str:
    """What a reader calls the node's operation: a module's path, or a function's name."""
    if isinstance(node.target, str):
        return node.target
    return getattr(node.target, "__name__", str(node.target))


def is_dropout(module: nn.Module) -> bool:
    """Whether the module is one of PyTorch's element-wise dropouts."""
    return type(module) in _DROPOUTS


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The node's positional and keyword arguments by name; positional ones beyond are left out."""
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    return given | dict(node.kwargs)


def _function_dropout(node: fx.Node) -> Applied | None:
    given = arguments(node, "input", "p", "training", "inplace")
    training, p = given.get("training", True), given.get("p", 0.5)
    return Applied(None) if training is False or (_is_number(p) and p == 0) else None


def _binary(node: fx.Node, x: fx.Node, kind: str) -> Applied | None:
    if node.kwargs and kind in ("mul", "div"):
        return None  # rounding_mode, out
    alpha: Any = node.kwargs.get("alpha", 1)
    if set(node.kwargs) - {"alpha", "other", "input"} or not _is_number(alpha):
        return None
    both: tuple[Any, ...] = (
        *node.args,
        *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs),
    )
    if len(both) != 2:
        return None
    left, right = both
    mutates = node.target in _IN_PLACE or (
        isinstance(node.target, str) and node.target.endswith("_")
    )
    if mutates and left is not x:
        return None  # the other tensor is what changes
    if left is x and right is x:
        doubles = kind == "add" and alpha == 1
        return Applied(Pointwise("scale", (2.0,))) if doubles else None
    other, x_is_left = (right, True) if left is x else (left, False)
    if _is_number(other):
        return _with_number(kind, float(other) * (alpha if x_is_left else 1), x_is_left, alpha)
    if not isinstance(other, fx.Node) or alpha != 1:
        return None
    if kind == "add":
        return Applied(Pointwise("add_residual"), other)
    return Applied(Pointwise("mul_channel"), other) if kind == "mul" else None


def _with_number(kind: str, c: float, x_is_left: bool, alpha: Any) -> Applied | None:
    if c != c:
        return None
    if kind == "mul":
        return Applied(Pointwise("scale", (c,)))
    if kind == "div":
        # PyTorch's CUDA kernel multiplies by the reciprocal too. c - x and c / x differ.
        return Applied(Pointwise("scale", (1.0 / c,))) if x_is_left and c != 0 else None
    if not x_is_left and (alpha != 1 or kind == "sub"):
        return None
    return Applied(Pointwise("add", (c if kind == "add" else -c,)))


def _module(module: nn.Module, training: bool | None) -> Applied | None:
    if is_dropout(module):
        acts = module.training if training is None else training
        return Applied(None) if not acts or module.p == 0 else None
    if type(module) is nn.Identity:
        return Applied(None)
    operation = of_module(module)
    return Applied(operation) if operation else None


def _function(node: fx.Node, x: fx.Node) -> Applied | None:
    target: Any = node.target
    if node.op == "call_method":
        target = target[:-1] if target.endswith("_") and not target.startswith("_") else target
    if target in _BINARY:
        return _binary(node, x, _BINARY[target])
    first = node.args[0] if node.args else node.kwargs.get("input")
    if first is not x or sum(argument is x for argument in node.all_input_nodes) != 1:
        return None
    if target in _NEGATIONS or (node.op == "call_method" and target in ("neg", "negative")):
        return Applied(Pointwise("scale", (-1.0,)))
    if target in _DROPOUT_FUNCTIONS:
        return _function_dropout(node)
    operation = of_call(target, node.args, node.kwargs)
    return Applied(operation) if operation else None


def read(
    node: fx.Node, x: fx.Node, modules: Mapping[str, nn.Module], training: bool | None
) -> Applied | None:
    """The pointwise operation that ``node`` applies to ``x``; None where it is none that we know.

    ``training`` is the mode that dropout modules are taken to be in; None: the one they are in.
    """
    if node.op == "call_module":
        if node.args != (x,) or node.kwargs:
            return None
        return _module(modules[str(node.target)], training)
    if node.op in ("call_function", "call_method"):
        return _function(node, x)
    return None


def may_mutate(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether running the node could change a tensor or module that existed before it."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        ours = plain_type(module).__module__.startswith("torch.nn.modules.")
        return not ours or bool(module._modules) or bool(getattr(module, "inplace", False))
    if node.op == "call_method":
        return str(node.target).rstrip("_") != str(node.target)
    if node.op != "call_function":
        return False
    name = target_name(node)
    if node.target in _IN_PLACE or (name.endswith("_") and not name.startswith("_")):
        return True
    if "out" in node.kwargs or any(a is True for a in (node.kwargs.get("inplace"), *node.args)):
        return True
    home = getattr(node.target, "__module__", None) or ""
    known = home.startswith(("torch", "_operator", "builtins", "math")) or home == ""
    return not known or name in ("setitem", "delitem", "setattr")
