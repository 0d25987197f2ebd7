"""Attention in TF32 against float64, with PyTorch's own products in TF32 as the measure."""

import copy

import pytest
import torch
import torch.nn.functional as F
from product_case import matmul_precision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from epinorm.capture.backend import compile_graph
from epinorm.operator.attention import attention

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernels are taken on Hopper", allow_module_level=True)

LIMIT = 1.1
"""Times the error of PyTorch's TF32: random roundings of as many bits, in another order. Sizes are
multiples of 8, as PyTorch computes others in full fp32."""


def heads(batch, count, rows, width, joined=False):
    """(B, H, rows, D), with a part that all rows have in common, as a bias gives them; joined: as
    the part of one Linear's result that it shares with others."""
    made = torch.randn(batch, rows, 3 if joined else 1, count, width, device="cuda")
    made += torch.randn(count, width, device="cuda")
    return made[:, :, 0].transpose(1, 2)


def error(made, exact):
    return ((made - exact).norm() / exact.norm()).item()


def products(q, k, v, scale):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("queries, keys", [(512, 512), (200, 200), (64, 304), (304, 72)])
@pytest.mark.parametrize("width", [64, 128])
def test_values(width, queries, keys):
    torch.manual_seed(0)
    q = heads(3, 5, queries, width, joined=True)
    given = (q, *(heads(3, 5, keys, width) for _ in range(2)))
    with matmul_precision("high"):
        ours, again = (attention(*given, 0.1)[0] for _ in range(2))
        theirs, exact = products(*given, 0.1), products(*(t.double() for t in given), 0.1)
    assert torch.equal(ours, again)
    assert error(ours, exact) <= LIMIT * error(theirs, exact)


def test_what_is_not_finite_comes_out_where_pytorch_puts_it():
    torch.manual_seed(0)
    q, k, v = (heads(2, 2, 100, 64) for _ in range(3))
    q[0, 0, 3, 5], q[0, 1, 70] = torch.nan, torch.inf
    v[1, 1, 99, 7], k[1, 0, :64, 2] = torch.nan, -torch.inf
    with matmul_precision("high"):
        ours, theirs = attention(q, k, v, 0.125)[0], products(q, k, v, 0.125)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(768, 3 * 768), nn.Linear(768, 768)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (12, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("precision, count", [("high", 1), ("highest", 0)])
def test_the_backend_takes_it_where_no_gradient_is_wanted(precision, count):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = Layer().cuda(), torch.randn(8, 200, 768, device="cuda")
    compiled = torch.compile(layer, backend=compile_graph, dynamic=False)
    with matmul_precision(precision), torch.no_grad():
        ours = compiled(x)
        with sdpa_kernel(SDPBackend.MATH):  # which follows the setting
            theirs = layer(x)
        exact = copy.deepcopy(layer).double()(x.double())
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            compiled(x)
            torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    assert names.count("attention_forward") == count
    assert error(ours, exact) <= max(LIMIT * error(theirs, exact), 4.8e-7)
