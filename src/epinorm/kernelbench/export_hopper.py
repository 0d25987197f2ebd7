"""The Hopper kernels of an exported file: the whole forward chain in one product's epilogue.

For each dtype and precision, with and without what backward needs, the library's own choice of tile
for the problem's sizes; the kernels come once, what differs is a prelude for each.
"""

from __future__ import annotations

import torch

from epinorm.cuda.hopper import ARCH, linear_norm_source, shared_bytes
from epinorm.cuda.hopper_plan import choose_tile, instance_for, planes_of, why_not
from epinorm.cuda.planes import split_source
from epinorm.cuda.rescue import rescue_source, rescue_tile
from epinorm.kernelbench.export_backward import products_of
from epinorm.kernelbench.export_core import Part, part_of, why_not_guarded
from epinorm.kernelbench.export_recipe import Recipe
from epinorm.kernelbench.export_text import ELEMENTS, SMS, Chains, entry, prelude_of
from epinorm.plan import Problem

__all__ = ["hopper_part"]


def hopper_part(recipe: Recipe, chains: Chains) -> Part:
    """What compute capability 9.0 takes where its copy engine and its tiles serve."""

    def forward(mode: str, problem: Problem) -> tuple[str, str]:
        return _instance(mode, problem, chains), _limits(mode, problem)

    return part_of("hopper", recipe, _why_not, forward, products_of)


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    if problem.k % 8:
        return f"rows of {problem.k} input features are not a multiple of 8"
    tile = choose_tile(problem, SMS, fp32_weight=False)
    if tile is None:
        return "no tile of the kernel fits the shared memory"
    if problem.dtype == torch.float32 and not tile.tf32:
        return why_not_guarded(problem)
    return None


def _instance(mode: str, problem: Problem, chains: Chains) -> str:
    tile = choose_tile(problem, SMS, fp32_weight=False)
    assert tile is not None
    instance = instance_for(problem, tile)
    split = problem.dtype == torch.float32 and not tile.tf32
    numbers: dict[str, int | str] = {
        "SPLIT": int(split),
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
    prelude = prelude_of(linear_norm_source(instance), "hopper_linear_norm.cu")
    preludes = {"MULTIPLY": chains.shortened(prelude)}
    if split:
        rows = -(-problem.m // 16) * 16 + problem.n
        numbers["RESCUE_BYTES"] = rescue_tile(instance.group_columns).shared_bytes
        source = split_source(planes_of(problem), problem.k, True, ARCH, rows, SMS)
        preludes["SPLIT"] = prelude_of(source, "split.cu")
        text = prelude_of(rescue_source(problem, True, ARCH), "rescue.cu")
        preludes["RESCUE"] = chains.shortened(text)
    return entry(repr(("hopper", mode, problem.training)), numbers, preludes)


def _limits(mode: str, problem: Problem) -> str:
    """A tile for few rows loads no more; one with W in shared memory has room for that W alone."""
    tile = choose_tile(problem, SMS, fp32_weight=False)
    assert tile is not None
    only = (problem.k, problem.n) if tile.resident_steps else None
    return f"    ({mode!r}, {problem.training}): ({tile.load_m}, {only}),\n"
