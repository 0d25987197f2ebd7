"""A tile of the portable kernels: its fields, and the shared memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epinorm.backends.cuda.text.instance import Instance, vectors

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
    tf32: ClassVar = False
    """Of Hopper's tiles alone."""

    def __str__(self) -> str:
        warps = f"{self.warps_m} x {self.warps_n} warps"
        return f"{self.block_m} x {self.block_n}, {self.stages} stages, {warps}"

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


def _vector_space(instance: Instance[PortableTile]) -> int:
    size = vectors(instance) * instance.tile.block_n * 4
    return -(-size // _VECTOR_ALIGNMENT) * _VECTOR_ALIGNMENT


def shared_bytes(instance: Instance[PortableTile]) -> int:
    """Dynamic shared memory of a block, as `portable_linear_norm.cu` lays it out."""
    tile = instance.tile
    exchange = 2 * 16 * 4 if tile.parts > 1 else 0
    finish = tile.warps * (_STORE_BYTES + exchange)
    ring = tile.stages * tile.stage_bytes(instance.problem.planes)
    return _vector_space(instance) + max(ring, finish)


def largest_stages(instance: Instance[PortableTile], limit: int) -> int:
    """How many slots of the ring fit into ``limit`` bytes of shared memory."""
    return (limit - _vector_space(instance)) // instance.tile.stage_bytes(instance.problem.planes)


def product_shared_bytes(tile: PortableTile, planes: int) -> int:
    """Dynamic shared memory of a block of `portable_product.cu`."""
    return max(tile.stages * tile.stage_bytes(planes), tile.warps * _STORE_BYTES)
