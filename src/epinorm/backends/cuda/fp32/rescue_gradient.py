"""The range guard of fp32's backward products: what fp16 planes could not hold, in plain fp32.

As `rescue.py` does for the forward product: launched right after each product of planes, it looks
at the flags on the GPU and overwrites just what they spoilt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.rescue import VECTOR_BYTES, RescueTile, prepare_guard, splits_of
from epinorm.backends.cuda.runtime.device import arch_of, max_shared_bytes, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo

SIGNATURE = "plpl" + "pppp" + "p" + "iii"
"""a, b and their row strides; the flags of rows and of the sum's indices, the latter's columns, the
scales of rows; result; m, n, k."""

TILE = RescueTile(128, 128, 128)
FLAG_BYTES = 4
"""What the address of flags must be a multiple of."""
LIST_BYTES = 16
"""Of the columns of an index, and what their address must be a multiple of."""


def tile_of(limit: int) -> RescueTile:
    """The tile for a GPU whose blocks can have ``limit`` bytes of shared memory."""
    return dataclasses.replace(TILE, limit=limit)


def rescue_gradient_source(
    transposed_a: bool,
    aligned: bool,
    splits: int,
    arch: str,
    tile: RescueTile = TILE,
    adds: bool = False,
) -> KernelSource:
    """The kernel's text; compiles without a GPU.

    aligned: each row of an ``a`` that is not transposed begins at a multiple of 16 bytes. splits:
    blocks that share a sum, 1 before sm_90. tile: as ``tile_of`` gives it. adds: to what is there.
    """
    prelude = {
        "kRows": TILE.rows,
        "kColumns": TILE.columns,
        "kWidth": TILE.width,
        "kBlockK": TILE.block_k,
        "kStages": tile.stages,
        "kTransposedA": transposed_a,
        "kAligned": aligned,
        "kAdds": adds,
        "kSplitK": splits,
        "kGroupParts": 1,
    }
    text = constants({name: int(value) for name, value in prelude.items()})
    return KernelSource("rescue_gradient", kernel_text("fp32/rescue_gradient.cu", text), arch)


def prepare_rescue(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    transposed_a: bool,
    row_flags: int,
    summed_flags: int,
    summed_spoilt: int,
    row_scale: int,
    *,
    adds: bool = False,
) -> Callable[[], None]:
    """A function that overwrites what flags spoilt of result = a @ b, or aᵀ @ b.

    A flagged row spoils itself; an index of the sum, flagged by 1, the columns in its list, and by
    more, everything. adds: that adds there instead; the kernel before it has added the rest, and
    nothing where any index of the sum is flagged. result: (R, S) fp32 contiguous. a: (R, L), or
    (L, R) if ``transposed_a``; b: (L, S); both fp32 with contiguous rows, at any stride. row_flags
    and summed_flags: the addresses, multiples of 4, of (R,) and (L,) uint8; summed_spoilt: the
    address, a multiple of 16, of (L, 4) int32, columns or -1, as in `planes.Planes`, not read with
    ``adds``; all complete before the last kernel of the stream begins. row_scale: the address of
    (R,) fp32, of the planes that were multiplied: what listed columns hold that is far above it is
    right as it is. What is not spoilt keeps its bits, and every launch of the same values gives the
    same bits. What can fail fails here, before anything is written: raises `ValueError` for shapes
    or addresses that do not fit.
    """
    rows, columns = result.shape
    length = b.shape[0]
    if a.shape != ((length, rows) if transposed_a else (rows, length)) or b.shape[1] != columns:
        raise ValueError(
            f"a{'ᵀ' if transposed_a else ''} @ b must have the shape of result "
            f"{tuple(result.shape)}, but got a {tuple(a.shape)} and b {tuple(b.shape)}"
        )
    if rows == 0 or columns == 0:
        return lambda: None
    a_at, a_stride = a.data_ptr(), a.stride(0)
    if (row_flags | summed_flags) % FLAG_BYTES:
        raise ValueError(
            f"flags must begin at multiples of {FLAG_BYTES} bytes, but got addresses "
            f"{row_flags:#x} and {summed_flags:#x}"
        )
    if summed_spoilt % LIST_BYTES:
        raise ValueError(
            f"lists of columns must begin at a multiple of {LIST_BYTES} bytes, but got address "
            f"{summed_spoilt:#x}"
        )
    aligned = transposed_a or (a_at | a_stride * 4) % VECTOR_BYTES == 0
    launch = _launcher(rows, columns, length, transposed_a, aligned, adds, result.device)
    return partial(
        launch,
        *(a_at, a_stride, b.data_ptr(), b.stride(0)),
        *(row_flags, summed_flags, summed_spoilt, row_scale, result.data_ptr()),
        *(rows, columns, length),
    )


@memo()
def _launcher(
    rows: int,
    columns: int,
    length: int,
    transposed_a: bool,
    aligned: bool,
    adds: bool,
    device: torch.device,
) -> Callable[..., None]:
    clusters = starts_early(device)  # both came with sm_90
    tile = tile_of(max_shared_bytes(device))
    splits = splits_of(tile, rows, columns, length, sm_count(device)) if clusters else 1
    source = rescue_gradient_source(transposed_a, aligned, splits, arch_of(device), tile, adds)
    return prepare_guard(load(source, device), device, SIGNATURE, tile, splits, (rows, columns))
