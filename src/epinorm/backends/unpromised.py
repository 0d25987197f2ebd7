"""Functions that PyTorch does not promise; None where this PyTorch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A PyTorch without CUDA has neither.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]

# The guard that torch.compile puts before its code, and what that code allocates with: past the
# dispatcher, on the current device, in a third of the time of torch.empty.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)

# (False) -> the hooks for saved tensors that hold now, as checkpointing's, or None.
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
