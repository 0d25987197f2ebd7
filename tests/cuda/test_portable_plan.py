"""What the portable core takes, with which tile, on which GPU; and how a core is forced."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest

from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan.gradients import planes_taken
from epinorm.backends.cuda.plan.portable import choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import product_shared_bytes, shared_bytes
from epinorm.backends.cuda.plan.strategy import wanted_core
from epinorm.backends.cuda.runtime.device import Gpu

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import problem_of

from imaginary import believe_in

# Multiprocessors; shared memory of a block and of a multiprocessor: CUDA programming guide.
H200 = Gpu((9, 0), 132, 232448, 233472)
A100 = Gpu((8, 0), 108, 166912, 167936)
L40S = Gpu((8, 9), 142, 101376, 102400)
B200 = Gpu((10, 0), 148, 232448, 233472)
RTX_5090 = Gpu((12, 0), 170, 101376, 102400)
GPUS = {"A100": A100, "L40S": L40S, "H200": H200, "B200": B200, "RTX 5090": RTX_5090}


@pytest.fixture
def on(monkeypatch):
    """Returns a function that lets the plan believe in a GPU."""
    monkeypatch.delenv("EPINORM_CORE", raising=False)

    def become(gpu: Gpu) -> None:
        believe_in(monkeypatch, gpu)

    return become


# ---- tiles ----

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 40, 48, 64, 72, 96, 104, 128, 136, 192, 248, 256)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_a_tile_exists_for_every_group_size(gpu, kind):
    for channels, (m, training) in itertools.product(
        GROUP_SIZES + ((384, 512) if kind == "bfloat16" else ()), ((1, False), (5000, True))
    ):
        problem = problem_of(m, 520, channels, max(1, 1024 // channels), kind, training)
        assert portable_plan.why_not(problem) is None
        tile = portable_plan.choose_tile(problem, gpu)
        assert tile is not None, (channels, m)
        assert tile.parts * tile.warp_n % channels == 0 or tile.warp_n % channels == 0
        assert tile.warps_n % tile.parts == 0


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("kind", ["bfloat16", "highest"])
def test_candidates_fit_a_multiprocessor(gpu, kind):
    sets = 2 if kind == "highest" else 1  # the sum, and that of the cross products
    for channels in GROUP_SIZES:
        problem = problem_of(1000, 520, channels, max(1, 1024 // channels), kind, True)
        for tile in portable_plan.candidates(problem, gpu):
            size = shared_bytes(portable_plan.instance_for(problem, tile))
            assert size <= gpu.shared_of_block
            assert tile.blocks * (size + 1024) <= gpu.shared_of_multiprocessor
            assert tile.threads * tile.blocks <= 256
            wide = tile.warp_n * sets > 128
            assert wide or sets * tile.warp_m * tile.warp_n // 32 <= 128, tile


def test_the_benchmark_takes_the_tiles_that_were_measured_best():
    tile = portable_plan.choose_tile(problem_of(), H200)
    assert (tile.block_m, tile.block_n, tile.block_k, tile.blocks) == (128, 256, 64, 1)
    tile = portable_plan.choose_tile(problem_of(kind="highest"), H200)
    assert (tile.block_m, tile.block_n, tile.block_k, tile.blocks) == (128, 128, 64, 1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("planes", [1, 2])
def test_products_fit_every_gpu(gpu, planes):
    tile = choose_product_tile(planes, gpu)
    assert tile.stages >= 3
    assert product_shared_bytes(tile, planes) <= gpu.shared_of_block
    small = dataclasses.replace(gpu, shared_of_block=49152)
    with pytest.raises(RuntimeError, match="too few for any tile"):
        choose_product_tile(planes, small)


def test_the_model_is_near_what_was_measured():
    measured = {"bfloat16": 279, "high": 396, "highest": 1130}
    for kind, time in measured.items():
        estimate = portable_plan.microseconds(problem_of(kind=kind), H200)
        assert estimate == pytest.approx(time, rel=0.15), kind


def test_how_wide_copies_can_be():
    assert portable_plan.copy_bytes(4096, 32, 16) == 16
    assert portable_plan.copy_bytes(4096, 32, 8) == 4
    assert portable_plan.copy_bytes(4100, 0) == 4
    assert portable_plan.copy_bytes(4096, 2) == 2


# ---- what is picked ----

REASONS = [
    (dict(kind="float64"), "not float64"),
    (dict(k=0), r"nothing to multiply \(0 input features\)"),
    (dict(channels=3), "a group of 3 channels is none of 2, a multiple of 4 up to 32 or of 8"),
    (dict(channels=36), "a group of 36 channels"),
    (dict(channels=1032, groups=2), "a group of 1032 channels does not fit"),
    (dict(channels=512, groups=2, kind="high"), "the range guard of fp32 computes groups of up to"),
]


@pytest.mark.parametrize("facts, reason", REASONS)
def test_every_reason_is_said(facts, reason, on):
    on(A100)
    problem = problem_of(**facts)
    plan = cuda_plan.plan_cuda(problem, "single")
    assert (plan.strategy, plan.core) == ("reference", None)
    auto = cuda_plan.plan_cuda(problem, "auto")
    assert auto.strategy == "epilogue"
    assert auto.reason.endswith(plan.reason)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(plan.reason)


@pytest.mark.parametrize("gpu", [A100, L40S, B200, RTX_5090])
@pytest.mark.parametrize("kind", ["bfloat16", "high", "highest"])
def test_other_gpus_take_the_portable_core(gpu, kind, on):
    on(gpu)
    plan = cuda_plan.plan_cuda(problem_of(kind=kind), "single")
    assert (plan.strategy, plan.core) == ("single", "portable")
    tile = portable_plan.choose_tile(problem_of(kind=kind), gpu)
    assert f"tiles of {tile.block_m} x {tile.block_n}, the portable core" in plan.reason
    # Where fp32 without tensor cores is a quarter of their rate, three products and the conversions
    # do not pay.
    if kind == "highest" and gpu in (A100, B200):
        assert cuda_plan.plan_cuda(problem_of(kind=kind), "auto").core == "portable"


@pytest.mark.parametrize("facts", [dict(k=8191), dict(channels=2, groups=3), dict(k=1028)])
def test_hopper_takes_it_where_the_copy_engine_cannot(facts, on):
    on(H200)
    assert cuda_plan.plan_cuda(problem_of(), "single").core == "hopper"
    assert cuda_plan.plan_cuda(problem_of(**facts), "single").core == "portable"


def test_auto_leaves_to_the_library_what_it_does_faster(on, monkeypatch):
    on(A100)
    monkeypatch.setattr(portable_plan, "microseconds", lambda *_: 1e6)
    plan = cuda_plan.plan_cuda(problem_of(), "auto")
    assert plan.strategy == "epilogue"
    assert "100000" in plan.reason


def test_a_core_can_be_forced(on, monkeypatch):
    on(H200)
    for text, core in (("", "hopper"), ("auto", "hopper"), ("portable", "portable")):
        monkeypatch.setenv("EPINORM_CORE", text)
        assert cuda_plan.plan_cuda(problem_of(), "single").core == core
    monkeypatch.setenv("EPINORM_CORE", "hopper")
    assert cuda_plan.plan_cuda(problem_of(k=8191), "auto").strategy == "epilogue"


def test_another_value_is_an_error_in_one_sentence(monkeypatch):
    monkeypatch.setenv("EPINORM_CORE", "Hopper")
    message = "EPINORM_CORE is one of auto, hopper, portable, but got 'Hopper'"
    with pytest.raises(ValueError, match=f"^{message}$"):
        wanted_core()


def test_planes_are_taken_where_they_pay(on):
    for gpu in (H200, A100):
        on(gpu)
        planes_taken.cache_clear()
        case = problem_of(kind="highest", training=True)
        assert planes_taken(case, True, True, "portable") == (True, True)
        small = problem_of(32, 64, 8, 8, "highest", True)
        assert planes_taken(small, True, True, "portable") == (False, False)
    planes_taken.cache_clear()


@pytest.mark.parametrize("kind", ["high", "highest"])
def test_few_rows_read_the_planes_of_a_prepacked_weight(kind, on):
    """At `high` converting W in each call costs more than PyTorch's product, of which W is half as
    long once it is converted; at `highest` it is converted on its way."""
    on(H200)
    problem = problem_of(16, kind=kind)
    plan = cuda_plan.plan_cuda(problem, "auto")
    assert plan.strategy == ("epilogue" if kind == "high" else "single")
    assert ("the weight's made on the way" in plan.reason.split(";")[0]) == (kind == "highest")
    converted = cuda_plan.plan_cuda(dataclasses.replace(problem, prepacked=True), "auto")
    assert converted.strategy == "single"
    assert "W's kept from call to call" in converted.reason.split(";")[0]


@pytest.mark.parametrize("m", [1, 4, 16, 32, 64])
def test_w_is_converted_where_the_library_takes_longer(m, on):
    """8192 to 8192 at `highest` on an H200: 134 us for 103, 138 for 127, 132 for 214, 134 for 266,
    135 for 356 (eager 207, 195, 233, 301, 396)."""
    on(H200)
    strategy = cuda_plan.plan_cuda(problem_of(m, kind="highest"), "auto").strategy
    assert strategy == ("single" if m > 4 else "epilogue")


@pytest.mark.parametrize("gpu", [H200, A100])
@pytest.mark.parametrize("training", [False, True])
def test_fp32_sums_of_few_terms_are_left_as_they_are(gpu, training, on):
    """What planes leave out of 3 terms is more than fp32 loses by adding them up."""
    on(gpu)
    facts = dict(m=300, groups=8, training=training)
    plans = {
        (k, kind): cuda_plan.plan_cuda(problem_of(k=k, kind=kind, **facts), "auto")
        for k in (3, 15, 64) for kind in ("highest", "bfloat16")
    }  # fmt: skip
    assert all("as they are" in plans[k, "highest"].reason for k in (3, 15))
    assert all(plans[k, "highest"].strategy == "epilogue" for k in (3, 15))
    others = [plan.reason for (k, kind), plan in plans.items() if k == 64 or kind == "bfloat16"]
    assert not any("as they are" in reason for reason in others)
    bare = problem_of(k=3, kind="highest", chain="gelu", **facts)
    assert cuda_plan.plan_cuda(bare, "auto").strategy == "reference"
