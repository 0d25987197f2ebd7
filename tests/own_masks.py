"""PyTorch's dropout with the mask of our kernels, so that a plain model can be compared."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

from epinorm.chain.dropout import draw_seeds, drop


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    (seed,) = draw_seeds(1, input.device)
    dropped = drop(input, seed, p)
    return input.copy_(dropped) if inplace else dropped


def own_masks() -> Any:
    """Within, ``F.dropout`` in training draws a seed as a fused chain does, and drops by it."""
    return mock.patch.object(F, "dropout", _dropout)
