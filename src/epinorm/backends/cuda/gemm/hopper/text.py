"""The Hopper kernel's instances: a tile's constants → the kernel's text → its launch.

One instance is one chain, one tile and one set of dtypes. `hopper_linear_norm.cu` says how the
kernel works; `plan/hopper.py` which tile a problem takes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.runtime.tensor_map import LARGEST_BOX
from epinorm.backends.cuda.text.instance import (
    TYPES,
    Instance,
    constants,
    epilogue_prelude,
    vectors,
)
from epinorm.backends.cuda.text.source import kernel_text

__all__ = [
    "ARCH",
    "STEP_BYTES",
    "Tile",
    "largest_stages",
    "linear_norm_source",
    "product_into_source",
    "product_shared_bytes",
    "product_source",
    "shared_bytes",
    "wgmma_text",
]

ARCH = "sm_90a"
STEP_BYTES = 128
"""Bytes of an operand's row in one step along the summed index: the widest swizzle."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that a block of sm_90 can have (CUDA programming guide, table of compute
capabilities)."""

WARPGROUP = 128
_STORE_BYTES = 4 * 2048  # of a consumer: warps x bytes of a buffer, row_store.cuh
_PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "tf32"}


@dataclass(frozen=True)
class Tile:
    """How a block cuts the product; the fields are the constants of `hopper_pipeline.cuh`.

    block_m, block_n: rows and columns of a tile. stages: slots of the ring. ping_pong: each
    warpgroup has tiles of its own; split_columns: each has half of a tile's columns (else of its
    rows). load_m: rows of A that are loaded, fewer than block_m where m is small. cluster: blocks
    that share the loads of B. group: row tiles that share a column tile. fold_steps: steps of 64
    between folds (two planes); 0: each product of 16 is folded. tf32: fp32 operands are multiplied
    as they are, as TF32. group_blocks: blocks of a cluster side by side that share a group's
    statistics. resident_steps: steps of B, where it is one column tile, that stay in shared memory;
    0: B goes through the ring. consumers: warpgroups that multiply; more than two take turns at
    small tiles. fp32_weight: by `hopper_fp32_weight.cu`, which converts W on the way; stages are of
    x's ring.
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
    group_blocks: int = 1
    resident_steps: int = 0
    consumers: int = 2
    fp32_weight: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers' and the producer's warpgroup."""
        return WARPGROUP * (self.consumers + 1)

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster."""
        return self.cluster * self.group_blocks

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
    def consumer_n(self) -> int:
        """Columns of a tile that one warpgroup multiplies."""
        return self.block_n // 2 if self.split_columns else self.block_n


def wgmma_text(columns: int, dtype: torch.dtype, major_k_a: bool, major_k_b: bool) -> str:
    """The instruction wgmma.mma_async.m64n<columns> with fp32 accumulators as a function."""
    count = columns // 2
    kind = _PTX_TYPES[dtype]
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    depth = 32 // dtype.itemsize
    flags = "1, 1" if kind == "tf32" else f"1, 1, {int(not major_k_a)}, {int(not major_k_b)}"
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} "
        f'{{{registers}}}, %{count}, %{count + 1}, p, {flags}; }}"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(accumulate));\n}}\n'
    )


def product_prelude(
    tile: Tile,
    planes: int,
    dtype: torch.dtype,
    major_k_a: bool = True,
    major_k_b: bool = True,
) -> str:
    """The constants that `hopper_pipeline.cuh` needs, and the product instruction."""
    return constants(
        {
            "kBlockM": tile.block_m,
            "kBlockN": tile.block_n,
            "kStages": tile.stages,
            "kPlanes": planes,
            "kFoldSteps": tile.fold_steps,
            "kMajorKA": major_k_a,
            "kMajorKB": major_k_b,
            "kCluster": tile.cluster,
            "kGroupBlocks": tile.group_blocks,
            "kResidentSteps": tile.resident_steps,
            "kTileGroup": max(tile.group // tile.cluster, 1),
            "kPingPong": tile.ping_pong,
            "kSplitColumns": tile.split_columns,
            "kLoadM": tile.load_m or tile.block_m,
            "kElementBytes": tile.element_bytes,
            "kConsumers": tile.consumers,
        }
    ) + wgmma_text(tile.consumer_n, dtype, major_k_a, major_k_b)


def stage_bytes(tile: Tile, planes: int) -> int:
    rows_of_b = 0 if tile.resident_steps else tile.block_n
    return planes * (tile.block_m + rows_of_b) * STEP_BYTES


def _barrier_bytes(tile: Tile) -> int:
    return (2 * tile.stages + tile.consumers + 1 + 2) * 8  # full, empty, turns, resident, exchanges


def shared_bytes(instance: Instance[Tile]) -> int:
    """Dynamic shared memory of a block, as `hopper_linear_norm.cu` lays it out."""
    tile = instance.tile
    ring = tile.stages * stage_bytes(tile, instance.planes)
    ring += tile.resident_steps * tile.block_n * STEP_BYTES
    parts = instance.group_columns // tile.consumer_n
    exchange = 2 * parts * 64 * 8 if parts > 1 else 0  # buffers, rows, bytes of a pair
    vector_bytes = vectors(instance) * tile.consumer_n * 4
    own = tile.consumers * (_STORE_BYTES + vector_bytes)
    return ring + own + exchange + _barrier_bytes(tile)


def product_shared_bytes(tile: Tile, planes: int) -> int:
    """Dynamic shared memory of a block of `hopper_product.cu`."""
    own = tile.consumers * _STORE_BYTES
    return tile.stages * stage_bytes(tile, planes) + own + _barrier_bytes(tile)


def product_source(
    tile: Tile,
    planes: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    scaled: bool,
    major_k_a: bool,
    major_k_b: bool,
    split: bool = False,
) -> KernelSource:
    """The plain product's text: operands of dtype, contiguous along the summed index or not.

    split: blocks share a sum, and each writes its part.
    """
    prelude = product_prelude(tile, planes, dtype, major_k_a, major_k_b)
    prelude += _result_prelude(scaled, split, out_dtype)
    text = kernel_text("gemm/hopper/hopper_product.cu", prelude)
    return KernelSource("hopper_product", text, ARCH)


def product_into_source(tile: Tile, planes: int, major_k_a: bool) -> KernelSource:
    """The same of fp16 planes, b not along the sum, added to what the fp32 result holds already."""
    prelude = product_prelude(tile, planes, torch.float16, major_k_a, False)
    prelude += _result_prelude(True, False, torch.float32)
    text = kernel_text("gemm/hopper/hopper_product_into.cu", prelude)
    return KernelSource("hopper_product_into", text, ARCH)


def _result_prelude(scaled: bool, split: bool, out_dtype: torch.dtype) -> str:
    numbers = constants({"kScaled": scaled, "kSplit": split})
    return numbers + f"#define OutType {TYPES[out_dtype]}\n"


def largest_stages(instance: Instance[Tile]) -> int:
    """How many slots of the ring fit a block's shared memory."""
    empty = dataclasses.replace(instance, tile=dataclasses.replace(instance.tile, stages=0))
    free = SHARED_LIMIT - shared_bytes(empty)
    return free // (stage_bytes(instance.tile, instance.planes) + 2 * 8)


def linear_norm_source(instance: Instance[Tile]) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU."""
    prelude = product_prelude(instance.tile, instance.planes, instance.operand_dtype)
    prelude += epilogue_prelude(instance)
    text = kernel_text("gemm/hopper/hopper_linear_norm.cu", prelude)
    return KernelSource("linear_norm", text, ARCH)
