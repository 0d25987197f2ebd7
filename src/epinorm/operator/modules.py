"""The operation as a module: ``LinearNorm``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from epinorm.chain import Chain, GroupNorm, LayerNorm, Norm, RMSNorm, Rounding
from epinorm.chain.pointwise import PointwiseLike
from epinorm.chain.reference import Results, apply_pointwise
from epinorm.operator.checks import check_operand_count
from epinorm.operator.dispatch import with_seeds
from epinorm.operator.functional import apply_chain
from epinorm.operator.undisturbed import is_distributed
from epinorm.said import log_once


class LinearNorm(nn.Module):
    """``nn.Linear``, a norm and pointwise operations around it, computed as one operation.

    Holds the layers that it replaces as ``linear`` and ``norm``, made in that order: the same
    parameter names, initial values and draws from the random generator as
    ``nn.Sequential(OrderedDict(linear=nn.Linear(...), norm=nn.GroupNorm(...)))``. ``return_sum``
    and ``rounding`` are those of ``linear_norm``. Dropout, as ``nn.Dropout(p)`` or
    ``"dropout(p)"``, drops while this module is in training. Where one of the two layers has a hook
    (as ``weight_norm`` and ``prune`` set), is another one (as an adapter) or has other settings
    than it was made with, the layers compute, one by one; so they do under hooks of all modules,
    but of DTensors.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: Norm,
        affine: bool = True,
        pre: str | PointwiseLike | Iterable[PointwiseLike] = (),
        post: str | PointwiseLike | Iterable[PointwiseLike] = (),
        return_sum: bool = False,
        rounding: Rounding = "once",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        chain = Chain.build(norm, pre, post, rounding, return_sum, drops=True)
        chain.groups(out_features)
        self.chain, self.eval_chain = str(chain), str(chain.without_dropout)
        self.linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self.norm = _layer(norm, out_features, affine, device=device, dtype=dtype)

    def forward(self, x: Tensor, *operands: Tensor) -> Results:
        """x (..., in_features) → (..., out_features); operands as ``linear_norm`` takes them."""
        # By way of _modules: nn.Module's own attribute look-up costs a microsecond each time.
        linear, norm = self._modules["linear"], self._modules["norm"]
        text = self.chain if self.training else self.eval_chain
        known = _computes_as(linear, nn.Linear) and _is_norm_of(norm, text, linear)
        if known and _has_any_global_hook():
            known = is_distributed((x,))  # of which the layers do not compute all that this does
            if known:
                log_once("LinearNorm of DTensors: hooks of all modules do not see its layers")
        if not known:
            return self._by_layers(x, operands, text)
        return apply_chain(
            x,
            *(parameter_of(linear, "weight"), parameter_of(linear, "bias")),
            *(parameter_of(norm, "weight"), parameter_of(norm, "bias")),
            operands,
            text,
        )

    def _by_layers(self, x: Tensor, operands: tuple[Tensor, ...], text: str) -> Results:
        log_once(
            "LinearNorm computes by its linear and norm, one by one: they have hooks, or are not "
            "those that it was made with"
        )
        chain = Chain.parse(text)
        operands = with_seeds(operands, chain.operand_kinds, x.device)
        check_operand_count(operands, chain)
        remaining = iter(operands)
        total = apply_pointwise(self.linear(x), chain.pre, remaining)
        y = apply_pointwise(self.norm(total), chain.post, remaining)
        return (y, total) if chain.returns_sum else y

    def extra_repr(self) -> str:
        return f"chain={self.chain!r}"


def parameter_of(layer: nn.Module | None, name: str) -> Any:
    """A layer's parameter, from where it is fastest; None where it does not exist, as RMSNorm's
    bias."""
    assert layer is not None
    parameters = layer._parameters
    return parameters[name] if name in parameters else getattr(layer, name, None)


def _computes_as(layer: Any, kind: type[nn.Module]) -> bool:
    """Whether calling the layer does what PyTorch's layer of that kind does, and nothing else."""
    return (
        getattr(type(layer), "forward", None) is kind.forward
        and "forward" not in layer.__dict__
        and not (
            layer._forward_pre_hooks
            or layer._forward_hooks
            or layer._backward_pre_hooks
            or layer._backward_hooks
        )
    )


def _is_norm_of(layer: Any, text: str, linear: Any) -> bool:
    norm = Chain.parse(text).norm
    if norm is None or not _computes_as(layer, _LAYERS[type(norm)]) or layer.eps != norm.eps:
        return False
    n = linear.out_features
    if isinstance(norm, GroupNorm):
        return bool((layer.num_groups, layer.num_channels) == (norm.num_groups, n))
    return tuple(layer.normalized_shape) == (n,)


_LAYERS: dict[Any, Any] = {GroupNorm: nn.GroupNorm, LayerNorm: nn.LayerNorm, RMSNorm: nn.RMSNorm}


def _layer(norm: Norm, features: int, affine: bool, **placed: Any) -> nn.Module:
    grouped = isinstance(norm, GroupNorm)
    if norm.num_groups > 1 and not grouped:
        raise ValueError(
            f"torch.nn has no layer that is {norm} over {features} channels: use linear_norm"
        )
    sizes = (norm.num_groups, features) if grouped else (features,)
    return _LAYERS[type(norm)](*sizes, norm.eps, affine, **placed)
