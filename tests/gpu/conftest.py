"""One norm-activation problem on a GPU: its tensors, our result, eager's and the float64 truth."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.norm.backward import NormBackward, NormGradients
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.chain import Chain
from epinorm.chain.reference import epilogue
from epinorm.problem import Forward, Inputs, Problem, Wanted
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.verify import poisoned_memory

sys.path.insert(0, str(Path(__file__).parent))

from product_case import matmul_precision


def _share_gpus() -> None:
    """Let each of pytest-xdist's workers see one of this machine's GPUs, before CUDA looks."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker and count > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(worker.removeprefix("gw")) % count]


_share_gpus()
CHAIN = "group_norm({groups})|leaky_relu(0.01)|scale(2)"

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
STATS_FLOOR = 4.0  # ulps


@dataclass
class NormCase:
    """The tensors of one problem; see ``make_case``."""

    problem: Problem
    inputs: Inputs
    z: Tensor
    dy: Tensor

    @property
    def want(self) -> Wanted:
        p = self.problem
        operands = tuple(True for _ in self.inputs.operands)
        return Wanted(True, True, p.has_bias, p.has_norm_weight, p.has_norm_bias, operands)

    @property
    def given(self) -> Tensor:
        """What the kernels are given of the linear: with its bias where they expect that."""
        return self.z + self.inputs.bias if self.problem.bias_in_z else self.z

    def forward(self) -> Forward:
        """Our forward kernel, its outputs pre-filled with NaN."""
        shape = (self.problem.m, self.problem.groups)
        stats = torch.empty(shape, dtype=self.problem.stats_dtype, device=self.z.device)
        with poisoned_memory([self.dy, stats]):
            return NormForward(self.problem)(self.given, self.inputs)

    def backward(self, kept: Forward, dy: Tensor | None = None) -> dict[str, Tensor]:
        """Our backward kernel, its outputs pre-filled with NaN, by the gradients' names."""
        like = [self.z, self.dy, self.inputs.bias, *self.inputs.operands]
        with poisoned_memory(like):
            found = NormBackward(self.problem)(
                self.inputs, kept, self.dy if dy is None else dy, self.want
            )
        return named(found)

    def pytorch(self, dtype: torch.dtype | None, device: str = "cuda") -> dict[str, Tensor]:
        """y and every gradient by PyTorch: in ``dtype``, or, for None, as eager computes it."""
        p = self.problem

        def leaf(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()

        z, bias, weight, norm_bias = map(leaf, (self.given, *self.inputs[2:5]))
        if bias is not None and p.bias_in_z:  # it is in z already, and has its gradient still
            bias = torch.zeros_like(bias).requires_grad_()
        given = weight
        if weight is None and norm_bias is not None:  # PyTorch 2.11: its backward raises
            given = torch.ones_like(norm_bias)
        operands = tuple(leaf(t) for t in self.inputs.operands)
        biased = z if bias is None else z + bias
        y = epilogue(biased.to(dtype or p.norm_dtype), p.chain, given, norm_bias, operands)
        leaves = {"dz": z, "bias": bias, "norm_weight": weight, "norm_bias": norm_bias}
        leaves |= {f"operand{i}": t for i, t in enumerate(operands)}
        leaves = {name: t for name, t in leaves.items() if t is not None}
        gradients = torch.autograd.grad(y, list(leaves.values()), self.dy.to(y.dtype))
        return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}

    def check(self) -> None:
        """Forward and every gradient are as accurate as eager's, and the same bits twice."""
        kept = self.forward()
        ours = {"y": kept.y, **self.backward(kept)}
        again = self.forward()
        repeated = {"y": again.y, **self.backward(again)}
        truth, eager = self.pytorch(torch.float64), self.pytorch(None)
        scale = None
        if self.problem.dtype == torch.float64:
            scale = self.pytorch(torch.float32)
        for name, ours_tensor in ours.items():
            assert ours_tensor.dtype == eager[name].dtype, name
            assert ours_tensor.shape == eager[name].shape, name
            assert torch.equal(bits(ours_tensor), bits(repeated[name])), f"{name} differs"
            error = relative_error(ours_tensor, truth[name])
            if scale is None:
                eager_error = relative_error(eager[name], truth[name])
                allowed = allowed_error(eager_error, ours_tensor.dtype)
            else:  # the truth has our own precision: the conditioning is measured in fp32
                allowed = max(2.0**-50, relative_error(scale[name], truth[name]) * 2.0**-27)
            assert error <= allowed, (
                f"{name}: error {error:.3e}, allowed {allowed:.3e}, {self.problem}"
            )
        self.check_statistics(kept)

    def check_statistics(self, kept: Forward) -> None:
        """mean and rstd of what enters the norm."""
        p = self.problem
        z = self.given.double()
        if self.inputs.bias is not None and not p.bias_in_z:
            z = z + self.inputs.bias.double()
        remaining = iter(self.inputs.operands)
        for operation in p.chain.pre:
            z = operation(z, next(remaining).double() if operation.operand else None)
        grouped = z.reshape(p.m, p.groups, p.n // p.groups)
        centred = "rms_norm" not in str(p.chain)
        eps = p.chain.norm.eps
        eps = torch.finfo(p.stats_dtype).eps if eps is None else eps
        mean = grouped.mean(2) if centred else torch.zeros(p.m, p.groups, device=z.device)
        rstd = ((grouped - mean.double()[..., None]).square().mean(2) + eps).rsqrt()
        tolerance = STATS_FLOOR * torch.finfo(p.stats_dtype).eps
        # Rounding of z + bias moves each value by an ulp of itself, whatever is computed after.
        spread = grouped.abs().amax(2) if p.m else grouped.sum(2)
        if centred:
            assert ((kept.mean.double() - mean).abs() <= tolerance * (spread + 1e-30)).all()
        limit = tolerance * (4 + spread * rstd)
        assert ((kept.rstd.double() / rstd - 1).abs() <= limit).all()


def named(found: NormGradients) -> dict[str, Tensor]:
    gradients = {"dz": found.dz, "bias": found.bias}
    gradients |= {"norm_weight": found.norm_weight, "norm_bias": found.norm_bias}
    gradients |= {f"operand{i}": t for i, t in enumerate(found.operands)}
    return {name: t for name, t in gradients.items() if t is not None}


def bits(t: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN."""
    return t.contiguous().view(torch.uint8)


def padded(t: Tensor, extra: int) -> Tensor:
    """The same matrix in rows that are ``extra`` values further apart."""
    if not extra:
        return t
    wide = t.new_full((t.shape[0], t.shape[1] + extra), float("nan"))
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def make_case(
    channels: int,
    groups: int,
    m: int,
    dtype: torch.dtype = torch.float32,
    chain: str = CHAIN,
    *,
    norm_dtype: torch.dtype | None = None,
    bias: bool = True,
    norm_weight: bool = True,
    norm_bias: bool = True,
    uniform: bool = False,
    scale: float = 1.0,
    offset: float = 0.0,
    extra: int = 0,
    training: bool = True,
) -> NormCase:
    """A problem of M × (groups × channels) with random parameters; ``extra`` pads the rows."""
    norm_dtype = norm_dtype or dtype
    parsed = Chain.parse(chain.format(groups=groups))
    n = groups * channels
    draw = torch.rand if uniform else torch.randn

    def vector(present: bool, kind: torch.dtype) -> Tensor | None:
        return torch.randn(n, device="cuda").to(kind) if present else None

    def matrix(kind: torch.dtype, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        values = draw(m, n, device="cuda", dtype=torch.float64) * scale + offset
        return padded(values.to(kind), extra)

    z = matrix(dtype, scale, offset)
    operands = tuple(
        vector(True, norm_dtype) if kind == "channel" else matrix(norm_dtype)
        for kind in parsed.operand_kinds
    )
    inputs = Inputs(
        torch.empty(m, 1, device="cuda", dtype=dtype),
        torch.empty(n, 1, device="cuda", dtype=dtype),
        vector(bias, dtype),
        vector(norm_weight, norm_dtype),
        vector(norm_bias, norm_dtype),
        operands,
    )
    problem = Problem(
        chain=parsed,
        m=m,
        k=1,
        n=n,
        dtype=dtype,
        norm_dtype=norm_dtype,
        out_dtype=norm_dtype,
        has_bias=bias,
        has_norm_weight=norm_weight,
        has_norm_bias=norm_bias,
        training=training,
        device=torch.device("cuda", torch.cuda.current_device()),
        precision="native" if dtype != torch.float32 else "highest",
    )
    dy = padded(torch.randn(m, n, device="cuda").to(norm_dtype), extra)
    return NormCase(problem, inputs, z, dy)


@pytest.fixture
def norm_case() -> Callable[..., NormCase]:
    """``make_case``, as a fixture: test files cannot import one another."""
    return make_case


@pytest.fixture(params=["highest", "high", "bfloat16", "float16"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """A dtype (``dtype_of``), or a precision of fp32, which PyTorch is set to within."""
    with matmul_precision("high" if request.param == "high" else "highest"):
        yield request.param


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """A precision of fp32, which PyTorch is set to within."""
    with matmul_precision(request.param):
        yield request.param
