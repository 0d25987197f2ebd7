"""What the operators promise on a GPU whichever strategy computes: autocast, graphs, streams."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epinorm import Chain, GroupNorm, LayerNorm, LinearNorm, RMSNorm, linear_norm
from epinorm.capture.backend import compile_graph
from epinorm.chain import reference
from epinorm.operator import schema
from epinorm.operator.functional import apply_chain
from epinorm.problem import Strategy
from epinorm.tools.accuracy import allowed_error, relative_error

NORMS = [GroupNorm(16), LayerNorm(), RMSNorm()]


def block(norm, post="leaky_relu(0.01)|scale(2)", **kw):
    made = LinearNorm(256, 512, norm=norm, post=post, device="cuda", **kw)
    for p in made.parameters():
        torch.nn.init.normal_(p)
    return made


def eager(made, x):
    norm_bias = getattr(made.norm, "bias", None)
    z = F.linear(x, made.linear.weight, made.linear.bias)
    return reference.epilogue(z, Chain.parse(made.chain), made.norm.weight, norm_bias)


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_autocast_gives_pytorch_dtypes_and_accuracy(norm, low):
    # No kink in the chain: a sign that rounding flips would be all of the gradients' error.
    made, x = block(norm, post="silu|scale(2)"), torch.randn(128, 256, device="cuda")
    leaves = [x.requires_grad_(), *made.parameters()]
    with torch.autocast("cuda", dtype=low):
        made(x)  # the second call takes the short way
        results = [made(x), eager(made, x)]
    assert results[0].dtype == results[1].dtype
    if not isinstance(norm, RMSNorm):  # PyTorch 2.11 runs rms_norm in the linear's 16 bit
        assert results[0].dtype == torch.float32
    dy = torch.randn_like(results[0])
    mine, theirs = ([y, *torch.autograd.grad(y, leaves, dy)] for y in results)
    exact_block = block(norm, post="silu|scale(2)", dtype=torch.float64)
    exact_block.load_state_dict(made.state_dict())
    x64 = x.detach().double().requires_grad_()
    y64 = eager(exact_block, x64)
    exact = [y64, *torch.autograd.grad(y64, [x64, *exact_block.parameters()], dy.double())]
    for a, b, truth in zip(mine, theirs, exact, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, truth) <= 1.1 * relative(b, truth) + 1e-6


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_cuda_graph_of_forward_and_backward(norm):
    made, x = block(norm), torch.randn(128, 256, device="cuda")
    leaves, dy = list(made.parameters()), torch.randn(128, 512, device="cuda")

    def step():
        y = made(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    for found, expected in zip(captured, step(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_work_lands_on_the_current_stream(norm):
    made, x = block(norm), torch.randn(4096, 256, device="cuda")
    with torch.no_grad():
        expected = made(x)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            late = torch.full_like(x, float("nan"))
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            found = made(late)
        side.synchronize()
    assert torch.equal(found, expected)


def test_devices_must_agree():
    made = block(LayerNorm())
    with pytest.raises(RuntimeError, match=r"found at least two devices, cpu and cuda:0!"):
        made(torch.randn(4, 256))


def test_a_change_of_precision_is_noticed():
    made, x = block(GroupNorm(16)), torch.randn(512, 256, device="cuda")
    truth = block(GroupNorm(16), dtype=torch.float64)
    truth.load_state_dict(made.state_dict())
    errors = {}
    with torch.no_grad():
        for setting in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            errors[setting] = relative(made(x), eager(truth, x.double()))
    assert errors["highest"] < 1e-5 < errors["high"]


def test_opcheck_on_cuda():
    made = block(GroupNorm(16))
    linear, norm = made.linear, made.norm
    x = torch.randn(8, 256, device="cuda", requires_grad=True)
    arguments = (x, linear.weight, linear.bias, norm.weight, norm.bias, [])
    torch.library.opcheck(schema.linear_norm, (*arguments, made.chain, "auto", False, None))


def test_empty_batch():
    w = torch.randn(512, 256, device="cuda", requires_grad=True)
    y = linear_norm(torch.randn(0, 256, device="cuda"), w, norm=GroupNorm(16))
    assert y.shape == (0, 512)
    (gradient,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(gradient, torch.zeros_like(w))


@pytest.mark.parametrize(
    "dtype, precision", [("bfloat16", "highest"), ("float32", "highest"), ("float32", "high")]
)
def test_cuda_graphs_of_compiled_code_hold_the_operators(dtype: str, precision: str) -> None:

    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()
    layers = [(nn.Linear(512, 512), nn.GroupNorm(32, 512), nn.SiLU()) for _ in range(2)]
    model = nn.Sequential(*(layer for block in layers for layer in block))
    model = model.to("cuda", getattr(torch, dtype))
    compiled = torch.compile(model, backend=compile_graph, mode="reduce-overhead")
    exact = copy.deepcopy(model).double()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for _ in range(5):
        x = torch.randn(256, 512, device="cuda", dtype=getattr(torch, dtype))
        dy = torch.randn_like(x)
        found = []
        for run, of in ((compiled, model), (model, model), (exact, exact)):
            of.zero_grad()
            y = run(x.to(next(of.parameters()).dtype))
            y.backward(dy.to(y.dtype))
            found.append(
                [t.detach().double().clone() for t in (y, *(p.grad for p in of.parameters()))]
            )
        for ours, eager, truth in zip(*found, strict=True):
            assert (ours - truth).norm() <= 1.5 * (eager - truth).norm() + 1e-12 * truth.norm()
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize(
    "chain,strategy",
    [
        ("relu", "single"),
        ("hardtanh|group_norm(8)", "single"),
        ("hardtanh|group_norm(8)", "epilogue"),
        ("relu|layer_norm", "epilogue"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_before_the_norm_fall_on_eagers_side_of_a_kink(
    chain: str, strategy: Strategy, dtype: torch.dtype
) -> None:
    """z kept without its bias, which is added behind z's rounding, had 20 times eager's error."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(300, 256), (512, 256), (512,)] + [(512,), (512,)] * ("norm" in chain)
    leaves = [torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes]
    dy = torch.randn(300, 512, device="cuda", generator=generator).to(dtype)

    def gradients(wide: bool, ours: bool) -> list[torch.Tensor]:
        given = [t.double() if wide else t.clone() for t in leaves]
        given = [t.requires_grad_() for t in given]
        x, weight, bias, gamma, beta = (*given, None, None)[:5]
        if ours:
            y = apply_chain(x, weight, bias, gamma, beta, (), chain, strategy)
        else:
            y = reference.linear_norm(x, weight, bias, Chain.parse(chain), gamma, beta, ())
        return list(torch.autograd.grad(y, given, dy.to(y.dtype)))

    kinds = zip(
        gradients(False, True), gradients(False, False), gradients(True, False), strict=True
    )
    for ours, eager, exact in kinds:
        allowed = allowed_error(relative_error(eager, exact), dtype)
        assert relative_error(ours, exact) <= allowed
