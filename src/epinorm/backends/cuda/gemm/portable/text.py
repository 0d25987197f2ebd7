"""The portable kernel's instances: a tile's constants → the kernel's text.

One instance is one chain, one tile and one set of dtypes, for any GPU since Ampere (sm_80).
`portable_pipeline.cuh` says how the kernel multiplies; `plan/portable.py` which tile a problem
takes.
"""

from __future__ import annotations

import torch

from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.instance import Instance, epilogue_prelude
from epinorm.backends.cuda.text.source import constants, kernel_text


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


def linear_norm_source(
    instance: Instance[PortableTile], arch: str, copy_bytes: int = 16, aligned_rows: bool = True
) -> KernelSource:
    """The kernel's text for one instance; compiles without a GPU.

    copy_bytes: 16, 4 or 2, of which all addresses and row strides of the operands are multiples.
    aligned_rows: rows of y and z are whole 16-byte units.
    """
    planes, dtype = instance.problem.planes, instance.operand_dtype
    prelude = _prelude(instance.tile, planes, dtype, copy_bytes, aligned_rows)
    prelude += epilogue_prelude(instance)
    text = kernel_text("gemm/portable/portable_linear_norm.cu", prelude)
    return KernelSource("portable_linear_norm", text, arch)


def product_source(
    tile: PortableTile, planes: int, major_k_a: bool, arch: str, aligned_rows: bool = True
) -> KernelSource:
    """The plain product's text; compiles without a GPU. aligned_rows: of c."""
    prelude = _prelude(tile, planes, torch.float16, 16, aligned_rows, major_k_a, False)
    text = kernel_text("gemm/portable/portable_product.cu", prelude)
    return KernelSource("portable_product", text, arch)
