"""Find Linear → pointwise* → Norm → pointwise* in a traced graph, or say what is in its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from epinorm.chain import Chain, GroupNorm, LayerNorm, Norm, RMSNorm
from epinorm.chain.pointwise import Pointwise
from epinorm.rewrite.spelling import Applied, arguments, is_dropout, may_mutate, read, target_name
from epinorm.rewrite.trace import has_hooks

__all__ = ["Candidate", "NormRead", "find"]

_NORM_FUNCTIONS = (F.group_norm, F.layer_norm, F.rms_norm)
_MAX_STEPS_BETWEEN = 16


@dataclass(frozen=True)
class NormRead:
    """A norm as the graph spells it: its value, and where its parameters come from.

    ``weight`` and ``bias`` are nodes; for a module they are None and read from the module.
    """

    norm: Norm
    normalized_shape: tuple[int, ...] | None
    weight: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass
class Candidate:
    """One chain of a graph. ``obstacle``: why it cannot be fused; None where it can."""

    nodes: list[fx.Node]
    norm_node: fx.Node
    norm: NormRead
    pre: list[Pointwise] = field(default_factory=list)
    post: list[Pointwise] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    obstacle: str | None = None
    stopped_by: str | None = None

    @property
    def chain(self) -> Chain:
        return Chain(self.norm.norm, tuple(self.pre), tuple(self.post))

    @property
    def linear(self) -> fx.Node:
        return self.nodes[0]


class _Finder:
    def __init__(
        self, graph: fx.Graph, root: nn.Module, modules: Mapping[str, nn.Module], training: Any
    ) -> None:
        self.root = root
        self.modules = modules
        self.training = training
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.by_index = list(graph.nodes)

    def module_of(self, node: fx.Node) -> nn.Module | None:
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def is_linear(self, node: fx.Node) -> bool:
        """Whether the node is a linear layer or looks like one, so that its case is reported."""
        module = self.module_of(node)
        if module is None:
            return node.op == "call_function" and node.target is F.linear
        return isinstance(module, nn.Linear) or "Linear" in type(module).__name__

    def linear_obstacle(self, node: fx.Node) -> str | None:
        module = self.module_of(node)
        if module is None:
            given = arguments(node, "input", "weight", "bias")
            tensors = isinstance(given.get("input"), fx.Node) and isinstance(
                given.get("weight"), fx.Node
            )
            return None if tensors else "F.linear is called with something other than tensors"
        cls = type(module)
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return f"{cls.__name__} has no shape before its first call; call fuse after it"
        plain = cls is nn.Linear or (is_parametrized(module) and cls.__bases__ == (nn.Linear,))
        if not plain:
            return f"{cls.__module__}.{cls.__name__} is not nn.Linear and may compute anything"
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            return "its linear layer is not called with one tensor as positional argument"
        return self.hook_obstacle(node)

    def hook_obstacle(self, node: fx.Node) -> str | None:
        module = self.module_of(node)
        if module is None:
            return None
        if has_hooks(module):
            return f"{node.target} has hooks"
        if "forward" in module.__dict__:
            return f"the forward of {node.target} was replaced on the object"
        return None

    def read_norm(self, node: fx.Node) -> NormRead | str | None:
        """The norm of a node; a str says why it does not fit a chain; None: it is no norm."""
        module = self.module_of(node)
        if module is not None:
            return _read_norm_module(module)
        if node.op == "call_function" and node.target in _NORM_FUNCTIONS:
            return _read_norm_function(node)
        return None

    def attribute(self, node: fx.Node) -> Tensor | None:
        if node.op != "get_attr":
            return None
        *path, name = str(node.target).split(".")
        owner = self.modules.get(".".join(path), None) if path else self.root
        value = getattr(owner, name, None)
        return value if isinstance(value, Tensor) else None

    def out_features(self, linear: fx.Node) -> int | None:
        module = self.module_of(linear)
        if module is not None:
            return int(module.out_features)  # type: ignore[arg-type]
        weight = linear.args[1] if len(linear.args) > 1 else linear.kwargs.get("weight")
        tensor = self.attribute(weight) if isinstance(weight, fx.Node) else None
        return tensor.shape[0] if tensor is not None and tensor.dim() == 2 else None

    def pure_between(self, first: fx.Node, last: fx.Node, chain: list[fx.Node]) -> bool:
        between = self.by_index[self.order[first] + 1 : self.order[last]]
        return not any(may_mutate(n, self.modules) for n in between if n not in chain)

    def step(self, node: fx.Node, x: fx.Node, chain: list[fx.Node]) -> Applied | str:
        """The pointwise operation of ``node`` on ``x`` in a chain; a str says why it is none."""
        if obstacle := self.hook_obstacle(node):
            return obstacle
        applied = read(node, x, self.modules, self.training)
        if applied is None:
            module = self.module_of(node)
            if module is not None and is_dropout(module):
                return f"{node.target} drops values in training"
            return f"{target_name(node)} is not a pointwise operation of a chain"
        if applied.operand is None:
            return applied
        if not self.pure_between(chain[0], node, chain):
            return f"tensors may change in place before {target_name(node)}"
        return self._with_operand(applied, chain[0])

    def _with_operand(self, applied: Applied, linear: fx.Node) -> Applied | str:
        operand, operation = applied.operand, applied.operation
        if operand is None or operation is None:
            return applied
        tensor = self.attribute(operand)
        if tensor is not None:
            n = self.out_features(linear)
            if n is None or tuple(tensor.shape) != (n,):
                shape = list(tensor.shape)
                return f"{operand.target} of shape {shape} is not one value per output channel"
            name = "mul_channel" if operation.name == "mul_channel" else "add_channel"
            return Applied(Pointwise(name), operand)
        if operation.name == "mul_channel":
            return "it multiplies by a tensor that is not known to hold one value per channel"
        if not _is_tensor_like(operand):
            return "it adds a value that is computed from shapes"
        return applied


def _is_tensor_like(node: fx.Node) -> bool:
    """Whether a node gives a tensor, as far as can be told without running it."""
    if node.op in ("placeholder", "call_module", "get_attr"):
        return True
    if node.op == "call_method":
        return node.target not in ("size", "dim", "numel", "item", "stride", "tolist")
    if node.target is getattr:
        return node.args[1] in ("T", "mT", "data", "real")
    return any(_is_tensor_like(n) for n in node.all_input_nodes) or not node.all_input_nodes


def _norm(
    eps: Any, shape: tuple[int, ...] | None, kind: Any, *groups: Any, **parameters: Any
) -> NormRead | str:
    """What was read, or why it is no norm of a chain: PyTorch takes an eps below zero."""
    if isinstance(eps, Tensor):
        return "its eps is a Tensor, whose value can change"
    try:
        return NormRead(kind(*groups, eps=eps), shape, **parameters)
    except (TypeError, ValueError) as error:
        return str(error)


def _read_norm_module(module: nn.Module) -> NormRead | str | None:
    if type(module) is nn.GroupNorm:
        return _norm(module.eps, (module.num_channels,), GroupNorm, module.num_groups)
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        shape = tuple(int(n) for n in module.normalized_shape)  # type: ignore[union-attr]
        if len(shape) != 1:
            return f"its norm spans {len(shape)} dimensions; a chain's norm spans the last one"
        kind = LayerNorm if type(module) is nn.LayerNorm else RMSNorm
        return _norm(module.eps, shape, kind)
    if isinstance(module, (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
        return f"{type(module).__name__} is a subclass of PyTorch's norm and may differ from it"
    return None


def _read_norm_function(node: fx.Node) -> NormRead | str:
    names = {
        F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
        F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
        F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    }[node.target]  # type: ignore[index]
    given = arguments(node, *names)
    weight, bias = given.get("weight"), given.get("bias")
    eps: Any = given.get("eps", None if node.target is F.rms_norm else 1e-5)
    if any(t is not None and not isinstance(t, fx.Node) for t in (weight, bias)):
        return f"{target_name(node)} is called with something other than tensors"
    if isinstance(eps, fx.Node):
        return "its eps is computed"
    if node.target is F.group_norm:
        if not isinstance(given["num_groups"], int):
            return "its num_groups is computed"
        return _norm(eps, None, GroupNorm, given["num_groups"], weight=weight, bias=bias)
    shape = given["normalized_shape"]
    if isinstance(shape, fx.Node) or any(not isinstance(n, int) for n in shape):
        return "its normalized_shape is computed from a tensor"
    if len(shape) != 1:
        return f"its norm spans {len(shape)} dimensions; a chain's norm spans the last one"
    kind = LayerNorm if node.target is F.layer_norm else RMSNorm
    return _norm(eps, tuple(shape), kind, weight=weight, bias=bias)


def _next(finder: _Finder, node: fx.Node) -> tuple[fx.Node | None, str | None]:
    """The user of ``node`` to follow towards a norm, and what is wrong if there are others."""
    users = [user for user in node.users if user.op != "output"]
    if not users:
        return None, None
    norms = [user for user in users if finder.read_norm(user) is not None]
    chosen = norms[0] if norms else users[0]
    if len(node.users) == 1:
        return chosen, None
    others = [
        "the output" if user.op == "output" else target_name(user)
        for user in node.users
        if user is not chosen
    ]
    return chosen, f"the result of {target_name(node)} is also used by {', '.join(others)}"


def _up_to_norm(finder: _Finder, linear: fx.Node) -> Candidate | None:
    """Follow a linear layer to the next norm; None where there is none to fuse it with."""
    obstacle = finder.linear_obstacle(linear)
    nodes = [linear]
    pre: list[Pointwise] = []
    operands: list[fx.Node] = []
    while len(nodes) <= _MAX_STEPS_BETWEEN:
        current = nodes[-1]
        node, shared = _next(finder, current)
        obstacle = obstacle or shared
        if node is None or finder.is_linear(node):
            return None
        norm = finder.read_norm(node)
        if norm is not None:
            first = node.args[0] if node.args else node.kwargs.get("input")
            if first is not current or node.all_input_nodes.count(current) != 1:
                return None
            nodes.append(node)
            obstacle = obstacle or finder.hook_obstacle(node)
            if isinstance(norm, str):
                return Candidate(nodes, node, _unread(), obstacle=obstacle or norm)
            return Candidate(nodes, node, norm, pre, [], operands, obstacle)
        applied = finder.step(node, current, nodes)
        if isinstance(applied, str):
            module = finder.module_of(node)
            if module is not None and not type(module).__module__.startswith("torch.nn."):
                return None
            obstacle = obstacle or applied
        else:
            pre += [applied.operation] if applied.operation else []
            operands += [applied.operand] if applied.operand else []
        nodes.append(node)
    return None


def _unread() -> NormRead:
    return NormRead(LayerNorm(), None)


def _extend(finder: _Finder, found: Candidate, taken: set[fx.Node]) -> None:
    """Take in the pointwise operations after the norm, as long as nothing else sees the values."""
    while len(found.nodes[-1].users) == 1:
        current = found.nodes[-1]
        (node,) = current.users
        if node.op == "output" or finder.is_linear(node) or finder.read_norm(node) is not None:
            return
        if node in taken:
            found.stopped_by = f"{target_name(node)} belongs to another chain"
            return
        applied = finder.step(node, current, found.nodes)
        if isinstance(applied, str):
            found.stopped_by = applied
            return
        if applied.operation:
            found.post.append(applied.operation)
        if applied.operand:
            found.operands.append(applied.operand)
        found.nodes.append(node)


def find(
    graph: fx.Graph, root: nn.Module, modules: Mapping[str, nn.Module], training: bool | None
) -> list[Candidate]:
    """Every chain of the graph in order, those that cannot be fused with their obstacle.

    ``modules`` are the root's by path; ``training`` is the mode to take dropout modules to be in,
    None for the one that they are in.
    """
    finder = _Finder(graph, root, modules, training)
    found: list[Candidate] = []
    taken: set[fx.Node] = set()
    for node in graph.nodes:
        if not finder.is_linear(node):
            continue
        candidate = _up_to_norm(finder, node)
        if candidate is None or not taken.isdisjoint(candidate.nodes):
            continue  # where two chains meet, the first one has the sum
        if candidate.obstacle is None:
            later = [
                p
                for p in (candidate.norm.weight, candidate.norm.bias)
                if p is not None and p.op != "get_attr"
            ]
            if later and not finder.pure_between(node, candidate.norm_node, candidate.nodes):
                candidate.obstacle = "tensors may change in place before its norm"
        if candidate.obstacle is None:
            _extend(finder, candidate, taken)
            taken.update(candidate.nodes)
        found.append(candidate)
    return found
