"""`round_weight.cu`: W as TF32 in the order of `register_tf32.cuh`, for x out of registers."""

from __future__ import annotations

import torch
from torch import Tensor

from epinorm.backends.cuda.plan.hopper_tile import rounded_columns
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.source import kernel_text

SIGNATURE = "plp" + "iii"
"""W and its row stride; what becomes of it; n, k, columns of the result."""
THREADS, NUMBERS = 256, 4
"""Of a block; and that a thread writes."""


class RoundedWeight:
    """Rounds a weight of (n, k) fp32, rows at any address, in each call."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        self.padded = rounded_columns(k)
        self.numbers = (n, k, self.padded)
        self.new = new_tensor((n, self.padded), torch.float32, device)
        blocks = -(-n * self.padded // (THREADS * NUMBERS))
        kernel = load(round_weight_source(), device)
        self.launch = kernel.prepare(SIGNATURE, max(blocks, 1), THREADS, dependent=True)

    def __call__(self, weight: Tensor, stride: int) -> Tensor:
        """The rounded copy, (n, padded), of a weight whose rows are ``stride`` numbers apart."""
        rounded = self.new()
        self.launch(weight.data_ptr(), stride, rounded.data_ptr(), *self.numbers)
        return rounded


def round_weight_source() -> KernelSource:
    """The kernel's text; compiles without a GPU."""
    return KernelSource("round_weight", kernel_text("fp32/round_weight.cu"), "sm_90a")
