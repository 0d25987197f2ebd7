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
    return made[:, :, 0].transpose(1, 2).requires_grad_()


def error(made, exact):
    return ((made - exact).norm() / exact.norm()).item()


def products(q, k, v, scale):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


@pytest.mark.parametrize("queries, keys", [(512, 512), (200, 200), (64, 304), (304, 72)])
@pytest.mark.parametrize("width", [64, 128])
def test_values_and_gradients(width, queries, keys):
    torch.manual_seed(0)
    q = heads(3, 5, queries, width, joined=True)
    k, v = (heads(3, 5, keys, width) for _ in range(2))
    given, wide = (q, k, v), [t.detach().double().requires_grad_() for t in (q, k, v)]
    with matmul_precision("high"):
        ours, again = (attention(*given, 0.1)[0] for _ in range(2))
        theirs = products(*given, 0.1)
        exact = products(*wide, 0.1)
        dy = torch.randn(3, queries, 5, width, device="cuda").transpose(1, 2)
        results = [
            (y, *torch.autograd.grad(y, x, dy.to(y.dtype)))
            for y, x in ((ours, given), (again, given), (theirs, given), (exact, wide))
        ]
    for our, same, their, true in zip(*results, strict=True):
        assert torch.equal(our, same)
        assert error(our, true) <= LIMIT * error(their, true)


def test_what_all_rows_have_in_common_cancels():
    """In a deep model tokens are nearly the same: gradients of their small differences."""
    torch.manual_seed(0)
    x = torch.randn(768, device="cuda") + 0.01 * torch.randn(2, 512, 768, device="cuda")
    layers = [nn.Linear(768, 256).cuda() for _ in range(3)]
    for layer in layers:
        nn.init.normal_(layer.bias, std=0.5)
    dy = torch.randn(2, 512, 4, 64, device="cuda").transpose(1, 2)

    def gradients(attend, dtype):
        made = [copy.deepcopy(layer).to(dtype) for layer in layers]
        q, k, v = (f(x.to(dtype)).unflatten(-1, (4, 64)).transpose(1, 2) for f in made)
        y = attend(q, k, v, 0.125)
        return torch.autograd.grad(y, [f.weight for f in made], dy.to(dtype))

    with matmul_precision("high"):
        ours = gradients(lambda *given: attention(*given)[0], torch.float32)
        theirs, exact = gradients(products, torch.float32), gradients(products, torch.float64)
    for our, their, true in zip(ours, theirs, exact, strict=True):
        assert error(our, true) <= LIMIT * error(their, true)


@pytest.mark.parametrize("large", ["key", "value"])
def test_one_large_row_is_no_common_part(large):
    """Of a token that is far from all others, and whose key is avoided: of the rows that the
    common part is taken from."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 8, 512, 64, device="cuda") for _ in range(3))
    row = (k if large == "key" else v)[:, :, 24:25].mul_(300)
    if large == "key":
        q -= (100 + (q * row).sum(-1, keepdim=True)) * row / row.square().sum(-1, keepdim=True)
    given = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in given]
    dy = torch.randn_like(q)
    with matmul_precision("high"):
        ours, theirs = attention(*given, 0.125)[0], products(*given, 0.125)
        exact = products(*wide, 0.125)
        results = [
            (y, *torch.autograd.grad(y, x, dy.to(y.dtype)))
            for y, x in ((ours, given), (theirs, given), (exact, wide))
        ]
    for our, their, true in zip(*results, strict=True):
        assert error(our, true) <= LIMIT * error(their, true)


def test_what_is_not_finite_comes_out_where_pytorch_puts_it():
    torch.manual_seed(0)
    q, k, v = (heads(2, 2, 100, 64).detach() for _ in range(3))
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
def test_the_backend_takes_it_forward_and_backward(precision, count):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = Layer().cuda(), torch.randn(8, 200, 768, device="cuda")
    compiled = torch.compile(layer, backend=compile_graph, dynamic=False)
    with matmul_precision(precision):

        def step(model, x):
            y = model(x)
            return y, *torch.autograd.grad(y.sum(), list(model.parameters()))

        ours = step(compiled, x)
        with sdpa_kernel(SDPBackend.MATH):  # which follows the setting
            theirs = step(layer, x)
        wide = Layer().cuda().double()
        wide.load_state_dict(layer.state_dict())
        exact = step(wide, x.double())
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step(compiled, x)
            torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    for kernel in ("forward", "backward_queries", "backward_keys"):
        assert names.count(f"attention_{kernel}") == count
    assert error(ours[0], exact[0]) <= max(LIMIT * error(theirs[0], exact[0]), 4.8e-7)
    for our, their, true in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert error(our, true) <= max(2 * error(their, true), 4.8e-7)
