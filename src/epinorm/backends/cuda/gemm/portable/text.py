"""The portable kernel's instances: a tile's constants → the kernel's text.

One instance is one chain, one tile and one set of dtypes, for any GPU since Ampere (sm_80).
`portable_pipeline.cuh` says how the kernel multiplies; `plan/portable.py` which tile a problem
takes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.instance import (
    TYPES,
    Instance,
    constants,
    epilogue_prelude,
    vectors,
)
from epinorm.backends.cuda.text.source import kernel_text

__all__ = [
    "LINEAR_NORM",
    "PRODUCT",
    "PortableTile",
    "largest_stages",
    "linear_norm_source",
    "product_shared_bytes",
    "product_source",
    "shared_bytes",
]

LINEAR_NORM = "portable_linear_norm"
PRODUCT = "portable_product"
"""Names of the two kernels."""

_STORE_BYTES = 2048  # of a warp's buffer: row_store.cuh
_VECTOR_ALIGNMENT = 128


@dataclass(frozen=True)
class PortableTile:
    """How a block cuts the product; the fields are the constants of `portable_pipeline.cuh`.

    warp_m, warp_n: rows and columns that a warp multiplies. warps_m, warps_n: warps of a block
    along each. block_k: elements of a step along the summed index. stages: slots of the ring.
    parts: warps that share a group wider than warp_n. group: row tiles that share a column tile.
    blocks: that a multiprocessor must hold at once, which limits their registers.
    """

    warp_m: int
    warp_n: int
    warps_m: int
    warps_n: int
    block_k: int = 64
    stages: int = 0
    parts: int = 1
    group: int = 16
    blocks: int = 1

    @property
    def block_m(self) -> int:
        return self.warp_m * self.warps_m

    @property
    def block_n(self) -> int:
        return self.warp_n * self.warps_n

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def tiles(self, m: int, n: int) -> int:
        """Blocks that a matrix of m by n takes."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def stage_bytes(self, planes: int) -> int:
        """Bytes of a slot of the ring."""
        return planes * (self.block_m + self.block_n) * self.block_k * 2


def _prelude(
    tile: PortableTile,
    planes: int,
    dtype: torch.dtype,
    copy_bytes: int,
    aligned_rows: bool,
    major_k_a: bool = True,
    major_k_b: bool = True,
) -> str:
    return constants(
        {
            "kWarpM": tile.warp_m,
            "kWarpN": tile.warp_n,
            "kWarpsM": tile.warps_m,
            "kWarpsN": tile.warps_n,
            "kBlockK": tile.block_k,
            "kStages": tile.stages,
            "kPlanes": planes,
            "kMajorKA": major_k_a,
            "kMajorKB": major_k_b,
            "kCopyBytes": copy_bytes,
            "kBfloat16": dtype == torch.bfloat16,
            "kTileGroup": tile.group,
            "kParts": tile.parts,
            "kAlignedRows": aligned_rows,
            "kBlocksPerMultiprocessor": tile.blocks,
        }
    )


def _vector_space(instance: Instance[PortableTile]) -> int:
    size = vectors(instance) * instance.tile.block_n * 4
    return -(-size // _VECTOR_ALIGNMENT) * _VECTOR_ALIGNMENT


def shared_bytes(instance: Instance[PortableTile]) -> int:
    """Dynamic shared memory of a block, as `portable_linear_norm.cu` lays it out."""
    tile = instance.tile
    exchange = 2 * 16 * 4 if tile.parts > 1 else 0
    finish = tile.warps * (_STORE_BYTES + exchange)
    ring = tile.stages * tile.stage_bytes(instance.planes)
    return _vector_space(instance) + max(ring, finish)


def largest_stages(instance: Instance[PortableTile], limit: int) -> int:
    """How many slots of the ring fit into ``limit`` bytes of shared memory."""
    return (limit - _vector_space(instance)) // instance.tile.stage_bytes(instance.planes)


def linear_norm_source(
    instance: Instance[PortableTile], arch: str, copy_bytes: int = 16, aligned_rows: bool = True
) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU.

    copy_bytes: 16, 4 or 2, of which all addresses and row strides of the operands are multiples.
    aligned_rows: rows of y and z are whole 16-byte units.
    """
    prelude = _prelude(
        instance.tile, instance.planes, instance.operand_dtype, copy_bytes, aligned_rows
    ) + epilogue_prelude(instance)
    text = kernel_text("gemm/portable/portable_linear_norm.cu", prelude)
    return KernelSource(LINEAR_NORM, text, arch)


def product_shared_bytes(tile: PortableTile, planes: int) -> int:
    """Dynamic shared memory of a block of `portable_product.cu`."""
    return max(tile.stages * tile.stage_bytes(planes), tile.warps * _STORE_BYTES)


def product_source(
    tile: PortableTile,
    planes: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scaled: bool,
    major_k_a: bool,
    major_k_b: bool,
    arch: str,
    copy_bytes: int = 16,
    aligned_rows: bool = True,
) -> KernelSource:
    """The plain product's text: operands of dtype, contiguous along the summed index or not."""
    prelude = _prelude(tile, planes, dtype, copy_bytes, aligned_rows, major_k_a, major_k_b)
    prelude += constants({"kScaled": scaled}) + f"#define OutType {TYPES[out_dtype]}\n"
    return KernelSource(PRODUCT, kernel_text("gemm/portable/portable_product.cu", prelude), arch)


def with_stages(tile: PortableTile, stages: int) -> PortableTile:
    """The same tile with another number of slots."""
    return dataclasses.replace(tile, stages=stages)
