"""The launch of attention's kernel, and the tiles that it takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from epinorm.backends.cuda.attention import kernels

_LOG2_E = 1 / math.log(2)


class _Tile(NamedTuple):
    """Queries and keys of a block, warps, and stages of the loop's loads."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# By the width of a head: measured on an H200 (docs/decisions/0028-attention_in_tf32.md).
_TILES = {64: _Tile(128, 32, 4, 3), 128: _Tile(128, 64, 8, 2)}


def run_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``epinorm::attention`` on a GPU: a program for each block of queries of each head."""
    strided = (*map(_in_rows, (query, key, value)), rows_first(query))
    lse = query.new_empty(query.shape[:3])
    (batch, heads, queries, width), keys = query.shape, key.shape[2]
    tile = _TILES[width]
    with torch.cuda.device(query.device):
        kernels.attention_forward[(-(-queries // tile.block_m) * batch * heads,)](
            *(*strided, lse),
            *(stride for tensor in strided for stride in tensor.stride()[:3]),
            *(heads, queries, keys, scale * _LOG2_E),
            *(width, tile.block_m, tile.block_n),
            *(queries % tile.block_m == 0, keys % tile.block_n == 0),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return strided[-1], lse


def rows_first(like: Tensor) -> Tensor:
    """An empty tensor of the shape (B, H, S, D) in the order (B, S, H, D), as PyTorch lays
    attention's result out."""
    batch, heads, rows, width = like.shape
    return like.new_empty((batch, rows, heads, width)).transpose(1, 2)


def _in_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
