"""A chain's calls from one place: one like an earlier one goes straight to its kernels.

The first call of a kind passes every check and is planned. What it was found to be is kept under
all that this depends on, which is compared anew at each call: PyTorch's modes and settings, and of
each tensor type, dtype, device, layout, sizes, strides and requires_grad. Those of the tensors are
compared in one call of C++, by the guard that torch.compile puts before its own code. PyTorch does
not promise that guard; where it is missing every call goes the long way, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.prepack import marked
from epinorm.chain import Chain, reference
from epinorm.operator import calls, ops
from epinorm.operator.autograd import differentiable, is_plain, is_undisturbed
from epinorm.operator.checks import check_leading_dimensions, check_types
from epinorm.precision import follows_setting, fp32_precision
from epinorm.problem import Executable, Inputs, Strategy, check_strategy

__all__ = ["Caller", "caller_of"]

MOST_KINDS = 16
MOST_SIZES = 1024

_tensor_guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_is_grad_enabled = torch.is_grad_enabled

FIRST_OPERAND = Inputs._fields.index("operands")


class Caller:
    """``linear_norm`` for one chain, strategy and strictness.

    like: what calls of a chain of the same structure were found to be; nothing yet if None.
    """

    def __init__(
        self,
        chain: str,
        strategy: Strategy = "auto",
        strict: bool = False,
        like: dict[int, list[_Kind]] | None = None,
    ) -> None:
        check_strategy(strategy)
        self.facts: calls.Facts = (chain, strategy, strict, None)
        self._constants = calls.constants_of(self.facts)
        self._kinds_of_operands = Chain.parse(chain).operand_kinds
        self._kinds = {} if like is None else like  # by number of tensors
        calls.callers.add(self)

    def forget(self) -> None:
        """Take the long way at the next call."""
        self._kinds.clear()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> Tensor:
        """x (..., K) → y (..., N); see ``epinorm.linear_norm``."""
        y = self.again(x, weight, bias, norm_weight, norm_bias, operands)
        if y is None:
            y = self.first(x, weight, bias, norm_weight, norm_bias, operands)
        return y

    def again(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> Tensor | None:
        """y if the call is like an earlier one, else None. Not to be traced by dynamo."""
        if not is_undisturbed():
            return None
        tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
        for kind in self._kinds.get(len(tensors), ()):
            if kind.fits(*tensors):
                training = kind.wants_gradient and _is_grad_enabled()
                executable = kind.executables.get(kind.key(tensors, training))
                if executable is None:
                    return None
                if isinstance(executable, calls.Eager):
                    return executable.y(self._constants, *tensors)
                if training and kind.is_matrix:
                    return differentiable(executable, self.facts, tensors)
                if operands and not kind.is_matrix:
                    operands = self._folded(operands)
                if training:  # autograd has to know of the folding
                    matrices = (_fold(x), *tensors[1:FIRST_OPERAND], *operands)
                    y = differentiable(executable, self.facts, matrices)
                    return y.view(*x.shape[:-1], y.shape[1])
                given = (x, weight, bias, norm_weight, norm_bias, operands, self._constants)
                return executable.forward(*given).y
        return None

    def _folded(self, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Those of one value an element as matrices."""
        pairs = zip(operands, self._kinds_of_operands, strict=True)
        return tuple([_fold(t) if kind == "element" else t for t, kind in pairs])

    def first(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> Tensor:
        """y by way of all checks; the next call like this one finds what they found."""
        y = call(x, weight, bias, norm_weight, norm_bias, operands, *self.facts[:3])
        if _tensor_guards is not None:
            self._keep(x, weight, bias, norm_weight, norm_bias, operands)
        return y

    def _keep(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> None:
        tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
        if not _is_strided(tensors) or not is_plain(tensors):
            return
        matrix, folded = x, operands
        if x.dim() != 2:
            if not all(t.is_contiguous() for t in (x, *operands)):
                return
            matrix, folded = _fold(x), self._folded(operands)
        kinds = self._kinds.setdefault(len(tensors), [])
        kind = next((kind for kind in kinds if kind.fits(*tensors)), None)
        if kind is None:
            if len(kinds) >= MOST_KINDS:
                return
            kind = _Kind(tensors)
            kinds.append(kind)
        training = kind.wants_gradient and torch.is_grad_enabled()
        if len(kind.executables) >= MOST_SIZES:
            kind.executables.clear()
        y_size = None if x is matrix or training else (*x.shape[:-1], weight.shape[0])
        key = kind.key(tensors, training)
        given = (matrix, weight, bias, norm_weight, norm_bias, folded)
        made = calls.executable_for_call(given, self.facts, training, y_size)
        if key == kind.key(tensors, training):  # no other thread changed the setting meanwhile
            kind.executables[key] = calls.eager_for(made) or made


@lru_cache(maxsize=1024)
def caller_of(chain: str, strategy: Strategy = "auto", strict: bool = False) -> Caller:
    """The caller of everyone who has none of their own; those of a structure know the same."""
    return Caller(chain, strategy, strict, _known(calls.structure_of(chain), strategy, strict))


@lru_cache(maxsize=1024)
def _known(structure: str, strategy: Strategy, strict: bool) -> dict[int, list[_Kind]]:
    return {}


class _Kind:
    """Tensors that differ from one another in leading dimensions and addresses at most.

    executables: what computes them, by leading dimensions and all else that it depends on.
    """

    __slots__ = ("executables", "fits", "has_setting", "is_matrix", "wants_gradient")

    def __init__(self, tensors: Sequence[Any]) -> None:
        x = tensors[0]
        self.has_setting = follows_setting(x.dtype, x.device.type)
        self.is_matrix = x.dim() == 2
        self.wants_gradient = any(t is not None and t.requires_grad for t in tensors)
        self.executables: dict[tuple[Any, ...], Executable | calls.Eager] = {}
        self.fits = _guard(tensors)

    def key(self, tensors: Sequence[Any], training: bool) -> tuple[Any, ...]:
        """What an executable depends on beyond the kind."""
        setting = (fp32_precision(), id(tensors[1]) in marked) if self.has_setting else None
        if len(tensors) == FIRST_OPERAND:
            return tensors[0].shape, training, setting
        return tensors[0].shape, training, setting, *[t.shape for t in tensors[FIRST_OPERAND:]]


def _guard(tensors: Sequence[Any]) -> Callable[..., bool]:
    """A function that says whether as many other tensors are of the same kind as these."""
    places = [i for i, t in enumerate(tensors) if t is not None]
    absent = [i for i, t in enumerate(tensors) if t is None]
    sizes: list[list[int | None]] = [list(tensors[i].shape) for i in places]
    strides: list[list[int | None]] = [list(tensors[i].stride()) for i in places]
    for i, size in zip(places, sizes, strict=True):
        if i == 0 or (i >= FIRST_OPERAND and len(size) > 1):  # the key holds them
            size[:-1] = [None] * (len(size) - 1)
    is_matrix = len(sizes[0]) == 2
    dense = [] if is_matrix else [i for i in places if i == 0 or i >= FIRST_OPERAND]
    for i in dense:  # contiguous, so that its strides follow from its sizes
        strides[places.index(i)] = [None] * len(strides[places.index(i)])
    assert _tensor_guards is not None
    given = [tensors[i] for i in places]
    guards = _tensor_guards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guards.check
    if is_matrix and not absent:
        return check

    def fits(*others: Any) -> bool:
        return (
            all([others[i] is None for i in absent])
            and check(*[others[i] for i in places])
            and all([others[i].is_contiguous() for i in dense])
        )

    return fits


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    operands: tuple[Tensor, ...],
    chain: str,
    strategy: Strategy,
    strict: bool,
) -> Tensor:
    """x (..., K) → y (..., N): leading dimensions are folded for the operator."""
    check_types(x, weight, bias, norm_weight, norm_bias, operands)
    if not _is_strided((x, weight, bias, norm_weight, norm_bias, *operands)):
        if strict or strategy not in ("auto", "reference"):
            raise RuntimeError(
                "sparse and nested tensors are computed by PyTorch's own layers alone"
            )
        parsed = Chain.parse(chain)
        return reference.linear_norm(x, weight, bias, parsed, norm_weight, norm_bias, operands)
    if x.dim() == 2:
        return ops.call(x, weight, bias, norm_weight, norm_bias, operands, chain, strategy, strict)
    parsed = Chain.parse(chain)
    check_leading_dimensions(x, operands, parsed)
    leading = x.shape[:-1]
    folded = [
        _fold(t) if kind == "element" else t
        for t, kind in zip(operands, parsed.operand_kinds, strict=True)
    ]
    y = ops.call(_fold(x), weight, bias, norm_weight, norm_bias, folded, chain, strategy, strict)
    return y.view(*leading, y.shape[-1])


def _is_strided(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the tensors are ordinary ones: not sparse, nested or of a library's own layout."""
    return all(t is None or (t.layout is torch.strided and not t.is_nested) for t in tensors)


def _fold(t: Tensor) -> Tensor:
    """(..., C) → (M, C)."""
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)
