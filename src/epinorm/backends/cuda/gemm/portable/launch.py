"""The launches of `portable_linear_norm.cu` and of `portable_product.cu`, which multiplies in the
backward pass 16-bit matrices or planes, on any GPU since Ampere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.launch import (
    KeptOperands,
    Operands,
    ProductKernel,
    chain_signature,
)
from epinorm.backends.cuda.gemm.portable.text import linear_norm_source, product_source
from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable import copy_bytes, instance_for
from epinorm.backends.cuda.plan.portable_tile import (
    PortableTile,
    product_shared_bytes,
    shared_bytes,
)
from epinorm.backends.cuda.runtime.device import arch_of
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.instance import rows_aligned
from epinorm.problem import Problem

SIGNATURE = "ppppll" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo, their strides in numbers; y, z, bias, gamma, beta, row and column
scale, mean, rstd; m, n, k."""
PRODUCT_SIGNATURE = "ppppll" + "pp" + "iii"
"""a hi and lo, b hi and lo, their strides in numbers; c, row scale; rows, columns, length."""


def addresses(operands: Operands) -> tuple[int, ...]:
    """Of a's planes and b's, and the row strides of either in numbers."""
    at = [operand.data_ptr() for operand in operands]
    return (*at, operands[0].stride(0), operands[2].stride(0))


class PortableLinearNorm:
    """The kernels of one problem with this tile, by how many bytes they copy at a time; as
    ``LinearNorm`` says."""

    def __init__(self, problem: Problem, tile: PortableTile) -> None:
        self.problem, self.tile = problem, tile
        self.by_planes = problem.dtype == torch.float32
        self.held: int | None = None
        self.launches: dict[int, Callable[..., None]] = {}
        if problem.m:  # now: a CUDA graph may be captured when it is first needed
            row_bytes = problem.k * problem.dtype.itemsize
            self._load(16 if self.by_planes else copy_bytes(row_bytes))

    def length(self, padded: int) -> int:
        return padded  # the padding is of zeros in both, and whole units can be copied with it

    def readable(self, matrix: Tensor) -> Tensor:
        return matrix

    def given(self, operands: Operands) -> tuple[Callable[..., None], tuple[Any, ...]]:
        at = x, _, w, _, x_stride, w_stride = addresses(operands)
        size, columns = operands[0].element_size(), operands[0].shape[1]
        width = copy_bytes(x, w, x_stride * size, w_stride * size, columns * size)
        return self.launches.get(width) or self._load(width), at

    def _load(self, width: int) -> Callable[..., None]:
        """The kernel that copies ``width`` bytes at a time."""
        problem, tile = self.problem, self.tile
        instance = instance_for(problem, tile)
        dynamic, aligned = shared_bytes(instance), rows_aligned(problem)
        source = linear_norm_source(instance, arch_of(problem.device), width, aligned)
        launch = self.launches[width] = load(source, problem.device).prepare(
            SIGNATURE + chain_signature(problem),
            tile.tiles(problem.m, problem.n),
            tile.threads,
            shared_bytes=dynamic,
            dependent=starts_early(problem.device),
        )
        return launch


def portable_product(
    shape: ProductShape, tile: PortableTile, major_k_a: bool, device: torch.device
) -> ProductKernel:
    """`portable_product.cu` for ``gemm/product.py``; operands are in rows of whole 16-byte units,
    or zeros up to the next."""
    aligned_rows = shape.columns % 4 == 0
    source = product_source(tile, shape.planes, major_k_a, arch_of(device), aligned_rows)
    dynamic = product_shared_bytes(tile, shape.planes)
    launch = load(source, device).prepare(
        PRODUCT_SIGNATURE,
        tile.tiles(shape.rows, shape.columns),
        tile.threads,
        shared_bytes=dynamic,
        dependent=starts_early(device),
    )
    return ProductKernel(launch, KeptOperands(addresses), (shape.rows, shape.columns, shape.length))
