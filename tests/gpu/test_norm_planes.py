"""dz written once as planes: the gradients against float64 and eager, on inputs hard for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import matmul_precision, plane_products

from epinorm.backends.cuda.plan.norm_planes import beside_dx
from epinorm.backends.cuda.plane_products import PlaneProducts
from epinorm.chain import Chain
from epinorm.chain.reference import epilogue
from epinorm.problem import Forward, Inputs, Problem, Wanted
from epinorm.tools.verify import poisoned_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the Hopper core needs compute capability 9.0",
    ),
]

FLOOR = {"high": 1e-3, "highest": 1e-6}
"""The promise of internals/precision.md, of the terms' magnitude."""
EVERY = Wanted(True, True, True, True, True, ())
NAMES = ("dX", "dW", "dbias", "dgamma", "dbeta")


class Case(NamedTuple):
    problem: Problem
    inputs: Inputs
    kept: Forward
    dy: Tensor


def make(
    m: int, k: int, n: int, groups: int, precision: str, seed: int = 0, post: str = "silu"
) -> Case:
    torch.manual_seed(seed)
    gpu = {"device": "cuda"}
    problem = Problem(
        chain=Chain.parse(f"group_norm({groups})|{post}"),
        m=m, k=k, n=n, dtype=torch.float32, norm_dtype=torch.float32, out_dtype=torch.float32,
        has_bias=True, has_norm_weight=True, has_norm_bias=True, training=True,
        device=torch.device("cuda", 0), precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip
    x, weight = torch.rand(m, k, **gpu) + 0.5, torch.randn(n, k, **gpu) / k**0.5
    bias, gamma = 0.1 * torch.randn(n, **gpu), 1 + 0.2 * torch.randn(n, **gpu)
    beta = 0.2 * torch.randn(n, **gpu)
    z = (x.double() @ weight.double().t()).float()
    grouped = (z.double() + bias.double()).view(m, groups, -1)
    mean = grouped.mean(2)
    rstd = (grouped.var(2, unbiased=False) + problem.chain.norm.eps).rsqrt()  # type: ignore[operator]
    kept = Forward(z, z, mean.float(), rstd.float())
    inputs = Inputs(x, weight, bias, gamma, beta, ())
    return Case(problem, inputs, kept, torch.randn(m, n, **gpu))


def gradients(case: Case, into: Tensor | None = None, products: PlaneProducts | None = None):  # type: ignore[no-untyped-def]
    """dX, dW and the sums over rows; dz went straight to planes."""
    products = products or plane_products(case.problem, writes_planes=True)
    norm, dx, dw = products(case.inputs, [case.kept], case.dy, EVERY, None, into)
    if products.dz_planes is not None:
        launches = products.dz_planes.launches
        assert launches, "no kernel that writes dz as planes was asked for"
        assert None not in launches.values(), "no cluster holds these rows without spilling"
    return dx, dw, norm.bias, norm.norm_weight, norm.norm_bias


def any_flagged(case: Case) -> bool:
    """Whether the range guard has anything to do."""
    products = plane_products(case.problem, writes_planes=True)
    operands = products.operands(case.inputs, None)
    assert products.dz_planes is not None
    found = products.dz_planes(case.inputs, case.kept, case.dy, EVERY, operands, False)
    assert found is not None
    written = found[1]
    written.finish()
    flags = written.by_row.held
    at = written.any_flag - flags.data_ptr()
    return flags[at : at + 4].view(torch.int32).item() != 0


def by_pytorch(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same from the same z by autograd; and the terms that dX and dW are sums of."""
    x, weight, bias, gamma, beta = (t.to(dtype) for t in case.inputs[:5])
    leaves = [case.kept.z.to(dtype) + bias, gamma, beta]
    leaves = [t.requires_grad_() for t in leaves]
    y = epilogue(leaves[0], case.problem.chain, leaves[1], leaves[2], ())
    dz, dgamma, dbeta = torch.autograd.grad(y, leaves, case.dy.to(dtype))
    with matmul_precision(case.problem.precision):
        dx, dw = dz @ weight, dz.t() @ x
    # dz is itself a difference of terms as large as its group's: where it nearly cancels, it is no
    # better than they are, in whatever order they are added up.
    grouped = dz.view(case.problem.m, case.problem.groups, -1)
    size = torch.maximum(grouped.abs(), grouped.square().mean(2, keepdim=True).sqrt()).view_as(dz)
    terms = size @ weight.abs(), size.t() @ x.abs()
    return dx, dw, dz.sum(0), dgamma, dbeta, *terms


def check(case: Case) -> None:
    """Each row of dX and dW keeps the promise, the sums are as good as eager's; twice the same."""
    like = [case.kept.z, case.inputs.x, case.inputs.weight]
    with poisoned_memory([torch.empty_like(t) for t in like]):
        found = gradients(case)
    truth, eager = by_pytorch(case, torch.float64), by_pytorch(case, torch.float32)
    for i in range(2):
        size = truth[5 + i].norm(dim=1)
        error = (found[i].double() - truth[i]).norm(dim=1)
        allowed = 1.1 * (eager[i].double() - truth[i]).norm(dim=1)
        allowed = torch.maximum(allowed, FLOOR[case.problem.precision] * size)
        worst = ((error - allowed) / size.clamp(min=1e-300)).max()
        assert (error <= allowed).all(), f"{NAMES[i]} is off by {worst:.2e} of its terms too much"
    for i in range(2, 5):
        error, of_eager = ((t[i].double() - truth[i]).norm() for t in (found, eager))
        size = truth[i].norm()
        assert error <= max(1.5 * of_eager, 1e-6 * size), (
            f"{NAMES[i]} is off by {error:.2e} of {size:.2e}, eager by {of_eager:.2e}"
        )
    for name, first, second in zip(NAMES, found, gradients(case), strict=True):
        assert torch.equal(first, second), (
            f"{name} of a second run has {(first != second).sum()} other values, "
            f"by up to {(first - second).abs().max():.2e} of {first.abs().max():.2e}"
        )


SIZES = [
    (256, 264, 512, 32),
    (1000, 520, 1048, 131),  # groups of 8, ragged everything
    (77, 1024, 8192, 512),
    (33, 128, 4096, 1024),  # groups of 4
    (130, 256, 3072, 128),  # groups of 24
    (256, 512, 4096, 8),  # a group is a block
    (64, 256, 2048, 1),
    (3, 64, 1024, 64),
    (2048, 512, 768, 48),
    (1024, 128, 8192, 512),  # many rows a cluster
    (3000, 64, 2048, 128),  # and a block by itself
    (600, 64, 4096, 8),  # and a team of a block
]


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, int, int, int], precision: str) -> None:
    check(make(*sizes, precision))


@pytest.mark.parametrize("m", [3, 130, 511, 1000])
def test_flags_scales_and_sums_are_filled_beside_dx(m: int) -> None:
    """Where W is much larger than dz, the kernel that does it runs beside dX's last tiles."""
    case = make(m, 2048, 3072, 192, "high")
    assert beside_dx(case.problem, 1)
    for change in (None, rows_of_all_sizes, out_of_range if m > 5 else None, flagged_weight):
        if change is not None:
            change(case)
        check(case)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("scale", [2.0**-9, 1.0, 2.0**9])
def test_ordinary_values_of_any_size_flag_nothing(scale: float, precision: str) -> None:
    case = make(256, 264, 512, 32, precision)
    case.inputs.weight.mul_(scale)  # z stays: its scale is what matters
    assert not any_flagged(case)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_sparse_gradients_of_ordinary_values_flag_nothing(precision: str) -> None:
    """A group that has a single one is as small as that, or cancels all but one element."""
    flagged = 0
    for seed in range(4):
        case = make(1024, 64, 8192, 512, precision, seed, post="leaky_relu(0.01)|scale(2)")
        case.dy.mul_(torch.rand_like(case.dy) < 0.1)
        flagged += any_flagged(case)
    assert flagged == 0


def sparse(case: Case) -> None:
    case.dy.mul_(torch.rand_like(case.dy) < 0.05)


def zero_rows_of_a_small_weight(case: Case) -> None:
    """dz is largest, in W's scales, where it counts nothing in dX."""
    case.inputs.weight.mul_(2.0**-38)
    case.inputs.weight[16:32] = 0


def spread(case: Case) -> None:
    case.dy.mul_(torch.exp2(-40 * torch.rand(case.problem.m, 1, device="cuda")))


def outlier(case: Case) -> None:
    case.dy[7] *= 2.0**12


def lonely(case: Case) -> None:
    case.dy[7] *= 2.0**35


def zero_rows(case: Case) -> None:
    case.dy[::3] = 0


def all_zero(case: Case) -> None:
    case.dy.zero_()


def tiny_channel(case: Case) -> None:
    """A group that only a row with a tiny gradient carries."""
    case.dy[:, 16:32] = 0
    case.dy[5] *= 2.0**-38
    case.dy[5, 16:32] = 2.0**-38


def small_channels(case: Case) -> None:
    case.inputs.norm_weight.mul_(torch.exp2(-torch.arange(case.problem.n, device="cuda") / 16))


def within_a_row(case: Case) -> None:
    case.dy[11, :64] *= 2.0**-35


def out_of_range(case: Case) -> None:
    case.dy[3] *= 1e-30
    case.dy[5, 9] = 1e30


def flagged_weight(case: Case) -> None:
    case.inputs.weight[11, 0] = 1e30


def flagged_x(case: Case) -> None:
    case.inputs.x[13] *= 1e-35


def zero_x(case: Case) -> None:
    case.inputs.x[13] = 0


def small_first_row(case: Case) -> None:
    """Every cluster takes the power of row 0 for the one that suits most."""
    case.dy[0] *= 2.0**-20


def large_first_row(case: Case) -> None:
    case.dy[0] *= 2.0**20


def first_row_out_of_range(case: Case) -> None:
    case.dy[0] *= 1e-30


def rows_of_all_sizes(case: Case) -> None:
    """x's and dz's rows, whose scales make up a power together."""
    steps = torch.arange(case.problem.m, device="cuda")
    case.inputs.x.mul_(torch.exp2(steps % 5 - 2.5)[:, None])
    case.dy.mul_(torch.exp2(steps % 7 / 2 - 1.5)[:, None])


def zero_row_among_small_x(case: Case) -> None:
    """Zeros have a scale, but no part in dW."""
    case.inputs.x.mul_(2.0**-30)
    case.inputs.x[13] = 0


def zero_row_of_x_beside_an_outlier(case: Case) -> None:
    case.inputs.x[13] = 0
    case.dy[7] *= 2.0**40
    case.dy[13] *= 2.0**30
    case.dy[7, 16:32] = 0


HARD: list[Callable[[Case], None]] = [
    *(spread, outlier, lonely, zero_rows, all_zero, tiny_channel, small_channels),
    *(within_a_row, sparse, zero_rows_of_a_small_weight),
    *(small_first_row, large_first_row, first_row_out_of_range, rows_of_all_sizes),
    *(out_of_range, flagged_weight, flagged_x, zero_x),
    *(zero_row_among_small_x, zero_row_of_x_beside_an_outlier),
]


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("change", HARD, ids=lambda change: change.__name__)
def test_hard_inputs(change: Callable[[Case], None], precision: str) -> None:
    case = make(256, 264, 512, 32, precision)
    change(case)  # z and its statistics stay: any will do
    check(case)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_more_rows_a_cluster_than_a_word_has_bits(precision: str) -> None:
    case = make(3300, 64, 8192, 512, precision)
    for row in (40, 1700, 3290, 3299):
        case.dy[row, row % 500] = 1e30
    check(case)


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_an_element_of_x_that_is_not_held_spoils_its_column_of_dw(precision: str) -> None:
    case = make(256, 264, 512, 32, precision)
    case.inputs.x[:, 5] = 0
    without = gradients(case)
    case.inputs.x[13, 5] = 1.2345 * 2.0**-45  # more bits than two planes have there
    assert any_flagged(case)
    found, truth = gradients(case), by_pytorch(case, torch.float64)[1][:, 5]
    assert torch.equal(found[0], without[0])
    assert (found[1][:, 5].double() - truth).norm() <= 1e-5 * truth.norm()
    others = torch.arange(264, device="cuda") != 5
    assert torch.equal(found[1][:, others], without[1][:, others])


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_come_out_where_eager_has_them(value: float, precision: str) -> None:
    case = make(256, 264, 512, 32, precision)
    case.dy[4, 6] = value
    found, eager = gradients(case), by_pytorch(case, torch.float32)
    truth = by_pytorch(case, torch.float64)
    for ours, theirs, right in zip(found[:2], eager[:2], truth[:2], strict=True):
        finite = theirs.isfinite()
        assert torch.equal(ours.isfinite(), finite)
        error = (ours.double() - right)[finite].norm() / right[finite].norm()
        assert error <= FLOOR[precision]


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("sizes", [(256, 264, 512, 32), (130, 2048, 3072, 192)], ids=str)
def test_a_graph_does_the_right_thing_on_other_values(
    sizes: tuple[int, int, int, int], precision: str
) -> None:
    case = make(*sizes, precision)
    products = plane_products(case.problem, writes_planes=True)
    ordinary = case.dy.clone()
    gradients(case, products=products)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(case, products=products)
    for change in (None, out_of_range, tiny_channel, None):
        case.dy.copy_(ordinary)
        if change is not None:
            change(case)
        graph.replay()
        for replayed, now in zip(captured, gradients(case, products=products), strict=True):
            assert torch.equal(replayed, now)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("change", [None, out_of_range], ids=["ordinary", "flagged"])
def test_dw_is_added_to_what_is_there(
    change: Callable[[Case], None] | None, precision: str
) -> None:
    case = make(1024, 1024, 2048, 128, precision)
    if change is not None:
        change(case)
    dw = gradients(case)[1]
    before = torch.randn_like(dw)
    into = before.clone()
    added = gradients(case, into)[1]
    assert added is into
    assert torch.equal(into, before + dw)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("sizes", [(2048, 2048, 2048, 128), (512, 4096, 4096, 256)], ids=str)
def test_it_takes_no_more_memory_than_to_split_dz(
    sizes: tuple[int, int, int, int], adds: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z and its statistics are the call's own, which frees them. Flags in a buffer of their own let
    the norm kernel's scratch go early where dz is split: a few KiB of 90 MB."""
    case = make(*sizes, precision)
    into = torch.zeros_like(case.inputs.weight) if adds else None
    peaks = []
    for writes_planes in (True, False):
        products = plane_products(case.problem, writes_planes=writes_planes)
        gradients(case, into, products)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        z = case.kept.z.clone()
        kept = [Forward(z, z, *(t.clone() for t in case.kept[2:4]))]
        del z
        found = products(case.inputs, kept, case.dy, EVERY, None, into)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del found
    assert peaks[0] <= peaks[1] + 4096
