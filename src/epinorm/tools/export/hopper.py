"""The Hopper kernels of an exported file: the whole forward chain in one product's epilogue.

For each dtype and precision, with and without what backward needs, the library's own choice of tile
for the problem's sizes, and with it whether fp32 W becomes a plane or is converted on the way; the
kernels come once, what differs is a prelude for each.
"""

from __future__ import annotations

import torch

from epinorm.backends.cuda.fp32.planes import split_shape, split_source
from epinorm.backends.cuda.fp32.rescue import rescue_source, rescue_tile, splits_of
from epinorm.backends.cuda.gemm.hopper.fp32_weight import (
    fp32_weight_source,
    split_and_sample_source,
)
from epinorm.backends.cuda.gemm.hopper.text import ARCH, linear_norm_source
from epinorm.backends.cuda.plan.hopper import choose_tile, instance_for, planes_of, why_not
from epinorm.backends.cuda.plan.hopper_tile import Tile, fp32_shared_bytes, shared_bytes
from epinorm.problem import Problem
from epinorm.tools.export.backward import products_of
from epinorm.tools.export.core import Instance, Part, part_of, why_not_guarded
from epinorm.tools.export.recipe import Recipe
from epinorm.tools.export.text import ELEMENTS, SMS, Chains, entry, prelude_of

__all__ = ["hopper_part"]


def hopper_part(recipe: Recipe, chains: Chains) -> Part:
    """What compute capability 9.0 takes where its copy engine and its tiles serve."""

    def forward(mode: str, problem: Problem) -> Instance:
        tile = _tile(problem)
        text = _instance(mode, problem, tile, chains)
        return Instance(text, _limits(mode, problem, tile), tile.fp32_weight)

    return part_of("hopper", recipe, _why_not, forward, products_of)


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    if problem.k % 8:
        return f"rows of {problem.k} input features are not a multiple of 8"
    tile = choose_tile(problem, SMS)
    if tile is None:
        return "no tile of the kernel fits the shared memory"
    if problem.dtype == torch.float32 and not tile.tf32:
        return why_not_guarded(problem)
    return None


def _tile(problem: Problem) -> Tile:
    tile = choose_tile(problem, SMS)
    if tile is not None and tile.fp32_input:  # that kernel is not exported
        tile = choose_tile(problem, SMS, converts=False)
    assert tile is not None
    return tile


def _instance(mode: str, problem: Problem, tile: Tile, chains: Chains) -> str:
    split = problem.dtype == torch.float32 and not tile.tf32
    make = _converting if tile.fp32_weight else _multiplying
    more, preludes = make(problem, tile)
    numbers: dict[str, int | str] = {"SPLIT": int(split), **more}
    if split:
        guard = rescue_tile(problem.chain.channels_per_group(problem.n))
        numbers["RESCUE_BYTES"] = guard.shared_bytes
        splits = splits_of(guard, problem.m, problem.n, problem.k, SMS)
        source = rescue_source(problem, True, ARCH, flags_late=tile.fp32_weight, splits=splits)
        preludes["RESCUE"] = prelude_of(source, "fp32/rescue.cu")
    shortened = {name: chains.shortened(text) for name, text in preludes.items()}
    return entry(repr(("hopper", mode, problem.training)), numbers, shortened)


_Macros = tuple[dict[str, int | str], dict[str, str]]
"""Numbers and preludes of an instance, by name."""


def _multiplying(problem: Problem, tile: Tile) -> _Macros:
    """x and W as they are, or as planes that are made first."""
    instance = instance_for(problem, tile)
    numbers: dict[str, int | str] = {
        "PLANES": planes_of(problem),
        "ELEMENT_TYPE": ELEMENTS[instance.operand_dtype],
        "ELEMENT_BYTES": tile.element_bytes,
        "BOX_M": tile.load_m or tile.block_m,
        "BOX_N": tile.box_n,
        "CLUSTER": tile.cluster_blocks,
        "ROWS_PER_CLUSTER": tile.block_m * tile.cluster,
        "COLUMNS_PER_CLUSTER": tile.block_n * tile.group_blocks,
        "SHARED_BYTES": shared_bytes(instance),
        "MULTIPLY_THREADS": tile.threads,
    }
    source = linear_norm_source(instance)
    preludes = {"MULTIPLY": prelude_of(source, "gemm/hopper/hopper_linear_norm.cu")}
    if instance.scaled:
        rows = -(-problem.m // 16) * 16 + problem.n
        source = split_source(planes_of(problem), problem.k, True, ARCH, rows, SMS)
        preludes["SPLIT"] = prelude_of(source, "fp32/split.cu")
    return numbers, preludes


def _converting(problem: Problem, tile: Tile) -> _Macros:
    """W is converted on its way into the product. The backward pass makes its own planes."""
    numbers: dict[str, int | str] = {
        "FP32_WEIGHT": 1,
        "ELEMENT_TYPE": ELEMENTS[torch.float16],
        "ELEMENT_BYTES": 2,
        "SHARED_BYTES": fp32_shared_bytes(instance_for(problem, tile)),
        "MULTIPLY_THREADS": tile.threads,
    }
    multiply = fp32_weight_source(instance_for(problem, tile), writes_plane=False)
    shape = split_shape(problem.m, problem.k, SMS)
    prepare = split_and_sample_source(problem.k, True, shape, both=False)
    return numbers, {
        "PREPARE": prelude_of(prepare, "fp32/split_and_sample.cu"),
        "MULTIPLY": prelude_of(multiply, "gemm/hopper/hopper_fp32_weight.cu"),
    }


def _limits(mode: str, problem: Problem, tile: Tile) -> str:
    """A tile for few rows loads no more; one with W in shared memory has room for that W alone."""
    only = (problem.k, problem.n) if tile.resident_steps else None
    return f"    ({mode!r}, {problem.training}): ({tile.load_m}, {only}),\n"
