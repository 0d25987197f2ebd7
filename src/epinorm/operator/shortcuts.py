"""The operators as a compiled graph calls them: past the dispatcher, where nothing waits there.

TorchInductor's code calls ``torch.ops.epinorm.linear_norm.default(...)`` and its like, and each
such call goes by way of the dispatcher to Python twice, for autograd and for the kernel, and passes
every check. A call like an earlier one needs none of that: native code computes it, a profile
around it or not, or what it was found to be does (``kinds.py``). PyTorch does not promise
where an overload keeps what it calls; where that is elsewhere, every call goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from epinorm.backends.memo import memo
from epinorm.operator import calls
from epinorm.operator.halves import begun, ended
from epinorm.operator.kinds import Kinds
from epinorm.operator.native_operators import NativeOperator
from epinorm.operator.undisturbed import (
    autograd_records,
    has_plain_types,
    is_undisturbed,
    untraced,
    wants_gradient,
)
from epinorm.problem import Executable, Forward, Inputs, Later, Wanted

_FORWARD, _BACKWARD, _END = 10, 16, 5
"""The numbers of arguments; see schema.py."""


class _FoundForward(NamedTuple):
    """complete: no tensor among the results is empty."""

    executable: Executable
    complete: bool


class _FoundBackward(NamedTuple):
    executable: Executable
    want: Wanted
    copies: bool


@memo()
def _known(
    operator: str, chain: str, strategy: Any, strict: bool, out_dtype: Any, weight_size: Any
) -> tuple[Kinds[Any], tuple[float, ...]]:
    """What calls of these facts have in common with those of the chain's structure, and the
    chain's own numbers; weight_size: so that a model's many layers do not share one list."""
    structure = calls.structure_of(chain)
    facts = chain, strategy, strict, out_dtype
    return _kinds(operator, structure, *facts[1:], weight_size), calls.constants_of(facts)


@memo()
def _kinds(*_: Any) -> Kinds[Any]:
    return Kinds()


@memo()
def _native(operator: str, *_: Any) -> NativeOperator:
    """Of its calls with these facts, and with these gradients wanted."""
    return NativeOperator(operator)


def shorten_forward(operator: Any, training: bool, spends_x: bool = False) -> None:
    """Let ``linear_norm``, or ``linear_norm_forward`` if training, be called without dispatch; or
    ``linear_norm_spending_x``."""
    name, returns_many = operator.name(), len(operator._schema.returns) > 1
    long: Callable[..., Any] | None = getattr(operator, "_op", None)
    if long is None:
        return

    @untraced
    def call(*arguments: Any, **named: Any) -> Any:
        if named or len(arguments) != _FORWARD:
            return long(*arguments, **named)
        x, weight, bias, norm_weight, norm_bias, operands, *facts = arguments
        native = _native(name, *facts)
        tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
        made = native.find(tensors)
        if made is not None:
            return made if returns_many else made[0]
        if not is_undisturbed():
            return long(*arguments)
        kinds, constants = _known(name, *facts, getattr(weight, "shape", None))
        found = kinds.find(tensors, autograd_records())
        if found is not None:
            executable, complete = found
            native.keep_forward(executable, tensors, arguments[6:])
            made = executable.forward(
                *(x, weight, bias, norm_weight, norm_bias, tensors[5:], constants)
            )
            if not training:
                return made.results
            return made.outputs if complete else distinct(made)
        result = long(*arguments)

        def make() -> _FoundForward | None:
            if wants_gradient(*tensors):
                return None
            executable = calls.executable_for_call(
                arguments[:6], arguments[6:], training, spends_x=spends_x
            )
            return _FoundForward(executable, all(t.numel() for t in result))

        kinds.keep(tensors, autograd_records(), make)
        return result

    operator._op = call


def shorten_backward(operator: Any, begins: bool = False, spends_dy: bool = False) -> None:
    """Let ``linear_norm_backward``, or ``linear_norm_backward_begin`` if it begins, be called
    without dispatch; or one of ``spending_dy``."""
    name, returned = operator.name(), list if len(operator._schema.returns) == 1 else tuple
    long: Callable[..., Any] | None = getattr(operator, "_op", None)
    if long is None:
        return

    @untraced
    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) == _BACKWARD - 1:  # TorchInductor names what is as by default
            arguments = (*arguments, named.pop("dsum", None))
        if named or len(arguments) != _BACKWARD:
            return long(*arguments, **named)
        dy, x, weight, bias, norm_weight, norm_bias, operands, z, mean, rstd, *rest = arguments
        *facts, wanted, dsum = rest
        native = _native(name, *facts, *wanted)
        read = (dy, x, weight, bias, norm_weight, norm_bias, *operands, dsum, z, mean, rstd)
        made = native.find_backward(read)
        if made is not None:
            return returned(made)
        if not is_undisturbed():
            return long(*arguments)
        kinds, constants = _known(name, *facts, getattr(weight, "shape", None))
        tensors = (x, weight, bias, norm_weight, norm_bias, *operands, dy, z, mean, rstd)
        if dsum is not None:
            tensors = (*tensors, dsum)
        fact = (autograd_records(), *wanted)
        found = kinds.find(tensors, fact)
        if found is not None:
            executable, want, copies = found
            inputs = Inputs(x, weight, bias, norm_weight, norm_bias, tuple(operands), constants)
            if copies:  # contiguous ones too, whose sign or zeros are not in memory
                dy = calls.as_dense(dy)
                dsum = None if dsum is None else calls.as_dense(dsum)
            elif not begins:
                native.keep_backward(executable, read, tuple(facts), want, dsum is not None)
            kept = [Forward(z, z, mean, rstd)]
            later: Later | None = [] if begins else None
            made = calls.in_order(
                executable.backward(inputs, kept, dy, want, None, None, dsum, later)
            )
            return returned(made if later is None else begun(made, later, dy))
        result = long(*arguments)

        def make() -> _FoundBackward | None:
            kept = (z, mean, rstd)
            if wants_gradient(*tensors) or not all(
                calls.as_dense(t) is t and t.is_contiguous() for t in kept
            ):
                return None
            executable = calls.executable_for_call(
                arguments[1:7], tuple(facts), True, spends_dy=spends_dy
            )
            copies = any(t is not None and calls.as_dense(t) is not t for t in (dy, dsum))
            return _FoundBackward(executable, calls.wanted_of(wanted), copies)

        kinds.keep(tensors, fact, make)
        return result

    operator._op = call


def shorten_end(operator: Any) -> None:
    """Let ``linear_norm_backward_end`` be called without dispatch."""
    long: Callable[..., Any] | None = getattr(operator, "_op", None)
    if long is None:
        return

    @untraced
    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) == _END - 1:  # as above
            arguments = (*arguments, named.pop("dz", None))
        tensors = arguments[:2]
        if (
            not named
            and len(arguments) == _END
            and is_undisturbed()
            and has_plain_types(tensors)
            and not wants_gradient(*tensors)
        ):
            return ended(arguments[0], arguments[1], arguments[-1])
        return long(*arguments, **named)

    operator._op = call


def distinct(found: Forward) -> tuple[Tensor, ...]:
    """As an operator's outputs have to be: what is not there is one empty tensor for all else."""
    return tuple(t if t.numel() else t.new_empty(t.shape) for t in found.outputs)
