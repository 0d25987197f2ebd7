"""Gradients added into the ones that are there: the same as autograd's own addition."""

import contextlib
import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from product_case import dtype_of, forced_core

import epinorm
from epinorm.backends.cuda.gemm.hopper.product import AddingProduct
from epinorm.backends.cuda.gemm.product import Product
from epinorm.backends.cuda.plan.hopper_product import TILES, ProductShape
from epinorm.backends.cuda.plan.hopper_product import Choice as TileChoice
from epinorm.operator import autograd
from epinorm.operator.calls import run_backward
from epinorm.tools.accuracy import allowed_error, relative_error

M, K, N, GROUPS = 2048, 4096, 4096, 256
"""Large enough that fp32 takes planes for dW, in sums that are not split."""

pytestmark = pytest.mark.gpu


def block(dtype=torch.float32, k=K, n=N, groups=GROUPS, strategy="auto"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n), nn.GroupNorm(groups, n), nn.SiLU())
    nn.init.normal_(model[1].weight, 1.0, 0.2)
    return epinorm.fuse(model.to("cuda", dtype), strict=True, strategy=strategy)


def batch(dtype=torch.float32, seed=0, m=M, k=K, n=N):
    torch.manual_seed(seed)
    x, dy = torch.randn(m, k, device="cuda"), torch.randn(m, n, device="cuda")
    return x.to(dtype), dy.to(dtype)


def weight_of(model):
    return next(p for p in model.parameters() if p.dim() == 2)


def step(model, x, dy, **options):
    model(x).backward(dy, **options)


def two_steps(model, batches, inside):
    """The gradients after two micro-batches, the second one within accumulate_in_place or not."""
    model.zero_grad(set_to_none=True)
    step(model, *batches[0])
    kept = weight_of(model).grad
    with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
        step(model, *batches[1])
    assert weight_of(model).grad is kept
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def added(monkeypatch):
    """An entry for each time that was added in place. (A profiler sends calls another way.)"""
    found = []

    def noting(*arguments):
        computed = run_backward(*arguments)
        into = arguments[-1]
        found.extend("in place" for gradient in computed if gradient is into)
        return computed

    monkeypatch.setattr(autograd, "run_backward", noting)
    return found


def test_the_sum_is_what_autograd_adds_up_to(kind):
    """fp32: bit for bit. In 16 bit it is rounded once instead of twice."""
    dtype = dtype_of(kind)
    model = block(dtype)
    batches = [batch(dtype, seed) for seed in (1, 2)]
    usual, ours = (two_steps(model, batches, inside) for inside in (False, True))
    exact = copy.deepcopy(model).double()
    truth = two_steps(exact, [(x.double(), dy.double()) for x, dy in batches], False)
    by_library = forced_core() != "hopper"
    for name, right in truth.items():
        if dtype == torch.float32 and not by_library:
            assert torch.equal(ours[name], usual[name]), name
        allowed = allowed_error(relative_error(usual[name], right), dtype)
        assert relative_error(ours[name], right) <= allowed, name


def adds_itself(kind):
    """The portable core leaves its products of planes to autograd: at high PyTorch's is faster."""
    return kind != "highest" or forced_core() == "hopper"


def test_it_is_done_within_and_only_there(kind, added):
    dtype = dtype_of(kind)
    model, batches = block(dtype), [batch(dtype)] * 2
    two_steps(model, batches, False)
    assert added == []
    two_steps(model, batches, True)
    assert added == ["in place"] * adds_itself(kind)


def test_planes_are_added_by_our_own_kernel(precision, monkeypatch):
    if forced_core() != "hopper":
        pytest.skip("the portable core adds as autograd does")
    calls, original = [], AddingProduct.__call__
    monkeypatch.setattr(
        AddingProduct, "__call__", lambda *given: (calls.append(given), original(*given))[1]
    )
    two_steps(block(), [batch()] * 2, True)
    assert len(calls) == 1


def test_memory_for_one_gradient_is_saved(kind):
    """With few rows, so that memory peaks where dW is allocated."""
    dtype = dtype_of(kind)
    if not adds_itself(kind):
        pytest.skip("the portable core adds as autograd does")
    # By name: auto leaves so few rows to PyTorch at `high`.
    model, given = block(dtype, strategy="single"), batch(dtype, m=256)
    peaks = []
    for inside in (False, True):
        two_steps(model, [given, given], inside)  # compile
        gc.collect()  # what other tests have left would be given back meanwhile
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
            step(model, *given)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # At highest W's planes, as large as dW, are there until dW is allocated: nothing is gained.
    # At high they are half as large, and rows of both sides are there too. Else what the step needs
    # besides may be the more by then: half of dW is what is certain.
    saved = 0 if kind == "highest" else N * K * dtype.itemsize // 2
    if kind == "high":
        saved -= given[0].shape[0] * (N + K) * dtype.itemsize
    assert peaks[1] <= peaks[0] - saved


def test_what_planes_cannot_hold_is_added_in_fp32(precision):
    """A group whose dz is 1e-30 of the rest in half of the rows: its rows of dW are flagged. And a
    row of x that is: an index of the sum, so all of dW."""
    model = block()
    first, (x, dy) = batch(seed=1), batch(seed=2)
    dy[::2, :16] *= 1e-30
    small = x.index_fill(0, torch.tensor([13], device="cuda"), 1e-35)
    for spoilt in ((x, dy), (small, dy)):
        usual, ours = (two_steps(model, [first, spoilt], inside) for inside in (False, True))
        for name, gradient in usual.items():
            assert torch.equal(ours[name], gradient), name


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_and_nan_come_out_where_autograd_has_them(value, precision):
    """In one row and group of dy: in 16 rows of dW."""
    model = block()
    first, (x, dy) = batch(seed=1), batch(seed=2)
    dy[5, 9] = value
    usual, ours = (two_steps(model, [first, (x, dy)], inside) for inside in (False, True))
    for name, gradient in usual.items():
        assert torch.equal(ours[name].isfinite(), gradient.isfinite()), name
    assert 0 < ours[next(n for n in ours if ours[n].dim() == 2)].isfinite().sum() < N * K


def test_small_problems_whose_sums_are_split_add_up_too(kind):
    """dW of 512 x 256 from 16384 rows: its sums are split over blocks."""
    dtype, sizes = dtype_of(kind), {"k": 256, "n": 512}
    model = block(dtype, **sizes, groups=16)
    batches = [batch(dtype, seed, m=16384, **sizes) for seed in (1, 2)]
    usual, ours = (two_steps(model, batches, inside) for inside in (False, True))
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for name, gradient in usual.items():
        assert relative_error(ours[name], gradient.double()) <= limit, name


def test_a_weight_used_twice_in_one_graph(precision, added):
    model, (x, dy) = block(), batch()

    def run(inside):
        model.zero_grad(set_to_none=True)
        step(model, x, dy)
        with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
            (model(x) * dy + model(x * 0.5) * dy).sum().backward()
        return weight_of(model).grad.clone()

    usual, ours = run(False), run(True)
    assert added == ["in place"] * 2 * adds_itself(precision)
    assert relative_error(ours, usual.double()) <= 1e-6


# ---- streams, graphs, and what wraps a step; tests/test_accumulation.py has the rest ----


def test_another_stream(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    expected = weight_of(model).grad * 2
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with epinorm.accumulate_in_place(), torch.cuda.stream(side):
        step(model, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    assert added == ["in place"] * adds_itself("highest")
    assert torch.equal(weight_of(model).grad, expected)


def test_a_weight_used_on_two_streams(added):
    """Autograd adds the plain use's gradient on the stream of that use: behind our addition."""
    model, (x, dy) = block(), batch()
    weight, side = weight_of(model), torch.cuda.Stream()
    found = []
    for inside in (False, True):
        model.zero_grad(set_to_none=True)
        step(model, x, dy)
        side.wait_stream(torch.cuda.current_stream())
        with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
            with torch.cuda.stream(side):
                plain = (weight * weight).sum()
            y = model(x)
            torch.cuda.current_stream().wait_stream(side)
            torch.autograd.backward([y, plain], [dy, torch.ones_like(plain)])
        torch.cuda.synchronize()
        found.append(weight.grad.clone())
    assert added == ["in place"] * adds_itself("highest")
    assert relative_error(found[1], found[0].double()) <= 1e-6


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, added):
    model, (x, dy) = block(), batch()
    leaf = x.clone().requires_grad_()
    step(model, leaf, dy)
    expected = weight_of(model).grad * 2
    with epinorm.accumulate_in_place():
        checkpoint(model, leaf, use_reentrant=use_reentrant).backward(dy)
    assert added == ["in place"] * (use_reentrant and adds_itself("highest"))
    assert torch.equal(weight_of(model).grad, expected)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_autocast(low, added):
    """What multiplies is a copy of the weight in 16 bit, whose gradient is cast."""
    model, (x, dy) = block(), batch()
    found = []
    for inside in (False, True):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", low):
            for _ in range(2):
                with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
                    model(x).backward(dy)
        found.append(weight_of(model).grad)
    assert added == []
    assert torch.equal(*found)


def test_a_compiled_model():
    model, (x, dy) = block(), batch()
    compiled = torch.compile(model, fullgraph=True)
    step(model, x, dy)
    expected = weight_of(model).grad * 2
    with epinorm.accumulate_in_place():
        compiled(x).backward(dy)
    assert relative_error(weight_of(model).grad, expected.double()) <= 1e-6


def test_a_captured_micro_batch(precision, added):
    """Replays add up. A micro-batch before the capture has loaded the kernels."""
    model, (x, dy) = block(), batch()
    two_steps(model, [(x, dy)] * 2, True)
    step_gradient = weight_of(model).grad / 2
    weight_of(model).grad.zero_()
    added.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), epinorm.accumulate_in_place():
        step(model, x, dy)
    assert added == ["in place"] * adds_itself(precision)
    for _ in range(4):
        graph.replay()
    assert relative_error(weight_of(model).grad, 4 * step_gradient.double()) <= 1e-6


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_steps_on_the_second_gpu_have_the_bits_of_the_first(kind, added):
    """Forward, backward and addition, with the first one current."""
    dtype = dtype_of(kind)
    model, batches = block(dtype), [batch(dtype, seed) for seed in (1, 2)]
    first = two_steps(model, batches, True)
    elsewhere = [(x.to("cuda:1"), dy.to("cuda:1")) for x, dy in batches]
    second = two_steps(epinorm.fuse(copy.deepcopy(model).to("cuda:1")), elsewhere, True)
    assert added == ["in place"] * 2 * adds_itself(kind)
    for name, gradient in first.items():
        assert torch.equal(gradient.cpu(), second[name].cpu()), name


# ---- the kernel itself ----


@pytest.mark.skipif("torch.cuda.get_device_capability() != (9, 0)")
@pytest.mark.parametrize("major_k_a", [True, False])
@pytest.mark.parametrize(
    ("planes", "tile"), [(p, cost.tile) for p, costs in TILES.items() for cost in costs], ids=str
)
def test_every_tile_adds_what_it_would_store(planes, tile, major_k_a):
    """Ragged sizes; rows that are flagged stay, and all rows if an index of the sum is flagged."""
    rows, columns, length = 328, 520, 64 * 7 + (24 if major_k_a else 25)
    size = (rows, length) if major_k_a else (length, rows)
    a, b, low_a, low_b = (
        torch.randn(s, device="cuda").half() for s in (size, (length, columns)) * 2
    )
    operands = (a, low_a, b, low_b)
    scale = torch.exp2(torch.randint(-9, 9, (rows,), device="cuda").float())
    shape = ProductShape(rows, columns, length, planes)
    store = Product(shape, TileChoice(tile, 1, 0.0), major_k_a, a.device)
    fresh = store(0, lambda: operands, scale.data_ptr())
    add = AddingProduct(shape, tile, major_k_a, a.device)
    before = torch.randn(rows, columns, device="cuda")
    row_flags = (torch.rand(rows, device="cuda") < 0.2).to(torch.uint8)
    sum_flags = torch.zeros(length, dtype=torch.uint8, device="cuda")
    for flagged in (None, 0, length - 1):
        if flagged is not None:
            sum_flags.zero_()
            sum_flags[flagged] = 1
        result = before.clone()
        flags = row_flags.data_ptr(), sum_flags.data_ptr()
        add(0, lambda: operands, scale.data_ptr(), result, *flags)
        expected = before + fresh if flagged is None else before
        expected = torch.where(row_flags.bool()[:, None], before, expected)
        assert torch.equal(result, expected)
