"""linear_norm as users call it: values, shapes, settings, and what wrong calls are told."""

import pytest
import torch
import torch.nn.functional as F

from epinorm import Chain, GroupNorm, LayerNorm, RMSNorm, linear_norm
from epinorm.chain import reference
from processes import imported_by

NORMS = [GroupNorm(4), LayerNorm(), RMSNorm()]
POST = "leaky_relu(0.01)|scale(2)"
STRATEGIES = ["auto", "reference"]


def tensors(*lead, k=10, n=24, dtype=torch.float32, draw=torch.randn):
    """x, weight, bias, norm_weight, norm_bias: all random, so that none can be forgotten."""
    return [draw(s).to(dtype) for s in ((*lead, k), (n, k), (n,), (n,), (n,))]


def ours(t, norm, strategy="auto", **kw):
    kw.setdefault("post", POST)
    x, w, b, g, h = t
    return linear_norm(x, w, b, norm=norm, norm_weight=g, norm_bias=h, strategy=strategy, **kw)


def eager(t, norm, pre="", post=POST, operands=()):
    x, w, b, g, h = t
    return reference.linear_norm(x, w, b, Chain.build(norm, pre, post), g, h, operands)


def assert_as_accurate(mine, theirs, exact, factor):
    """Our error against float64 relative to eager's; the floor is one rounding of the output."""
    exact = exact.double()
    scale = exact.norm()
    error, yardstick = ((v.double() - exact).norm() / scale for v in (mine, theirs))
    assert error <= factor * yardstick + torch.finfo(mine.dtype).eps / 4, (error, yardstick)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("draw", [torch.rand, torch.randn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_against_float64(strategy, norm, draw, dtype):
    t = tensors(64, k=96, n=48, dtype=dtype, draw=draw)
    y = ours(t, norm, strategy)
    assert y.dtype == dtype
    if dtype == torch.float64:
        torch.testing.assert_close(y, eager(t, norm), rtol=1e-12, atol=1e-12)
        return
    exact = eager([v.double() for v in t], norm)
    assert_as_accurate(y, eager(t, norm), exact, 1.1 if dtype != torch.float32 else 1.2)
    assert torch.equal(y, ours(t, norm, strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS[1:], ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_any_leading_dimensions(strategy, norm, lead):
    t = tensors(*lead)
    r = torch.randn(*lead, 24)
    t[0].requires_grad_()
    y = ours(t, norm, strategy, pre="add_residual", operands=[r])
    expected = eager(t, norm, pre="add_residual", operands=[r])
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    mine, theirs = (torch.autograd.grad(v, t[0], dy)[0] for v in (y, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert y.shape == (*lead, 24)


@pytest.mark.parametrize("lead", [(4,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("norm", NORMS[1:], ids=str)
def test_gradients_of_several_losses_at_once(norm, lead):
    t = tensors(*lead)
    r = torch.randn(*lead, 24)
    leaves = [t[0].requires_grad_(), r.requires_grad_()]
    for _ in range(2):  # a call like an earlier one folds x's dimensions in its own node
        y = ours(t, norm, "cpu", pre="add_residual", operands=[r])
    dy = torch.randn(3, *y.shape)
    found = torch.autograd.grad(y, leaves, dy, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in dy]
    for batch, gradients in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(batch, torch.stack(gradients), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_empty_batch(strategy, norm):
    t = [v.requires_grad_() for v in tensors(0)]
    y = ours(t, norm, strategy)
    assert y.shape == (0, 24)
    grads = torch.autograd.grad(y.sum(), t)
    assert grads[0].shape == (0, 10)
    assert all(torch.equal(g, torch.zeros_like(v)) for g, v in zip(grads[1:], t[1:], strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_optional_tensors(strategy, norm):
    for present in range(8):
        t = tensors(9)
        t[2:] = [v if present >> i & 1 else None for i, v in enumerate(t[2:])]
        torch.testing.assert_close(ours(t, norm, strategy), eager(t, norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_do_not_matter(strategy):
    x, w, b, g, h = tensors(9)
    wide = torch.randn(9, 15)
    wide[:, 2:12] = x
    views = [
        wide[:, 2:12],  # rows with a stride
        x.t().contiguous().t(),  # column major
        x[:1].expand(9, 10),  # rows with stride 0
    ]
    w_t = w.t().contiguous().t()
    every_other = torch.stack([g, g], 1).reshape(-1)[::2]
    for view in views:
        strided = ours((view, w_t, b, every_other, h), GroupNorm(4), strategy)
        dense = (view.contiguous(), w, b, g, h)
        exact = eager([v.double() for v in dense], GroupNorm(4))
        assert_as_accurate(strided, eager(dense, GroupNorm(4)), exact, 1.2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_nan_and_inf_stay_where_eager_has_them(strategy, norm):
    t = tensors(6)
    t[0][1, 3], t[0][2, 0], t[0][4, 5] = float("nan"), float("inf"), -float("inf")
    y, expected = ours(t, norm, strategy), eager(t, norm)
    assert torch.equal(y.isnan(), expected.isnan())
    assert expected.isnan().any(1).tolist() == [False, True, True, False, True, False]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_cpu_autocast_is_pytorch_own(strategy, norm, low):
    t = [v.requires_grad_() for v in tensors(16)]
    r = torch.randn(16, 24)
    kw = {"pre": "silu", "post": "leaky_relu|add_residual", "operands": [r]}
    with torch.autocast("cpu", dtype=low):
        y = ours(t, norm, strategy, **kw)
        expected = eager(t, norm, **kw)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    mine, theirs = (torch.autograd.grad(v.float().square().sum(), t) for v in (y, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)


def test_autocast_refuses_what_it_cannot_honour():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="strict=True cannot be met: under autocast"):
            ours(tensors(4), LayerNorm(), strict=True)
        with pytest.raises(RuntimeError, match="strategy 'cpu' cannot be met: under autocast"):
            ours(tensors(4), LayerNorm(), "cpu")


def test_disabled_autocast_changes_nothing():
    t = tensors(4)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(ours(t, LayerNorm()), ours(t, LayerNorm()))


def replaced(at, value):
    t = tensors(6)
    t[at] = value
    return t


WRONG = {
    "0D": (replaced(0, torch.tensor(1.0)), LayerNorm(), {}, RuntimeError, "at least 1D.*x is 0D"),
    "K": (replaced(0, torch.randn(6, 11)), GroupNorm(4), {}, RuntimeError,
          r"mat1 and mat2 shapes cannot be multiplied \(6x11 and 10x24\)"),
    "weight rank": (replaced(1, torch.randn(24)), LayerNorm(), {}, RuntimeError,
                    r"weight must be 2D \(N, K\), got shape \[24\]"),
    "bias": (replaced(2, torch.randn(23)), LayerNorm(), {}, RuntimeError,
             r"bias must be a vector .* \(24,\), got shape \[23\]"),
    "norm_weight": (replaced(3, torch.randn(1)), GroupNorm(4), {}, RuntimeError,
                    r"Expected weight to be a vector of size equal .* got norm_weight of shape"),
    "norm_bias": (replaced(4, torch.randn(24, 1)), GroupNorm(4), {}, RuntimeError,
                  r"Expected bias to be a vector of size equal .* got norm_bias of shape"),
    "groups": (tensors(6), GroupNorm(5), {}, RuntimeError,
               r"divisible by num_groups, but got input of shape \[6, 24\] and num_groups=5"),
    "one value": (tensors(1), GroupNorm(24), {}, ValueError,
                  r"Expected more than 1 value per channel when training.*\[1, 24\]"),
    "group norm 3D": (tensors(2, 3), GroupNorm(4), {}, ValueError,
                      r"group_norm normalises dimension 1.*got x of shape \[2, 3, 10\]"),
    "group norm 1D": (tensors(), GroupNorm(4), {}, ValueError, r"must be 2D.*shape \[10\]"),
    "x dtype": (replaced(0, torch.randn(6, 10).double()), LayerNorm(), {}, RuntimeError,
                "x and weight must have the same dtype, but got torch.float64 and torch.float32"),
    "bias dtype": (replaced(2, torch.randn(24).half()), LayerNorm(), {}, RuntimeError,
                   "x and bias must have the same dtype"),
    "norm dtype": (replaced(3, torch.randn(24).half()), LayerNorm(), {}, RuntimeError,
                   "norm_weight must have dtype torch.float32, but got torch.float16"),
    "integer": (tensors(6, dtype=torch.int64), LayerNorm(), {}, NotImplementedError,
                "not implemented for torch.int64: x must be float32, float64"),
    "complex": (tensors(6, dtype=torch.complex64), LayerNorm(), {}, NotImplementedError,
                "not implemented for torch.complex64"),
    "float8": (tensors(6, dtype=torch.float8_e4m3fn), LayerNorm(), {}, NotImplementedError,
               "not implemented for torch.float8_e4m3fn"),
    "device": (replaced(1, torch.randn(24, 10, device="meta")), LayerNorm(), {}, RuntimeError,
               "Expected all tensors to be on the same device.*cpu and meta!"),
    "not a tensor": (replaced(0, [[1.0]]), LayerNorm(), {}, TypeError,
                     "x must be a Tensor, not list"),
    "missing operand": (tensors(6), LayerNorm(), {"post": "add_residual"}, ValueError,
                        r"the chain takes 1 \(add_residual\) tensor operands, got 0"),
    "extra operand": (tensors(6), LayerNorm(), {"operands": [torch.randn(24)]}, ValueError,
                      "the chain takes no tensor operands, got 1"),
    "channel shape": (tensors(6), LayerNorm(),
                      {"post": "mul_channel", "operands": [torch.randn(6, 24)]}, RuntimeError,
                      r"operand 0 must have shape \[24\].*got \[6, 24\]"),
    "residual shape": (tensors(6), LayerNorm(),
                       {"post": "add_residual", "operands": [torch.randn(1, 24)]}, RuntimeError,
                       r"operand 0 must have shape \[6, 24\].*got \[1, 24\]"),
    "folded residual": (tensors(2, 3), LayerNorm(),
                        {"post": "add_residual", "operands": [torch.randn(3, 2, 24)]},
                        RuntimeError,
                        r"operand 0 must have one value per element of the output, "
                        r"\[2, 3, 'N'\], got \[3, 2, 24\]"),
    "operand dtype": (tensors(6), LayerNorm(),
                      {"post": "mul_channel", "operands": [torch.randn(24).double()]},
                      RuntimeError, "operand 0 must have dtype torch.float32"),
    "operation": (tensors(6), LayerNorm(), {"post": "leaky_rely"}, ValueError,
                  "did you mean 'leaky_relu'"),
    "strategy": (tensors(6), LayerNorm(), {"strategy": "fast"}, ValueError,
                 "unknown strategy 'fast'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_calls_are_told_what_is_wrong(name, grad):
    t, norm, kw, error, message = WRONG[name]
    if grad:
        t = [
            v.detach().requires_grad_() if torch.is_tensor(v) and v.dtype.is_floating_point else v
            for v in t
        ]
    with pytest.raises(error, match=message):
        ours(t, norm, **{"strategy": "auto", **kw})


# The same mistakes made with PyTorch's own layers: our exception types are theirs.
@pytest.mark.parametrize(
    "name", ["0D", "K", "groups", "one value", "norm_weight", "x dtype", "integer", "norm_bias"]
)
def test_exception_types_are_those_of_pytorch(name):
    (x, w, b, g, h), norm, _, error, _ = WRONG[name]
    with pytest.raises(error):
        reference.normalize(F.linear(x, w, b), norm, g, h)


def test_a_mutated_module_is_read_anew():
    t = tensors(6)
    act = torch.nn.LeakyReLU(0.1)
    first = ours(t, LayerNorm(), post=act)
    act.negative_slope = 0.5
    assert torch.equal(ours(t, LayerNorm(), post=act), ours(t, LayerNorm(), post="leaky_relu(0.5)"))
    assert not torch.equal(ours(t, LayerNorm(), post=act), first)


def test_importing_epinorm_imports_torch_alone():
    heavy = ["matplotlib", "rich", "typer", "cuda", "epinorm.capture", "epinorm.backends.cuda"]
    heavy += ["triton", "torch.utils.flop_counter"]  # which imports Triton
    assert imported_by("import epinorm", heavy) == []
