"""LinearNorm: the names, values and behaviour of the layers that it replaces."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import epinorm
from epinorm import GroupNorm, LayerNorm, LinearNorm, RMSNorm

CASES = [
    (GroupNorm(4, eps=1e-3), lambda affine, kw: nn.GroupNorm(4, 24, 1e-3, affine, **kw)),
    (LayerNorm(eps=1e-4), lambda affine, kw: nn.LayerNorm(24, 1e-4, affine, **kw)),
    (RMSNorm(), lambda affine, kw: nn.RMSNorm(24, None, affine, **kw)),
]


def layers(make_norm, bias=True, affine=True, **kw):
    linear = nn.Linear(10, 24, bias, **kw)
    return nn.Sequential(OrderedDict(linear=linear, norm=make_norm(affine, kw)))


def randomise(module):
    for p in module.parameters():
        nn.init.normal_(p)


@pytest.mark.parametrize("norm,make_norm", CASES, ids=lambda c: str(c)[:12])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_names_values_and_draws_are_those_of_the_layers(norm, make_norm, bias, affine, dtype):
    torch.manual_seed(3)
    theirs = layers(make_norm, bias, affine, dtype=dtype)
    after = torch.rand(1)
    torch.manual_seed(3)
    ours = LinearNorm(10, 24, bias, norm=norm, affine=affine, post="relu", dtype=dtype)
    assert torch.equal(torch.rand(1), after)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("norm,make_norm", CASES, ids=lambda c: str(c)[:12])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_values_and_gradients_against_float64(norm, make_norm, bias, affine):
    ours = LinearNorm(10, 24, bias, norm=norm, affine=affine, post=[nn.SiLU(), "scale(2)"])
    randomise(ours)
    truth = layers(make_norm, bias, affine, dtype=torch.float64)
    truth.load_state_dict(ours.state_dict())
    eager = layers(make_norm, bias, affine)
    eager.load_state_dict(ours.state_dict())
    x = torch.rand(64, 10, requires_grad=True)
    dy = torch.randn(64, 24)

    def results(module, x, dy):
        y = module(x)
        y = y if module is ours else nn.functional.silu(y) * 2
        return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], dy)]

    x64 = x.detach().double().requires_grad_()
    exact = results(truth, x64, dy.double())
    for mine, theirs, true in zip(results(ours, x, dy), results(eager, x, dy), exact, strict=True):
        error, yardstick = ((t.double() - true).norm() / true.norm() for t in (mine, theirs))
        # A handful of roundings either way: sums of 64 or 10 terms, in another order than eager's.
        assert error <= 1.5 * yardstick + 2**-24


def test_groups_must_divide_when_it_is_made():
    with pytest.raises(ValueError, match="num_groups=5 and 24 output features"):
        LinearNorm(10, 24, norm=GroupNorm(5))


def test_it_takes_operands():
    block = LinearNorm(10, 24, norm=LayerNorm(), pre="mul_channel", post="add_residual")
    randomise(block)
    x, s, r = torch.randn(2, 3, 10), torch.randn(24), torch.randn(2, 3, 24)
    z = block.linear(x) * s
    torch.testing.assert_close(block(x, s, r), block.norm(z) + r)
    with pytest.raises(ValueError, match=r"takes 2 \(mul_channel, add_residual\) .* got 1"):
        block(x, s)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_it_travels(travel):
    block = LinearNorm(10, 24, norm=GroupNorm(4), post="leaky_relu(0.2)")
    randomise(block)
    again = travel(block)
    x = torch.randn(5, 10)
    assert torch.equal(again(x), block(x))
    assert all(a is not b for a, b in zip(again.parameters(), block.parameters(), strict=True))


class Adapter(nn.Module):
    """As LoRA's: shows the weight of the layer that it wraps."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(10, 24, bias=False)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base(x) + self.down(x)


def _scaled(layer):
    layer.register_forward_hook(lambda module, given, y: y * 2)


CHANGES = {
    "adapter": lambda m: setattr(m, "linear", Adapter(m.linear)),
    "weight_norm": lambda m: nn.utils.weight_norm(m.linear).weight_g.data.mul_(2),
    "prune": lambda m: prune.l1_unstructured(m.linear, "weight", 0.5).weight_orig.data.mul_(3),
    "hook": lambda m: _scaled(m.linear),
    "hook of the norm": lambda m: _scaled(m.norm),
    "eps": lambda m: setattr(m.norm, "eps", 1.0),
    "groups": lambda m: setattr(m, "norm", nn.GroupNorm(8, 24)),
    "another norm": lambda m: setattr(m, "norm", nn.Identity()),
    "forward": lambda m: setattr(m.linear, "forward", lambda x: x.new_ones(x.shape[0], 24)),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
    "another Linear": lambda m: setattr(m, "linear", nn.Linear(10, 24, bias=False)),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("norm", [GroupNorm(4), LayerNorm()], ids=str)
def test_what_is_done_to_its_layers_counts(norm, name):
    block = LinearNorm(10, 24, norm=norm, pre="add_residual", post="silu").double()
    randomise(block)
    CHANGES[name](block)
    block.double()
    x, r = torch.randn(5, 10, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64)
    for _ in range(2):
        expected = nn.functional.silu(block.norm(block.linear(x) + r))
        torch.testing.assert_close(block(x, r), expected, rtol=1e-10, atol=1e-10)


def test_dropout_and_the_sum_by_the_layers():
    block = LinearNorm(
        10, 24, norm=LayerNorm(), pre="add_residual", post="dropout(0.5)", return_sum=True
    )
    _scaled(block.linear)
    x, r = torch.randn(5, 10), torch.randn(5, 24)
    y, total = block(x, r)
    torch.testing.assert_close(total, block.linear(x) + r)
    assert 0.2 < (y == 0).double().mean() < 0.8
    with pytest.raises(ValueError, match=r"takes 2 \(add_residual, dropout\) .* got 0"):
        block(x)


def test_repr_shows_the_chain():
    text = repr(LinearNorm(10, 24, norm=GroupNorm(4), post="relu"))
    assert "chain='group_norm(4,1e-05)|relu'" in text
    assert "in_features=10" in text


def test_torch_fx_sees_one_call():
    block = LinearNorm(10, 24, norm=GroupNorm(4), post="relu")
    traced = torch.fx.symbolic_trace(block)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert calls == [epinorm.operator.functional.apply_chain]
    x = torch.randn(5, 10)
    assert torch.equal(traced(x), block(x))


def test_meta_device():
    block = LinearNorm(10, 24, norm=GroupNorm(4), device="meta")
    assert block(torch.empty(5, 10, device="meta")).shape == (5, 24)
