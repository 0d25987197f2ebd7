"""Two planes in groups that the blocks of a cluster share, on a Hopper GPU.

``ProductCase.check`` (product_case.py) compares with float64, relative to eager's own error. The
range guard is in all of it.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import HARD, bits, fitted, forced_tile, make_product

import epinorm
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile, operand_slots
from epinorm.backends.prepack import prepacked
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

TOGETHER = Tile(128, 128, 0, ping_pong=False, cluster_n=2, fold_steps=1)
IN_TURN = Tile(64, 128, 0, cluster_n=2, fold_steps=1)
TILES = [
    TOGETHER,
    IN_TURN,
    Tile(128, 128, 2, ping_pong=False, cluster_n=2),
    Tile(64, 128, 2, cluster_n=2),
    Tile(128, 72, 0, ping_pong=False, cluster_n=2, fold_steps=0),
    Tile(64, 72, 0, cluster_n=2, fold_steps=0),
    Tile(64, 80, 0, cluster_n=3, fold_steps=1),
    Tile(64, 128, 0, cluster_n=4, fold_steps=1),
    Tile(128, 128, 0, ping_pong=False, cluster_n=4, fold_steps=1),
]
OF_FOUR = Tile(128, 128, 0, ping_pong=False, cluster_n=4, fold_steps=1)
HARD_TILES = pytest.mark.parametrize("tile", [TOGETHER, IN_TURN, OF_FOUR], ids=str)
BOTH = pytest.mark.parametrize("tile", [TOGETHER, IN_TURN], ids=str)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile):
    """More tiles than clusters, forward and training; few rows; a mean far from zero."""
    channels = tile.block_n * tile.cluster_n
    with forced_tile(tile):
        for training in (False, True):
            make_product(8451, 264, channels, 3, "highest", training=training).check()
        make_product(70, 72, channels, 1, "highest", "add_residual|layer_norm|silu").check()
        chain = "silu|rms_norm|gelu"
        make_product(300, 1001, channels, 1, "highest", chain, norm_bias=False).check()
        make_product(4097, 264, channels, 1, "highest", training=True, offset=3.0).check()


@BOTH
@pytest.mark.parametrize("m", [0, 1, 15, 17, 63, 64, 65, 127, 128, 129, 1000, 8449])
def test_rows(m, tile):
    with forced_tile(tile):
        for groups in (1, 2):
            make_product(m, 200, 256, groups, "highest", training=True, uniform=True).check()


@BOTH
@pytest.mark.parametrize("k", [1, 2, 3, 5, 63, 65, 129, 200, 1001, 4099])
def test_lengths(k, tile):
    """Less than a step, and more than the ring holds."""
    with forced_tile(tile):
        make_product(300, k, 256, 2, "highest", uniform=True, bias=False).check()


@BOTH
@pytest.mark.parametrize("chain", ["add_residual|layer_norm", "layer_norm|relu|add_residual"])
@pytest.mark.parametrize("m, k, training", [(20003, 264, False), (70, 64, True), (8451, 72, True)])
def test_a_residual_through_the_ring(m, k, training, chain, tile):
    with forced_tile(tile):
        case = make_product(m, k, 256, 1, "highest", chain, training=training)
        instance = hopper_plan.instance_for(case.problem, fitted(case.problem, tile))
        assert operand_slots(instance) > 0
        case.check()


@HARD_TILES
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("training", [False, True])
def test_a_flagged_row_changes_no_other(hard, training, tile):
    """Blocks exchange statistics that are not finite with ordinary ones in the same message."""
    rows = [0, 5, 64, 127, 4096]
    with forced_tile(tile):
        channels = tile.block_n * tile.cluster_n
        case = make_product(4097, 264, channels, 3, "highest", training=training)
        x = case.inputs.x.clone()
        x[rows, 7] = HARD[hard]
        if hard == "tiny":
            x[rows] *= 1e-38
        after = case.check_others(rows, x)
    eager, truth = case.pytorch(None)["y"][rows], case.pytorch(torch.float64)["y"][rows]
    ours = after.y[rows]
    assert torch.equal(ours.isnan(), eager.isnan())
    if not eager.isnan().any():
        # Few rows, each a sum of its own in plain fp32 (test_precision.py allows as much).
        allowed = 2.0 * allowed_error(relative_error(eager, truth), torch.float32)
        assert relative_error(ours, truth) <= allowed


@HARD_TILES
@pytest.mark.parametrize("hard", HARD)
def test_a_flagged_column_changes_its_group_alone(hard, tile):
    """In either block's half of a group."""
    channels = tile.block_n * tile.cluster_n
    with forced_tile(tile):
        for column in (7, channels + 200):
            case = make_product(4097, 264, channels, 3, "highest", training=True)
            before = case.check()
            weight, group = case.inputs.weight.clone(), column // channels
            weight[column, 3] = HARD[hard]
            if hard == "tiny":
                weight[column] *= 1e-38
            case.inputs = case.inputs._replace(weight=weight)
            after = case.ours()
            kept = torch.arange(3 * channels, device="cuda") // channels != group
            assert torch.equal(bits(after.y[:, kept]), bits(before.y[:, kept]))
            eager, truth = case.pytorch(None)["y"], case.pytorch(torch.float64)["y"]
            assert torch.equal(after.y.isnan(), eager.isnan())
            if not eager.isnan().any():
                allowed = 2.0 * allowed_error(relative_error(eager, truth), torch.float32)
                assert relative_error(after.y, truth) <= allowed


def test_what_the_plan_takes_with_a_prepacked_weight():
    """As a user calls it; the same bits as with a weight that is converted in the call."""
    torch.manual_seed(0)
    x = torch.randn(8451, 256, device="cuda")
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).cuda().eval()
    with torch.no_grad():
        fused = epinorm.fuse(model)
        expected = fused(x)
        truth = copy.deepcopy(model).double()(x.double())
        allowed = allowed_error(relative_error(model(x), truth), torch.float32)
        assert relative_error(expected, truth) <= allowed
        with prepacked(fused):
            for _ in range(2):  # the first call makes the planes, the second reads them
                assert torch.equal(bits(fused(x)), bits(expected))


@BOTH
def test_hundreds_of_runs_give_the_same_bits(tile):
    with forced_tile(tile):
        case = make_product(8451, 264, 256, 1, "highest", training=True)
        case.check_repeats(300)
