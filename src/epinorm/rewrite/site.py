"""One fused chain in a rewritten ``forward``: what it checks on each call, and both ways to run.

Nothing of the model is kept here: modules and tensors come in as arguments, so replaced
parameters, moved models and replicas are what they are at the call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from epinorm.chain import Chain, GroupNorm, Norm
from epinorm.chain.pointwise import module_constants
from epinorm.operator.dispatch import Caller
from epinorm.operator.functional import apply_chain
from epinorm.operator.modules import parameter_of
from epinorm.problem import Strategy
from epinorm.rewrite.guard import GuardCode, hook_conditions
from epinorm.rewrite.match import Candidate
from epinorm.rewrite.spelling import arguments
from epinorm.rewrite.trace import has_hooks

__all__ = ["Site", "build_site", "load_function"]

_PLAIN_TENSORS = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class _ModuleCheck:
    """A module of the chain, by its place among the inputs, and what it must still be."""

    index: int
    name: str
    type: type[nn.Module]
    constants: tuple[tuple[str, Any], ...]

    def changed(self, module: Any) -> str | None:
        if type(module) is not self.type:
            return f"{self.name} is now a {type(module).__name__}"
        if has_hooks(module):
            return f"{self.name} has hooks"
        if "forward" in module.__dict__:
            return f"the forward of {self.name} was replaced on the object"
        for name, value in self.constants:
            if getattr(module, name) != value:
                return f"{name} of {self.name} is no longer {value}"
        return None

    def conditions(self, module: str, guard: GuardCode) -> list[str]:
        """Of which one holds where the module of that name has changed, in a guard's code."""
        constants = [f"{module}.{name} != {guard.value(v)}" for name, v in self.constants]
        return [
            f"type({module}) is not {guard.value(self.type)}",
            *hook_conditions(module),
            *constants,
        ]


@dataclass(frozen=True)
class _Source:
    """Where weight and bias come from: a module's place among the inputs, or their own places."""

    module: int | None = None
    weight: int | None = None
    bias: int | None = None

    def get(self, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        if self.module is not None:
            module = inputs[self.module]
            return parameter_of(module, "weight"), parameter_of(module, "bias")
        weight = None if self.weight is None else inputs[self.weight]
        return weight, None if self.bias is None else inputs[self.bias]


@dataclass(eq=False)
class Site:
    """A callable for one chain; ``inputs`` are x, the chain's modules and its other tensors."""

    text: str
    norm: Norm
    normalized_shape: tuple[int, ...] | None
    where: str
    linear: _Source
    norm_source: _Source
    operands: tuple[int, ...]
    operand_kinds: tuple[str, ...]
    checks: tuple[_ModuleCheck, ...]
    count: int
    stepwise: Callable[..., Tensor]
    strategy: Strategy
    strict: bool
    _said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.__name__ = "fused_chain"  # what torch.fx calls it in the code that it writes
        self._caller = Caller(self.text, self.strategy, self.strict)
        self._tensors = self._gathering()

    def __call__(self, *inputs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            tensors = self._tensors(*inputs)
            if tensors is not None and not _has_any_global_hook():
                y = self._caller.again(*tensors)
                if y is not None:
                    return y
        return self._checked(inputs)

    def _gathering(self) -> Callable[..., tuple[Any, ...] | None]:
        """A function that finds a call's tensors among its inputs, in the order of ``Caller``.

        None where that needs the long way: a module has changed or computes its parameters.
        """
        names = [f"i{place}" for place in range(self.count)]
        types = {check.index: check.type for check in self.checks}
        guard = GuardCode("return None")
        for check in self.checks:
            guard.refuse_if(*check.conditions(names[check.index], guard))

        def parameters(source: _Source) -> list[str]:
            if source.module is None:
                places = (source.weight, source.bias)
                return ["None" if place is None else names[place] for place in places]
            module = names[source.module]
            has_bias = types[source.module] is not nn.RMSNorm
            bias = f"{module}._parameters['bias']" if has_bias else "None"
            return [f"{module}._parameters['weight']", bias]

        tensors = [names[0], *parameters(self.linear), *parameters(self.norm_source)]
        operands = "".join(f"{names[place]}, " for place in self.operands)
        guard.line(f"return {', '.join(tensors)}, ({operands})")
        return guard.function(names)

    def _checked(self, inputs: tuple[Any, ...]) -> Tensor:
        x = inputs[0]
        obstacle = self._modules_changed(inputs) or self._unfit_x(x)
        if obstacle is None:
            weight, bias = self.linear.get(inputs)
            norm_weight, norm_bias = self.norm_source.get(inputs)
            operands = tuple([inputs[i] for i in self.operands])
            obstacle = self._unfit(x, weight, bias, norm_weight, norm_bias, operands)
            if obstacle is None:
                if torch.compiler.is_compiling():
                    return apply_chain(
                        x, weight, bias, norm_weight, norm_bias, operands,
                        self.text, self.strategy, self.strict,
                    )  # fmt: skip
                return self._caller.first(x, weight, bias, norm_weight, norm_bias, operands)
        self._say(obstacle)
        return self.stepwise(*inputs)

    def _modules_changed(self, inputs: tuple[Any, ...]) -> str | None:
        for check in self.checks:
            changed = check.changed(inputs[check.index])
            if changed is not None:
                return changed
        return "hooks for all modules are set" if _has_any_global_hook() else None

    def _unfit_x(self, x: Any) -> str | None:
        if type(x) not in _PLAIN_TENSORS:
            return f"its input is a {type(x).__name__}, not a plain Tensor"
        if x.layout is not torch.strided or x.is_nested:
            return "its input is a sparse or nested tensor"
        if x.dim() != 2 and isinstance(self.norm, GroupNorm):
            return (
                f"GroupNorm of {x.dim()}-dimensional input normalises dimension 1, "
                "which is not the linear layer's output"
            )
        return "its input has no dimensions" if x.dim() == 0 else None

    def _unfit(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Any, ...],
    ) -> str | None:
        if weight.dim() != 2:
            return f"its weight has {weight.dim()} dimensions"
        n = weight.shape[0]
        if self.normalized_shape is not None and self.normalized_shape[0] != n:
            return f"its norm is for {list(self.normalized_shape)} features, the linear gives {n}"
        if operands and (unfit := self._unfit_operands(x, n, operands)):
            return unfit
        dtype = x.dtype
        if (
            weight.dtype == dtype
            and (bias is None or bias.dtype == dtype)
            and (norm_weight is None or norm_weight.dtype == dtype)
            and (norm_bias is None or norm_bias.dtype == dtype)
        ):
            return None
        autocast = torch.is_autocast_enabled(x.device.type)
        return None if autocast else "its tensors are of several dtypes"

    def _unfit_operands(self, x: Tensor, n: int, operands: tuple[Any, ...]) -> str | None:
        full = (*x.shape[:-1], n)
        # Under autocast the norm and what follows it are in fp32 on CUDA; on a CPU dtypes mix as
        # they do in PyTorch's layers, which compute the chain there.
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.float32 if autocast else x.dtype
        for operand, kind in zip(operands, self.operand_kinds, strict=True):
            if type(operand) not in _PLAIN_TENSORS:
                return f"a {type(operand).__name__} takes part in it, not a plain Tensor"
            if tuple(operand.shape) != (full if kind == "element" else (n,)):
                return f"a tensor of shape {list(operand.shape)} takes part in it"
            if operand.dtype != dtype and not (autocast and x.device.type == "cpu"):
                return "its tensors are of several dtypes"
        return None

    def _say(self, obstacle: str) -> None:
        """Warn once per reason that a chain runs layer by layer; raise under ``strict``."""
        message = f"epinorm: {self.where} runs layer by layer, not fused: {obstacle}"
        if self.strict:
            raise RuntimeError(f"strict=True, but {message}")
        if not torch.compiler.is_compiling() and obstacle not in self._said:
            self._said.add(obstacle)
            warnings.warn(message, stacklevel=3)


def call_module(module: nn.Module, *args: Any) -> Any:
    """Call a module that comes in as an argument."""
    return module(*args)


def load_function(graph: fx.Graph, name: str) -> Callable[..., Any]:
    """Compile a graph's code to a function of ``self`` and its placeholders."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<epinorm {name}>", "exec"), namespace)
    return namespace["forward"]


def _constants(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What of a module is part of the chain's text, and so must still be what it was."""
    if isinstance(module, nn.Linear):
        return ()
    names = module_constants(type(module))
    return tuple((name, getattr(module, name)) for name in names if name != "inplace")


class _Inputs:
    """The values that come into a chain from outside, each with its place."""

    def __init__(self) -> None:
        self.places: dict[fx.Node | str, int] = {}

    def place(self, value: fx.Node | str) -> int:
        return self.places.setdefault(value, len(self.places))


def _stepwise(candidate: Candidate, inputs: _Inputs) -> Callable[..., Tensor]:
    """The chain's own layers and operations, one after the other, as a function of the inputs."""
    graph = fx.Graph()
    outside = {value: graph.placeholder(f"input_{i}") for value, i in inputs.places.items()}
    values: dict[fx.Node, fx.Node] = {k: v for k, v in outside.items() if isinstance(k, fx.Node)}
    for node in candidate.nodes:
        args = fx.node.map_arg(node.args, values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        if node.op == "call_module":
            args = (outside[str(node.target)], *args)
            values[node] = graph.call_function(call_module, args, kwargs)
        else:
            values[node] = graph.create_node(node.op, node.target, args, kwargs)
    graph.output(values[candidate.nodes[-1]])
    run = load_function(graph, f"{candidate.nodes[-1].name} stepwise")

    def stepwise(*inputs: Any) -> Tensor:
        return run(None, *inputs)

    return stepwise


def _source(node: fx.Node, weight: Any, bias: Any, inputs: _Inputs) -> _Source:
    if node.op == "call_module":
        return _Source(module=inputs.place(str(node.target)))
    places = [inputs.place(t) if isinstance(t, fx.Node) else None for t in (weight, bias)]
    return _Source(None, *places)


def build_site(
    candidate: Candidate,
    chain: Chain,
    modules: Mapping[str, nn.Module],
    where: str,
    strategy: Strategy,
    strict: bool,
) -> tuple[Site, list[fx.Node | str]]:
    """The callable for a candidate's chain, and its inputs in order: nodes, and modules by path."""
    inputs, linear = _Inputs(), candidate.linear
    given = arguments(linear, "input", "weight", "bias")
    inputs.place(given["input"])
    linear_source = _source(linear, given.get("weight"), given.get("bias"), inputs)
    norm = candidate.norm
    norm_source = _source(candidate.norm_node, norm.weight, norm.bias, inputs)
    for node in candidate.nodes:
        if node.op == "call_module":
            inputs.place(str(node.target))
        for value in node.all_input_nodes:
            if value not in candidate.nodes:
                inputs.place(value)
    checks = tuple(
        _ModuleCheck(i, path, type(modules[path]), _constants(modules[path]))
        for path, i in inputs.places.items()
        if isinstance(path, str)
    )
    site = Site(
        text=str(chain),
        norm=norm.norm,
        normalized_shape=norm.normalized_shape,
        where=where,
        linear=linear_source,
        norm_source=norm_source,
        operands=tuple(inputs.place(node) for node in candidate.operands),
        operand_kinds=candidate.chain.operand_kinds,
        checks=checks,
        count=len(inputs.places),
        stepwise=_stepwise(candidate, inputs),
        strategy=strategy,
        strict=strict,
    )
    return site, list(inputs.places)
