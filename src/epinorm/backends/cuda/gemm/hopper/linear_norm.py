"""The launch of `hopper_linear_norm.cu`, which reads its operands by tensor maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.gemm.launch import Operands, chain_signature
from epinorm.backends.cuda.plan.hopper import instance_for, persistent_blocks
from epinorm.backends.cuda.plan.hopper_tile import STEP_BYTES, Tile, operand_slots, shared_bytes
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.launch import Kernel
from epinorm.backends.cuda.runtime.tensor_map import tensor_map
from epinorm.backends.cuda.text.instance import Instance
from epinorm.problem import Problem

SIGNATURE = "mmmm" + "ppppppppp" + "iii"
"""x hi and lo, w hi and lo; y, z or the sum, bias, gamma, beta, row and column scale, mean, rstd;
m, n, k. In front of them a map of the element operand that the kernel holds, if it holds one."""


def prepare_persistent(
    kernel: Kernel, instance: Instance[Tile], signature: str, shared: int
) -> Callable[..., None]:
    """A launch of blocks, or clusters, that take the instance's tiles in turn; shared: bytes of
    dynamic shared memory."""
    problem, tile = instance.problem, instance.tile
    rows = -(-problem.m // (tile.block_m * tile.cluster))
    tiles = rows * -(-problem.n // (tile.block_n * tile.cluster_n))
    together = tile.cluster_blocks
    most = sm_count(problem.device) // together
    if tile.cluster_n > 1:  # a GPC's multiprocessors need not be a multiple of a cluster's
        most = kernel.clusters_at_once(together, tile.threads, shared)
    return kernel.prepare(
        signature,
        persistent_blocks(tiles, most) * together,
        tile.threads,
        shared_bytes=shared,
        cluster=together if together > 1 else None,
        dependent=True,
    )


class HopperLinearNorm:
    """The kernel of one problem with this tile; as ``LinearNorm`` says."""

    def __init__(self, problem: Problem, tile: Tile) -> None:
        self.problem, self.tile = problem, tile
        self.by_planes = problem.dtype == torch.float32 and not tile.tf32
        instance = instance_for(problem, tile)
        dynamic = shared_bytes(instance)
        self.slots = operand_slots(instance)
        self.held = problem.chain.operand_kinds.index("element") if self.slots else None
        kernel = load(linear_norm_source(instance), problem.device)
        signature = "m" * (self.slots > 0) + SIGNATURE + chain_signature(problem)
        self.launch = prepare_persistent(kernel, instance, signature, dynamic)

    def length(self, padded: int) -> int:
        return self.problem.k

    def readable(self, matrix: Tensor) -> Tensor:
        if matrix.data_ptr() % 16 or matrix.stride(0) * matrix.element_size() % 16:
            return matrix.clone(memory_format=torch.contiguous_format)
        return matrix

    def given(self, operands: Operands) -> tuple[Callable[..., None], tuple[Any, ...]]:
        tile = self.tile
        of_x, of_w = tile.load_m or tile.block_m, tile.box_n
        boxes = zip(operands[:4], (of_x, of_x, of_w, of_w), strict=True)
        maps = tuple(tensor_map(plane, rows, tile.block_k) for plane, rows in boxes)
        for element in operands[4:]:
            columns = STEP_BYTES // element.element_size()
            maps = (tensor_map(element, tile.block_m, columns), *maps)
        return self.launch, maps
