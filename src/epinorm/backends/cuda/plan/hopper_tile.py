"""A tile of the Hopper kernels: its fields, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from epinorm.backends.cuda.runtime.tensor_map import LARGEST_BOX
from epinorm.backends.cuda.text.instance import Instance, columns_of, rows_aligned, vectors

STEP_BYTES = 128
"""Bytes of an operand's row in one step along the summed index: the widest swizzle."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that a block of sm_90 can have (CUDA programming guide, table of compute
capabilities)."""
WARPGROUP = 128
WIDEST_PRODUCT = 256
"""Columns of one wgmma (PTX ISA)."""
_STORE_BYTES = 4 * 2048  # of a consumer: warps x bytes of a buffer, row_store.cuh


@dataclass(frozen=True)
class Tile:
    """How a block cuts the product; the fields are the constants of `hopper_ring.cuh`.

    block_m, block_n: rows and columns of a tile. stages: slots of the ring. ping_pong: each
    warpgroup has tiles of its own; split_columns: each has half of a tile's columns (else of its
    rows). load_m: rows of A that are loaded, fewer than block_m where m is small. cluster: blocks
    that share the loads of B. group: row tiles that share a column tile. fold_steps: steps of 64
    between folds (two planes); 0: each product of 16 is folded. tf32: fp32 operands are multiplied
    as they are, as TF32. register_a: x's rows are then rounded on their way into registers, and W
    by a kernel in front. cluster_n: blocks of a cluster side by side that share a group's
    statistics. resident_steps: steps of B, where it is one column tile, that stay in shared memory;
    0: B goes through the ring. consumers: warpgroups that multiply; more than two take turns at
    small tiles. fp32_weight: by `hopper_fp32_weight.cu`, which converts W on the way; stages are of
    x's ring. fp32_input: by `hopper_fp32_input.cu`, which converts x; stages are of W's ring.
    """

    block_m: int
    block_n: int
    stages: int
    ping_pong: bool = True
    cluster: int = 1
    group: int = 16
    fold_steps: int = 4
    split_columns: bool = False
    load_m: int | None = None
    tf32: bool = False
    register_a: bool = False
    cluster_n: int = 1
    resident_steps: int = 0
    consumers: int = 2
    fp32_weight: bool = False
    fp32_input: bool = False

    def __str__(self) -> str:
        order = "pingpong" if self.ping_pong else "cooperative"
        text = f"{self.block_m} x {self.block_n}, {self.stages} stages, {order}"
        text += f", cluster of {self.cluster_blocks}" * (self.cluster_blocks > 1)
        return (
            text
            + ", W in shared memory" * (self.resident_steps > 0)
            + (", TF32 from registers" if self.register_a else ", TF32" * self.tf32)
        )

    @property
    def converts(self) -> bool:
        """fp32 on the way: W or x."""
        return self.fp32_weight or self.fp32_input

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers' and the producer's warpgroup."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.cluster_n

    @property
    def element_bytes(self) -> int:
        """Bytes of an operand's element."""
        return 4 if self.tf32 else 2

    @property
    def block_k(self) -> int:
        """Elements of a step along the summed index: a row of 128 bytes."""
        return STEP_BYTES // self.element_bytes

    @property
    def box_n(self) -> int:
        """Rows of B that one copy brings."""
        rows = self.block_n // self.cluster
        return rows if rows <= LARGEST_BOX else rows // 2

    @property
    def in_halves(self) -> bool:
        """Whether a warpgroup's columns are two products; but where fp32 is converted on the way,
        slots of the ring are freed in halves then."""
        return self.consumer_n > WIDEST_PRODUCT

    @property
    def slot_barriers(self) -> int:
        """Barriers of a slot of `hopper_ring.cuh`'s ring: full and empty, of each of its parts."""
        return 4 if self.in_halves else 2

    @property
    def consumer_n(self) -> int:
        """Columns of a tile that one warpgroup multiplies."""
        return self.block_n // 2 if self.split_columns else self.block_n


def rounded_columns(k: int) -> int:
    """Columns of W as TF32 in the order of `register_tf32.cuh`: whole steps."""
    return -(-k * 4 // STEP_BYTES) * STEP_BYTES // 4


def stage_bytes(tile: Tile, planes: int) -> int:
    """Bytes of a slot of the ring."""
    rows_of_b = 0 if tile.resident_steps else tile.block_n
    return planes * (tile.block_m + rows_of_b) * STEP_BYTES


def _exchangers(tile: Tile) -> int:
    """How many of a block's warpgroups exchange parts of groups, each for the rows of its own."""
    return 1 if tile.split_columns else tile.consumers


def _barrier_bytes(tile: Tile) -> int:
    exchanges = 2 * _exchangers(tile) if tile.cluster_n > 1 else 2
    return (
        tile.slot_barriers * tile.stages + tile.consumers + 1 + exchanges
    ) * 8  # turns, resident


def shared_bytes(instance: Instance[Tile]) -> int:
    """Dynamic shared memory of a block, as `hopper_linear_norm.cu` lays it out."""
    tile = instance.tile
    ring = tile.stages * stage_bytes(tile, instance.problem.planes)
    ring += tile.resident_steps * tile.block_n * STEP_BYTES
    parts = columns_of(instance.problem) // tile.consumer_n
    exchange = 2 * _exchangers(tile) * parts * 64 * 8 if parts > 1 else 0  # rows, bytes of a pair
    vector_bytes = vectors(instance) * tile.consumer_n * 4
    own = tile.consumers * (_STORE_BYTES + vector_bytes)
    return ring + own + exchange + _barrier_bytes(tile)


def product_shared_bytes(tile: Tile, planes: int) -> int:
    """Dynamic shared memory of a block of `hopper_product.cu`."""
    own = tile.consumers * _STORE_BYTES
    return tile.stages * stage_bytes(tile, planes) + own + _barrier_bytes(tile)


def largest_stages(instance: Instance[Tile]) -> int:
    """How many slots of the ring fit a block's shared memory."""
    empty = dataclasses.replace(instance, tile=dataclasses.replace(instance.tile, stages=0))
    free = SHARED_LIMIT - shared_bytes(empty)
    return free // (
        stage_bytes(instance.tile, instance.problem.planes) + instance.tile.slot_barriers * 8
    )


def operand_slots(instance: Instance[Tile]) -> int:
    """Slots of the ring, behind a tile's last step, for the chain's one element operand; 0: the
    epilogue reads such operands from memory. It pays in clusters, with two planes and in halves."""
    tile, problem, size = instance.tile, instance.problem, instance.problem.norm_dtype.itemsize
    in_cluster = tile.cluster_n > 1
    together = problem.planes == 2 and not (in_cluster and tile.split_columns)
    pays = in_cluster if tile.ping_pong else together or tile.in_halves
    kinds = problem.chain.operand_kinds
    serves = kinds.count("element") == 1 and (tile.in_halves or "seed" not in kinds)  # or spills
    aligned = rows_aligned(problem) and size == problem.out_dtype.itemsize
    whole_lines = tile.consumer_n * size % STEP_BYTES == 0
    if not (pays and serves and aligned and whole_lines) or tile.cluster > 1:
        return 0
    boxes = tile.block_n * size // STEP_BYTES  # a line of each of the tile's rows
    slots = math.ceil(boxes / (stage_bytes(tile, problem.planes) // (tile.block_m * STEP_BYTES)))
    # In halves nobody multiplies while the operand is read.
    return slots if tile.stages >= slots + (0 if tile.in_halves else 2) else 0


BLOCK_N = 128


def fp32_weight_tiles(planes: int) -> list[Tile]:
    """What there is to choose from: rows of x by 128 rows of W, which gives columns of y."""
    # Few row tiles that share a column tile: they read the same rows of W, in fp32. With two planes
    # 64 rows of x take as many accumulators as 192 with one.
    rows = (64,) if planes == 2 else (128, 256)
    return [Tile(m, BLOCK_N, 4, ping_pong=False, group=4, fp32_weight=True) for m in rows]


def fp32_input_tiles(unit: int, widest: int) -> list[Tile]:
    """128 rows of x by columns of y, multiples of ``unit`` up to ``widest``."""
    widths = [width for width in (256, 192, 128) if width % unit == 0 and width <= widest]
    return [Tile(BLOCK_N, n, 3, ping_pong=False, group=8, fp32_input=True) for n in widths]


def _besides_rings(instance: Instance[Tile]) -> int:
    """Bytes for the verdict, its barriers and, where x is converted, what the epilogue needs."""
    tile = instance.tile
    verdict = 16 + 16
    if tile.fp32_weight:
        return verdict
    own = 2 * (_STORE_BYTES + vectors(instance) * tile.block_n * 4)
    buffer = tile.cluster_n * 64 * 8 + 8  # with its barrier, as in shared_bytes()
    return verdict + own + (2 * tile.consumers * buffer if tile.cluster_n > 1 else 0)


def holds_operand(instance: Instance[Tile]) -> bool:
    """Whether a kernel that converts x takes the chain's one element operand through its ring."""
    tile, kinds = instance.tile, instance.problem.chain.operand_kinds
    return tile.fp32_input and tile.in_halves and kinds.count("element") == 1


def fp32_step_boxes(tile: Tile) -> int:
    """Lines of each fp32 row in a step along the summed index, 32 columns each; as many halves of
    the other matrix's rows. In halves fragments of two such steps take as many registers."""
    return 1 if tile.in_halves else 2


def _fp32_stage_bytes(instance: Instance[Tile]) -> tuple[int, int]:
    """Bytes of a slot of the fp32 matrix's ring, and of the plane's."""
    tile, boxes = instance.tile, fp32_step_boxes(instance.tile)
    rows = tile.block_m if tile.fp32_weight else tile.block_n
    return BLOCK_N * boxes * STEP_BYTES, instance.problem.planes * rows * boxes * STEP_BYTES // 2


def stages_of_fp32(instance: Instance[Tile]) -> int:
    """Slots of the fp32 matrix's ring: as many as fit beside the plane's."""
    stage, of_plane = _fp32_stage_bytes(instance)  # a slot has two barriers, 16 bytes
    left = SHARED_LIMIT - instance.tile.stages * (of_plane + 16) - _besides_rings(instance)
    return left // (stage + 16)


def fp32_shared_bytes(instance: Instance[Tile]) -> int:
    """Dynamic shared memory of a block, as the kernels that convert on the way lay it out."""
    stage, of_plane = _fp32_stage_bytes(instance)
    rings = stages_of_fp32(instance) * (stage + 16) + instance.tile.stages * (of_plane + 16)
    return rings + _besides_rings(instance)
