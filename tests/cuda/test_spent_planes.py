"""x's planes over x: launches and the tensors they read, memory, text; values in tests/gpu."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epinorm.backends import prepack
from epinorm.backends.cuda import executable
from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.fp32.planes import split_over_source, split_shape
from epinorm.backends.cuda.fp32.rescue import rescue_source
from epinorm.backends.cuda.gemm.forward import _launch_of
from epinorm.backends.cuda.plan.plane_layout import LONGEST_KEPT_ROW, PlaneLayout
from epinorm.backends.cuda.plan.planes import over_x, product_of
from epinorm.backends.cuda.plan.steps import completed
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.problem import Inputs, Layout, Plan, Problem

sys.path.insert(0, str(Path(__file__).parent))

from problems import problem_of

pytestmark = pytest.mark.usefixtures("kept_figures")

M, K, N = 24, 64, 96
LAYER_NORM, RELU = ("layer_norm|silu", "planes"), ("relu", "single")
BOTH = pytest.mark.parametrize(("text", "strategy"), [LAYER_NORM, RELU])


def problem(text: str, k: int = K, **changes: Any) -> Problem:
    found = problem_of(M, k, N, 1, kind="highest", chain=text, parameters=(True, False, False))
    changes = {"device": torch.device("cpu"), "spends_x": True, **changes}
    return replace(found, **changes)


def tensors(k: int = K) -> Inputs:
    return Inputs(torch.randn(M, k), torch.randn(N, k), torch.randn(N), None, None, ())


def expected(inputs: Inputs, text: str) -> Tensor:
    x, weight, bias = (t.double() for t in inputs[:3])
    return linear_norm(x, weight, bias, Chain.parse(text), None, None, [])


def layout(inputs: Inputs) -> Layout:
    return Layout(inputs.x.stride(0), inputs.weight.stride(0), (M, N))


def check(run: Any, inputs: Inputs, text: str, spends: bool) -> None:
    truth, before = expected(inputs, text), [t.clone() for t in inputs[:3]]
    y = run(inputs).y
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)
    assert inputs.x.isnan().all() if spends else torch.equal(inputs.x, before[0])
    assert torch.equal(inputs.weight, before[1])


@BOTH
def test_x_is_written_over_by_as_many_launches(text, strategy, gpu: Any) -> None:
    run, _ = executable._forward(problem(text), Plan(strategy, "", "hopper"), layout(tensors()))
    for _ in range(3):
        check(run, tensors(), text, True)
        assert gpu.kinds()[:3] == ["split_over", "linear_norm", "rescue"]


@BOTH
def test_where_it_cannot_be_it_stays(text, strategy, gpu: Any) -> None:
    plan = Plan(strategy, "", "hopper")
    odd = torch.empty(M * K + 1)[1:].view(M, K).normal_()
    apart = torch.randn(M, K + 4)[:, :K]
    odd_weight = torch.empty(N * K + 1)[1:].view(N, K).normal_()
    for change in ({"x": odd}, {"x": apart}, {"weight": odd_weight}):
        inputs = tensors()._replace(**change)
        run, _ = executable._forward(problem(text), plan, layout(inputs))
        check(run, inputs, text, False)
        assert gpu.kinds()[:3] == ["split", "linear_norm", "rescue"]
    inputs = tensors(100)
    run, _ = executable._forward(problem(text, 100), plan, layout(inputs))
    check(run, inputs, text, False)
    assert gpu.kinds()[0] == "split"


def test_an_x_of_any_leading_dimensions(gpu: Any) -> None:
    inputs = tensors()
    truth = expected(inputs, "relu")
    wide = Layout(K, K, (2, 3, 4, N))
    run, _ = executable._forward(problem("relu"), Plan("single", "", "hopper"), wide)
    y = run(inputs._replace(x=inputs.x.view(2, 3, 4, K))).y
    torch.testing.assert_close(y.view(M, N).double(), truth, rtol=1e-4, atol=1e-4)
    assert gpu.kinds()[0] == "split_over"


def test_what_spends_x() -> None:
    spent = problem("relu")
    assert over_x(spent)
    assert over_x(product_of(problem("layer_norm")))
    for changes in ({"spends_x": False}, {"training": True}, {"k": 100}, {"k": 8256}):
        assert not over_x(replace(spent, **changes))


@pytest.mark.parametrize("rows", [1, 1000, 1 << 20])
def test_whole_rows_are_held_in_registers(rows: int) -> None:
    for columns in range(8, LONGEST_KEPT_ROW + 1, 8):
        shape = split_shape(rows, columns, 132)
        assert shape.threads * shape.vectors * 4 >= columns


@BOTH
def test_recorded_passes_and_graphs(text, strategy, gpu: Any) -> None:
    inputs = [tensors() for _ in range(2)]
    made = CudaExecutable(problem(text), Plan(strategy, "", "hopper"), layout(inputs[0]))
    for _ in range(60):
        for at in inputs:
            at.x.normal_()
            check(lambda given: made.forward(*given), at, text, True)
        if gpu.graph_launches > 1:
            break
    assert gpu.replayed > 0
    assert gpu.graph_launches > 1


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
@BOTH
def test_beside_a_prepacked_weight(text, strategy, gpu: Any, streams: None) -> None:
    inputs = tensors()
    run, _ = executable._forward(problem(text), Plan(strategy, "", "hopper"), layout(inputs))
    with prepack.prepacked(inputs.weight):
        for first in (["split", "split_over"], ["split_over"]):
            check(run, inputs._replace(x=torch.randn(M, K)), text, True)
            assert gpu.kinds()[: len(first)] == first


@pytest.mark.parametrize("kind", ["highest", "high"])
@pytest.mark.parametrize("packed", [False, True])
def test_memory_is_less_by_xs_planes(kind: str, packed: bool, gpu: Any) -> None:
    """And as the plan says; inference has no lists of columns, which backward products read."""
    m, k, n = 256, 512, 512
    ordinary = replace(
        problem_of(m, k, n, 1, kind=kind, chain="relu"), prepacked=packed, spends_x=False
    )
    spent = replace(ordinary, spends_x=True)
    rows = 0 if packed else n
    layouts = [PlaneLayout(ordinary.planes, k, m, rows, o, lists=False) for o in (False, True)]
    for found, halved in zip(layouts, (m + rows, rows), strict=True):
        assert found.nbytes == ordinary.planes * 2 * halved * k + (4 + 1) * (m + rows)
    for over, lists in ((False, 16), (True, 0)):
        with_lists = PlaneLayout(ordinary.planes, k, m, rows, over)
        assert with_lists.nbytes == layouts[over].nbytes + lists * (m + rows)
    plans = [completed(p, Plan("single", "", "hopper")) for p in (ordinary, spent)]
    if plans[0].forward[0].kernel == "split":
        bound = [_launch_of(p, "hopper", packed).split for p in (ordinary, spent)]
        assert [each.nbytes for each in bound] == [each.nbytes for each in layouts]
        assert [p.scratch[0].nbytes for p in plans] == [each.nbytes for each in layouts]
        assert plans[1].forward[0].kernel == "split_over"
        assert "x's planes over x" in str(plans[1])
    else:  # TF32
        assert plans[0] == plans[1]


def test_planes_together_have_no_more_bits_than_fp32() -> None:
    """So the guard rounds nothing where it puts x together; magnitudes over all of fp16's range."""
    value = (torch.rand(1 << 20) + 1) * 2.0 ** (14 - 44 * torch.rand(1 << 20))
    high = value.half()
    low = ((value - high.float()) * 2048).half()
    made = high.float() + low.float() * 2.0**-11
    assert torch.equal(made.double(), high.double() + low.double() / 2048)
    for scale in (2.0**-74, 2.0**46):
        assert torch.equal((made * scale).double(), made.double() * scale)


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("columns", [8, 64, 192, 1024, 2048, 8192])
@pytest.mark.parametrize("rows", [100, 1 << 20])
def test_splitting_does_not_spill(planes: int, columns: int, rows: int) -> None:
    result = compiled(split_over_source(planes, columns, "sm_90a", rows))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
    assert result.registers <= 64


@pytest.mark.parametrize("kind", ["highest", "high"])
@pytest.mark.parametrize(
    ("chain", "channels", "groups", "splits"),
    [
        ("relu", 2048, 1, 8),
        ("mul_channel|gelu|add_residual", 768, 1, 4),
        ("group_norm({groups})|silu", 256, 8, 1),
        ("layer_norm|gelu", 2048, 1, 1),
    ],
)
def test_the_guard_does_not_spill(chain, channels, groups, splits, kind) -> None:
    found = problem_of(1024, 1024, channels, groups, kind=kind, chain=chain)
    result = compiled(rescue_source(found, True, "sm_90a", splits=splits, spent=True))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log
