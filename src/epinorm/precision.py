"""From PyTorch's settings and dtypes to how a matrix product is to be computed.

PyTorch has two interfaces for the precision of fp32 products, an old one
(``torch.set_float32_matmul_precision``, ``allow_tf32``) and, from 2.9 on, a new one
(``torch.backends.cuda.matmul.fp32_precision``). Once both were used, reading the old one may raise;
the new one always answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

Precision = Literal["native", "high", "highest"]
"""``native``: the dtype's own product (bf16, fp16, fp64). ``high``: fp32 inputs where TF32 is
allowed. ``highest``: fp32 inputs, fp32 accuracy."""


matmul_setting: Callable[[], str] = partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
"""What torch.backends.cuda.matmul.fp32_precision reads, six times faster: on every call's path.
Where products have no setting of their own, the answer is the backend's, or the general one."""


def fp32_precision() -> Literal["high", "highest"]:
    """How PyTorch computes fp32 products on CUDA now: ``highest`` (IEEE) or ``high`` (TF32)."""
    return "high" if matmul_setting() == "tf32" else "highest"


def convolutions_take_tf32() -> bool:
    """Whether PyTorch computes fp32 convolutions on CUDA in TF32 now, which is its default."""
    # At::Context asks the same: the old ``torch.backends.cudnn.allow_tf32`` sets it too.
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def follows_setting(dtype: torch.dtype, device_type: str) -> bool:
    """Whether ``fp32_precision`` decides about products of this dtype and device type."""
    return dtype == torch.float32 and device_type == "cuda"


def takes_tf32(*sizes: int) -> bool:
    """Whether PyTorch computes an fp32 product of sizes m, k, n in TF32 where that is allowed.

    A single row, column or term is left to other kernels, in full fp32: measured with cuBLAS of
    CUDA 13.0 on an H200, for sizes from 1 to 1024 and operands in any order. (Of sums of 17 to 33
    terms with 100 rows and columns or more, every third is too, as its heuristics have it.)
    """
    return min(sizes) > 1


def product_precision(
    dtype: torch.dtype, device_type: str, sizes: tuple[int, ...] | None = None
) -> Precision:
    """The precision of a product of two ``dtype`` matrices on ``device_type`` ("cpu", "cuda").

    sizes: m, k and n of (m, k) (k, n), where PyTorch's own choice of kernels counts as well.
    """
    if follows_setting(dtype, device_type):
        setting = fp32_precision()
        return setting if sizes is None or takes_tf32(*sizes) else "highest"
    return "highest" if dtype == torch.float32 else "native"
