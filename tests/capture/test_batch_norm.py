"""BatchNorm in training, captured: eager's y, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import epinorm

K, N, ROWS = 12, 16, 10

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two Linears, two BatchNorms, and whatever ``run`` makes of them."""

    def __init__(self, run: Forward, **norm: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(K, N), nn.Linear(N, N, bias=False)
        self.na, self.nb = nn.BatchNorm1d(N, **norm), nn.BatchNorm1d(N, **norm)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plain(m: Net, x: Tensor) -> Tensor:
    return m.nb(m.b(torch.relu(m.na(m.a(x)))).tanh())


def operands(m: Net, x: Tensor) -> Tensor:
    h = m.na(m.a(x) + 2.0)
    return F.gelu(m.nb(m.b(h) + h)) * m.na.weight + h


def one_twice(m: Net, x: Tensor) -> Tensor:
    """The running statistics are changed by the first call, then by the second."""
    return F.silu(m.na(m.a(x))) + m.na(m.b(m.a(x)))


def entwined(m: Net, x: Tensor) -> Tensor:
    """The second call comes before what stands behind the first."""
    first, second = m.na(m.a(x)), m.na(m.b(m.a(x)))
    return F.gelu(first) + torch.relu(second)


def read_behind(m: Net, x: Tensor) -> Tensor:
    """The running statistics are read between a norm and its activation."""
    h = m.na(m.a(x))
    seen = m.na.running_mean * 2
    return torch.relu(h) + seen


def once_ours(m: Net, x: Tensor) -> Tensor:
    """PyTorch's own call of the same module saves the statistics, and is no chain."""
    return m.na(m.na(m.a(x)).cumsum(1)) + m.na(m.b(m.a(x)))


def read_as_operand(m: Net, x: Tensor) -> Tensor:
    return m.na(m.a(x)) + m.na.running_var


def of_tokens(m: Net, x: Tensor) -> Tensor:
    """Rows of three dimensions are those of a matrix for BatchNorm: LeViT's, point clouds'."""
    h = torch.relu(m.na(m.a(x.unflatten(0, (2, -1))).flatten(0, 1)).unflatten(0, (2, -1)))
    return m.nb((m.b(h) + h).view(-1, N)).tanh()


def checkpointed(m: Net, x: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        return m.nb(m.b(h))

    h = torch.relu(m.na(m.a(x)))
    return checkpoint(part, h, use_reentrant=False).sin()  # type: ignore[no-any-return]


NETS: dict[str, tuple[Forward, dict[str, Any], list[str]]] = {
    "plain": (plain, {}, ["batch_norm(1e-05)|relu", "tanh|batch_norm(1e-05)"]),
    "operands": (
        operands,
        {"momentum": 0.3, "eps": 1e-3},
        [
            "add(2)|batch_norm(0.001)",
            "add_residual|batch_norm(0.001)|gelu|mul_channel|add_residual",
        ],
    ),
    "keeps nothing": (
        plain,
        {"momentum": 1.0},
        ["batch_norm(1e-05)|relu", "tanh|batch_norm(1e-05)"],
    ),
    "keeps all": (plain, {"momentum": 0.0}, ["batch_norm(1e-05)|relu", "tanh|batch_norm(1e-05)"]),
    "not affine": (plain, {"affine": False}, ["batch_norm(1e-05)|relu", "tanh|batch_norm(1e-05)"]),
    "no running statistics": (
        plain,
        {"track_running_stats": False},
        ["batch_norm(1e-05)|relu", "tanh|batch_norm(1e-05)"],
    ),
    "one twice": (one_twice, {}, ["batch_norm(1e-05)|silu", "batch_norm(1e-05)|add_residual"]),
    "entwined": (entwined, {}, ["batch_norm(1e-05)", "batch_norm(1e-05)|relu|add_residual"]),
    "read behind": (read_behind, {}, ["batch_norm(1e-05)"]),
    "once ours": (once_ours, {}, ["batch_norm(1e-05)", "batch_norm(1e-05)|add_residual"]),
    "read as an operand": (read_as_operand, {}, ["batch_norm(1e-05)"]),
    "of tokens": (of_tokens, {}, ["batch_norm(1e-05)|relu", "add_residual|batch_norm(1e-05)|tanh"]),
    "checkpointed": (checkpointed, {}, ["batch_norm(1e-05)", "batch_norm(1e-05)|relu"]),
}


def step(model: Callable[..., Any], x: Tensor) -> list[Tensor]:
    """y and x's gradient of a call."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.sin().sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


def compare(model: nn.Module, other: Any, of_other: nn.Module, **tolerance: float) -> None:
    """Four steps, one of them in eval, and a call without gradients leave the same."""
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-9}
    for training in (True, True, False, True):
        for each in (model, of_other):
            each.train(training)
            each.zero_grad()
        x = torch.randn(ROWS, K, dtype=torch.float64) * 2 + 1
        found, expected = step(other, x), step(model, x)
        for pairs in (
            zip(found, expected, strict=True),
            *(
                zip(getattr(of_other, kind)(), getattr(model, kind)(), strict=True)
                for kind in ("parameters", "buffers")
            ),
        ):
            for ours, theirs in pairs:
                torch.testing.assert_close(ours.detach(), theirs.detach(), **tolerance)
                if theirs.grad is not None:
                    torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x), **tolerance)
    torch.testing.assert_close(list(of_other.buffers()), list(model.buffers()), **tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", NETS)
def test_fused_is_eager(name: str) -> None:
    run, norm, chains = NETS[name]
    model = Net(run, **norm).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    compare(model, fused, fused)
    rows = [row for row in epinorm.explain(fused).rows if "batch_norm" in row.chain and row.fused]
    assert [row.chain for row in rows if row.fused] == chains


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", [name for name in NETS if name != "checkpointed"])
def test_compiled_is_eager(name: str) -> None:
    run, norm, _ = NETS[name]
    model = Net(run, **norm).double()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="epinorm", options={"strategy": "reference"})
    compare(model, compiled, other)


@pytest.mark.usefixtures("interpreted")
def test_a_compiled_checkpoint_changes_statistics_as_torch_compile_does() -> None:
    """Once, where eager's second run changes them again."""
    model = Net(checkpointed).double()
    other = copy.deepcopy(model)
    x = torch.randn(ROWS, K, dtype=torch.float64)
    step(torch.compile(model, backend="aot_eager"), x)
    step(torch.compile(other, backend="epinorm", options={"strategy": "reference"}), x)
    torch.testing.assert_close(list(other.buffers()), list(model.buffers()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model_changes_statistics_twice(reentrant: bool) -> None:
    """The second run ends as soon as what is wanted was saved: that is in the last norm's call."""
    model = Net(lambda m, x: m.nb(m.b(m.na(m.a(x))))).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")

    def run(each: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(each, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    for _ in range(3):
        x = torch.randn(ROWS, K, dtype=torch.float64)
        found, expected = step(run(fused), x), step(run(model), x)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(dict(fused.named_buffers()), dict(model.named_buffers()))


def test_one_row_is_pytorchs_own_error_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N))
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    fused(torch.randn(4, K))
    before = copy.deepcopy(fused.state_dict())
    for each in (fused, torch.compile(fused, backend="epinorm")):
        with pytest.raises(Exception, match="Expected more than 1 value per channel when training"):
            each(torch.randn(1, K))
    del before["1.num_batches_tracked"]  # which eager has counted by then
    after = fused.state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def test_statistics_in_16_bits_are_as_eager_rounds_them() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N)).bfloat16()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for _ in range(5):
        x = torch.randn(64, K).bfloat16()
        torch.testing.assert_close(fused(x), model(x))
        for ours, theirs in zip(fused[1].buffers(), model[1].buffers(), strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8)


def test_statistics_of_fp32_behind_16_bits() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N, affine=False)).bfloat16()
    model[1].float()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.randn(64, K).bfloat16()
    torch.testing.assert_close(fused(x), model(x), rtol=2**-7, atol=2**-7)
    for ours, theirs in zip(fused[1].buffers(), model[1].buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def left(model: nn.Module, x: Tensor, **settings: Any) -> str:
    """Why the only place of a model is left to PyTorch."""
    plainly = copy.deepcopy(model)
    fused = epinorm.fuse(model, **settings)
    torch.testing.assert_close(fused(x), plainly(x), rtol=0, atol=0)
    torch.testing.assert_close(fused.state_dict(), plainly.state_dict(), rtol=0, atol=0)
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    return row.reason


def test_what_is_not_taken_says_why() -> None:
    def of(norm: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(K, N), norm)

    x = torch.randn(ROWS, K)
    reference: Any = {"strategy": "reference"}
    assert "rounding='eager'" in left(of(nn.BatchNorm1d(N)), x, rounding="eager", **reference)
    heads = nn.Sequential(nn.Linear(K, N), nn.Unflatten(1, (4, 4)), nn.BatchNorm1d(4))
    assert "not (M, N)" in left(heads, x, **reference)
    assert "PyTorch's own here: on a CPU" in left(of(nn.BatchNorm1d(N)), x)
    assert "does not run on a cpu device" in left(of(nn.BatchNorm1d(N)), x, strategy="planes")


@pytest.mark.filterwarnings("ignore")
def test_momentum_that_changes_is_left_alone() -> None:
    """No number that a graph could hold: Dynamo leaves the call to Python."""
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N, momentum=None)).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    compare(model, fused, fused)
    assert not any(row.fused for row in epinorm.explain(fused).rows)


def test_a_momentum_that_is_scheduled_is_followed() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N), nn.ReLU()).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for momentum in (0.1, 0.2, 0.3, 0.3, 0.05):
        x = torch.randn(ROWS, K, dtype=torch.float64)
        for each in (model, fused):
            each[1].momentum = momentum
        torch.testing.assert_close(fused(x), model(x))
        torch.testing.assert_close(fused.state_dict(), model.state_dict())


def test_what_enters_it_is_no_second_result() -> None:
    """The chain has the batch's statistics as one already."""

    def run(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.na(h) + h

    model = Net(run).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    compare(model, fused, fused)
    (row,) = [row for row in epinorm.explain(fused).rows if "batch_norm" in row.chain]
    assert "used more than once" in row.reason


def test_under_autocast_it_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N))
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x = torch.randn(ROWS, K)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=0)
    torch.testing.assert_close(fused.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not epinorm.explain(fused).rows[0].fused


def test_another_number_of_rows_is_no_other_capture() -> None:
    model = Net(plain).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    for rows in (5, 9, 17, 33):
        x = torch.randn(rows, K, dtype=torch.float64)
        for ours, theirs in zip(step(fused, x), step(model, x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(list(fused.buffers()), list(model.buffers()))


def test_dropout_behind_it_is_of_the_chain_and_drops_as_much() -> None:
    model = nn.Sequential(nn.Linear(K, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.25))
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    y, expected = fused(x := torch.randn(64, K)), model[:3](x)
    kept = y != 0
    assert 0.7 < (kept.sum() / (expected > 0).sum()).item() < 0.8
    torch.testing.assert_close(y[kept], expected[kept] / 0.75, rtol=1e-4, atol=1e-5)
    assert epinorm.explain(fused).rows[0].chain == "batch_norm(1e-05)|relu|dropout(0.25)"


@pytest.mark.filterwarnings("error:.*degrees of freedom", "error:.*may not alias")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("track", [True, False])
def test_no_rows_leave_the_statistics(track: bool) -> None:
    model = Net(plain, track_running_stats=track).double()
    fused, other = (copy.deepcopy(model) for _ in range(2))
    fused = epinorm.fuse(fused, strategy="reference")
    compiled = torch.compile(other, backend="epinorm", options={"strategy": "reference"})
    for rows in (0, 7, 0, 4):
        x = torch.randn(rows, K, dtype=torch.float64)
        expected = step(model, x)
        for each, of in ((fused, fused), (compiled, other)):
            torch.testing.assert_close(step(each, x), expected)
            torch.testing.assert_close(of.state_dict(), model.state_dict())
            for ours, theirs in zip(of.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_checkpoint_in_a_checkpoint() -> None:
    """Neither saves the buffers that the inner one changes."""

    def run(m: Net, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return m.nb(m.b(h)).relu()

        def outer(h: Tensor) -> Tensor:
            h = torch.tanh(m.a(h))
            return checkpoint(inner, h, use_reentrant=False) * 2  # type: ignore[no-any-return]

        return checkpoint(outer, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Net(run).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    compare(model, fused, fused)
    assert any(row.fused for row in epinorm.explain(fused).rows)


def test_arguments_by_name() -> None:
    def run(m: Net, x: Tensor) -> Tensor:
        na = m.na
        both = {"running_mean": na.running_mean, "running_var": na.running_var}
        return torch.relu(input=F.batch_norm(input=m.a(x), training=True, **both))

    model = Net(run).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    compare(model, fused, fused)
    assert epinorm.explain(fused).rows[0].fused


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64")])
def test_statistics_of_dtypes_that_eager_refuses(dtypes: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.BatchNorm1d(N)).double()
    model[1].running_mean, model[1].running_var = (
        torch.ones(N, dtype=getattr(torch, dtype)) for dtype in dtypes
    )
    fused = epinorm.fuse(model, strategy="reference")
    with pytest.raises(RuntimeError, match="[Ee]xpected"):
        fused(torch.randn(ROWS, K, dtype=torch.float64))


@pytest.mark.slow
def test_a_pass_backward_by_inductors_kernels_leaves_the_statistics() -> None:
    """They are saved for the gradient of another BatchNorm, which goes by them."""

    def run(m: Net, x: Tensor) -> Tensor:
        na, h = m.na, m.a(x)
        known = F.batch_norm(m.b(h), na.running_mean, na.running_var, na.weight, na.bias)
        return F.gelu(known) + na(m.a(x)).relu() * na.running_var

    model = Net(run).double()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="epinorm", options={"strategy": "reference"})
    x = torch.randn(ROWS, K, dtype=torch.float64)
    y = compiled(x)
    torch.testing.assert_close(y, model(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-9)
    before = copy.deepcopy(other.state_dict())
    y.sin().sum().backward()
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
