"""What is fused: Linear → pointwise* → norm → pointwise*, and what correct means."""

from __future__ import annotations

from epinorm.chain.chain import Chain, GroupNorm, LayerNorm, Norm, RMSNorm, Rounding, returns_sum

__all__ = ["Chain", "GroupNorm", "LayerNorm", "Norm", "RMSNorm", "Rounding", "returns_sum"]
