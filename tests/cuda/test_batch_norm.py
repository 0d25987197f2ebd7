"""BatchNorm in training on a GPU of the imagination: every launch, and the steps that native code
repeats, which do what PyTorch does. fp64, whose products are PyTorch's own."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import epinorm
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.capture import paying
from epinorm.capture.running import Updating
from epinorm.chain import Chain
from epinorm.operator.autograd import differentiable
from epinorm.operator.calls import executable_for_call
from epinorm.operator.dispatch import Caller
from epinorm.operator.native_calls import NativeCalls
from epinorm.operator.transforms import cast
from epinorm.problem import Problem

M, K, N = 24, 16, 40
F64 = torch.float64
FORWARD = ["batch_statistics", "batch_join", "batch_forward"]
BACKWARD = ["batch_backward", "batch_sums", "batch_backward", "norm_column_sums"]


def tensors(m=M, operands=0, affine=True):
    sizes = [(m, K), (N, K), (N,)]
    given = [torch.randn(size, dtype=F64).requires_grad_() for size in sizes]
    vectors = [torch.randn(N, dtype=F64).requires_grad_() for _ in range(2)]
    given += vectors if affine else [None, None]
    return given + [torch.randn(m, N, dtype=F64).requires_grad_() for _ in range(operands)]


def eager(given, running, post, momentum=0.1):
    x, weight, bias, gamma, beta, *rest = given
    z = nn.functional.linear(x, weight, bias)
    z = z + rest[0] if rest else z
    y = nn.functional.batch_norm(z, *running, gamma, beta, True, momentum)
    return post(y)


def buffers():
    return [torch.randn(N, dtype=F64), torch.rand(N, dtype=F64) + 0.5]


def check(given, chain, post, running, wanted=None):
    """y, the gradients and the running statistics are eager's; returns y and the caller's."""
    theirs = [t.clone() for t in running]
    expected = eager(given, theirs, post)
    y = chain(*running, *given[:5], tuple(given[5:]))
    dy = torch.randn_like(expected)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(running, theirs, rtol=1e-10, atol=1e-10)
    wanted = [t for t in given if t is not None] if wanted is None else wanted
    found, known = (torch.autograd.grad(each, wanted, dy) for each in (y, expected))
    for ours, eagers in zip(found, known, strict=True):
        torch.testing.assert_close(ours, eagers, rtol=1e-9, atol=1e-9)
    return y


@pytest.mark.parametrize(
    ("text", "operands", "post"),
    [
        ("batch_norm(1e-05)|relu", 0, torch.relu),
        ("add_residual|batch_norm(1e-05)|gelu", 1, nn.functional.gelu),
        ("batch_norm(1e-05)", 0, lambda y: y),
    ],
)
def test_steps_are_eagers_and_native_ones_run_no_python(gpu, monkeypatch, text, operands, post):
    chain = Updating(Caller(text, "epilogue"), 0.1)
    for affine in (True, False):
        gpu.kinds()
        for run in range(8):
            y = check(tensors(operands=operands, affine=affine), chain, post, buffers())
            if run == 0:
                assert gpu.kinds() == FORWARD + BACKWARD
        assert y.grad_fn.name() == "LinearNormBackward"

        def fail(*_):
            raise AssertionError("Python was asked")

        with monkeypatch.context() as patch:
            patch.setattr("epinorm.operator.autograd.run_backward", fail)
            before = gpu.replayed
            check(tensors(operands=operands, affine=affine), chain, post, buffers())
        assert gpu.replayed == before + len(FORWARD + BACKWARD)


def test_fewer_gradients_have_fewer_launches(gpu):
    chain = Updating(Caller("batch_norm(1e-05)|relu", "epilogue"), 0.1)
    for places, kinds in (
        ([3, 4], ["batch_backward", "batch_sums"]),
        ([4], ["batch_backward", "batch_sums"]),
        ([0], ["batch_backward", "batch_sums", "batch_backward"]),
        ([1, 3], ["batch_backward", "batch_sums", "batch_backward"]),
        ([2], BACKWARD),
    ):
        for _ in range(4):
            given = tensors()
            for i, t in enumerate(given):
                t.requires_grad_(i in places)
            gpu.kinds()
            check(given, chain, torch.relu, buffers(), [given[i] for i in places])
            assert gpu.kinds() == FORWARD + kinds


def test_without_gradients_y_lies_over_z_and_the_statistics_come_all_the_same(gpu):
    chain = Updating(Caller("relu|batch_norm(1e-05)", "epilogue"), 0.25)
    for _ in range(6):
        given, running = tensors(), buffers()
        theirs = [t.clone() for t in running]
        with torch.no_grad():
            y = chain(*running, *given, ())
            z = torch.relu(nn.functional.linear(*given[:3]))
            expected = nn.functional.batch_norm(z, *theirs, *given[3:], True, 0.25)
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(running, theirs, rtol=1e-10, atol=1e-10)
        assert not y.requires_grad


def test_the_batchs_statistics_have_no_gradient(gpu):
    caller = Caller("batch_norm(1e-05)", "epilogue")
    for _ in range(6):
        y, statistics = caller(*tensors(), ())
        assert y.requires_grad
        assert not statistics.requires_grad
        assert statistics.shape == (2, N)
        torch.testing.assert_close(y.detach().mean(0), y.new_zeros(N), rtol=1, atol=10)


def test_a_step_of_a_network_is_eagers(gpu, monkeypatch):
    """All of it through ``fuse``: momenta, a module that is called twice, and no statistics."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(K, N), nn.Linear(N, N), nn.Linear(N, N)
            self.na, self.nb = nn.BatchNorm1d(N, momentum=0.3), nn.BatchNorm1d(N)
            self.nc = nn.BatchNorm1d(N, affine=False, track_running_stats=False)

        def forward(self, x):
            h = torch.relu(self.na(self.a(x)))
            h = self.nb(self.b(h))
            return self.nc(nn.functional.silu(self.nb(self.c(h))))

    def plan(problem, strategy="auto"):
        return plan_cuda(problem, strategy)

    monkeypatch.setattr(paying, "plan_for", plan)
    model = Net().double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="epilogue")
    for _ in range(6):
        x = torch.randn(M, K, dtype=F64)
        results = []
        for each in (model, fused):
            each.zero_grad()
            y = each(x)
            y.sin().sum().backward()
            results.append([y.detach(), *(p.grad for p in each.parameters()), *each.buffers()])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    assert gpu.kinds() == 6 * (3 * FORWARD + 3 * BACKWARD)


def test_fp32_parameters_change_no_plan(gpu):
    for rows in (256, 16384):
        of_16_bits = Problem(
            *(Chain.parse("batch_norm(1e-05)|relu"), rows, 512, 512, *(torch.bfloat16,) * 3),
            *(True, True, True, True, torch.device("cuda", 0), "native"),
        )
        mixed = dataclasses.replace(of_16_bits, norm_dtype=torch.float32)
        plans = [plan_cuda(problem, "auto") for problem in (of_16_bits, mixed)]
        assert plans[0] == plans[1]
        assert plans[0].strategy == "epilogue"
        assert plans[0].gain > 1


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
def test_a_step_under_autocast(gpu, monkeypatch, low, affine):
    """All in 16 bits but the norm's parameters, their gradients and the statistics; by native code
    in the end."""
    text = "relu|batch_norm(1e-05)|gelu"
    facts, calls = (text, "epilogue", False, low), NativeCalls()
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: low)
    for _ in range(6):
        # So few terms that dX and dW are the library's products.
        x, weight, bias, gamma, beta = given = [
            t.detach()[..., : K - 4 if i < 2 else N].float().contiguous().requires_grad_()
            for i, t in enumerate(tensors())
        ]
        given[3:] = [t if there else None for t, there in zip((gamma, beta), affine, strict=True)]
        low_given = cast(given, low)
        executable = executable_for_call((*low_given, ()), facts, True, True)
        with torch.autocast("cpu", low):  # which the imaginary GPU's tensors are under
            made = calls.find(given)
            if made is None:
                made = differentiable(executable, facts, low_given)
            calls.keep(executable, given, facts, True, True)
        y, statistics = made
        assert (y.dtype, statistics.dtype) == (low, torch.float32)
        s = nn.functional.linear(*(t.to(low).double() for t in (x, weight, bias))).relu()
        vectors = [None if t is None else t.double() for t in given[3:]]
        true = nn.functional.gelu(nn.functional.batch_norm(s, None, None, *vectors, True))
        dy = torch.randn_like(y)
        leaves = [t for t in given if t is not None]
        found = torch.autograd.grad(y, leaves, dy)
        assert all(g.dtype == torch.float32 for g in found)
        exact = torch.autograd.grad(true, leaves, dy.double())
        pairs = zip((y, *statistics, *found), (true, s.mean(0), s.var(0), *exact), strict=True)
        for ours, expected in pairs:
            assert (ours - expected).norm() < 0.03 * expected.norm()
    assert y.grad_fn.name() == "LinearNormBackward"
    assert gpu.kinds()[: len(FORWARD + BACKWARD)] == FORWARD + BACKWARD
