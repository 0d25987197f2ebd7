"""How accurate strategy `single` is in fp32: the promise of internals/precision.md, row by row.

For every finite input, a row of the linear's output is within 2x eager's error of the float64 truth
or within 1e-6, whichever is larger; over ordinary data, heavy tails up to log-normal sigma = 4
included, within 1x, or 4 ulps as everywhere. The cases share two kernels: only values differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import ProductCase, make_product

import epinorm
from epinorm.tools.accuracy import allowed_error, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

M, K, CHANNELS, GROUPS = 130, 1024, 16, 16
N = CHANNELS * GROUPS
FLOOR = {"highest": 1e-6, "high": 1e-3}  # per row; TF32 rounds to 2^-11
KINDS = pytest.mark.parametrize("kind", ["highest", "high"])


def lognormal(shape: tuple[int, ...], sigma: float) -> Tensor:
    """Random signs, magnitudes exp(sigma * normal)."""
    signs = torch.randint(0, 2, shape, device="cuda") * 2.0 - 1
    return signs * torch.exp(sigma * torch.randn(shape, device="cuda"))


def case_of(kind: str, x: Tensor | None = None, weight: Tensor | None = None) -> ProductCase:
    case = make_product(M, K, CHANNELS, GROUPS, kind, training=True)
    if x is not None:
        case.inputs.x.copy_(x)
    if weight is not None:
        case.inputs.weight.copy_(weight)
    return case


def row_errors(result: Tensor, truth: Tensor) -> Tensor:
    """‖row − truth‖ / ‖truth‖ of every row; a truth of zeros gives ‖row‖."""
    norm = torch.linalg.vector_norm(truth, dim=1)
    error = torch.linalg.vector_norm(result.double() - truth, dim=1)
    return error / torch.where(norm > 0, norm, 1.0)


def check_promise(case: ProductCase, ratio: float = 2.0) -> None:
    """The linear's output row by row, and y as a whole, finite wherever eager's is."""
    found = case.ours()
    again = case.ours()
    assert torch.equal(found.y, again.y)
    truth, precision = case.truth, case.problem.precision
    assert truth["z"].isfinite().all(), "the case itself overflows"
    theirs = torch.stack([row_errors(y["z"], truth["z"]) for y in case.yardsticks]).amax(0)
    ours = row_errors(found.z, truth["z"])
    allowed = (ratio * theirs).clamp(min=FLOOR[precision])
    worst = (ours / allowed).nan_to_num(nan=float("inf")).argmax()
    assert bool((ours <= allowed).all()), (
        f"row {worst.item()}: error {ours[worst]:.3e}, eager {theirs[worst]:.3e}"
    )
    assert torch.equal(found.y.isfinite(), case.eager["y"].isfinite())


def check_ordinary(case: ProductCase) -> None:
    """No worse than eager over the whole matrix, in z and in y; and the promise for each row."""
    found = case.ours()
    for name in ("z", "y"):
        error = relative_error(getattr(found, name), case.truth[name])
        theirs = max(relative_error(y[name], case.truth[name]) for y in case.yardsticks)
        allowed = allowed_error(theirs, torch.float32)
        assert error <= allowed, f"{name}: {error:.3e}, eager {theirs:.3e}"
    check_promise(case)


# ---- ordinary data ----


@KINDS
@pytest.mark.parametrize("name", ["rand", "randn", "offset"])
def test_ordinary_data(name, kind):
    x = torch.rand(M, K, device="cuda") if name == "rand" else torch.randn(M, K, device="cuda")
    check_ordinary(case_of(kind, x + 1000 * (name == "offset")))


@KINDS
@pytest.mark.parametrize("sigma", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("where", ["x", "weight", "both"])
def test_heavy_tails(where, sigma, kind):
    x = lognormal((M, K), sigma) if where != "weight" else None
    weight = lognormal((N, K), sigma) if where != "x" else None
    check_ordinary(case_of(kind, x, weight))


HALF = 0.5
BENCHMARK = (1024, 8192, 512)
SMALLER = [(256, 1024, 64), (256, 4096, 64), (512, 8192, 64)]
"""m, k and groups of 16. Few output tiles: the library splits K and adds in short chains."""


@pytest.mark.parametrize("shape, ratio", [(BENCHMARK, HALF), *((s, 1.005) for s in SMALLER)])
@pytest.mark.parametrize("uniform", [False, True])
def test_highest_against_eager(shape, ratio, uniform):
    m, k, groups = shape
    case = make_product(m, k, 16, groups, "highest", training=True, uniform=uniform)
    found = case.ours()
    for name in ("z", "y"):
        error = relative_error(getattr(found, name), case.truth[name])
        theirs = relative_error(case.eager[name], case.truth[name])
        assert error <= ratio * theirs, f"{name}: {error:.3e}, eager {theirs:.3e}"


@pytest.mark.parametrize("k", [1024, 8192])
@pytest.mark.parametrize("uniform", [False, True])
def test_high_is_no_worse_than_tf32(k, uniform):
    case = make_product(512, k, 16, 64, "high", training=True, uniform=uniform)
    found = case.ours()
    for name in ("z", "y"):
        error = relative_error(getattr(found, name), case.truth[name])
        theirs = relative_error(case.eager[name], case.truth[name])
        assert error <= 1.005 * theirs, f"{name}: {error:.3e}, eager {theirs:.3e}"


# ---- the whole range of fp32 ----


@KINDS
@pytest.mark.parametrize("where", ["x", "weight", "both"])
def test_tails_of_sigma_8(where, kind):
    x = lognormal((M, K), 8.0) if where != "weight" else None
    weight = lognormal((N, K), 8.0) if where != "x" else None
    check_promise(case_of(kind, x, weight))


@KINDS
@pytest.mark.parametrize("outlier", [1e4, 1e6, 1e8, 1e12])
@pytest.mark.parametrize("against", ["ordinary", "zero"])
def test_one_outlier_in_a_row(outlier, against, kind):
    """Against a zero weight it contributes nothing, and all that counts lies far below it."""
    case = case_of(kind)
    case.inputs.x[3, 17] = outlier
    case.inputs.x[40:43, 900] = -outlier
    if against == "zero":
        case.inputs.weight[:, 17] = 0
        case.inputs.weight[:, 900] = 0
    check_promise(case)


@KINDS
@pytest.mark.parametrize("outlier", [1e4, 1e8, 1e12])
def test_one_outlier_in_a_row_of_the_weight(outlier, kind):
    case = case_of(kind)
    case.inputs.weight[5, 17] = outlier
    case.inputs.x[:, 17] = 0
    check_promise(case)


@KINDS
def test_rows_of_zeros(kind):
    case = case_of(kind)
    case.inputs.x[0] = 0
    case.inputs.x[77] = -0.0
    case.inputs.weight[9] = 0
    found = case.ours()
    assert not found.z[0].any()
    assert not found.z[77].any()
    assert not found.z[:, 9].any()
    check_promise(case)


@KINDS
@pytest.mark.parametrize("scale", [1e-40, 1e-43, 1e-38, 1e-30, 1e30, 1e36])
def test_rows_at_the_ends_of_the_range(scale, kind):
    case = case_of(kind)
    case.inputs.x[3] *= scale
    case.inputs.x[128:] *= scale
    check_promise(case)


@KINDS
def test_tiny_rows_against_huge_ones(kind):
    """Neither fits fp16's range, their products are ordinary."""
    case = case_of(kind)
    case.inputs.x[:65] *= 1e-30
    case.inputs.weight.mul_(1e30)
    case.inputs.x[65:] *= 1e-25
    check_promise(case)


@KINDS
@pytest.mark.parametrize("decades", [5, 15, 30])
def test_a_huge_range_inside_a_row(decades, kind):
    case = case_of(kind)
    exponents = (torch.rand(M, K, device="cuda") * 2 - 1) * decades
    case.inputs.x.mul_(10**exponents)
    check_promise(case)


@KINDS
def test_a_huge_range_that_the_weight_undoes(kind):
    """x falls by 40 decades along K and W rises by as many: every product is of size one."""
    case = case_of(kind)
    steps = torch.linspace(-18, 18, K, device="cuda")
    case.inputs.x.mul_(10**steps)
    case.inputs.weight.mul_(10**-steps)
    check_promise(case)


@KINDS
def test_alternating_signs_that_cancel(kind):
    """Products cancel in pairs up to a part in 10^4, far from each other in the sum."""
    case = cancelling(kind)
    order = torch.randperm(K, device="cuda")
    case.inputs.x.copy_(case.inputs.x[:, order].clone())
    case.inputs.weight.copy_(case.inputs.weight[:, order].clone())
    check_promise(case)


def test_neighbours_that_cancel():
    """Outside the promise: eager loses nothing, the planes their 23rd bit."""
    case = cancelling("highest")
    x, weight = case.inputs.x.double(), case.inputs.weight.double()
    terms = (x.square() @ weight.square().t()).sqrt()
    truth = case.truth["z"]
    bound = 2.0**-23 * torch.linalg.vector_norm(terms, dim=1)
    bound /= torch.linalg.vector_norm(truth, dim=1)
    assert (row_errors(case.ours().z, truth) <= bound).all()


def cancelling(kind: str) -> ProductCase:
    case = case_of(kind)
    x, weight = case.inputs.x, case.inputs.weight
    weight[:, 1::2] = weight[:, ::2]
    x[:, 1::2] = -x[:, ::2] * (1 + 1e-4 * torch.randn(M, K // 2, device="cuda"))
    return case


@KINDS
def test_a_value_that_vanishes_beside_its_row(kind):
    """2^60 against a zero weight, and what counts 2^170 below."""
    x = torch.zeros(M, K, device="cuda")
    x[:, 0] = 2.0**60
    x[:, 1:] = torch.randn(M, K - 1, device="cuda") * 2.0**-110
    case = case_of(kind, x)
    case.inputs.weight[:, 0] = 0
    check_promise(case)


@KINDS
@pytest.mark.parametrize("others", ["equal", "zero"])
def test_a_group_whose_channels_differ_by_an_element_that_is_not_held(others, kind):
    """y is made of what that element brings; beside zeros z is as well."""
    case = case_of(kind)
    weight = case.inputs.weight.view(GROUPS, CHANNELS, K)
    weight[:] = weight[:, :1].clone() if others == "equal" else 0.0
    weight[:, :, 17] = torch.randn(GROUPS, CHANNELS, device="cuda")
    case.inputs.x[:, 17] = 1e-12
    check_promise(case)


@KINDS
def test_nothing_else_changes_where_one_row_is_hard(kind):
    """The guard's own path touches the flagged row alone: the others keep their bits."""
    case = case_of(kind)
    easy = case.ours()
    case.inputs.x[50] *= 1e-35
    hard = case.ours()
    others = torch.arange(M, device="cuda") != 50
    for before, after in zip(easy.outputs, hard.outputs, strict=True):
        assert torch.equal(before[others], after[others])
    assert not torch.equal(easy.z[50], hard.z[50])


@KINDS
def test_a_cuda_graph_notices_rows_that_become_hard(kind):
    """Captured on ordinary values, replayed on hard ones: flags are read on the device."""
    case = case_of(kind)
    case.ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    case.inputs.x[7] *= 1e-36
    case.inputs.x[8, 3] = 1e12
    case.inputs.weight[:, 3] = 0
    case.inputs.weight[30] *= 1e-36
    graph.replay()
    expected = case.ours()
    for found, right in zip(captured.outputs, expected.outputs, strict=True):
        assert torch.equal(found, right)
    check_promise(case)


def test_a_sum_of_three_terms_that_cancels_is_as_accurate_as_eagers() -> None:
    """Found by fuzzing: planes had 8.6 times eager's error, where the sigmoid magnifies it."""
    torch.manual_seed(24421)
    ours, eager = [], []
    for _ in range(8):
        x = torch.rand(300, 3, device="cuda") * 2.0**12
        weight = torch.randn(2, 3, device="cuda")
        pre, norm = "sigmoid", epinorm.LayerNorm(eps=0.1)
        y = epinorm.linear_norm(x, weight, norm=norm, pre=pre)
        z = F.layer_norm(torch.sigmoid(F.linear(x, weight)), (2,), eps=0.1)
        exact = torch.sigmoid(F.linear(x.double(), weight.double()))
        truth = F.layer_norm(exact, (2,), eps=0.1)
        ours.append(y - truth)
        eager.append(z - truth)
    assert torch.cat(ours).norm() <= 1.01 * torch.cat(eager).norm() + 1e-6
