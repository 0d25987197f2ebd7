"""The portable kernels of an exported file, for every GPU since Ampere that Hopper's do not serve.

The same text whatever the GPU: how a block cuts the product is decided when the file builds, from a
table of the library's own choices, and so is how wide memory is accessed. Shared memory of a block
differs: 163 KB (8.0), 227 KB (9.0 and 10.0), and 99 KB, which fit every other GPU too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from epinorm.backends.cuda.fp32.gradient_planes import gradient_source
from epinorm.backends.cuda.fp32.planes import split_source
from epinorm.backends.cuda.fp32.rescue import rescue_source, rescue_tile
from epinorm.backends.cuda.fp32.rescue_gradient import rescue_gradient_source, tile_of
from epinorm.backends.cuda.gemm.portable.text import linear_norm_source, product_source
from epinorm.backends.cuda.plan.portable import choose_tile, instance_for, planes_of, why_not
from epinorm.backends.cuda.plan.portable_product import choose_tile as choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.device import Gpu, arch_of_capability
from epinorm.problem import Problem
from epinorm.tools.export.core import (
    ROWS_MULTIPLE,
    Instance,
    Part,
    Products,
    part_of,
    why_not_guarded,
)
from epinorm.tools.export.recipe import Recipe
from epinorm.tools.export.text import SMS, Chains, entry, prelude_of

__all__ = ["GPUS", "TILE_FIELDS", "portable_part"]

GPUS: Mapping[tuple[int, int] | None, Gpu] = {
    (8, 0): Gpu((8, 0), 108, 166912, 167936),
    (9, 0): Gpu((9, 0), SMS, 232448, 233472),
    (10, 0): Gpu((10, 0), 148, 232448, 233472),
    None: Gpu((12, 0), 170, 101376, 102400),
}
"""The GPU that a capability's tiles are chosen for: A100, H200, B200; None: any other capability,
for which the tiles of an RTX 5090 serve. Shared memory: CUDA programming guide."""

SMALLEST = GPUS[None].shared_of_block
"""The range guard's tile is sized for this on every GPU: it rarely has work."""

TILE_FIELDS = {
    "WARP_M": ("kWarpM", lambda tile: tile.warp_m),
    "WARP_N": ("kWarpN", lambda tile: tile.warp_n),
    "WARPS_M": ("kWarpsM", lambda tile: tile.warps_m),
    "WARPS_N": ("kWarpsN", lambda tile: tile.warps_n),
    "STEP_K": ("kBlockK", lambda tile: tile.block_k),
    "RING_STAGES": ("kStages", lambda tile: tile.stages),
    "GROUP_PARTS": ("kParts", lambda tile: tile.parts),
    "TILE_GROUP": ("kTileGroup", lambda tile: tile.group),
    "RESIDENT_BLOCKS": ("kBlocksPerMultiprocessor", lambda tile: tile.blocks),
}
"""Macro of an exported file → the kernel's constant, and what of a ``PortableTile`` it is."""

_WIDTHS = {"COPY_BYTES": "kCopyBytes", "ALIGNED_ROWS": "kAlignedRows"}
_ARCH = arch_of_capability(8, 0)  # preludes are the same for all


def portable_part(recipe: Recipe, chains: Chains) -> Part:
    """What every GPU since Ampere takes where it has no other core."""

    def forward(mode: str, problem: Problem) -> Instance:
        tiles = _tiles((mode, problem.training), _forward_tiles(problem))
        return Instance(_instance(mode, problem, chains), tiles)

    return part_of("portable", recipe, _why_not, forward, _products)


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    if not problem.m:
        return "there are no rows to choose a tile for"
    if any(choose_tile(problem, gpu) is None for gpu in GPUS.values()):
        return "no tile of the kernel fits the shared memory"
    if problem.dtype == torch.float32:
        return why_not_guarded(problem)
    return None


def _forward_tiles(problem: Problem) -> dict[tuple[int, int] | None, PortableTile]:
    found = {}
    for capability, gpu in GPUS.items():
        tile = choose_tile(problem, gpu)
        assert tile is not None
        found[capability] = tile
    return found


def _product_tiles(planes: int) -> dict[tuple[int, int] | None, PortableTile]:
    return {of: choose_product_tile(planes, gpu) for of, gpu in GPUS.items()}


def _tiles(key: object, tiles: Mapping[tuple[int, int] | None, PortableTile]) -> str:
    lines = "".join(
        f"        {capability}: {tuple(value(tile) for _, value in TILE_FIELDS.values())},\n"
        for capability, tile in tiles.items()
    )
    return f"    {key!r}: {{\n{lines}    }},\n"


def _left_open(prelude: str, *constants: tuple[str, str]) -> str:
    """The prelude with a macro, (macro, constant), for what is decided when the file builds."""
    for macro, constant in constants:
        prelude, count = re.subn(rf"(constexpr \w+ {constant} =) \w+;", rf"\1 {macro};", prelude)
        assert count == 1, f"no constant {constant} in the prelude"
    return prelude


_TILE = [*((macro, constant) for macro, (constant, _) in TILE_FIELDS.items()), *_WIDTHS.items()]
_ALIGNED = ("K_ALIGNED", "kAligned")


def _instance(mode: str, problem: Problem, chains: Chains) -> str:
    tile = _forward_tiles(problem)[None]
    split, planes = problem.dtype == torch.float32, planes_of(problem)
    numbers: dict[str, int | str] = {"SPLIT": int(split), "PLANES": planes}
    source = linear_norm_source(instance_for(problem, tile), _ARCH)
    prelude = prelude_of(source, "gemm/portable/portable_linear_norm.cu")
    preludes = {"MULTIPLY": chains.shortened(_left_open(prelude, *_TILE))}
    if split:
        group = problem.chain.channels_per_group(problem.n)
        numbers["RESCUE_BYTES"] = rescue_tile(group, SMALLEST).shared_bytes
        preludes["SPLIT"] = _split_prelude(problem)
        rescue = prelude_of(rescue_source(problem, True, _ARCH, SMALLEST), "fp32/rescue.cu")
        preludes["RESCUE"] = chains.shortened(_left_open(rescue, _ALIGNED))
    return entry(repr(("portable", mode, problem.training)), numbers, preludes)


def _split_prelude(problem: Problem) -> str:
    rows = -(-problem.m // 16) * 16 + problem.n
    source = split_source(planes_of(problem), problem.k, True, _ARCH, rows, SMS)
    return _left_open(prelude_of(source, "fp32/split.cu"), _ALIGNED)


def _products(mode: str, problem: Problem) -> Products:
    split, planes = problem.dtype == torch.float32, planes_of(problem)
    # A sum is never split over blocks.
    numbers: dict[str, int | str] = {
        "SPLIT": int(split), "PLANES": planes, "DX_PARTS": 1, "DW_PARTS": 1
    }  # fmt: skip
    preludes: dict[str, str] = {}
    tile, guard = _product_tiles(planes)[None], tile_of(SMALLEST)
    if split:
        numbers["RESCUE_BYTES"] = guard.shared_bytes
        preludes["SPLIT"] = _split_prelude(problem)
        gradient = gradient_source(planes, True, True, _ARCH)
        preludes["GRADIENT"] = prelude_of(gradient, "fp32/split_gradient.cu")
    dtype = torch.float16 if split else problem.dtype
    for name, major_k_a in (("DX", True), ("DW", False)):
        source = product_source(
            *(tile, planes, dtype, problem.dtype, split, major_k_a, False, _ARCH)
        )
        preludes[name] = _left_open(prelude_of(source, "gemm/portable/portable_product.cu"), *_TILE)
        if split:
            rescue = rescue_gradient_source(not major_k_a, True, 1, _ARCH, guard)
            preludes[f"RESCUE_{name}"] = prelude_of(rescue, "fp32/rescue_gradient.cu")
    left_out = None
    if split and problem.n % ROWS_MULTIPLE:
        left_out = f"{problem.n} output features are not a multiple of {ROWS_MULTIPLE}"
    text = entry(repr(("portable", mode)), numbers, preludes)
    return Products(text, _tiles(mode, _product_tiles(planes)), left_out)
