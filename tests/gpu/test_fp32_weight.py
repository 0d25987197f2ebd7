"""The Hopper kernels that convert W or x on the way: values, planes left, flags, scales corrected.

Yardsticks as in test_hopper.py. What the range guard computes again has fp32's error, so results
with flags are compared as any other.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from product_case import ProductCase, bits, forced_tile, make_product, matmul_precision, split

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.fp32 import kept_planes
from epinorm.backends.cuda.fp32.planes import Planes
from epinorm.backends.cuda.gemm.hopper.fp32_weight import Converting
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile, fp32_input_tiles, fp32_weight_tiles
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

ONE_PLANE = [*fp32_weight_tiles(1), *fp32_input_tiles(128, 256)]
IN_HALVES = Tile(128, 384, 4, ping_pong=False, group=8, fp32_input=True)
"""Scales are found on the way; test_halves.py has what else is its own."""
TILES = [*ONE_PLANE, *fp32_weight_tiles(2)]
NAMES = [f"{t.block_m}x{t.block_n}" for t in TILES]
KINDS = {tile: "high" for tile in (*ONE_PLANE, IN_HALVES)} | {
    tile: "highest" for tile in fp32_weight_tiles(2)
}
LIMITS = {"high": 1e-3, "highest": 1e-6}
BOUNDS = {"high": 1e-3, "highest": 2.0**-19}
"""What a line's error stays below here, and what it may be in any case (internals/precision.md)."""
HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"


@pytest.fixture(params=TILES, ids=NAMES)
def tile(request):
    with forced_tile(request.param):
        yield request.param


@pytest.fixture(params=[*TILES, IN_HALVES], ids=[*NAMES, "halves"])
def any_tile(request):
    with forced_tile(request.param):
        yield request.param


@pytest.fixture(params=[*ONE_PLANE, IN_HALVES], ids=[*NAMES[: len(ONE_PLANE)], "halves"])
def leaving_tile(request):
    """What training takes: planes are left for the backward pass."""
    with forced_tile(request.param):
        yield request.param


def make(
    tile: Tile, m: int = 300, k: int = 520, channels: int = 16, groups: int = 24, **more
) -> ProductCase:
    """Training, which the plan excludes for two planes: the kernel writes z."""
    return make_product(m, k, channels, groups, KINDS[tile], training=True, **more)


def converted(case: ProductCase, tile: Tile) -> Tensor:
    """The matrix that the kernel reads as fp32; the other is a plane."""
    return case.inputs.weight if tile.fp32_weight else case.inputs.x


def plain(case: ProductCase, tile: Tile) -> Tensor:
    return case.inputs.x if tile.fp32_weight else case.inputs.weight


# ---- values ----


@pytest.mark.parametrize("channels", [2, 4, 8, 16, 32, 64, 128])
def test_group_sizes(tile, channels):
    """In groups of 2 or 4 a large eps, or the few that are nearly constant outweigh all others."""
    eps = "0.1" if channels < 8 else "1e-5"
    chain = f"group_norm({{groups}},{eps})|leaky_relu(0.01)|scale(2)"
    make(tile, channels=channels, groups=max(5, 520 // channels), chain=chain).check()


@pytest.mark.parametrize("m", [0, 1, 7, 127, 128, 129, 255, 256, 257, 1025])
def test_rows(tile, m):
    make(tile, m).check()


@pytest.mark.parametrize("k", [4, 8, 12, 28, 32, 36, 60, 64, 68, 124, 128, 132, 260, 1000, 4100])
def test_sums(tile, k):
    two_planes = KINDS[tile] == "highest"
    make(tile, k=k + hopper_plan.SHORT_SUM if two_planes else k).check()


@pytest.mark.parametrize("groups", [1, 2, 7, 8, 9, 15, 16, 17])
def test_columns(tile, groups):
    make(tile, groups=groups).check()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", ["gelu|group_norm({groups})|sigmoid", HEAVY])
def test_chains(tile, chain, training):
    make_product(300, 264, 16, 24, KINDS[tile], chain, training=training).check()


def test_rms_norm(tile):
    make_product(300, 264, 128, 1, KINDS[tile], "rms_norm|silu", training=True).check()


@pytest.mark.parametrize("present", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_parameters_that_are_not_there(tile, present):
    bias, weight, norm_bias = map(bool, present)
    make(tile, bias=bias, norm_weight=weight, norm_bias=norm_bias).check()


def test_more_tiles_than_blocks(any_tile):
    """A block's second tile: rings and barriers go on, scales are corrected in both."""
    tile = any_tile
    case = make(tile, m=tile.block_m * 2 + 88, k=136, groups=8448 // 16)
    w = converted(case, tile)
    w[5, 7] = w[-3, 100] = w[w.shape[0] // 2, 135] = 1e4
    case.check()
    if KINDS[tile] != "high":
        return
    other, planes = planes_left(case, tile)
    assert torch.equal(bits(other.hi), bits(split(plain(case, tile), 1).hi))
    found = planes.hi[:, :136].double() * planes.scale.double()[:, None]
    error = (found - w.double()).norm(dim=1) / w.double().norm(dim=1)
    assert error[planes.flags == 0].max() < 2.0**-11


def test_mean_far_from_zero(tile):
    make(tile, offset=10.0).check()


def test_rows_with_a_stride(tile):
    case = make(tile)
    wide = torch.randn(case.problem.n, case.problem.k + 8, device="cuda")
    wide[:, : case.problem.k] = case.inputs.weight
    case.inputs = case.inputs._replace(weight=wide[:, : case.problem.k])
    case.check()


@pytest.mark.parametrize("of", ["x", "weight"])
def test_rows_off_16_bytes(tile, of):
    """One is read number by number; the one to be converted becomes a plane first."""
    case = make(tile)
    matrix = getattr(case.inputs, of)
    off = torch.empty(matrix.numel() + 1, device="cuda")[1:].view(matrix.shape).copy_(matrix)
    case.inputs = case.inputs._replace(**{of: off})
    case.check()


# ---- hard matrices ----


def outliers(w: Tensor) -> None:
    """Beyond what a sample of the row foretells."""
    for row in (0, 5, 8, 70, 127, 128, w.shape[0] - 1):
        w[row, (row * 37 + 3) % w.shape[1]] = 10.0 ** (row % 7)


def tiny(w: Tensor) -> None:
    w[3, 7], w[40, -1], w[40, 0] = 1e-14, 1e-30, -1e-39


def too_many_tiny(w: Tensor) -> None:
    w[9, 100:108] = 1e-20


def out_of_range(w: Tensor) -> None:
    w[17] *= 1e30
    w[18] *= 1e-35


def infinite(w: Tensor) -> None:
    w[33, 5], w[34, 6], w[200, 0] = float("inf"), float("nan"), float("-inf")


def zero_rows(w: Tensor) -> None:
    w[16:32], w[100] = 0, 0


def sparse(w: Tensor) -> None:
    w *= torch.rand_like(w) < 0.01


def unseen(w: Tensor) -> None:
    """Nothing but zeros where rows of 1032 are sampled; small elsewhere, beside a large row."""
    sampled = torch.zeros(w.shape[1], dtype=torch.bool, device=w.device)
    pieces = -(-w.shape[1] // 16)
    for place in range(16):
        sampled[place * pieces // 16 * 16 :][:16] = True
    w[:64] *= 2.0**-12 * ~sampled
    w[20] *= 2.0**30


def zeros_by_out_of_range(w: Tensor) -> None:
    w[24:32], w[27] = 0, float("inf")


def heavy_tails(w: Tensor) -> None:
    w *= torch.exp(2 * torch.randn_like(w))


HARD = [outliers, tiny, too_many_tiny, out_of_range, infinite, zero_rows, sparse, heavy_tails]
HARD += [unseen, zeros_by_out_of_range]


def where_finite(ours: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Both without what is not finite, which must be in the same places."""
    finite = truth.isfinite()
    assert torch.equal(ours.isfinite(), finite)
    return ours[finite].double(), truth[finite].double()


def check_rows(z: Tensor, truth: Tensor, eager: Tensor, limit: float) -> None:
    """Each as accurate as twice eager, or to the limit."""
    for row in range(0, z.shape[0], 37):
        ours, exact = where_finite(z[row], truth[row])
        theirs = eager[row][truth[row].isfinite()].double()
        allowed = max(2 * (theirs - exact).norm().item(), limit * exact.norm().item())
        assert (ours - exact).norm().item() <= allowed


@pytest.mark.parametrize("change", HARD)
def test_hard_matrices(any_tile, change):
    """Each line of z as accurate as eager, or to the limit; the same bits twice."""
    tile = any_tile
    limit = LIMITS[KINDS[tile]]
    case = make(tile, m=600, k=1032)
    matrix = converted(case, tile)
    untouched = matrix.clone()
    change(matrix)
    first, second = case.ours(), case.ours()
    for ours, again in zip(first.outputs, second.outputs, strict=True):
        assert torch.equal(bits(ours), bits(again))
    # From here on a column is of the converted matrix.
    z, truth, eager = (
        t if tile.fp32_weight else t.t() for t in (first.z, case.truth["z"], case.eager["z"])
    )
    check_rows(z, truth, eager, BOUNDS[KINDS[tile]])
    # Each column counts alike, whatever its size: beside a much larger one a row is one number,
    # whose terms may happen to cancel.
    sizes = truth.where(truth.isfinite(), 0.0).norm(dim=0).clamp(min=1e-300)
    z, truth, eager = (t.double() / sizes for t in (z, truth, eager))
    check_rows(z, truth, eager, limit)
    # Nor may a column be worse, but for its share of cut sums: nothing hides behind the others.
    for column in range(0, z.shape[1], 5):
        ours, exact = where_finite(z[:, column], truth[:, column])
        theirs = eager[:, column][truth[:, column].isfinite()].double()
        allowed = limit * exact.norm().item()
        if limit < 1e-3:
            allowed = max(2 * (theirs - exact).norm().item(), allowed)
        assert (ours - exact).norm().item() <= allowed, (column, (theirs - exact).norm().item())
    # A hard row must not spoil the results of the others.
    ordinary = (matrix == untouched).all(1)
    error = (z - truth)[:, ordinary].norm() / truth[:, ordinary].norm()
    assert ordinary.sum() == 0 or error < limit


# ---- the planes that are left ----


def planes_left(case: ProductCase, tile: Tile) -> tuple[Planes, Planes]:
    """Of the matrix that became a plane first, and of the converted one."""
    launch = Converting(case.problem, tile, leaves=True)
    left = launch.bind(*case.layout(case.inputs))(case.inputs).left
    planes = launch.of_x.planes_in(left.x), launch.of_weight.planes_in(left.weight)
    return planes if tile.fp32_weight else planes[::-1]


@pytest.mark.parametrize(
    "k, change", [(8, None), (60, None), (132, None), *[(1032, change) for change in HARD]]
)
def test_planes_are_left_as_split_makes_them(leaving_tile, change, k):
    """One to the bit. The other: what is not flagged is held to 2^-8, each row of it to 2^-11."""
    tile = leaving_tile
    case = make(tile, m=600, k=k)
    matrix = converted(case, tile)
    if change is not None:
        change(matrix)
    other, w = planes_left(case, tile)
    expected = split(plain(case, tile), 1)
    for name in ("hi", "scale", "flags"):
        assert torch.equal(bits(getattr(other, name)), bits(getattr(expected, name))), name
    exact = matrix.double()
    found = w.hi[:, :k].double() * w.scale.double()[:, None]
    held = (found - exact).abs() <= 2.0**-8 * exact.abs()
    listed = torch.zeros_like(held)
    rows = (w.flags == 1).nonzero().flatten()
    for row in rows.tolist():
        columns = w.spoilt[row]
        columns = columns[columns >= 0].long()
        assert columns.unique().numel() == columns.numel() > 0
        listed[row, columns] = True
    assert torch.equal(~held[w.flags == 1], listed[w.flags == 1])
    assert held[w.flags == 0].all()
    errors = (found - exact).norm(dim=1)
    assert (errors <= 2.0**-11 * exact.norm(dim=1))[w.flags == 0].all()
    split_flags = split(matrix, 1).flags
    assert ((w.flags != 0) | (split_flags == 0)).all(), "what split flags is flagged here"
    assert (w.hi[:, k:] == 0).all()


def test_nothing_is_flagged_without_need(leaving_tile):
    tile = leaving_tile
    for change in (outliers, zero_rows, zeros_by_out_of_range, unseen):
        case = make(tile, m=600, k=1032)
        w = converted(case, tile)
        w.add_(w.sign() * 1e-3)  # nothing near zero by chance
        change(w)
        _, planes = planes_left(case, tile)
        assert torch.equal(planes.flags, split(w, 1).flags), change.__name__


@pytest.mark.parametrize("change", [None, *HARD])
def test_what_two_planes_do_not_hold_is_flagged(change):
    """And nothing else: by the scales that were used, sampled or corrected."""
    tile = fp32_weight_tiles(2)[0]
    case = make(tile, m=150, k=1032)
    matrix = case.inputs.weight
    if change is not None:
        change(matrix)
    launch = Converting(case.problem, tile)
    layout, missing = launch.of_weight, launch.missing[1]
    buffer = torch.empty(layout.nbytes - missing, dtype=torch.uint8, device="cuda")
    launch.new_weight = lambda: buffer
    launch.bind(*case.layout(case.inputs))(case.inputs)
    n = case.problem.n
    at = layout.scale - missing, layout.flags - missing, layout.spoilt - missing
    scale = buffer[at[0] :][: 4 * n].view(torch.float32).double()
    flags = buffer[at[1] :][:n]
    spoilt = buffer[at[2] :][: 16 * n].view(torch.int32).view(n, 4)
    scaled = matrix.double() / scale[:, None]
    hi = scaled.half().double()
    lo = ((scaled - hi) * 2048).half().double() / 2048
    held = (scaled - hi - lo).abs() < scaled.abs() * 2.0**-20
    held &= (scaled - hi).abs() < scaled.abs() * 2.0**-8
    held |= matrix == 0
    listed = torch.zeros_like(held)
    for row in (flags == 1).nonzero().flatten().tolist():
        columns = spoilt[row][spoilt[row] >= 0].long()
        assert columns.unique().numel() == columns.numel() > 0
        listed[row, columns] = True
    assert torch.equal(~held[flags == 1], listed[flags == 1])
    assert held[flags == 0].all()
    in_range = matrix.abs().amax(1).log2().abs() < 60  # not so: NaN and 0 too
    assert ((~held).sum(1)[(flags == 2) & in_range] > 4).all()


@pytest.mark.parametrize("of", ["x", "weight"])
@pytest.mark.parametrize(
    "tile", [*fp32_weight_tiles(2), Tile(128, 128, 0, ping_pong=False, fold_steps=1)], ids=str
)
def test_small_values_of_few_bits_beside_zeros(tile, of):
    """Exact in two planes, but in lo alone: products of lo and lo are left out."""
    with forced_tile(tile):
        case = make_product(150, 1032, 16, 24, "highest", training=True)
        few, other = case.inputs.x, case.inputs.weight
        if of == "weight":
            few, other = other, few
        few.copy_(torch.randint(-7, 8, few.shape, device="cuda"))  # beside 2^40: steps of 2^-26
        few[:, 0], other[:, 0] = 2.0**40, 0
        z, truth, eager = case.ours().z, case.truth["z"], case.eager["z"]
    assert relative_error(z, truth) <= max(2 * relative_error(eager, truth), LIMITS["highest"])


@pytest.fixture
def high(monkeypatch):
    """TF32 is allowed; no problem is multiplied as it."""
    candidates = hopper_plan.candidates
    monkeypatch.setattr(
        hopper_plan, "candidates", lambda p: (tile for tile in candidates(p) if not tile.tf32)
    )
    memo.clear()
    with matmul_precision("high"):
        yield
    memo.clear()


@pytest.mark.usefixtures("high")
@pytest.mark.parametrize("change", [None, tiny, outliers, infinite])
def test_gradients_with_planes_left_and_without(monkeypatch, change):
    """A step through the library, whose plan takes this kernel."""
    m, k, channels, groups = 512, 4096, 16, 512
    case = make_product(m, k, channels, groups, "high", training=True)
    chosen = hopper_plan.choose_tile(case.problem, 132)
    assert chosen is not None
    assert chosen.fp32_weight
    model = nn.Sequential(nn.Linear(k, channels * groups), nn.GroupNorm(groups, channels * groups))
    model.to("cuda")
    if change is not None:
        change(model[0].weight.data)
    dy = torch.randn(m, channels * groups, device="cuda")

    def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        leaves = [x, *model.parameters()]
        return list(torch.autograd.grad(model(x), leaves, dy))

    x = case.inputs.x
    eager = gradients(model, x, dy)
    truth = gradients(copy.deepcopy(model).double(), x.double(), dy.double())
    fused = epinorm.fuse(copy.deepcopy(model))
    for megabytes in ("0", "1000"):
        monkeypatch.setenv(kept_planes.VARIABLE, megabytes)
        memo.clear()
        for ours, theirs, exact in zip(gradients(fused, x, dy), eager, truth, strict=True):
            if change is infinite:
                ours, exact = where_finite(ours, exact)
                theirs = theirs[theirs.isfinite()]
                if ours.numel() == 0:
                    continue
            allowed = allowed_error(relative_error(theirs, exact), torch.float32)
            assert relative_error(ours, exact) <= max(allowed, 4e-4)


def test_rows_with_leading_dimensions_again_and_again():
    x = torch.randn(128, 128, 3072, device="cuda")
    layers = nn.Sequential(nn.Linear(3072, 768), nn.LayerNorm(768), nn.ReLU()).cuda()
    with matmul_precision("high"), torch.no_grad():
        expected = copy.deepcopy(layers).double()(x.double())
        allowed = allowed_error(relative_error(layers(x), expected), torch.float32)
        fused = epinorm.fuse(layers)
        for _ in range(6):
            y = fused(x)
            assert y.shape == expected.shape
            assert relative_error(y, expected) <= allowed


def small(rows, columns, exponent, corrected):
    """Rows whose largest magnitude is in [2^exponent, 2^(exponent + 1)); corrected: unsampled."""
    values = (torch.rand(rows, columns, device="cuda") + 1) * 2.0**exponent
    values *= torch.randn(rows, columns, device="cuda").sign()
    if corrected:
        values *= 2.0**-6
        values[:, 20] = 1.5 * 2.0**exponent
    return values


def check_gradients(layers, x, told):
    """Of a fused copy, by the same bits twice, beside eager's; told: what `explain` says of it."""

    def gradients(model, x, dy):
        wanted = [*model.parameters(), x] if x.requires_grad else list(model.parameters())
        return torch.autograd.grad(model(x), wanted, dy)

    with matmul_precision("high"):
        dy = torch.randn_like(layers(x))
        fused = epinorm.fuse(copy.deepcopy(layers))
        found, again = gradients(fused, x, dy), gradients(fused, x, dy)
        eager = gradients(layers, x, dy)
        explained = epinorm.explain(fused)
    assert told in (explained.rows or explained.linears)[0].reason
    exact_x = x.detach().double().requires_grad_(x.requires_grad)
    truth = gradients(copy.deepcopy(layers).double(), exact_x, dy.double())
    for ours, same, theirs, exact in zip(found, again, eager, truth, strict=True):
        allowed = allowed_error(relative_error(theirs, exact), torch.float32)
        assert relative_error(ours, exact) <= max(1.05 * allowed, 1e-5)
        assert torch.equal(ours, same)


@pytest.mark.parametrize("exponent", [-12, -11, -10, -9])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_rows_of_any_size_have_their_part_of_dw(exponent, corrected, normed, both):
    """No scale of an ordinary row, estimated or corrected, is that of a row of zeros."""
    norm = [nn.LayerNorm(768)] if normed else []
    layers = nn.Sequential(nn.Linear(3072, 768), *norm, nn.GELU()).cuda()
    x = small(16384, 3072, exponent, corrected).requires_grad_(both)
    check_gradients(layers, x, "the input's made on the way")


@pytest.mark.parametrize("exponent", [-12, -11, -10, -9])
@pytest.mark.parametrize("corrected", [False, True])
def test_rows_of_any_size_have_their_part_of_dx(exponent, corrected):
    linear = nn.Linear(4096, 8192, bias=False)  # of which a gradient is 0
    layers = nn.Sequential(linear, nn.BatchNorm1d(8192), nn.ReLU()).cuda()
    with torch.no_grad():
        linear.weight.copy_(small(8192, 4096, exponent, corrected))
    x = torch.randn(1024, 4096, device="cuda", requires_grad=True)
    check_gradients(layers, x, "the weight's made on the way")


@pytest.mark.parametrize("m", [64, 128])
@pytest.mark.parametrize("prepacked", [False, True])
def test_inference_at_highest(m, prepacked):
    """The plan takes it for a weight as it is; prepacked planes are read as ever."""
    layers = nn.Sequential(nn.Linear(8192, 8192), nn.GELU()).cuda()
    x = torch.randn(m, 8192, device="cuda")
    with matmul_precision("highest"), torch.no_grad():
        expected = copy.deepcopy(layers).double()(x.double())
        allowed = allowed_error(relative_error(layers(x), expected), torch.float32)
        fused = epinorm.fuse(layers)
        if prepacked:
            epinorm.prepack(fused)
        for _ in range(3):
            y = fused(x)
            assert relative_error(y, expected) <= allowed
        with torch.no_grad():
            layers[0].weight[3, 7] = 1e4  # beyond what its sample foretells
        expected = copy.deepcopy(layers).double()(x.double())
        assert relative_error(fused(x), expected) <= allowed
