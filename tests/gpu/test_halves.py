"""Tiles wider than one product, in which a warpgroup multiplies two halves of its columns in turn,
on a Hopper GPU.

``ProductCase.check`` (product_case.py) compares with float64, relative to eager's own error. The
range guard of fp32 is in all of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import HARD, fitted, forced_tile, make_product

import epinorm
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile, operand_slots
from epinorm.tools.accuracy import relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

ALONE = Tile(128, 384, 0, ping_pong=False)
PAIR = Tile(128, 384, 0, ping_pong=False, cluster_n=2)
TILES = [
    *(ALONE, PAIR),
    Tile(128, 320, 0, ping_pong=False, cluster_n=2),
    Tile(128, 272, 0, ping_pong=False),  # halves of 136 columns
    Tile(128, 384, 2, ping_pong=False, cluster_n=2),
]
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "float16", "high"])
BOTH = pytest.mark.parametrize("tile", [ALONE, PAIR], ids=str)


def channels_of(tile: Tile) -> int:
    return tile.block_n * tile.cluster_n


@KINDS
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, kind):
    """More tiles than blocks, forward and training; few rows; a mean far from zero."""
    channels = channels_of(tile)
    with forced_tile(tile):
        for training in (False, True):
            make_product(8451, 264, channels, 3, kind, training=training).check()
        make_product(70, 72, channels, 1, kind, "gelu|layer_norm|silu").check()
        chain = "silu|rms_norm|mul_channel"
        make_product(300, 1000, channels, 1, kind, chain, norm_bias=False).check()
        make_product(4097, 264, channels, 1, kind, training=True, offset=3.0).check()


@BOTH
@pytest.mark.parametrize("m", [0, 1, 15, 17, 63, 64, 65, 127, 128, 129, 1000, 8449])
def test_rows(m, tile):
    with forced_tile(tile):
        for groups in (1, 2):
            make_product(m, 200, channels_of(tile), groups, training=True, uniform=True).check()


@BOTH
@pytest.mark.parametrize("k", [8, 64, 72, 128, 136, 192, 200, 264, 1000, 4104])
def test_lengths(k, tile):
    """Less than a step, and more than the ring holds."""
    with forced_tile(tile):
        make_product(300, k, channels_of(tile), 2, uniform=True, bias=False).check()


@BOTH
@pytest.mark.parametrize("kind", ["bfloat16", "high", "autocast"])
@pytest.mark.parametrize("m, k, training", [(20003, 264, False), (70, 64, True), (8451, 72, True)])
def test_a_residual_through_the_ring(m, k, training, kind, tile):
    """In as many slots as the ring has, in fp32. Rows that begin on no 16 bytes come as a copy."""
    out = torch.float32 if kind == "autocast" else None
    kind = "bfloat16" if kind == "autocast" else kind
    channels = channels_of(tile)
    with forced_tile(tile):
        chain = "add_residual|layer_norm"
        case = make_product(m, k, channels, 1, kind, chain, training=training, out_dtype=out)
        slots = operand_slots(hopper_plan.instance_for(case.problem, fitted(case.problem, tile)))
        assert slots == (2 if case.problem.out_dtype == torch.bfloat16 else 3)
        case.check()
        (element,) = case.inputs.operands
        room = torch.empty(element.numel() + 1, dtype=element.dtype, device="cuda")[1:]
        case.inputs = case.inputs._replace(operands=(room.view_as(element).copy_(element),))
        case.check()


@BOTH
@pytest.mark.parametrize("kind", ["bfloat16", "high"])
def test_the_sum_too(kind, tile):
    channels = channels_of(tile)
    with forced_tile(tile):
        case = make_product(8451, 264, channels, 1, kind, "add_residual|layer_norm|returns(sum)")
        case.check_with_sum()


@BOTH
@pytest.mark.parametrize("kind", ["bfloat16", "high"])
@pytest.mark.parametrize("hard", HARD)
def test_a_hard_row_changes_no_other(hard, kind, tile):
    """Blocks exchange statistics that are not finite with ordinary ones in the same message."""
    rows = [0, 5, 64, 127, 4096]
    with forced_tile(tile):
        case = make_product(4097, 264, channels_of(tile), 3, kind, training=True)
        x = case.inputs.x.clone()
        x[rows, 7] = HARD[hard]
        after = case.check_others(rows, x)
    assert torch.equal(after.y[rows].isnan(), case.pytorch(None)["y"][rows].isnan())


@BOTH
@pytest.mark.parametrize("kind", ["bfloat16", "high"])
def test_a_thousand_runs_give_the_same_bits(kind, tile):
    with forced_tile(tile):
        chain = "add_residual|layer_norm"
        case = make_product(9000, 328, channels_of(tile), 1, kind, chain, training=True)
        case.check_repeats(1000)


def test_berts_blocks_take_them():
    """By one call, against PyTorch's own layers."""
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = torch.nn.Linear(3072, 768), torch.nn.LayerNorm(768)

        def forward(self, x, residual):
            return self.norm(self.dense(x) + residual)

    block = Block().to("cuda", torch.bfloat16).eval()
    x = torch.randn(16384, 3072, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(16384, 768, device="cuda", dtype=torch.bfloat16)
    fused = epinorm.fuse(block)
    with torch.no_grad():
        ours, eager = fused(x, residual), block(x, residual)
        assert "128 x 384" in epinorm.explain(fused).rows[0].reason
        exact = block.double()(x.double(), residual.double())
    assert relative_error(ours, exact) <= relative_error(eager, exact)


# ---- fp32 x converted on the way ----

INPUT_ALONE = Tile(128, 384, 4, ping_pong=False, group=8, fp32_input=True)
INPUT_PAIR = Tile(128, 384, 4, ping_pong=False, group=8, fp32_input=True, cluster_n=2)
INPUT_TILES = [
    *(INPUT_ALONE, INPUT_PAIR),
    Tile(128, 320, 4, ping_pong=False, group=8, fp32_input=True, cluster_n=2),
    Tile(128, 272, 4, ping_pong=False, group=8, fp32_input=True),
]
INPUTS = pytest.mark.parametrize("tile", [INPUT_ALONE, INPUT_PAIR], ids=["alone", "pair"])


@pytest.mark.parametrize("tile", INPUT_TILES, ids=["alone", "pair", "320", "272"])
def test_every_tile_that_converts(tile):
    channels = channels_of(tile)
    with forced_tile(tile):
        for training in (False, True):
            make_product(8451, 264, channels, 3, "high", training=training).check()
        make_product(70, 72, channels, 1, "high", "gelu|layer_norm|silu").check()
        chain = "silu|rms_norm"
        make_product(300, 1000, channels, 1, "high", chain, norm_bias=False).check()
        make_product(4097, 264, channels, 1, "high", training=True, offset=3.0).check()


@INPUTS
@pytest.mark.parametrize("m", [0, 1, 15, 64, 65, 127, 128, 129, 1000, 8449])
def test_rows_that_are_converted(m, tile):
    with forced_tile(tile):
        for groups in (1, 2):
            make_product(m, 200, channels_of(tile), groups, "high", training=True).check()


@INPUTS
@pytest.mark.parametrize("k", [4, 28, 32, 36, 60, 64, 68, 132, 192, 260, 1000, 4100])
def test_lengths_that_are_converted(k, tile):
    """Sums of an even number of steps, a part of the last or of the last two; longer than rings."""
    with forced_tile(tile):
        make_product(300, k, channels_of(tile), 2, "high", uniform=True, bias=False).check()


@INPUTS
@pytest.mark.parametrize("ending", ["", "|returns(sum)"])
@pytest.mark.parametrize("m, k, training", [(20003, 264, False), (70, 64, True), (8451, 72, True)])
def test_a_residual_beside_conversion(m, k, training, ending, tile):
    """More fills of the ring than it has slots."""
    channels = channels_of(tile)
    with forced_tile(tile):
        chain = "add_residual|layer_norm" + ending
        case = make_product(m, k, channels, 1, "high", chain, training=training)
        if not ending:
            case.check()
            (element,) = case.inputs.operands
            room = torch.empty(element.numel() + 1, device="cuda")[1:]
            case.inputs = case.inputs._replace(operands=(room.view_as(element).copy_(element),))
            case.check()
            return
        case.check_with_sum()


@INPUTS
@pytest.mark.parametrize("training", [False, True])
def test_scales_that_are_corrected(training, tile):
    """Rows beyond what their first columns foretell, in the first tile and in a later one: sums
    so far are scaled down, and a row without an outlier keeps its bits beside one that has."""
    with forced_tile(tile):
        chain = "add_residual|layer_norm"
        case = make_product(20003, 520, channels_of(tile), 1, "high", chain, training=training)
        x = case.inputs.x.clone()
        outliers = [0, 5, 127, 128, 9000, 20002]
        for row in outliers:
            x[row, (row * 37 + 40) % 520] = 10.0 ** (2 + row % 4)
        x[300] *= 4.0 ** (torch.arange(520, device="cuda") // 32)  # at nearly every step
        x[301, :200], x[302, :500], x[8500] = 0.0, 0.0, 0.0
        x[303], x[304] = x[303] * 1e-15, x[304] * 1e-19
        x[40, 7], x[41, 8] = 1e-30, 1e-14
        case.check_others([*outliers, *range(300, 305), 40, 41, 8500], x)
        del case.truth, case.yardsticks  # of the former x
        case.check()


@INPUTS
@pytest.mark.parametrize("hard", HARD)
def test_a_hard_row_beside_conversion_changes_no_other(hard, tile):
    rows = [0, 5, 64, 127, 4096]
    with forced_tile(tile):
        case = make_product(4097, 264, channels_of(tile), 3, "high", training=True)
        x = case.inputs.x.clone()
        x[rows, 7] = HARD[hard]
        after = case.check_others(rows, x)
    assert torch.equal(after.y[rows].isnan(), case.pytorch(None)["y"][rows].isnan())


@INPUTS
def test_a_thousand_conversions_give_the_same_bits(tile):
    with forced_tile(tile):
        chain = "add_residual|layer_norm"
        case = make_product(9000, 328, channels_of(tile), 1, "high", chain)
        first = case.check()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            found = case.run().y
            wrong += (found != first.y).sum()
            found.fill_(float("nan"))  # the next run gets this memory
        assert wrong.item() == 0
