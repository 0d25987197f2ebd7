"""The backward products on any GPU since Ampere, of 16-bit matrices or planes."""

from __future__ import annotations

import torch

from epinorm.backends.cuda.gemm.launch import KeptOperands, ProductKernel
from epinorm.backends.cuda.gemm.portable.linear_norm import addresses
from epinorm.backends.cuda.gemm.portable.text import product_source
from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable_tile import PortableTile, product_shared_bytes
from epinorm.backends.cuda.runtime.device import arch_of
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import starts_early

SIGNATURE = "ppppll" + "pp" + "iii"
"""a hi and lo, b hi and lo, their strides in numbers; c, row scale; rows, columns, length."""


def portable_product(
    shape: ProductShape,
    tile: PortableTile,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scaled: bool,
    major_k_a: bool,
    device: torch.device,
) -> ProductKernel:
    """`portable_product.cu` for ``gemm/product.py``; operands are in rows of whole 16-byte units,
    or zeros up to the next."""
    source = product_source(
        *(tile, shape.planes, dtype, out_dtype, scaled, major_k_a, False),
        arch_of(device),
        aligned_rows=shape.columns * out_dtype.itemsize % 16 == 0,
    )
    dynamic = product_shared_bytes(tile, shape.planes)
    launch = load(source, device).prepare(
        SIGNATURE,
        tile.tiles(shape.rows, shape.columns),
        tile.threads,
        shared_bytes=dynamic,
        dependent=starts_early(device),
    )
    return ProductKernel(launch, KeptOperands(addresses), (shape.rows, shape.columns, shape.length))
