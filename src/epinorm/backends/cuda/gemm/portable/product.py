"""Products of 16-bit matrices or planes on any GPU since Ampere, nothing after them: dX and dW.

Operands lie along the summed index or across it, as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.portable.text import product_source
from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable_product import choose_tile
from epinorm.backends.cuda.plan.portable_tile import product_shared_bytes
from epinorm.backends.cuda.runtime.device import arch_of, gpu_of
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.memo import memo

__all__ = ["Product", "prepare_product"]

SIGNATURE = "ppppll" + "pp" + "iii"
"""a hi and lo, b hi and lo, their strides in numbers; c, row scale; rows, columns, length."""

MOST_KEPT = 256


class Product:
    """c (rows, columns) = a · b, ready to launch.

    a: (rows, length), or (length, rows) unless ``major_k_a``; b: (length, columns); planes of
    ``dtype`` in rows of whole 16-byte units, or zeros up to the next. With ``scaled`` a's row i
    counts scale[i].
    """

    def __init__(
        self,
        shape: ProductShape,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        scaled: bool,
        major_k_a: bool,
        device: torch.device,
    ) -> None:
        rows, columns = shape.rows, shape.columns
        tile = choose_tile(shape.planes, gpu_of(device))
        aligned = columns * out_dtype.itemsize % 16 == 0
        source = product_source(
            *(tile, shape.planes, dtype, out_dtype, scaled, major_k_a, False),
            arch_of(device),
            aligned_rows=aligned,
        )
        dynamic = product_shared_bytes(tile, shape.planes)
        self.launch: Callable[..., None] = load(source, device, dynamic).prepare(
            SIGNATURE,
            tile.tiles(rows, columns),
            tile.threads,
            shared_bytes=dynamic,
            dependent=starts_early(device),
        )
        self.new = partial(torch.empty, (rows, columns), dtype=out_dtype, device=device)
        self.sizes = (rows, columns, shape.length)
        self.addresses: dict[Any, tuple[int, ...]] = {}

    def __call__(
        self, key: Any, operands: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]], scale: int
    ) -> Tensor:
        """Multiply; operands: a's planes hi and lo, then b's, asked for where ``key``, all that
        their addresses and strides depend on, is new."""
        at = self.addresses.get(key) or self._keep_addresses(key, *operands())
        result = self.new()
        self.launch(*at, result.data_ptr(), scale, *self.sizes)
        return result

    def _keep_addresses(self, key: Any, *planes: Tensor) -> tuple[int, ...]:
        if len(self.addresses) >= MOST_KEPT:
            self.addresses.clear()
        pointers = tuple(plane.data_ptr() for plane in planes)
        strides = (planes[0].stride(0), planes[2].stride(0))
        at = self.addresses[key] = (*pointers, *strides)
        return at


@memo()
def prepare_product(
    shape: ProductShape,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scaled: bool,
    major_k_a: bool,
    device: torch.device,
) -> Product:
    """The product of this shape."""
    return Product(shape, dtype, out_dtype, scaled, major_k_a, device)
