"""The backward products of an fp32 chain on the Hopper core: dX = dZ W and dW = dZᵀ x."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from epinorm.cuda.device import sm_count
from epinorm.cuda.gradient_planes import split_columns, split_rows
from epinorm.cuda.hopper import THREADS, Tile, product_shared_bytes, product_source
from epinorm.cuda.hopper_plan import fold_steps
from epinorm.cuda.jit import load
from epinorm.cuda.launch import TensorMap, tensor_map
from epinorm.cuda.planes import Planes, split
from epinorm.cuda.rescue_gradient import rescue_gradient

__all__ = ["TILES", "input_gradient", "serves", "weight_gradient"]

BOX = 64
"""Rows and columns of a box of an operand that does not run along the summed index."""
TILES = {
    1: Tile(128, 256, 4, ping_pong=False),
    2: Tile(128, 128, 3, ping_pong=False),
}
"""By planes; the plain epilogue is short, so the two warpgroups work together."""


def serves(m: int, k: int, n: int) -> bool:
    """Whether the products of these sizes can be computed here: rows of whole 16-byte units."""
    return m > 0 and n % 8 == 0 and k % 4 == 0


@lru_cache(maxsize=256)
def _launcher(
    planes: int, major_k_a: bool, rows: int, columns: int, k: int, device: torch.device
) -> Callable[..., None]:
    tile = dataclasses.replace(TILES[planes], fold_steps=fold_steps(k))
    source = product_source(tile, planes, torch.float16, torch.float32, True, major_k_a, False)
    dynamic = product_shared_bytes(tile, planes)
    tiles = -(-rows // tile.block_m) * -(-columns // tile.block_n)
    return load(source, device, dynamic).prepare(
        "mmmmppiii",
        min(sm_count(device), tiles),
        THREADS,
        shared_bytes=dynamic,
        dependent=True,
    )


def _maps(planes: Planes, box_rows: int) -> tuple[TensorMap, TensorMap]:
    return tensor_map(planes.hi, box_rows, BOX), tensor_map(planes.lo, box_rows, BOX)


def _product(a: Planes, b: Planes, major_k_a: bool, rows: int, columns: int, k: int) -> Tensor:
    planes = 2 if a.lo.data_ptr() != a.hi.data_ptr() else 1
    result = torch.empty((rows, columns), dtype=torch.float32, device=a.hi.device)
    box_rows = TILES[planes].block_m if major_k_a else BOX
    launch = _launcher(planes, major_k_a, rows, columns, k, result.device)
    maps = (*_maps(a, box_rows), *_maps(b, BOX))
    launch(*(m.data for m in maps), result.data_ptr(), a.scale.data_ptr(), rows, columns, k)
    return result


def input_gradient(dz: Tensor, weight: Tensor, planes: int) -> Tensor:
    """dX (m, k) = dz (m, n) · weight (n, k), all fp32, dz contiguous; by one or three products."""
    w = split(weight, planes)
    a = split_rows(dz, w.scale, planes)
    dx = _product(a, w, True, dz.shape[0], weight.shape[1], dz.shape[1])
    rescue_gradient(dx, dz, weight, False, a.flags, w.flags)
    return dx


def weight_gradient(dz: Tensor, x: Tensor, planes: int) -> Tensor:
    """dW (n, k) = dzᵀ · x (m, k), all fp32, dz (m, n) contiguous; by one or three products."""
    b = split(x, planes)
    a = split_columns(dz, b.scale, planes)
    dw = _product(a, b, False, dz.shape[1], x.shape[1], dz.shape[0])
    rescue_gradient(dw, dz, x, True, a.flags, b.flags)
    return dw
