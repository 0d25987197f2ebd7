"""Chains without a norm: their gradients, also of a result that is kept, and memory."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from product_case import forced_core, matmul_precision

import epinorm
from epinorm.backends.cuda.runtime.native import settle
from epinorm.chain import Chain
from epinorm.tools.accuracy import relative_error
from epinorm.tools.bench import model_runner
from epinorm.tools.timing import Runner, peak_memory_mb

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
M, K, N = 1000, 256, 512


@pytest.mark.parametrize("last", ["relu", "sigmoid", "tanh"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(BF16, "high"), (F16, "high"), (F32, "high"), (F32, "highest")]
)
def test_gradients_are_those_of_the_result(last, dtype, precision):
    """Of y as it is, whose kinks and roundings then play no part; in Python's steps and native."""
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(0)
    sizes = (M, K), (N, K), (N,), (M, N)
    given = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in sizes]
    x, weight, bias, residual = given
    text = f"scale(0.25)|add_residual|{last}"
    gradient = Chain.parse(text).pre[-1].definition.result_gradient
    dy = torch.randn(M, N, device="cuda").to(dtype)
    activation = getattr(torch, last)

    def errors(y):
        found = torch.autograd.grad(y, given, dy)
        dz = gradient(dy.double(), y.detach().double())
        through = 0.25 * dz
        exact = (through @ weight.double(), through.t() @ x.double(), through.sum(0), dz)
        return [relative_error(f, e) for f, e in zip(found, exact, strict=True)]

    for _ in range(5):
        y = epinorm.linear(
            x, weight, bias, post=text.split("|"), operands=[residual], strategy="single"
        )
        z = F.linear(x.double(), weight.double(), bias.double())
        exact = activation(0.25 * z + residual.double())
        eager = activation(0.25 * F.linear(x, weight, bias) + residual)
        floor = torch.finfo(dtype).eps
        assert relative_error(y, exact) <= 1.1 * relative_error(eager, exact) + floor
        for ours, theirs in zip(errors(y), errors(eager), strict=True):
            assert ours <= 1.1 * theirs + floor


Change = Callable[[Tensor, Tensor, Tensor], None]
FLOOR = {"high": 1e-3, "highest": 1e-6}
"""The promise of internals/precision.md, of the terms' magnitude."""


def of_rows(_x: Tensor, _weight: Tensor, dy: Tensor) -> None:
    dy[5] *= 1e-25
    dy[700] *= 1e25


def of_columns(_x: Tensor, _weight: Tensor, dy: Tensor) -> None:
    dy[:, 3] *= 1e-25
    dy[:, 701] *= 1e15


def of_elements(x: Tensor, weight: Tensor, dy: Tensor) -> None:
    """Whose columns are listed, of x and of W; and one of dz."""
    x[7, 5], weight[9, 11], dy[13, 17] = 1e-30, 1e-30, 1e-30


def of_a_row_of_x(x: Tensor, _weight: Tensor, _dy: Tensor) -> None:
    x[13] *= 1e-25


@pytest.mark.parametrize("change", [None, of_rows, of_columns, of_elements, of_a_row_of_x])
@pytest.mark.parametrize("last", ["relu", "silu"])
def test_what_planes_cannot_hold_is_as_exact_as_eagers(
    last: str, change: Change | None, precision: str
) -> None:
    """Each row of dX and dW; in Python's steps and native, and where x's and W's planes are made
    again. For ReLU, at `highest`, fp32 dz is written over x's planes."""
    m, k, n = 4000, 2056, 2040
    torch.manual_seed(0)
    x, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda") / k**0.5
    bias, dy = 0.1 * torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    if change is not None:
        change(x, weight, dy)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    wide: list[Tensor] = [t.detach().double() for t in given]

    def exact(y: Tensor) -> tuple[Tensor, ...]:
        """The gradients, and their terms; of y's own kinks. z's error counts beside dz too."""
        if last == "relu":
            dz = dy.double() * (y > 0)
            size = dz.abs()
        else:
            z = F.linear(*wide).requires_grad_()
            (dz,) = torch.autograd.grad(F.silu(z), z, dy.double())
            size = 2 * dy.double().abs()
        gradients = dz @ wide[1], dz.t() @ wide[0], dz.sum(0)[:, None]
        return (*gradients, size @ wide[1].abs(), size.t() @ wide[0].abs(), size.sum(0)[:, None])

    def errors(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> list[Tensor]:
        """Of each row; a bias' gradient has one number in each."""
        rows = (found[0], found[1], found[2][:, None])
        return [(f.double() - e).norm(dim=1) for f, e in zip(rows, truth[:3], strict=True)]

    eager_y = getattr(F, last)(F.linear(*given))
    of_eager = errors(torch.autograd.grad(eager_y, given, dy), exact(eager_y.detach()))
    before: list[tuple[Tensor, ...]] = []
    settle()
    for _ in range(5):
        y = epinorm.linear(*given, post=[last], strategy="single")
        first = torch.autograd.grad(y, given, dy, retain_graph=True)
        again = torch.autograd.grad(y, given, dy)
        for now, then in zip((first, again), before, strict=False):
            assert all(map(torch.equal, now, then)), "a second run has other bits"
        before = [first, again]
    truth = exact(y.detach())
    for found in before:
        for ours, eagers, size in zip(errors(found, truth), of_eager, truth[3:], strict=True):
            allowed = torch.maximum(1.1 * eagers, FLOOR[precision] * size.norm(dim=1))
            assert (ours <= allowed).all(), f"{((ours - allowed) / size.norm(dim=1)).max():.2e}"


def test_a_training_step_of_an_mlp_takes_no_more_memory_than_eagers() -> None:
    """Where the third of four layers computes dW at `highest`: four y, x's planes, dz's, dy and
    two dW, each half as large. What the library's products need besides is eager's."""
    if forced_core() != "hopper" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the portable core splits dz")
    m, n = 4096, 2048
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(n, n), nn.ReLU())]
    model, x = nn.Sequential(*layers).cuda(), torch.randn(m, n, device="cuda")
    device, peaks = x.device, []
    settle()
    with matmul_precision("highest"):
        for candidate in (model, epinorm.fuse(copy.deepcopy(model))):
            runner = model_runner(candidate, (x,), True)
            for _ in range(8):
                runner.prepare()
                runner.run()

            def prepare(clear: Callable[[], None] = runner.prepare) -> None:
                clear()
                torch._C._cuda_clearCublasWorkspaces()

            gc.collect()  # what other tests have left would be given back meanwhile
            peaks.append(peak_memory_mb(Runner(runner.run, prepare), device))
    eager, ours = peaks
    assert ours <= 8.1 * 4 * m * n / 1e6, peaks
    assert ours <= eager, peaks
