"""Convolutions of one tap as Linears; InstanceNorm as a LayerNorm: values, gradients, layouts."""

import copy

import pytest
import torch
from product_case import matmul_precision
from torch import nn
from torch.profiler import ProfilerActivity, profile

import epinorm
from epinorm.tools.accuracy import allowed_error, relative_error


@pytest.fixture(autouse=True)
def full_fp32():
    torch._dynamo.reset()
    with matmul_precision("highest"):
        torch.backends.cudnn.allow_tf32 = False
        yield
    torch.backends.cudnn.allow_tf32 = True


def results(model, x, dy):
    x = x.detach().clone().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x)
    y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def launched(model, x):
    """The names of what the second call launches; after a first."""
    with torch.no_grad():
        model(x)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            model(x)
            torch.cuda.synchronize()
    return [event.name for event in profiled.events()]


def check(model, x, fused):
    """Values and gradients as near to float64 as eager's, and laid out as eager's."""
    with torch.no_grad():
        dy = torch.randn_like(model(x))
    truth = results(copy.deepcopy(model).double(), x.double(), dy)
    for ours, theirs, exact in zip(
        results(fused, x, dy), results(model, x, dy), truth, strict=True
    ):
        allowed = allowed_error(relative_error(theirs, exact), torch.float32)
        assert relative_error(ours, exact) <= allowed
        assert ours.shape == theirs.shape
    with torch.no_grad():
        assert fused(x).stride() == model(x).stride()


@pytest.mark.parametrize("channels_last", [True, False])
def test_images(channels_last):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(1024, 512, 1), nn.GELU()), torch.rand(32, 1024, 14, 14)
    model, x = model.cuda(), x.cuda()
    if channels_last:
        model, x = (t.to(memory_format=torch.channels_last) for t in (model, x))
    fused = epinorm.fuse(copy.deepcopy(model))
    check(model, x, fused)
    if channels_last:  # elsewhere the rule may be set otherwise
        assert [row.fused for row in epinorm.explain(fused).linears] == [True]
        names = launched(fused, x)
        assert any(name.startswith("linear_norm") for name in names)
        assert not any("copy" in name.lower() for name in names)


def test_points():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1024, 1024, 1), nn.GELU(), nn.Conv1d(1024, 1024, 1)).cuda()
    x = torch.randn(16, 1024, 1024, device="cuda")
    fused = epinorm.fuse(copy.deepcopy(model))
    check(model, x, fused)
    assert [row.fused for row in epinorm.explain(fused).linears] == [True, True]
    names = launched(fused, x)
    assert sum(name.startswith("linear_norm") for name in names) == 2


def test_narrow_ones_and_tf32_stay_pytorchs():
    narrow, wide = nn.Conv1d(64, 128, 1).cuda(), nn.Conv1d(1024, 1024, 1).cuda()
    for model, k, tf32 in ((narrow, 64, False), (wide, 1024, True)):
        torch.backends.cudnn.allow_tf32 = tf32
        x = torch.randn(32, k, 1024, device="cuda")
        fused = epinorm.fuse(copy.deepcopy(model))
        with torch.no_grad():
            assert torch.equal(fused(x), model(x))
        assert not epinorm.explain(fused).linears


def test_the_setting_is_looked_at_before_each_call():
    model, x = nn.Conv1d(1024, 1024, 1).cuda(), torch.randn(32, 1024, 1024, device="cuda")
    fused = epinorm.fuse(nn.Sequential(model))
    ours = []
    for tf32 in (True, False, True):
        torch.backends.cudnn.allow_tf32 = tf32
        names = launched(fused, x)
        ours.append(any(name.startswith("linear_norm") for name in names))
    assert ours == [False, True, False]


def test_a_captured_graph_replays_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(512, 512, 1), nn.ReLU()).cuda()
    x = torch.randn(32, 512, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    fused = epinorm.fuse(copy.deepcopy(model.to(memory_format=torch.channels_last)))
    with torch.no_grad():
        expected = fused(x)
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        x.mul_(-1)
        graph.replay()
        assert not torch.equal(y, expected)
        assert torch.equal(y, fused(x))


class Benchmark(nn.Module):
    """Problem 28 of level 2 of KernelBench."""

    def __init__(self, k, n):
        super().__init__()
        self.bmm, self.instance_norm = nn.Linear(k, n), nn.InstanceNorm2d(n)

    def forward(self, x, y):
        x = self.instance_norm(self.bmm(x).unsqueeze(1).unsqueeze(1)).squeeze(1).squeeze(1)
        return (x + y) * y


@pytest.mark.filterwarnings("ignore:input's size")
def test_instance_norm_of_rows():
    torch.manual_seed(0)
    model = Benchmark(1024, 2048).cuda()
    x, y = (torch.rand(1024, size, device="cuda") for size in (1024, 2048))
    fused = epinorm.fuse(copy.deepcopy(model))
    dy = torch.randn(1024, 2048, device="cuda")
    of = [
        results(_With(m, other), given, dy)
        for m, other, given in (
            (fused, y, x),
            (model, y, x),
            (copy.deepcopy(model).double(), y.double(), x.double()),
        )
    ]
    # The bias is taken off again by the mean: its gradient is nothing but roundings.
    for ours, theirs, exact in zip(*(each[:3] for each in of), strict=True):
        allowed = allowed_error(relative_error(theirs, exact), torch.float32)
        assert relative_error(ours, exact) <= allowed
    (row,) = epinorm.explain(fused).rows
    assert row.chain == "layer_norm(1e-05)|add_residual|mul_element"
    assert not row.left


class _With(nn.Module):
    """A model of two inputs, of which the second stays."""

    def __init__(self, model, other):
        super().__init__()
        self.model, self.other = model, other

    def forward(self, x):
        return self.model(x, self.other)
