"""The Hopper kernel's instances: a tile's constants → the kernel's text → its launch.

One instance is one chain, one tile and one set of dtypes. `hopper_linear_norm.cu` says how the
kernel works; `plan/hopper.py` which tile a problem takes.
"""

from __future__ import annotations

import torch

from epinorm.backends.cuda.plan.hopper_tile import STEP_BYTES, Tile, operand_slots
from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.instance import (
    Instance,
    epilogue_prelude,
    rows_aligned,
)
from epinorm.backends.cuda.text.source import constants, kernel_text

ARCH = "sm_90a"

_PTX_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "tf32"}


def wgmma_text(columns: int, dtype: torch.dtype, major_k_a: bool, major_k_b: bool) -> str:
    """The instruction wgmma.mma_async.m64n<columns> with fp32 accumulators as a function."""
    count = columns // 2
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        f"  {_wgmma_statement(columns, dtype, major_k_a, major_k_b)}\n}}\n"
    )


def wgmma_in_halves_text(columns: int, dtype: torch.dtype) -> str:
    """The same for more columns than one instruction has, as `product_in_halves.cuh` wants it: of
    rows along k, each half by itself. Both in one are for functions that are not used then."""
    half, rows = columns // 2, columns // 2 * STEP_BYTES // 16  # as a descriptor counts them
    first = f"kHalf * {half // 2} + "
    return (
        "#define IN_HALVES\ntemplate <int kHalf>\n"
        f"__device__ __forceinline__ void wgmma_half(float (&d)[{half}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        f"  b += kHalf * {rows};\n"
        f"  {_wgmma_statement(half, dtype, True, True, first)}\n}}\n"
        f"__device__ __forceinline__ void wgmma(float (&d)[{half}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        "  wgmma_half<0>(d, a, b, accumulate);\n  wgmma_half<1>(d, a, b, accumulate);\n}\n"
    )


def _wgmma_statement(
    columns: int, dtype: torch.dtype, major_k_a: bool, major_k_b: bool, first: str = ""
) -> str:
    """first: of the accumulators, as text in front of a number."""
    count = columns // 2
    kind = _PTX_TYPES[dtype]
    flags = "1, 1" if kind == "tf32" else f"1, 1, {int(not major_k_a)}, {int(not major_k_b)}"
    return (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{32 // dtype.itemsize}.f32.{kind}.{kind} "
        f'{{{_registers(count)}}}, %{count}, %{count + 1}, p, {flags}; }}"\n'
        f'    : {_accumulators(count, first)} : "l"(a), "l"(b), "r"(accumulate));'
    )


def wgmma_a_text(columns: int, adds: bool = True) -> str:
    """wgmma.mma_async.m64n<columns>k16 of fp16 with A from registers, as a function; adds: to what
    the accumulators hold."""
    return (
        f"__device__ __forceinline__ void wgmma_a{'' if adds else '_alone'}"
        f"(float (&d)[{columns // 2}], const unsigned (&a)[4], "
        f"unsigned long long b) {{\n{_wgmma_a_statement(columns, adds)}}}\n"
    )


def wgmma_a_in_halves_text(columns: int, row_bytes: int) -> str:
    """The same for more columns than one instruction has, as two, B's rows ``row_bytes`` apart."""
    half, rows = columns // 2, columns // 2 * row_bytes // 16
    statement = _wgmma_a_statement(half, first=f"kHalf * {half // 2} + ")
    return (
        "template <int kHalf>\n"
        f"__device__ __forceinline__ void wgmma_half(float (&d)[{half}], const unsigned (&a)[4], "
        "unsigned long long b) {\n"
        f"  b = (b >> 32 << 32) | (static_cast<unsigned>(b) + kHalf * {rows}u);\n{statement}}}\n"
        f"__device__ __forceinline__ void wgmma_a(float (&d)[{half}], const unsigned (&a)[4], "
        "unsigned long long b) {\n  wgmma_half<0>(d, a, b);\n  wgmma_half<1>(d, a, b);\n}\n"
    )


def _wgmma_a_statement(columns: int, adds: bool = True, first: str = "") -> str:
    """first: as in ``_wgmma_statement``."""
    count, flags = columns // 2, f"{int(adds)}, 1, 1, 0"
    a = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 '
        f'{{{_registers(count)}}}, {{{_registers(4, count)}}}, %{count + 4}, {flags};"\n'
        f'    : {_accumulators(count, first)} : {a}, "l"(b));\n'
    )


def wgmma_tf32_text(columns: int) -> str:
    """wgmma.mma_async.m64n<columns>k8 of TF32 with A from registers, as a function."""
    count = columns // 2
    a = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void wgmma_a(float (&d)[{count}], const unsigned (&a)[4], "
        "unsigned long long b, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k8.f32.tf32.tf32 "
        f'{{{_registers(count)}}}, {{{_registers(4, count)}}}, %{count + 4}, p, 1, 1; }}"\n'
        f'    : {_accumulators(count)} : {a}, "l"(b), "r"(accumulate));\n}}\n'
    )


def _registers(count: int, first: int = 0) -> str:
    return ", ".join(f"%{first + i}" for i in range(count))


def _accumulators(count: int, first: str = "") -> str:
    return ", ".join(f'"+f"(d[{first}{i}])' for i in range(count))


def product_prelude(
    tile: Tile,
    planes: int,
    dtype: torch.dtype,
    major_k_a: bool = True,
    major_k_b: bool = True,
    held_slots: int = 0,
) -> str:
    """The constants that `hopper_ring.cuh` needs, and the product instruction."""
    text = constants(
        {
            "kBlockM": tile.block_m,
            "kBlockN": tile.block_n,
            "kStages": tile.stages,
            "kPlanes": planes,
            "kFoldSteps": tile.fold_steps,
            "kMajorKA": major_k_a,
            "kMajorKB": major_k_b,
            "kCluster": tile.cluster,
            "kClusterN": tile.cluster_n,
            "kWeightSteps": tile.resident_steps,
            "kOperandSlots": held_slots,
            "kTileGroup": max(tile.group // tile.cluster, 1),
            "kPingPong": tile.ping_pong,
            "kSplitColumns": tile.split_columns,
            "kLoadM": tile.load_m or tile.block_m,
            "kElementBytes": tile.element_bytes,
            "kRegisterA": tile.register_a,
            "kConsumers": tile.consumers,
        }
    )
    if tile.in_halves:
        return text + wgmma_in_halves_text(tile.consumer_n, dtype)
    text += wgmma_text(tile.consumer_n, dtype, major_k_a, major_k_b)
    return text + wgmma_tf32_text(tile.consumer_n) * tile.register_a


def product_source(
    tile: Tile, planes: int, major_k_a: bool, split: bool = False, adds: bool = False
) -> KernelSource:
    """The plain product's text; compiles without a GPU.

    split: blocks share a sum, and each writes its part. adds: to what the result holds already.
    """
    prelude = product_prelude(tile, planes, torch.float16, major_k_a, False)
    prelude += constants({"kSplit": split})
    entry = "hopper_product_into" if adds else "hopper_product"
    return KernelSource(entry, kernel_text(f"gemm/hopper/{entry}.cu", prelude), ARCH)


def linear_norm_source(instance: Instance[Tile]) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU."""
    tile, planes, slots = instance.tile, instance.problem.planes, operand_slots(instance)
    prelude = product_prelude(tile, planes, instance.operand_dtype, held_slots=slots)
    held = "const __grid_constant__ TensorMap element," if slots else ""
    prelude += "#define HOLDS_OPERAND\n" * (slots > 0) + f"#define HELD_PARAMETER {held}\n"
    prelude += "#define LEAVES_MOMENTS\n" * instance.problem.column_moments
    prelude += constants({"kAlignedRows": rows_aligned(instance.problem)})
    prelude += epilogue_prelude(instance)
    text = kernel_text("gemm/hopper/hopper_linear_norm.cu", prelude)
    return KernelSource("linear_norm", text, ARCH)
