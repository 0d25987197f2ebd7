"""What TF32 gives: eager's layers with the operands of each fp32 product rounded to TF32.

Where TF32 is allowed, the library's heuristics still take fp32 kernels for some sizes (on an H200
16 × 512 → 512). Eager's own error is no yardstick for a product in TF32 there; this is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.precision import product_precision, takes_tf32

DROPPED_BITS = 13
"""Of fp32's 23 bits behind the point TF32 has 10."""

_aten = torch.ops.aten
_FIRST_OPERAND = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}
"""Which argument of a product is its left operand; the right one follows it."""


def allows_tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch may multiply matrices of this dtype in TF32 there, as it is set now."""
    return product_precision(dtype, device.type) == "high"


def round_to_tf32(x: Tensor) -> Tensor:
    """fp32 values of any shape to the nearest that TF32 holds, ties away from zero as PTX's
    ``cvt.rna.tf32`` has them. Exact for denormal numbers too; Inf and NaN stay."""
    last = 1 << DROPPED_BITS
    rounded = (x.view(torch.int32) + last // 2 & -last).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


class RoundedOperands(TorchDispatchMode):
    """Within, fp32 products, forward and backward, are of operands rounded to TF32.

    The library multiplies them: in fp32 or in TF32, which holds them as they are. Products that
    PyTorch computes in fp32 at any setting (`precision.takes_tf32`) stay as they are.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode F.linear and its like arrive in one piece
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        at = _FIRST_OPERAND.get(func.overloadpacket)
        if at is not None and _may_be_tf32(*args[at : at + 2]):
            args = (*args[:at], *map(round_to_tf32, args[at : at + 2]), *args[at + 2 :])
        return func(*args, **kwargs)


def _may_be_tf32(left: Tensor, right: Tensor) -> bool:
    """Of (..., m, k) and (..., k, n)."""
    fp32 = left.dtype == right.dtype == torch.float32
    return fp32 and takes_tf32(*left.shape[-2:], right.shape[-1])
