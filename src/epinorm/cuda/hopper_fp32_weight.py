"""The Hopper kernel that reads W as fp32 and converts it on the way: its instances.

One plane alone (`high`). `kernels/hopper_fp32_weight.cu` says how it works, `hopper_plan.py` when
it is taken: where x has so few rows that a pass which makes a plane of W costs more.
"""

from __future__ import annotations

from dataclasses import dataclass

from epinorm.cuda.hopper import ARCH, STEP_BYTES
from epinorm.cuda.instance import Instance, constants, epilogue_prelude, instance_of
from epinorm.cuda.jit import KernelSource
from epinorm.cuda.planes import TOLERANCE, SplitShape, split_prelude
from epinorm.cuda.source import kernel_text
from epinorm.plan import Problem

__all__ = [
    "Fp32WeightTile",
    "fp32_weight_source",
    "instance_for",
    "shared_bytes",
    "split_and_sample_source",
]

BLOCK_N = 128
BLOCK_K = 64
THREADS = 384


@dataclass(frozen=True)
class Fp32WeightTile:
    """``block_m`` rows of x by 128 rows of W. writes_plane: W's plane is kept for the backward."""

    block_m: int = 256
    stages_w: int = 3
    stages_x: int = 4
    group: int = 16
    writes_plane: bool = False


def instance_for(problem: Problem, tile: Fp32WeightTile) -> Instance[Fp32WeightTile]:
    """The kernel of this problem; the scales are undone before the epilogue."""
    return instance_of(problem, tile, planes=1, scaled=False)


def shared_bytes(tile: Fp32WeightTile) -> int:
    """Dynamic shared memory of a block, as `hopper_fp32_weight.cu` lays it out."""
    rings = tile.stages_w * BLOCK_N * 2 * STEP_BYTES + tile.stages_x * tile.block_m * STEP_BYTES
    barriers = (tile.stages_w + tile.stages_x + 1) * 16
    return rings + 16 + barriers


def fp32_weight_source(instance: Instance[Fp32WeightTile]) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU."""
    tile = instance.tile
    prelude = constants(
        {
            "kBlockN": BLOCK_N,
            "kBlockM": tile.block_m,
            "kStagesW": tile.stages_w,
            "kStagesX": tile.stages_x,
            "kTileGroup": tile.group,
            "kWritesPlane": tile.writes_plane,
            "kPlanes": 1,
        }
    )
    prelude += f"constexpr float kTolerance = {TOLERANCE[1]};\n"
    prelude += _wgmma_text(tile.block_m) + epilogue_prelude(instance)
    text = kernel_text("hopper_fp32_weight.cu", prelude)
    return KernelSource("linear_norm_fp32_weight", text, ARCH)


def _wgmma_text(columns: int) -> str:
    """wgmma.mma_async.m64n<columns>k16 of fp16 with A from registers, as a function."""
    count = columns // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void wgmma_a(float (&d)[{count}], const unsigned (&a)[4], "
        "unsigned long long b) {\n"
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 '
        f'{{{d}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"\n'
        f'    : {outputs} : {inputs}, "l"(b));\n}}\n'
    )


def split_and_sample_source(
    columns: int, aligned: bool, shape: SplitShape, both: bool
) -> KernelSource:
    """The kernel that makes x's plane and estimates the scales of W's rows.

    aligned: each row of x starts on 16 bytes. both: x's plane is written as it is, too.
    """
    prelude = split_prelude(1, columns, aligned, shape, "both" if both else "ordered")
    return KernelSource("split_and_sample", kernel_text("split_and_sample.cu", prelude), ARCH)
