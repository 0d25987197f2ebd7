"""Attention in TF32 against float64, with PyTorch's own products in TF32 as the measure."""

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from product_case import matmul_precision
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import epinorm
from epinorm.backends import memo
from epinorm.capture.backend import compile_graph
from epinorm.capture.fuse import fused_of
from epinorm.capture.tf32_attention import Attending, is_taken_now
from epinorm.operator.attention import attention
from epinorm.operator.dispatch import Uses

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


def by_backend(layer):
    torch._dynamo.reset()
    return torch.compile(layer, backend=compile_graph, dynamic=False)


def by_fuse(layer):
    return epinorm.fuse(copy.deepcopy(layer))


def step(model, x):
    y = model(x)
    return y, *torch.autograd.grad(y.sum(), list(model.parameters()))


def kernels_of(function, *given):
    """How often each of ours ran, forward and both backward."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        function(*given)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events()]
    parts = "forward", "backward_queries", "backward_keys"
    return [names.count(f"attention_{part}") for part in parts]


@pytest.mark.parametrize("precision, count", [("high", 1), ("highest", 0)])
@pytest.mark.parametrize("optimized", [by_backend, by_fuse])
def test_it_is_taken_forward_and_backward(optimized, precision, count):
    torch.manual_seed(0)
    layer, x = Layer().cuda(), torch.randn(56, 200, 768, device="cuda")
    model = optimized(layer)
    with matmul_precision(precision):
        ours = step(model, x)
        with sdpa_kernel(SDPBackend.MATH):  # which follows the setting
            theirs = step(layer, x)
        wide = Layer().cuda().double()
        wide.load_state_dict(layer.state_dict())
        exact = step(wide, x.double())
        assert kernels_of(step, model, x) == [count] * 3
    assert error(ours[0], exact[0]) <= max(LIMIT * error(theirs[0], exact[0]), 4.8e-7)
    for our, their, true in zip(ours[1:], theirs[1:], exact[1:], strict=True):
        assert error(our, true) <= max(2 * error(their, true), 4.8e-7)


# ---- under fuse ----


def fused_layer(batch=56):
    torch.manual_seed(0)
    layer = Layer().cuda()
    return layer, by_fuse(layer), torch.randn(batch, 200, 768, device="cuda")


def test_fuse_looks_at_the_settings_at_each_call():
    layer, fused, x = fused_layer()
    math, efficient = SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION
    with torch.no_grad():
        for _ in range(2):
            with matmul_precision("high"):
                fused(x)  # the first call tries the kernels
                assert kernels_of(fused, x)[0] == 1
                for chosen in (math, [math, efficient]):
                    with sdpa_kernel(chosen, set_priority=True):
                        fused(x)
                        assert kernels_of(fused, x)[0] == 0
                with torch.autocast("cuda", torch.bfloat16):
                    assert kernels_of(fused, x)[0] == 0
                torch.backends.cuda.enable_mem_efficient_sdp(False)
                try:
                    assert kernels_of(fused, x)[0] == 0
                finally:
                    torch.backends.cuda.enable_mem_efficient_sdp(True)
                fused_of(fused).forget()  # which calls gained nothing meanwhile
            with matmul_precision("highest"):
                assert kernels_of(fused, x)[0] == 0
                exact = copy.deepcopy(layer).double()(x.double())
                assert error(fused(x), exact) <= max(2 * error(layer(x), exact), 4.8e-7)


def test_fuse_leaves_what_is_small():
    _, fused, x = fused_layer(batch=2)
    with matmul_precision("high"):
        step(fused, x)
        assert kernels_of(step, fused, x) == [0] * 3


def test_second_derivatives_under_fuse():
    layer, fused, x = fused_layer()

    def second(model, x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        return first.detach(), *torch.autograd.grad(first.square().sum(), [x, model.qkv.weight])

    with matmul_precision("high"):
        ours = second(fused, x)
        with sdpa_kernel(SDPBackend.MATH):
            theirs, exact = second(layer, x), second(copy.deepcopy(layer).double(), x.double())
    for our, their, true in zip(ours, theirs, exact, strict=True):
        assert error(our, true) <= 2 * error(their, true)


def warmed_up(function):
    """As PyTorch asks before a CUDA graph is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def fused_attention():
    """A fused model of attention alone, and a step of it that gives y and gradients."""
    model, given = epinorm.fuse(Attention()), [heads(56, 12, 200, 64) for _ in range(3)]
    dy = torch.randn_like(given[0])

    def run():
        y = model(*given)
        return y, *torch.autograd.grad(y, given, dy)

    return model, given, run


def captured(function):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def test_a_cuda_graph_of_a_step():
    _, given, run = fused_attention()
    with matmul_precision("high"):
        warmed_up(run)
        graph, results = captured(run)
        with torch.no_grad():
            given[0].normal_()
        assert kernels_of(graph.replay) == [1] * 3
        for replayed, expected in zip(results, run(), strict=True):
            assert torch.equal(replayed, expected)


def test_kernels_can_be_loaded_while_a_cuda_graph_is_captured():
    """As those of the backward pass where only the forward pass ran before, at other sizes."""
    from epinorm.backends.cuda.attention import kernels

    model, given, run = fused_attention()
    with matmul_precision("high"):
        warmed_up(lambda: model(*given))
        for part in ("forward", "backward_queries", "backward_keys"):
            getattr(kernels, f"attention_{part}").device_caches.clear()
        graph, results = captured(run)
        assert kernels_of(graph.replay) == [1] * 3
        for replayed, expected in zip(results, run(), strict=True):
            assert torch.equal(replayed, expected)


def test_what_was_never_tried_is_pytorchs_in_a_cuda_graph():
    model, given, _ = fused_attention()
    with matmul_precision("high"), torch.no_grad():
        warmed_up(lambda: model(*given))
        memo.clear()
        graph, _ = captured(lambda: model(*given))
        assert kernels_of(graph.replay) == [0] * 3


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_the_second_gpu_has_the_bits_of_the_first():
    """With the first one current."""
    layer, fused, x = fused_layer()
    with matmul_precision("high"):
        first, other = step(fused, x), by_fuse(layer.to("cuda:1"))
        second = step(other, x.to("cuda:1"))
        assert kernels_of(step, other, x.to("cuda:1")) == [1] * 3
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.cpu(), two.cpu())


@pytest.mark.alone
@pytest.mark.parametrize(
    "batch, count, rows, training",
    [
        *[(1, 16, 736, False), (4, 12, 424, False), (32, 12, 152, False)],
        *[(1, 16, 1256, True), (4, 12, 728, True), (32, 12, 256, True)],
    ],
)
def test_where_it_is_just_taken_it_is_not_slower(batch, count, rows, training):
    """The host's time with the GPU's, of calls one behind another: at the fewest terms."""
    q, k, v = (heads(batch, count, rows, 64) for _ in range(3))
    dy = torch.randn_like(q)

    def run(function):
        with torch.set_grad_enabled(training):
            y = function(q, k, v)
        if training:
            torch.autograd.grad(y, (q, k, v), dy)

    def seconds(function):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            run(function)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 50

    functions = Attending(Uses()), F.scaled_dot_product_attention
    with matmul_precision("high"):
        with torch.set_grad_enabled(training):
            assert is_taken_now(q, k, v)
        for function in functions:
            run(function)
        ours, theirs = (min(seconds(function) for _ in range(5)) for function in functions)
    print(f"{batch, count, rows}: {ours * 1e6:.0f} us, PyTorch's {theirs * 1e6:.0f} us")
    assert ours <= theirs
