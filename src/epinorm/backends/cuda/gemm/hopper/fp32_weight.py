"""The Hopper kernels that read W or x as fp32 and convert it on the way: their instances.

One plane alone (`high`). `hopper_fp32_weight.cu` and `hopper_fp32_input.cu` say how they work,
`plan/hopper.py` when they are taken: where the other matrix has so few rows that a pass which makes
a plane of this one costs more.
"""

from __future__ import annotations

from epinorm.backends.cuda.fp32.planes import TOLERANCE, SplitShape, split_prelude
from epinorm.backends.cuda.gemm.hopper.text import ARCH
from epinorm.backends.cuda.plan.hopper_tile import (
    BLOCK_N,
    Tile,
    stages_of_fp32,
)
from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.instance import Instance, epilogue_prelude
from epinorm.backends.cuda.text.source import constants, kernel_text


def fp32_weight_source(instance: Instance[Tile], writes_plane: bool) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU.

    writes_plane: W's plane is kept for the backward pass.
    """
    prelude = _prelude(instance, instance.tile.block_m, writes_plane)
    prelude += constants({"kLendsRing": True})
    text = kernel_text("gemm/hopper/hopper_fp32_weight.cu", prelude)
    return KernelSource("linear_norm_fp32_weight", text, ARCH)


def fp32_input_source(instance: Instance[Tile], writes_plane: bool) -> KernelSource:
    """The same of the kernel that converts x on the way; writes_plane: x's plane is kept."""
    prelude = _prelude(instance, instance.tile.block_n, writes_plane)
    prelude += constants({"kLendsRing": False, "kAlignedRows": instance.aligned_rows})
    text = kernel_text("gemm/hopper/hopper_fp32_input.cu", prelude)
    return KernelSource("linear_norm_fp32_input", text, ARCH)


def _prelude(instance: Instance[Tile], plane_rows: int, writes_plane: bool) -> str:
    """plane_rows: of a tile, of the matrix that is a plane."""
    tile = instance.tile
    numbers = constants(
        {
            "kBlockN": BLOCK_N,
            "kBlockM": plane_rows,
            "kStagesW": stages_of_fp32(instance),
            "kStagesX": tile.stages,
            "kTileGroup": tile.group,
            "kWritesPlane": writes_plane,
            "kPlanes": 1,
            "kTolerance": TOLERANCE[1],
        }
    )
    return numbers + _wgmma_text(plane_rows) + epilogue_prelude(instance)


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
    return KernelSource("split_and_sample", kernel_text("fp32/split_and_sample.cu", prelude), ARCH)
