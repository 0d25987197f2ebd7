"""Which tile the portable core multiplies a plain product with."""

from __future__ import annotations

import dataclasses

from epinorm.backends.cuda.plan.hopper_product import ProductShape
from epinorm.backends.cuda.plan.portable import product_microseconds
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.device import Gpu

TILES = {
    1: (PortableTile(64, 64, 2, 4, 64), PortableTile(64, 64, 2, 4, 32)),
    2: (PortableTile(64, 32, 2, 4, 32),),
}
"""By planes: the first of which three slots fit."""
FEWEST_STAGES = 3
MOST_STAGES = 6


def choose_tile(planes: int, gpu: Gpu) -> PortableTile:
    """The tile for operands of so many planes, with the slots that fit this GPU."""
    for tile in TILES[planes]:
        stages = min(gpu.shared_of_block // tile.stage_bytes(planes), MOST_STAGES)
        if stages >= FEWEST_STAGES:
            return dataclasses.replace(tile, stages=stages)
    raise RuntimeError(f"{gpu.shared_of_block} bytes of shared memory are too few for any tile")


def microseconds(shape: ProductShape, gpu: Gpu) -> float:
    """Estimated time of a product."""
    tile = choose_tile(shape.planes, gpu)
    return product_microseconds(shape.rows, shape.columns, shape.length, shape.planes, tile, gpu)
