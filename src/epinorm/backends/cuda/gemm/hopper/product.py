"""The backward products on the Hopper core, by planes: dX = dZ W and dW = dZᵀ x.

Operands lie along the summed index or across it, as they come. Where the tiles do not fill the GPU
and the sum is long, it is split over blocks, and `gemm/add_splits.cu` adds the parts up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.hopper.text import ARCH, product_source
from epinorm.backends.cuda.gemm.launch import KeptOperands, Operands, ProductKernel
from epinorm.backends.cuda.plan.hopper import persistent_blocks
from epinorm.backends.cuda.plan.hopper_product import (
    BLOCK_K,
    Choice,
    ProductShape,
    choose,
    tiles_of,
)
from epinorm.backends.cuda.plan.hopper_tile import Tile, product_shared_bytes
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.tensor_map import tensor_map
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo

THREADS = Tile(64, 64, 0).threads
"""Of a block: every tile here has two warpgroups that multiply."""
BOX = 64
"""Rows and columns of a box of an operand that does not run along the summed index."""
SIGNATURE = "mmmm" + "pp" + "iiii"
"""a hi and lo, b hi and lo; c, row scale; rows, columns, length of a part, parts."""
ADDING_SIGNATURE = "mmmm" + "pppp" + "iii"
"""a hi and lo, b hi and lo; c, row scale, flags of rows and of the sum; rows, columns, length."""

ADD_THREADS, ADD_VALUES = 256, 4
"""Of add_splits: threads of a block, and values that each adds up."""


def add_splits_source(parts: int) -> KernelSource:
    """The kernel that adds up the parts; compiles without a GPU."""
    text = kernel_text("gemm/add_splits.cu", constants({"kSplitK": parts}))
    return KernelSource("add_splits", text, ARCH)


def add_splits(parts: int, count: int, device: torch.device) -> Callable[..., None]:
    """What adds up the parts of ``count`` sums: a function of their address, the result's and
    ``count``."""
    blocks = -(-count // (ADD_THREADS * ADD_VALUES))
    kernel = load(add_splits_source(parts), device)
    return kernel.prepare("ppl", blocks, ADD_THREADS, dependent=True)


def _maps(tile: Tile, major_k_a: bool) -> Callable[[Operands], tuple[bytes, ...]]:
    """The tensor maps of a's and b's planes."""
    rows_of_a = tile.block_m if major_k_a else BOX
    boxes = rows_of_a, rows_of_a, BOX, BOX
    return lambda planes: tuple(
        tensor_map(plane, rows, BOX) for plane, rows in zip(planes, boxes, strict=True)
    )


def hopper_product(
    shape: ProductShape, choice: Choice, major_k_a: bool, device: torch.device
) -> ProductKernel:
    """`hopper_product.cu` for ``gemm/product.py``; with parts, c is theirs."""
    parts, planes, tile = choice.parts, shape.planes, choice.tile
    source = product_source(tile, planes, major_k_a, split=parts > 1)
    dynamic = product_shared_bytes(tile, planes)
    launch = load(source, device).prepare(
        SIGNATURE,
        persistent_blocks(tiles_of(shape, tile) * parts, sm_count(device)),
        THREADS,
        shared_bytes=dynamic,
        dependent=True,
    )
    numbers = (shape.rows, shape.columns, -(-shape.steps // parts) * BLOCK_K, parts)
    return ProductKernel(launch, KeptOperands(_maps(tile, major_k_a)), numbers)


class AddingProduct:
    """c += a · b into a c that is there; otherwise as `Product`."""

    def __init__(
        self, shape: ProductShape, tile: Tile, major_k_a: bool, device: torch.device
    ) -> None:
        self.maps = KeptOperands(_maps(tile, major_k_a))
        self.sizes = (shape.rows, shape.columns, shape.length)
        dynamic = product_shared_bytes(tile, shape.planes)
        source = product_source(tile, shape.planes, major_k_a, adds=True)
        self.launch = load(source, device).prepare(
            ADDING_SIGNATURE,
            persistent_blocks(tiles_of(shape, tile), sm_count(device)),
            THREADS,
            shared_bytes=dynamic,
            dependent=True,
        )

    def __call__(
        self,
        key: Any,
        operands: Callable[[], Operands],
        scale: int,
        result: Tensor,
        row_flags: int,
        summed_flags: int,
    ) -> None:
        """Add to ``result`` (rows, columns), contiguous, from a 16-byte address; the rest as for
        `Product`. Not to rows that are flagged, nor to any if an index of the sum is; the addresses
        of (rows,) and (length,) uint8, multiples of 4."""
        addresses = (result.data_ptr(), scale, row_flags, summed_flags)
        self.launch(*self.maps(key, operands), *addresses, *self.sizes)


@memo()
def prepare_adding(
    shape: ProductShape, major_k_a: bool, device: torch.device
) -> AddingProduct | None:
    """The product of this shape into a result that is there already; None where sums are better
    split, since a kernel of its own then adds up their parts."""
    choice = choose(shape, sm_count(device))
    return AddingProduct(shape, choice.tile, major_k_a, device) if choice.parts == 1 else None
