"""fp32 by planes whatever the width, with a norm or without: outputs and gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.operator.functional import apply_chain
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.verify import poisoned_memory

NAMES = ("x", "weight", "bias", "norm_weight", "norm_bias")

NORMED = [
    (300, 96, 768, "add_residual|layer_norm(1e-12)"),
    (256, 512, 512, "layer_norm|mish"),
    (130, 1024, 1024, "rms_norm(1e-6)|silu"),
    (70, 136, 4096, "layer_norm|gelu"),
    (33, 264, 8192, "gelu|layer_norm"),
    (200, 128, 768, "group_norm(64)|silu|mul_element"),  # 12 channels
    (200, 100, 120, "group_norm(5)|silu"),  # 24
    (200, 72, 200, "group_norm(5)|add_residual"),  # 40
    (130, 64, 300, "group_norm(3)|silu|mul_channel"),  # 100
    (65, 64, 75, "group_norm(5)|silu"),  # 15: rows of no whole 16 bytes
    (40, 200, 2048, "add_channel|group_norm(2)|sigmoid"),  # 1024
    (20, 70, 17, "layer_norm|tanh"),
    (1, 512, 1024, "layer_norm|silu"),
    (257, 3, 768, "layer_norm"),
    (5, 512, 16384, "rms_norm|silu"),
]
PLAIN = [
    (300, 512, 768, "identity"),
    (300, 512, 3072, "gelu"),
    (130, 264, 1000, "silu|mul_element|add_residual"),
    (257, 64, 10, "identity"),
    (65, 100, 33, "sigmoid|sub_channel|mul_channel"),
    (1, 512, 512, "silu"),
    (33, 5, 7, "scale(3)|add_residual"),
]


@contextlib.contextmanager
def precision_set(precision: str) -> Iterator[None]:
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    yield
    torch.set_float32_matmul_precision(saved)


def tensors_of(m: int, k: int, n: int, text: str, seed: int = 0) -> list[Tensor]:
    """x, weight, bias, the norm's parameters where there is a norm, then the operands."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    chain = Chain.parse(text)
    x, weight, bias = draw(m, k), draw(n, k) / math.sqrt(k), draw(n) / 2
    affine = [] if chain.norm is None else [1 + draw(n) / 4, draw(n) / 2]
    return [x, weight, bias, *affine, *(
        draw(n) if kind == "channel" else draw(m, n) for kind in chain.operand_kinds
    )]  # fmt: skip


def arguments(tensors: list[Tensor], text: str) -> tuple:
    count = 3 if Chain.parse(text).norm is None else 5
    given = [*tensors[:count], *[None] * (5 - count)]
    return (*given, tuple(tensors[count:]))


def step(tensors: list[Tensor], text: str, dy: Tensor, how: str) -> dict[str, Tensor]:
    """y and all gradients by epinorm with strategy ``how``, by "eager", or in "float64"."""
    dtype = torch.float64 if how == "float64" else torch.float32
    leaves = [t.to(dtype).detach().requires_grad_() for t in tensors]
    *given, operands = arguments(leaves, text)
    if how in ("eager", "float64"):
        x, weight, bias, gamma, beta = given
        y = linear_norm(x, weight, bias, Chain.parse(text), gamma, beta, operands)
    else:
        with poisoned_memory([dy, tensors[0], tensors[1]]):
            y = apply_chain(*given, operands, text, how)
    gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
    return {"y": y.detach(), **{str(i): g for i, g in enumerate(gradients)}}


def check(tensors: list[Tensor], text: str, precision: str, strategy: str, times: float = 1.0):
    m, n = tensors[0].shape[0], tensors[1].shape[0]
    dy = torch.randn(m, n, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    truth = step(tensors, text, dy, "float64")
    with precision_set(precision):
        eager = step(tensors, text, dy, "eager")
        ours = step(tensors, text, dy, strategy)
        again = step(tensors, text, dy, strategy)
        with torch.no_grad():
            *given, operands = arguments(tensors, text)
            inferred = apply_chain(*given, operands, text, strategy)
    ours["inference"], again["inference"] = inferred, inferred
    truth["inference"], eager["inference"] = truth["y"], eager["y"]
    wrong = []
    for name, value in ours.items():
        what = NAMES[int(name)] if name.isdigit() and int(name) < 5 else name
        assert torch.equal(value, again[name]), f"{what} differs between two runs"
        allowed = times * allowed_error(relative_error(eager[name], truth[name]), torch.float32)
        error = relative_error(value, truth[name])
        if not error <= allowed:
            wrong.append(f"{what}: error {error:.2e}, allowed {allowed:.2e}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("case", NORMED, ids=lambda c: f"{c[3]}-{c[0]}-{c[1]}-{c[2]}")
def test_every_width_is_as_accurate_as_eager(case, precision):
    check(tensors_of(*case), case[3], precision, "planes")


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("case", PLAIN, ids=lambda c: f"{c[3]}-{c[0]}-{c[1]}-{c[2]}")
def test_linears_without_a_norm_are_as_accurate_as_eager(case, precision):
    check(tensors_of(*case), case[3], precision, "single")


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    "case",
    [
        (2048, 1024, 768, "add_residual|layer_norm(1e-12)"),
        (1, 1024, 768, "layer_norm|gelu"),
        (300, 1, 64, "layer_norm|silu"),
        (16, 4096, 512, "group_norm(8)|silu"),
        (16, 8192, 8192, "group_norm(512)|silu"),
        (2048, 768, 3072, "gelu"),
        (8, 64, 10, "identity"),
    ],
    ids=lambda c: f"{c[3]}-{c[0]}-{c[1]}-{c[2]}",
)
def test_what_is_chosen_is_as_accurate_as_eager(case, precision):
    check(tensors_of(*case), case[3], precision, "auto")


def test_few_columns():
    """At `high` PyTorch's TF32 kernel for so few columns is as accurate as one plane: a toss-up."""
    check(tensors_of(64, 768, 2, "tanh"), "tanh", "highest", "single")


def outliers(x: Tensor, weight: Tensor) -> None:
    x[3, 5], weight[7, 2], x[:, 9] = 3e6, -2e5, x[:, 9] * 1e4


def denormals(x: Tensor, weight: Tensor) -> None:
    x[4] *= 1e-41
    weight[:, 3] *= 1e-40


def zeros(x: Tensor, weight: Tensor) -> None:
    x[2], weight[5] = 0.0, 0.0


def spread(x: Tensor, weight: Tensor) -> None:
    x[6] *= torch.logspace(-12, 3, x.shape[1], device=x.device)
    weight[11] *= torch.logspace(3, -12, x.shape[1], device=x.device)


@pytest.mark.parametrize("hard", [outliers, denormals, zeros, spread])
@pytest.mark.parametrize(
    ("n", "text", "strategy"),
    [
        (1024, "layer_norm|silu", "planes"),
        (1024, "group_norm(2)|silu", "planes"),
        (1024, "silu", "single"),
        (768, "add_residual|layer_norm", "planes"),
        (75, "rms_norm|silu", "planes"),  # rows of no whole 16 bytes
        (4096, "layer_norm|gelu", "planes"),
        (8192, "layer_norm", "planes"),
    ],
)
def test_hard_inputs(hard, n, text, strategy):
    tensors = tensors_of(96, 256, n, text)
    hard(*tensors[:2])
    check(tensors, text, "highest", strategy, times=2.0)


@pytest.mark.parametrize("hard", [outliers, denormals, zeros, spread])
@pytest.mark.parametrize(
    ("m", "k", "n", "precision"),
    [(2100, 256, 1024, "high"), (2100, 258, 1024, "high"), (8500, 256, 256, "highest")],
)
def test_hard_inputs_in_clusters(m, k, n, precision, hard):
    """The norm in one kernel with the product: as TF32, and, where rows of x are not on 16 bytes,
    by planes, whose range guard shares groups of 1024 too."""
    tensors = tensors_of(m, k, n, "add_residual|layer_norm|silu")
    hard(*tensors[:2])
    check(tensors, "add_residual|layer_norm|silu", precision, "single", times=2.0)


@pytest.mark.parametrize("n", [75, 768, 4096])
@pytest.mark.parametrize(("text", "strategy"), [("layer_norm", "planes"), ("gelu", "single")])
def test_what_is_not_finite_comes_out_where_pytorch_puts_it(text, strategy, n):
    for place in ("x", "weight"):
        tensors = tensors_of(70, 128, n, text)
        matrix = tensors[0 if place == "x" else 1]
        matrix[5, 3], matrix[9, 4] = float("nan"), float("inf")
        dy = torch.randn(70, n, device="cuda")
        eager, ours = (step(tensors, text, dy, how) for how in ("eager", strategy))
        for name, value in ours.items():
            assert torch.equal(value.isnan(), eager[name].isnan()), (place, name)


@pytest.mark.parametrize(("text", "strategy"), [("layer_norm", "planes"), ("gelu", "single")])
def test_an_empty_batch(text, strategy):
    tensors = tensors_of(0, 128, 768, text)
    found = step(tensors, text, torch.empty(0, 768, device="cuda"), strategy)
    assert found["y"].shape == (0, 768)
    assert not found["1"].any()


def test_a_plain_linear_keeps_no_output_for_its_backward():
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    weight = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        y = apply_chain(x, weight, None, None, None, (), "identity", "single")
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        del y
    planes = 4 * (x.numel() + weight.numel())
    assert kept < planes * 1.05


@pytest.mark.parametrize(
    ("text", "strategy"), [("gelu|add_residual", "single"), ("add_residual|layer_norm", "planes")]
)
def test_an_operand_at_an_odd_address(text, strategy):
    tensors = tensors_of(70, 128, 768, text)
    moved = torch.empty(70 * 768 + 1, device="cuda")[1:].view(70, 768)
    tensors[-1] = moved.copy_(tensors[-1])
    check(tensors, text, "highest", strategy)
