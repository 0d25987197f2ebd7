"""The Linears and norms of a PyTorch model, faster by one call, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epinorm.backends.prepack import prepack, prepacked, unprepack
from epinorm.chain import Chain, GroupNorm, LayerNorm, RMSNorm
from epinorm.operator.accumulation import accumulate_in_place
from epinorm.operator.functional import linear, linear_norm
from epinorm.operator.modules import LinearNorm

__version__ = "0.2.0"

__all__ = ["Chain", "GroupNorm", "LayerNorm", "LinearNorm", "RMSNorm", "__version__"]
__all__ += ["accumulate_in_place", "explain", "fuse", "linear", "linear_norm", "unfuse"]
__all__ += ["prepack", "prepacked", "unprepack"]

if TYPE_CHECKING:
    from epinorm.capture import explain, fuse, unfuse
else:

    def __getattr__(name: str) -> Any:
        """Load what captures models when first used: epinorm is imported without TorchDynamo."""
        if name in ("explain", "fuse", "unfuse"):
            from epinorm import capture

            return getattr(capture, name)
        raise AttributeError(f"module 'epinorm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
