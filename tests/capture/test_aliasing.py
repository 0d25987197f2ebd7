"""Inputs that share memory at one call and not at another, where a graph changes one in place."""

import copy

import pytest
import torch
from torch import nn

import epinorm
from epinorm.capture import aliasing

ROWS, WIDTH = 24, 32


class Advancing(nn.Module):
    """Changes ``state`` between a Linear and the norm behind it: its argument, or its buffer."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("state", torch.zeros(ROWS, WIDTH))
        self.double()  # changed so, rows become nearly constant

    def forward(self, x, given=None):
        h = self.fc(x)
        state = self.state if given is None else given
        state.mul_(0.5).add_(1)
        return self.norm(h.relu())


def apart(model, x):
    return torch.ones_like(x)


SHARED = {
    "view": lambda model, x: x.view(ROWS, WIDTH),
    "detached": lambda model, x: x.detach(),
    "a row": lambda model, x: x[:1],
    "the weight": lambda model, x: model.fc.weight.detach(),
    "the bias": lambda model, x: model.fc.bias.data,
}


def fused(model):
    return epinorm.fuse(model, strategy="cpu")


def with_backend(model):
    return torch.compile(model, backend="epinorm", options={"strategy": "cpu"})


def x():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("ours", [fused, with_backend])
@pytest.mark.parametrize("shares", SHARED.values(), ids=list(SHARED))
@pytest.mark.parametrize("first", ["apart", "shared"])
def test_an_argument_that_is_changed(ours, shares, first, interpreted):
    eager = Advancing()
    model = copy.deepcopy(eager)
    run = ours(model)

    def alone(model, x):
        return torch.ones_like(shares(model, x))

    order = [alone, shares] if first == "apart" else [shares, alone]
    with torch.no_grad():
        for given in (*order, *order):
            mine, its = x(), x()
            y, expected = run(mine, given(model, mine)), eager(its, given(eager, its))
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(mine, its)
            for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("ours", [fused, with_backend])
def test_a_buffer_that_is_x(ours, interpreted):
    eager = Advancing()
    model = copy.deepcopy(eager)
    run = ours(model)
    with torch.no_grad():
        torch.testing.assert_close(run(x()), eager(x()))
        torch.testing.assert_close(run(model.state[:]), eager(eager.state[:]))
        torch.testing.assert_close(model.state, eager.state)


def test_autograd_sees_the_change():
    model, given = fused(Advancing()), x()
    model(given, apart(model, given)).sum().backward()
    y = model(given, given.view(ROWS, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_view_of_another_dtype():
    class Clearing(Advancing):
        def forward(self, x, bits):
            h = self.fc(x)
            bits.zero_()
            return self.norm(h.relu())

    eager = Clearing()
    model = fused(copy.deepcopy(eager))
    with torch.no_grad():
        model(x(), torch.ones(ROWS, WIDTH, dtype=torch.int64))
        mine, its = x(), x()
        torch.testing.assert_close(
            model(mine, mine.view(torch.int64)), eager(its, its.view(torch.int64))
        )


class Dropping(Advancing):
    """A dropout that drops nothing gives x itself, which is then changed."""

    def __init__(self, share=0.5):
        super().__init__()
        self.drop = nn.Dropout(share)

    def forward(self, x):
        h = self.fc(x)
        rest = self.drop(x)
        rest += 1.5
        return self.norm(h + rest)


class ByName(Dropping):
    def forward(self, x):
        h = self.fc(x)
        rest = nn.functional.dropout(training=self.training, p=self.drop.p, input=x)
        rest += 1.5
        return self.norm(h + rest)


class ChangingWhatWasRead(Dropping):
    def forward(self, x):
        h = self.fc(self.drop(x))
        x.clamp_(min=0)
        return self.norm(h + x)


@pytest.mark.parametrize("of", [Dropping, ByName, ChangingWhatWasRead])
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "p=0"])
def test_a_dropout_that_drops_nothing(of, trains):
    eager = of(0.0 if trains else 0.5).train(trains)
    model = fused(copy.deepcopy(eager))
    mine, its = x(), x()
    with torch.no_grad():
        torch.testing.assert_close(model(mine), eager(its))
        torch.testing.assert_close(mine, its)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x().requires_grad_() * 1).sum().backward()


def test_a_dropout_that_drops_is_no_obstacle():
    model = fused(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)))
    model(torch.randn(4, 8))
    assert epinorm.explain(model).fused == 1


class ByAnotherName(nn.Module):
    """A norm or an activation by hand, of what is changed by the name that a cast gives it."""

    def __init__(self, written):
        super().__init__()
        self.fc, self.norm, self.written = nn.Linear(WIDTH, 64), nn.GroupNorm(32, 64), written
        self.double()

    def forward(self, x):
        return self.norm(self.written(self.fc(x)))


def centred(h):
    v = h.double()
    v -= v.mean(-1, keepdim=True)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def squared(h):
    v = h.to(torch.float64)
    v.pow_(2)
    return h * torch.rsqrt(v.mean(-1, keepdim=True) + 1e-6)


def gated(h):
    v = h.contiguous()
    v *= 1.702
    return h * torch.sigmoid(v)


def named(h):
    return h * torch.rsqrt(torch.mean(input=h * h, dim=-1, keepdim=True) + 1e-6)


def into(h):
    v = torch.mul(h, 1.702, out=h)
    return h * torch.sigmoid(v)


@pytest.mark.parametrize("written", [centred, squared, gated, named, into])
@pytest.mark.parametrize("ours", [fused, with_backend])
def test_a_value_that_is_changed_by_another_name(written, ours, interpreted):
    eager = ByAnotherName(written)
    model = ours(copy.deepcopy(eager))
    with torch.no_grad():
        torch.testing.assert_close(model(x()), eager(x()))


@torch.library.custom_op("epinorm_tests::advance", mutates_args=("one", "others"))
def advance(one: torch.Tensor, others: list[torch.Tensor]) -> None:
    one.add_(1)
    for other in others:
        other.mul_(3)


@pytest.mark.parametrize("ours", [fused, with_backend])
def test_an_operator_that_changes_a_list(ours, interpreted):
    class Listed(Advancing):
        def forward(self, x, state):
            h = self.fc(x)
            advance(state, [x])
            return self.norm(h.relu())

    eager = Listed()
    model = ours(copy.deepcopy(eager))
    with torch.no_grad():
        torch.testing.assert_close(model(x(), torch.zeros(3)), eager(x(), torch.zeros(3)))


def test_an_error_leaves_what_the_graph_entered(interpreted):
    class Entering(Advancing):
        def forward(self, x, state, index):
            h = self.fc(x)
            with torch.no_grad():
                state.mul_(0.5)
                chosen = torch.index_select(state, 0, index)
            return self.norm(h.relu()) + chosen.sum()

    model = with_backend(Entering().requires_grad_(False))
    good, bad = torch.tensor([0, 1]), torch.tensor([0, 9999])
    model(x(), torch.ones(ROWS, WIDTH, dtype=torch.float64), good)
    given = x()
    with pytest.raises(IndexError):
        model(given, given.view(ROWS, WIDTH), bad)
    assert torch.is_grad_enabled()


def test_what_is_fused_stays_fused_where_nothing_is_shared():
    model, given = fused(Advancing()), x()
    with torch.no_grad():
        for _ in range(2):
            model(given, apart(model, given))
    (row,) = epinorm.explain(model).rows
    assert row.fused


def test_a_batch_norm_costs_no_look():
    graphs = []

    def backend(gm, _):
        graphs.append(gm)
        return gm

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    torch.compile(model, backend=backend)(torch.randn(16, 8))
    (gm,) = graphs
    assert len(aliasing.changed_inputs(gm)) == 3
    assert aliasing.AsCaptured(gm).guarded(gm) is gm
