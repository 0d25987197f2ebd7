"""The shape of the work of a norm kernel: which threads hold a group, and how many rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

WARP = 32
SECTOR_BYTES = 32
"""The unit of DRAM and L2 traffic: what neighbouring lanes read together should fill one."""
LARGEST_ACCESS_BYTES = 16
NARROW = "narrower vectors, where a tensor is not aligned to 16 bytes"
"""What else a plan says of a norm kernel."""


@dataclass(frozen=True)
class NormTile:
    """A team of ``lanes`` lanes holds one (row, group), ``vectors`` × ``vector`` channels a lane.

    Teams of up to 32 lanes lie side by side in a warp, and ``warps_x`` × ``warps_y`` warps of a
    block side by side on columns and below each other on rows; a larger team is a whole block.
    ``rows``: rows that a thread has in flight. ``keep``: the channels' parameters stay in
    registers. ``resident``: blocks that a multiprocessor must hold, which bounds the registers;
    left to itself ptxas may spill for more of them. ``prefetch``: a thread loads its next rows
    before it works on these.
    """

    vector: int
    lanes: int
    vectors: int
    rows: int
    warps_x: int = 1
    warps_y: int = 1
    keep: bool = False
    resident: int = 1
    prefetch: bool = False

    def __str__(self) -> str:
        return (
            f"{self.lanes} lanes a group, {self.vectors} x {self.vector} values a lane, "
            f"{self.threads} threads"
        )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.lanes if self.lanes > WARP else WARP * self.warps_x * self.warps_y

    @property
    def values(self) -> int:
        """Values of one row that a thread holds."""
        return self.vectors * self.vector

    @property
    def groups_per_block(self) -> int:
        """Groups side by side in a block."""
        return 1 if self.lanes > WARP else self.warps_x * (WARP // self.lanes)

    @property
    def row_warps(self) -> int:
        """Warps of a block side by side in a row."""
        return self.lanes // WARP if self.lanes > WARP else self.warps_x

    @property
    def rows_per_pass(self) -> int:
        """Rows that a block has in flight."""
        return self.rows * self.warps_y


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is not below value."""
    return 1 << max(value - 1, 0).bit_length()


def vector_width(channels: int, itemsize: int, tensors: Iterable[Tensor | None]) -> int:
    """The widest vector, in values, of up to 16 bytes of z that all accesses are aligned for.

    A vector lies in one group, so the width divides ``channels``; each tensor's address and, of
    matrices, row stride must be a multiple of its access, which is the vector or 16 bytes of it.
    """
    width = LARGEST_ACCESS_BYTES // itemsize
    while channels % width:
        width //= 2
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0 or tensor.dtype == torch.int64:  # a seed
            continue
        size = tensor.element_size()
        address = tensor.data_ptr()
        if tensor.dim() == 2 and tensor.shape[0] > 1:
            address |= tensor.stride(0) * size
        while address % min(width * size, LARGEST_ACCESS_BYTES):
            width //= 2
    return width


def lanes_for(
    channels: int, vector: int, itemsize: int, most_values: int
) -> tuple[int, int] | None:
    """(lanes, vectors a lane) of a team inside a warp, or None where it cannot hold the group.

    The choice wastes the fewest lanes on a group that is no power of two, as long as the team's
    lanes together fill a sector; ties go to more lanes, which hold less each.
    """
    needed = ceil_div(channels, vector)
    widest = min(power_of_two_from(needed), WARP)
    best: tuple[float, int, int] | None = None
    lanes = 1
    while lanes <= widest:
        vectors = ceil_div(needed, lanes)
        fills_sector = lanes == widest or lanes * vector * itemsize >= SECTOR_BYTES
        if vectors * vector <= most_values and fills_sector:
            candidate = (needed / (lanes * vectors), lanes, vectors)
            best = max(best, candidate) if best else candidate
        lanes *= 2
    return None if best is None else best[1:]
