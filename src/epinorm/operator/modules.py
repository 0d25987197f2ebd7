"""The operation as a module: ``LinearNorm``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.chain import Chain, GroupNorm, LayerNorm, Norm, RMSNorm, Rounding
from epinorm.chain.pointwise import PointwiseLike
from epinorm.chain.reference import Results
from epinorm.operator.functional import apply_chain


class LinearNorm(nn.Module):
    """``nn.Linear``, a norm and pointwise operations around it, computed as one operation.

    Holds the layers that it replaces as ``linear`` and ``norm``, made in that order: the same
    parameter names, initial values and draws from the random generator as
    ``nn.Sequential(OrderedDict(linear=nn.Linear(...), norm=nn.GroupNorm(...)))``. ``return_sum``
    and ``rounding`` are those of ``linear_norm``. Dropout, as ``nn.Dropout(p)`` or
    ``"dropout(p)"``, drops while this module is in training.
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
        return apply_chain(
            x,
            *(parameter_of(linear, "weight"), parameter_of(linear, "bias")),
            *(parameter_of(norm, "weight"), parameter_of(norm, "bias")),
            operands,
            self.chain if self.training else self.eval_chain,
        )

    def extra_repr(self) -> str:
        return f"chain={self.chain!r}"


def parameter_of(layer: nn.Module | None, name: str) -> Any:
    """A layer's parameter, from where it is fastest; None where it does not exist, as RMSNorm's
    bias."""
    assert layer is not None
    parameters = layer._parameters
    return parameters[name] if name in parameters else getattr(layer, name, None)


_LAYERS: dict[Any, Any] = {GroupNorm: nn.GroupNorm, LayerNorm: nn.LayerNorm, RMSNorm: nn.RMSNorm}


def _layer(norm: Norm, features: int, affine: bool, **placed: Any) -> nn.Module:
    grouped = isinstance(norm, GroupNorm)
    if norm.num_groups > 1 and not grouped:
        raise ValueError(
            f"torch.nn has no layer that is {norm} over {features} channels: use linear_norm"
        )
    sizes = (norm.num_groups, features) if grouped else (features,)
    return _LAYERS[type(norm)](*sizes, norm.eps, affine, **placed)
