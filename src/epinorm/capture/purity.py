"""What nodes of a graph may change: other tensors, and modes. Nothing is moved across these."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, "i" + name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "concat"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
)
_IN_PLACE_METHODS = frozenset(f"__{function.__name__}__" for function in _IN_PLACE_OPERATORS)
_KEYWORDS = frozenset((operator.and_, operator.or_, operator.not_))
"""That end with _ and change nothing."""
BATCH_NORM = (
    *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
)
"""The arguments of F.batch_norm."""
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm")
_EFFECTS = ("set_", "manual_seed", "seed", "embedding")
_HIDDEN_EFFECTS = ("batch_norm", "instance_norm", "moving_avg")
"""In the names of what changes statistics that it is given, which its schema need not say."""
_METHODS_WITH_EFFECTS = frozenset(
    (
        *("register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
        *("backward", "__setitem__"),
    )
)


def _public(namespace: Any) -> set[Any]:
    named = ((name, getattr(namespace, name)) for name in dir(namespace))
    return {
        value
        for name, value in named
        if callable(value)
        and not isinstance(value, type)
        and not name.startswith(("_", *_EFFECTS))
        and not name.endswith("_")
        and not _may_move_statistics(name)
    }


def _may_move_statistics(name: str) -> bool:
    return any(part in name for part in _HIDDEN_EFFECTS)


@cache
def _functions() -> frozenset[Any]:
    """PyTorch's and Python's functions that return a result and do nothing else."""
    spaces = (torch, F, torch._C._nn, torch.special, torch.linalg, torch.fft, math, operator)
    hidden = {getattr, torch.sym_float, torch.sym_int, torch._C._log_api_usage_once, *_KEYWORDS}
    known: set[Any] = set().union(hidden, *map(_public, spaces))
    known -= {operator.setitem, operator.delitem, *_IN_PLACE_OPERATORS}
    return frozenset(known)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _asks_in_place(node: fx.Node) -> bool:
    """Whether the call's ``inplace`` or ``out`` is given."""
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if True not in node.args or not callable(node.target):
        return False
    signature = _signature(node.target)
    if signature is None or "inplace" not in signature.parameters:
        return False
    given = dict(zip(signature.parameters, node.args, strict=False))
    return bool(given.get("inplace"))


def arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    """The node's positional and keyword arguments by name; positional ones beyond are left out."""
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    return given | dict(node.kwargs)


def value_of(node: Any) -> Tensor | None:
    """The tensor without values that Dynamo has for a node; None for what is no tensor."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def tensor_of(node: Any) -> Tensor:
    """``value_of`` a node that is a tensor."""
    value = value_of(node)
    assert value is not None
    return value


def _is_in_place(method: str) -> bool:
    ends = method.endswith("_") and not method.endswith("__")
    return ends or method in _IN_PLACE_METHODS


def is_pure(node: fx.Node) -> bool:
    """Whether running the node leaves all tensors, modes and settings as they were."""
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    name = str(node.target)
    if node.op == "call_method":
        return not (name in _METHODS_WITH_EFFECTS or _is_in_place(name) or _asks_in_place(node))
    if node.op != "call_function":
        return False
    target: Any = node.target
    if target is F.batch_norm:
        return not running_statistics(node)
    if target is F.embedding:
        longest = arguments(node, *_EMBEDDING).get("max_norm")
        return longest is None  # else it shortens rows of its weight, in place
    if target in _IN_PLACE_OPERATORS:  # of numbers they make new ones
        return value_of(node) is None and value_of(node.args[0]) is None
    if isinstance(target, torch._ops.OpOverload):
        return not (target._schema.is_mutable or _may_move_statistics(target._schema.name))
    if isinstance(target, torch._ops.OpOverloadPacket):
        if _may_move_statistics(str(target)):
            return False
        overloads = [getattr(target, name) for name in target.overloads()]
        return not any(overload._schema.is_mutable for overload in overloads)
    return target in _functions() and not _asks_in_place(node)


def changed_argument(node: fx.Node) -> fx.Node | None:
    """The tensor that the node changes in place and returns; None where there is none such."""
    first: Any = node.args[0] if node.args else node.kwargs.get("input")
    if value_of(first) is None or value_of(node) is None or node.kwargs.get("out") is not None:
        return None
    if node.op == "call_method":
        in_place = _is_in_place(str(node.target))
    else:
        name = getattr(node.target, "__name__", "")
        in_place = node.op == "call_function" and (
            node.target in _IN_PLACE_OPERATORS
            or _asks_in_place(node)
            or (name.endswith("_") and not name.startswith("_") and node.target not in _KEYWORDS)
        )
    return first if in_place else None


def running_statistics(node: fx.Node) -> list[Any]:
    """The running statistics that a BatchNorm changes, and returns nothing of."""
    if node.op != "call_function" or node.target is not F.batch_norm:
        return []
    given = arguments(node, *BATCH_NORM)
    if given.get("training", False) is False:
        return []
    return [given[name] for name in BATCH_NORM[1:3] if given.get(name) is not None]


def changes(node: fx.Node) -> list[fx.Node]:
    """The tensors that the node is known to change in place."""
    first = changed_argument(node)
    found: list[Any] = [] if first is None else [first]
    if node.op == "call_function" and node.target is operator.setitem:
        found.append(node.args[0])
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        given = {a.name: v for a, v in zip(schema, node.args, strict=False)} | node.kwargs
        found += [given.get(a.name) for a in schema if a.alias_info and a.alias_info.is_write]
    found.append(node.kwargs.get("out"))
    found += running_statistics(node)
    return [given for given in pytree.tree_leaves(found) if isinstance(given, fx.Node)]


def _given_back(node: fx.Node) -> fx.Node | None:
    """The input of a dropout that may drop nothing, which then gives it back itself; the tensor
    that Dynamo has for its result is another one."""
    if node.op != "call_function" or "dropout" not in getattr(node.target, "__name__", ""):
        return None
    given = arguments(node, "input", "p", "training")
    share, training = given.get("p", 0.5), given.get("training", given.get("train"))
    drops = training is True and isinstance(share, (int, float)) and share > 0
    source = given.get("input", given.get("self"))
    return None if drops or value_of(node) is None or value_of(source) is None else source


def storage_of(node: fx.Node) -> int | None:
    """What tells whether two nodes' tensors share memory; None for what has none."""
    while (source := _given_back(node)) is not None:
        node = source
    value = value_of(node)
    if value is None or value.layout is not torch.strided:
        return None
    return unwrapped(value).untyped_storage()._cdata


def may_be_changed(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    """Whether a reader of a node, or of a view of it, may change it; but for those inside."""
    return any(
        user.op == "output"
        or not is_pure(user)
        or (storage_of(user) == storage_of(node) and may_be_changed(user, inside))
        for user in node.users
        if user not in inside
    )


def unwrapped(value: Tensor) -> Tensor:
    """The tensor as it is in memory, where vmap or grad look at it otherwise."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value
