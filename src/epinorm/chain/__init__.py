"""What is fused: Linear → pointwise* → norm → pointwise*, and what correct means."""

from __future__ import annotations

from epinorm.chain.chain import Chain, Rounding, returns_more
from epinorm.chain.norms import BatchNorm, GroupNorm, LayerNorm, Norm, RMSNorm

__all__ = [
    "BatchNorm",
    "Chain",
    "GroupNorm",
    "LayerNorm",
    "Norm",
    "RMSNorm",
    "Rounding",
    "returns_more",
]
