"""What the Hopper kernel takes, with which tile, when `auto` picks it, and what it says if not."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.plan import costs, portable
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan.gradients import planes_taken
from epinorm.backends.cuda.plan.hopper_tile import Tile, shared_bytes
from epinorm.backends.cuda.plan.plane_layout import PlaneLayout
from epinorm.backends.cuda.plan.planes import product_of
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.chain import Chain
from epinorm.problem import Problem

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import problem_of

from imaginary import believe_in

SMS = 132
SHARED_LIMIT = 227 * 1024


@pytest.fixture
def hopper(monkeypatch):
    """Let the plan believe in an H200; returns a function that changes its compute capability."""
    monkeypatch.delenv("EPINORM_CORE", raising=False)

    def become(major, minor):
        believe_in(monkeypatch, Gpu((major, minor), SMS, SHARED_LIMIT, SHARED_LIMIT + 1024))

    become(9, 0)
    return become


# ---- what cannot be served ----

REASONS = [
    (dict(kind="float64"), "not float64"),
    (dict(k=0), r"nothing to multiply \(0 input features\)"),
    (
        dict(channels=3),
        "a group of 3 channels is none of 2, a multiple of 4 up to 128 or of 8 up to",
    ),
    (dict(channels=6), "a group of 6 channels"),
    (dict(channels=14), "a group of 14 channels"),
    (dict(channels=8200, groups=1), "a group of 8200 channels"),
    (dict(k=8191), r"rows of 8191 input features are not a multiple of 16 bytes \(TMA\)"),
    (dict(k=8188, kind="float16"), "rows of 8188 input features"),
    (dict(channels=4, groups=3), "rows of 12 output features are not a multiple of 16 bytes"),
    (dict(channels=2, groups=3, kind="highest"), "rows of 6 output features"),
    (
        dict(channels=4, groups=3, out_dtype=torch.float32, training=True),
        "rows of 12 output features",  # y could be written, z in 16 bit not
    ),
]


@pytest.mark.parametrize("facts, reason", REASONS)
def test_every_reason_is_said(facts, reason, hopper, monkeypatch):
    monkeypatch.setenv("EPINORM_CORE", "hopper")
    problem = problem_of(**facts)
    said = hopper_plan.why_not(problem)
    assert said is not None
    plan = cuda_plan.plan_cuda(problem, "single")
    assert plan.strategy == "reference"
    assert plan.reason == said
    auto = cuda_plan.plan_cuda(problem, "auto")
    assert auto.strategy in ("planes", "epilogue")
    assert auto.reason.endswith(said)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(said)


@pytest.mark.parametrize(
    "facts",
    [
        dict(kind="high", k=8191),  # fp32 planes are padded
        dict(kind="highest", k=1),
        dict(channels=4, groups=3, kind="highest"),
        dict(channels=4, groups=3, out_dtype=torch.float32),  # inference writes y alone
        dict(channels=2, groups=4),
        dict(m=0),
        dict(m=1),
    ],
)
def test_what_just_fits(facts):
    assert hopper_plan.why_not(problem_of(**facts)) is None


def test_another_gpu_is_named(hopper, monkeypatch):
    monkeypatch.setenv("EPINORM_CORE", "hopper")
    hopper(8, 0)
    problem = problem_of()
    expected = "the Hopper core needs compute capability 9.0, this GPU has 8.0"
    assert cuda_plan.plan_cuda(problem, "single").reason == expected
    assert cuda_plan.plan_cuda(problem, "auto").reason.endswith(expected)
    hopper(10, 0)
    assert "this GPU has 10.0" in cuda_plan.plan_cuda(problem, "auto").reason


def test_no_tile_is_a_reason_too(hopper, monkeypatch):
    monkeypatch.setattr(hopper_plan, "choose_tile", lambda *_, **__: None)
    monkeypatch.setenv("EPINORM_CORE", "hopper")
    plan = cuda_plan.plan_cuda(problem_of(), "auto")
    assert plan.strategy == "epilogue"
    assert "no tile of the single kernel fits the shared memory" in plan.reason


@pytest.mark.parametrize(
    ("sizes", "kind", "chain", "strategy"),
    [
        ((600, 512, 256), "bfloat16", "silu|layer_norm", "epilogue"),
        ((343, 128, 256), "bfloat16", "rms_norm|silu", "epilogue"),
        ((4759, 1000, 1024), "bfloat16", "silu|rms_norm", "epilogue"),  # rows off whole lines
        ((49, 1024, 1000), "high", "identity", "reference"),
        ((270, 768, 8192), "high", "silu|identity|gelu", "reference"),
        ((13, 3072, 384), "highest", "identity|gelu", "reference"),
        ((16384, 768, 768), "bfloat16", "add_residual|layer_norm", "single"),
        ((16384, 768, 768), "high", "add_residual|layer_norm", "single"),  # in clusters
        ((16384, 768, 768), "highest", "add_residual|layer_norm", "planes"),
        ((16384, 3072, 768), "high", "add_residual|layer_norm", "single"),
        ((16384, 3072, 768), "bfloat16", "add_residual|layer_norm", "single"),  # in halves
        ((16384, 1536, 384), "bfloat16", "add_residual|layer_norm", "single"),
        ((4096, 3072, 768), "bfloat16", "add_residual|layer_norm", "epilogue"),  # half of the GPU
        ((16384, 768, 768), "bfloat16", "dropout(0.1)|add_residual|layer_norm", "epilogue"),
        ((8192, 2048, 8192), "high", "group_norm(8)", "single"),
        ((1024, 1024, 1024), "high", "rms_norm|silu", "planes"),  # by the host, not "epilogue"
    ],
)
def test_what_loses_by_the_gpus_time_is_not_taken(hopper, sizes, kind, chain, strategy):
    """Shapes of the sweep, as they were measured on an H200."""
    hopper(9, 0)
    m, k, n = sizes
    parsed = Chain.parse(chain)
    problem = dataclasses.replace(
        problem_of(m, k, kind=kind),
        **dict(n=n, chain=parsed, has_norm_weight=parsed.norm is not None),
        has_norm_bias=parsed.norm is not None and "rms" not in chain,
    )
    assert cuda_plan.plan_cuda(problem, "auto").strategy == strategy


@pytest.mark.parametrize(
    ("columns", "padded"),
    [(8, 8), (36, 40), (72, 72), (100, 104), (110, 128), (1000, 1024), (1024, 1024)],
)
def test_rows_of_planes_begin_on_whole_lines_where_that_adds_little(columns, padded):
    assert PlaneLayout(2, columns, 10, 10).padded == padded


# ---- tiles ----

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)


@pytest.mark.parametrize("channels", GROUP_SIZES)
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
def test_a_tile_exists_for_every_group_size(channels, kind):
    if (kind, channels) == ("highest", 2048):
        pytest.skip("three sets of accumulators: it may or may not fit the registers")
    for m, training in ((1, False), (17, True), (1000, True), (65536, False)):
        problem = problem_of(m, 520, channels, max(1, 1024 // channels), kind, training)
        assert hopper_plan.why_not(problem) is None
        tile = hopper_plan.choose_tile(problem, SMS)
        assert tile is not None
        assert tile.stages >= 2
        assert shared_bytes(hopper_plan.instance_for(problem, tile)) <= SHARED_LIMIT
        columns = tile.block_n * tile.cluster_n
        assert columns % channels == 0  # a group never lies in two tiles
        assert columns < problem.n + columns
        assert (tile.load_m or tile.block_m) >= min(m, tile.block_m)


def registers(problem: Problem, tile: Tile) -> int:
    """Accumulators of a consumer's thread: two planes have three sets."""
    consumers = 1 if tile.ping_pong or tile.split_columns else 2
    rows = tile.block_m // 64 // consumers
    return (3 if problem.planes == 2 else 1) * rows * tile.consumer_n // 2


@pytest.mark.parametrize("channels", GROUP_SIZES)
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_no_candidate_has_more_accumulators_than_registers(channels, kind):
    problem = problem_of(1000, 520, channels, max(1, 1024 // channels), kind, True)
    for tile in hopper_plan.candidates(problem):
        assert registers(problem, tile) <= 192, tile
        assert tile.consumer_n % 8 == 0
        assert tile.consumer_n <= (hopper_plan.WIDEST_IN_HALVES if tile.in_halves else 256)


@pytest.mark.parametrize(
    "kind, block_m, block_n, ping_pong",
    [("bfloat16", 128, 256, False), ("highest", 128, 128, False)],
)
def test_the_benchmark_takes_the_tile_that_was_measured_best(kind, block_m, block_n, ping_pong):
    tile = hopper_plan.choose_tile(problem_of(kind=kind), SMS)
    assert (tile.block_m, tile.block_n, tile.ping_pong) == (block_m, block_n, ping_pong)


@pytest.mark.parametrize(
    ("facts", "block_m", "block_n", "blocks"),
    [
        (dict(m=65536, k=256, channels=256, groups=1), 64, 128, 2),  # in turn
        (dict(m=65536, k=256, channels=256, groups=1, training=True), 64, 128, 2),
        (dict(m=65536, k=128, channels=192, groups=1), 64, 96, 2),
        (dict(m=16384, k=1024, channels=256, groups=4), 128, 128, 2),  # together
        (dict(m=65536, k=256, channels=128, groups=2), 128, 128, 1),
        (dict(m=1024, k=256, channels=256, groups=1), 64, 128, 2),  # 12.4 us for 14.9
        (dict(m=65536, k=256, channels=256, groups=1, kind="high"), 64, 256, 1),
    ],
)
def test_two_planes_share_groups_of_up_to_256_in_clusters(facts, block_m, block_n, blocks):
    tile = hopper_plan.choose_tile(problem_of(**{"kind": "highest", **facts}), SMS)
    assert (tile.block_m, tile.block_n, tile.cluster_n) == (block_m, block_n, blocks)
    assert tile.ping_pong == (block_m == 64 and tile.consumer_n == block_n)


HEAVY_TO_KEEP = [
    ("mish|layer_norm", 2),
    ("dropout(0.1)|layer_norm", 2),
    ("add_residual|layer_norm|mul_element", 1),
]


@pytest.mark.parametrize(("chain", "ways"), HEAVY_TO_KEEP)
def test_two_planes_that_keep_z_take_no_cluster_whose_registers_spill(chain, ways):
    """A residual is multiplied together alone: 131 us for 139 in training."""
    for channels, training, expected in ((256, True, 0), (256, False, ways), (224, True, ways)):
        problem = problem_of(65536, 256, channels, 1, "highest", training, chain)
        found = [t for t in hopper_plan.candidates(problem) if not t.split_columns]
        assert len([t for t in found if t.cluster_n > 1]) == expected


MEASURED_BY_TWO_PLANES = [
    (16384, 1024, 256, 1, "layer_norm", False, "single"),  # 86.7 us, planes 90.8
    (65536, 256, 256, 1, "layer_norm", True, "single"),  # 113.5, 129.5
    (65536, 256, 256, 1, "add_residual|layer_norm", True, "single"),  # 130.8, 147.3
    (
        1024,
        8192,
        256,
        32,
        "group_norm({groups})|silu",
        False,
        "planes",
    ),  # 696; 740 folded each step
    (65536, 512, 512, 1, "layer_norm|relu", False, "single"),  # 272.9, 308.9
    (18704, 1024, 512, 1, "add_residual|layer_norm", False, "single"),  # 150.9, 171.2
    (4096, 512, 512, 1, "layer_norm|relu", False, "planes"),
    (1280, 512, 512, 1, "layer_norm|mish", False, "planes"),
    (25038, 4096, 384, 1, "add_residual|layer_norm|silu", False, "planes"),
    (16384, 768, 768, 1, "add_residual|layer_norm", False, "planes"),  # 157, 179
]


@pytest.mark.parametrize(
    ("m", "k", "channels", "groups", "chain", "training", "best"), MEASURED_BY_TWO_PLANES
)
def test_one_kernel_of_two_planes_where_it_was_measured_faster(
    m, k, channels, groups, chain, training, best, hopper
):
    """On an H200: by its own forward pass, or by the norm kernel behind a product by planes."""
    problem = problem_of(m, k, channels, groups, "highest", training, chain)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == best


def test_a_measured_tile_overrides_the_model(monkeypatch):
    problem = problem_of(520, 256, 16, 32)
    chosen = hopper_plan.choose_tile(problem, SMS)
    other = next(tile for tile in hopper_plan.candidates(problem) if tile != chosen)
    key = (problem.planes, 16, problem.m, problem.k, problem.n)
    monkeypatch.setitem(hopper_plan.MEASURED, key, other)
    hopper_plan.choose_tile.cache_clear()
    try:
        assert hopper_plan.choose_tile(problem, SMS) == other
    finally:
        monkeypatch.undo()
        hopper_plan.choose_tile.cache_clear()
    assert hopper_plan.choose_tile(problem, SMS) == chosen


def test_the_model_grows_with_the_work():
    tile = Tile(128, 128, 4)
    small = hopper_plan.cycles(problem_of(), tile, SMS)
    for facts in (dict(m=8192), dict(k=16384), dict(groups=2048)):
        assert hopper_plan.cycles(problem_of(**facts), tile, SMS) > small
    assert hopper_plan.cycles(problem_of(training=True), tile, SMS) > small
    assert hopper_plan.microseconds(problem_of(), SMS) == pytest.approx(178, rel=0.1)


# ---- what is picked ----


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "high", "highest"])
def test_auto_takes_one_kernel_for_the_benchmark(kind, hopper):
    plan = cuda_plan.plan_cuda(problem_of(kind=kind), "auto")
    assert plan.strategy == "single"
    tile = hopper_plan.choose_tile(problem_of(kind=kind), SMS)
    assert plan.reason.startswith("one kernel")
    assert f"tiles of {tile.block_m} x {tile.block_n}" in plan.reason
    assert ("warpgroups in turn" if tile.ping_pong else "warpgroups together") in plan.reason
    if kind == "highest":
        assert "two fp16 planes" in plan.reason
    asked = cuda_plan.plan_cuda(problem_of(kind=kind), "single")
    assert plan.reason.startswith(asked.reason.removeprefix("asked for by name; "))


@pytest.mark.parametrize(
    ("facts", "for_accuracy"),
    [
        (dict(k=128, kind="highest", training=True), True),
        (dict(k=24, kind="highest", training=True), True),
        (dict(k=136, kind="highest", training=True), False),
        (dict(k=128, kind="highest"), False),
        (dict(k=128, kind="high", training=True), False),
        (dict(k=128, training=True), False),
    ],
)
def test_training_on_short_fp32_sums_takes_what_is_more_accurate(
    facts, for_accuracy, hopper, monkeypatch
):
    problem = problem_of(m=65536, channels=4, groups=256, **facts)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "single"
    assert cuda_plan.plan_cuda(problem, "single").strategy == "single"
    monkeypatch.setattr(hopper_plan, "microseconds", lambda *_, **__: 1e6)
    plan = cuda_plan.plan_cuda(problem, "auto")
    assert plan.strategy == ("single" if for_accuracy else "epilogue")
    assert (f"sums as short as {facts['k']}" in plan.reason) == for_accuracy


def test_epilogue_by_name_is_always_served(hopper):
    for facts, _ in REASONS:
        plan = cuda_plan.plan_cuda(problem_of(**facts), "epilogue")
        assert plan.strategy == "epilogue"
        assert plan.reason.startswith("asked for by name")


def test_auto_says_both_estimates_where_the_library_wins(hopper, monkeypatch):
    problem = problem_of()
    monkeypatch.setattr(hopper_plan, "microseconds", lambda *_, **__: 1e6)
    plan = cuda_plan.plan_cuda(problem, "auto")
    assert plan.strategy == "epilogue"
    assert "100000" in plan.reason


@pytest.mark.parametrize("length", [1024, 16384, 65536])
def test_no_library_product_is_estimated_above_the_rate_of_all_multiprocessors(length, hopper):
    """However long its sums are that may be split: 128 rows of 16384 took 1441 us on an H200, 559
    by the estimate, so a chain of them was left to PyTorch."""
    problem = problem_of(kind="highest", m=128, k=length, channels=16384, groups=1)
    fastest = 2.0 * problem.m * problem.k * problem.n / costs.FLOPS["highest"]
    assert costs.library_product(problem) >= fastest


@pytest.mark.parametrize(("k", "n", "measured"), [(256, 64, 51), (64, 256, 44)])
def test_long_sums_of_few_tiles_take_little_more_than_what_memory_takes(k, n, measured, hopper):
    """dW of 100,352 rows in TF32, measured on an H200; of wide ones arithmetic is the limit."""
    long = problem_of(kind="high", m=100_352, k=k, channels=n, groups=1)
    assert costs.library_product(long, "dW") == pytest.approx(measured, rel=0.25)
    wide = problem_of(kind="high", m=16_384, k=4096, channels=4096, groups=1)
    for capability, rate in (
        ((9, 0), costs.TF32["dW"][0]),
        ((8, 0), portable.library_flops(wide, Gpu((8, 0), SMS, SHARED_LIMIT, SHARED_LIMIT))),
    ):
        hopper(*capability)
        assert costs.library_product(wide, "dW") >= 2.0 * wide.m * wide.k * wide.n / rate


@pytest.mark.parametrize(
    ("m", "k", "n", "of", "measured"),
    [
        (16384, 768, 768, "dX", 88),
        (16384, 768, 768, "dW", 134),
        (16384, 3072, 768, "dW", 366),
        (65536, 256, 256, "dX", 53),
        (65536, 256, 256, "dW", 56),
    ],
)
def test_gradients_in_tf32_take_as_long_as_measured(m, k, n, of, measured, hopper):
    """On an H200, by its profiler. dW of the first two was taken for 85 us, so both were left to
    the library, in steps of 396 us for 271."""
    problem = problem_of(kind="high", m=m, k=k, channels=n, groups=1, training=True)
    assert costs.library_product(problem, of) == pytest.approx(measured, rel=0.35)
    assert planes_taken(problem, True, True) == (k >= 768, k >= 768)


@pytest.mark.parametrize("sizes", [(512, 0, 256), (512, 256, 0), (512, 1, 256), (512, 256, 1)])
@pytest.mark.parametrize("of", ["y", "dX", "dW"])
def test_products_of_nothing_and_of_one_column_have_an_estimate(sizes, of, hopper):
    m, k, n = sizes
    problem = dataclasses.replace(problem_of(kind="high", m=m, k=k, chain="gelu"), n=n)
    assert 0 < costs.library_product(problem, of) < 20


@pytest.mark.parametrize("chain", ["gelu", "layer_norm|gelu", "batch_norm(1e-05)"])
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
@pytest.mark.parametrize("training", [False, True])
def test_no_columns_are_pytorchs(chain, kind, training, hopper):
    parsed = Chain.parse(chain)
    facts = {"n": 0, "chain": parsed, "has_norm_weight": parsed.norm is not None}
    problem = problem_of(kind=kind, m=512, k=64, training=training)
    problem = dataclasses.replace(problem, **facts)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "reference"


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_what_the_host_takes_decides_about_small_problems(kind, hopper, monkeypatch):
    """A product by PyTorch and a kernel of ours take the host longer than any call of ours alone,
    even where the GPU would be done sooner; but not if it is then later than with PyTorch's, by
    more than short estimates are off."""
    problem = problem_of(kind=kind, m=128, k=512, channels=32, groups=8)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "single"
    eager = costs.eager(problem)
    assert costs.library_product(problem) + costs.norm_forward(problem) < 0.9 * eager
    monkeypatch.setattr(hopper_plan, "microseconds", lambda *_, **__: 0.9 * eager)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "single"
    monkeypatch.setattr(hopper_plan, "microseconds", lambda *_, **__: eager + 3.5)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "epilogue"


def test_dreamers_block_in_bf16_is_one_kernel(hopper):
    """Measured: 15.6 us of the GPU, eager 17.0, two kernels 12.2; in a loop 38, 75 and 80."""
    problem = problem_of(1024, 1024, 1024, 1, "bfloat16", chain="rms_norm(1e-4)|silu")
    assert cuda_plan.plan_cuda(problem, "auto").strategy == "single"
    few = problem_of(22, 128, 128, 40, "bfloat16", chain="silu|group_norm({groups})|silu")
    assert cuda_plan.plan_cuda(few, "auto").strategy == "epilogue"  # 10.2; one kernel 25, eager 20


@pytest.mark.parametrize("strategy", ["single", "planes"])
@pytest.mark.parametrize("kind", ["high", "highest"])
@pytest.mark.parametrize("m", [16, 256, 16384])
@pytest.mark.parametrize("prepacked", [False, True])
def test_a_plan_says_what_the_product_is_multiplied_as(m, kind, strategy, prepacked, hopper):
    """And of a prepacked weight, whether what is kept is read."""
    problem = problem_of(m, 3072, 48, 16, kind, chain="group_norm({groups})|silu")
    problem = dataclasses.replace(problem, prepacked=prepacked)
    product = problem if strategy == "single" else product_of(problem)
    tile = hopper_plan.choose_tile(product, SMS, prepacked)
    reason = cuda_plan.plan_cuda(problem, strategy).reason
    assert ("TF32" in reason) == tile.tf32
    assert ("plane," in reason or "planes," in reason) != tile.tf32
    assert ("made on the way" in reason) == tile.converts
    assert ("W's kept" in reason) == (prepacked and not (tile.tf32 or tile.converts))


LOST = [
    # Sums that the library splits over idle multiprocessors: 44.5 us for 29.7, 49.5 for 43.6.
    (11, 8192, 12, 16, "highest", False, "add_residual|group_norm({groups})|gelu", "epilogue"),
    (15, 8192, 256, 1, "high", True, "add_residual|identity|gelu", "reference"),
    # Blocks that each read fp32 rows of their own: 230.7 for 203.7.
    (9817, 8192, 256, 1, "high", False, "add_residual|layer_norm|leaky_relu(0.01)", "epilogue"),
]


@pytest.mark.parametrize(
    ("m", "k", "channels", "groups", "kind", "training", "chain", "best"), LOST
)
def test_what_lost_to_pytorch_is_not_taken(
    m, k, channels, groups, kind, training, chain, best, hopper
):
    """Rows of benchmarks/sweep.py on an H200, by the GPU's time."""
    problem = problem_of(m, k, channels, groups, kind, training, chain)
    assert cuda_plan.plan_cuda(problem, "auto").strategy == best


@pytest.mark.parametrize(
    ("m", "kind", "training", "chain"),
    [
        (16, "bfloat16", False, "layer_norm"),
        (4096, "bfloat16", True, "silu|identity"),
        (64, "high", False, "layer_norm"),
    ],
)
def test_what_would_be_done_sooner_is_left_with_a_reason(m, kind, training, chain, hopper):
    """By the host and the GPU together; it is the GPU's time alone that it may lose by."""
    reason = cuda_plan.plan_cuda(problem_of(m, 1024, 1024, 1, kind, training, chain), "auto").reason
    chosen = re.findall(r"estimated (\d+) us", reason)
    for other, gpu, limit in re.findall(
        r": (\d+)(?:, but ([\d.]+) of the GPU, where ([\d.]+) is the limit)?(?:;|$)", reason
    ):
        assert float(other) >= float(chosen[0]) or float(gpu) > float(limit)
    assert "limit" in reason


@pytest.mark.parametrize("m", [128, 1280])
def test_training_small_fp32_layers_is_not_left_to_pytorch(m, hopper):
    """TD-MPC2 at `highest`: the host takes 0.65 to 0.8 of the time that eager takes it."""
    facts = dict(m=m, k=512, channels=512, groups=1, chain="layer_norm|mish", training=True)
    assert cuda_plan.plan_cuda(problem_of(kind="highest", **facts), "auto").strategy == "planes"


@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_equal_problems_get_equal_plans(kind, hopper):
    first, second = problem_of(kind=kind), problem_of(kind=kind)
    assert first is not second
    assert cuda_plan.plan_cuda(first, "auto") == cuda_plan.plan_cuda(second, "auto")
    assert cuda_plan.plan_cuda(dataclasses.replace(first, m=1), "auto").strategy in (
        "single",
        "epilogue",
    )


@pytest.mark.parametrize(
    ("tiles", "blocks"),
    [(0, 1), (1, 1), (132, 132), (133, 132), (256, 128), (512, 128), (1024, 128), (1025, 129)],
)
def test_blocks_are_as_few_as_need_no_round_more(tiles, blocks):
    """But for 133 tiles, where half of the multiprocessors would have nothing to do."""
    assert hopper_plan.persistent_blocks(tiles, 132) == blocks
