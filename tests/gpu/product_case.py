"""One Linear → Norm problem on a GPU: its tensors, our result, eager's, and the truth."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.backends.cuda.fp32.planes import Planes, splitter
from epinorm.backends.cuda.gemm.forward import SingleForward
from epinorm.backends.cuda.norm.backward import NormBackward
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.gradients import BackwardChoice
from epinorm.backends.cuda.plan.hopper_tile import Tile, largest_stages
from epinorm.backends.cuda.plan.norm_planes import beside_dx, worthwhile
from epinorm.backends.cuda.plan.strategy import wanted_core
from epinorm.backends.cuda.plane_products import PlaneProducts
from epinorm.backends.cuda.runtime.device import gpu_of
from epinorm.backends.memo import clear, memo
from epinorm.chain import Chain, RMSNorm
from epinorm.chain.reference import epilogue
from epinorm.problem import Core, Forward, Inputs, Layout, Problem
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.verify import poisoned_memory

T = TypeVar("T")

CHAIN = "group_norm({groups})|leaky_relu(0.01)|scale(2)"

HARD = {"inf": float("inf"), "nan": float("nan"), "huge": 1e12, "tiny": 1e-38}
"""Values that planes of fp16 do not hold, or nothing does."""

KINDS = {
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
    "high": (torch.float32, "high"),
    "highest": (torch.float32, "highest"),
}


def dtype_of(kind: str) -> torch.dtype:
    """The dtype of one of ``KINDS``."""
    return KINDS[kind][0]


def forced_core() -> Core:
    """The core that the environment forces, else Hopper's."""
    return "portable" if wanted_core() == "portable" else "hopper"


@dataclass
class ProductCase:
    """The tensors of one problem; see ``make_product``."""

    problem: Problem
    inputs: Inputs
    core: Core = dataclasses.field(default_factory=forced_core)

    def run(self, inputs: Inputs | None = None) -> Forward:
        """By the single kernel with this core."""
        inputs = self.inputs if inputs is None else inputs
        if self.core == "portable":
            self._skip_unless_served()
        return _forward(self.problem, self.core).bind(*self.layout(inputs))(inputs)

    def layout(self, inputs: Inputs) -> Layout:
        size = self.problem.m, self.problem.n
        return Layout(inputs.x.stride(0), inputs.weight.stride(0), size)

    def _skip_unless_served(self) -> None:
        """What Hopper's clusters serve and this core does not: wide groups."""
        p = self.problem
        why_not = portable_plan.why_not(p)
        if why_not is None and portable_plan.choose_tile(p, gpu_of(p.device)) is None:
            why_not = "no tile fits"
        if why_not is not None:
            pytest.skip(f"the portable core does not serve it: {why_not}")

    def ours(self) -> Forward:
        """The same, its outputs pre-filled with NaN."""
        p = self.problem
        like = [torch.empty(p.m, p.n, dtype=t, device=p.device) for t in (p.out_dtype, p.dtype)]
        like.append(torch.empty(p.m, p.groups, dtype=torch.float32, device=p.device))
        with poisoned_memory(like):
            return self.run()

    def linear(self, dtype: torch.dtype | None, bias: bool = True) -> Tensor:
        """The linear's output in ``dtype``, or, for None, by eager in the problem's precision."""
        x, weight, b = self.inputs[:3]
        b = b if bias else None
        if dtype is not None:
            return F.linear(x.to(dtype), weight.to(dtype), None if b is None else b.to(dtype))
        with matmul_precision(self.problem.precision):
            return F.linear(x, weight, b)

    def pytorch(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """y, z as it is kept, and the statistics by PyTorch: in ``dtype``, or as eager does."""
        p = self.problem
        kind = dtype or p.norm_dtype
        biased = self.linear(dtype).to(kind)
        weight, norm_bias = (None if t is None else t.to(kind) for t in self.inputs[3:5])
        operands = tuple(t.to(kind) for t in self.inputs.operands)
        y = epilogue(biased, p.chain, weight, norm_bias, operands)
        mean, rstd = self._statistics(biased)
        return {"y": y, "z": self.linear(dtype, p.bias_in_z), "mean": mean, "rstd": rstd}

    def _statistics(self, biased: Tensor) -> tuple[Tensor, Tensor]:
        p = self.problem
        value = biased.double()
        remaining = iter(self.inputs.operands)
        for operation in p.chain.pre:
            value = operation(value, next(remaining).double() if operation.operand else None)
        grouped = value.reshape(p.m, p.groups, p.n // p.groups)
        eps = p.chain.norm.eps
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        mean = grouped.mean(2)
        if isinstance(p.chain.norm, RMSNorm):
            mean = torch.zeros_like(mean)
        rstd = ((grouped - mean[..., None]).square().mean(2) + eps).rsqrt()
        return mean, rstd

    def rounded(self, compute: Callable[[torch.dtype], T]) -> T:
        """As TF32 is defined: operands rounded to 10 bits behind the point, all else exact."""
        exact = self.inputs
        self.inputs = exact._replace(x=to_tf32(exact.x), weight=to_tf32(exact.weight))
        try:
            return compute(torch.float64)
        finally:
            self.inputs = exact

    def by_yardsticks(self, compute: Callable[[torch.dtype | None], T]) -> list[T]:
        """What ours may be no worse than: eager's; and TF32's own where it is allowed, since eager
        takes plain fp32 for small products and vectors."""
        high = self.problem.precision == "high"
        return [compute(None)] + ([self.rounded(compute)] if high else [])

    @cached_property
    def yardsticks(self) -> list[dict[str, Tensor]]:
        return self.by_yardsticks(self.pytorch)

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        return self.pytorch(torch.float64)

    @property
    def eager(self) -> dict[str, Tensor]:
        return self.yardsticks[0]

    def check(self) -> Forward:
        """All results are as accurate as eager's, and the same bits twice."""
        p = self.problem
        first, second = self.ours(), self.ours()
        for name, ours, again in zip(Forward._fields, first.outputs, second.outputs, strict=False):
            assert torch.equal(bits(ours), bits(again)), f"{name} differs from run to run, {p}"
        assert first.y.dtype == p.out_dtype
        assert first.y.shape == (p.m, p.n)
        names = ["y"]
        if p.training:
            names += ["z", "rstd"] + ["mean"] * (not isinstance(p.chain.norm, RMSNorm))
            assert first.z.dtype == p.dtype
            assert first.rstd.shape == (p.m, p.groups)
        else:
            assert [t.shape for t in first.outputs[1:]] == [(0,)] * 3
        for name in names:
            self._check_error(name, getattr(first, name))
        return first

    def check_repeats(self, times: int) -> None:
        """The same bits, run back to back, so that one launch's start overlaps the end of the one
        before."""
        first = self.check()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(times):
            again = self.run()
            for found, expected in zip(again.outputs, first.outputs, strict=True):
                wrong += (found != expected).sum()
                found.fill_(float("nan"))  # the next run gets this memory
        assert wrong.item() == 0

    def check_others(self, rows: list[int], x: Tensor) -> Forward:
        """Ours of an x with other values in these rows, which leaves the bits of all others."""
        before = self.check()
        self.inputs = self.inputs._replace(x=x)
        after = self.ours()
        others = torch.ones(len(x), dtype=torch.bool, device=x.device)
        others[rows] = False
        for ours, earlier in zip(after.outputs, before.outputs, strict=True):
            if ours.numel():
                assert torch.equal(bits(ours[others]), bits(earlier[others]))
        return after

    def check_with_sum(self) -> None:
        """y and the sum in front of it, of a residual and LayerNorm over the whole row."""
        found, (residual,) = self.run(), self.inputs.operands

        def by_pytorch(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
            total = self.linear(dtype) + residual.to(dtype or residual.dtype)
            weight, bias = (t.to(total.dtype) for t in self.inputs[3:5])
            return F.layer_norm(total, (self.problem.n,), weight, bias), total

        yardsticks, truths = self.by_yardsticks(by_pytorch), by_pytorch(torch.float64)
        for i, ours in enumerate((found.y, found.second)):
            error = max(relative_error(of[i], truths[i]) for of in yardsticks)
            assert relative_error(ours, truths[i]) <= allowed_error(error, self.problem.dtype)

    def _check_error(self, name: str, ours: Tensor) -> None:
        p = self.problem
        error = relative_error(ours, self.truth[name])
        theirs = max(relative_error(found[name], self.truth[name]) for found in self.yardsticks)
        allowed = allowed_error(theirs, p.dtype if name in ("y", "z") else torch.float32)
        if name in ("mean", "rstd"):
            # Operands of 11 bits: the limit of 16-bit dtypes. And each step of 16 is cut at 25 bits
            # (internals/precision.md), which a group's mean keeps, where roundings are up and down.
            allowed = max(allowed, p.k / 16 * 2.0**-25, 1.1 * theirs * (p.precision != "highest"))
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}, {p}"


def bits(t: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN."""
    return t.contiguous().view(torch.uint8)


def to_tf32(t: Tensor) -> Tensor:
    """fp32 rounded to TF32's 10 bits behind the point, ties away from zero."""
    return (t.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """PyTorch's setting for fp32 products; "native" (16 bit) needs none."""
    torch.set_float32_matmul_precision("high" if precision == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def make_product(
    m: int,
    k: int,
    channels: int,
    groups: int,
    kind: str = "bfloat16",
    chain: str = CHAIN,
    *,
    training: bool = False,
    out_dtype: torch.dtype | None = None,
    uniform: bool = False,
    offset: float = 0.0,
    bias: bool = True,
    norm_weight: bool = True,
    norm_bias: bool = True,
    device: str = "cuda",
) -> ProductCase:
    """A problem of (m, k) × (groups × channels, k) with random parameters.

    x is uniform or normal plus ``offset``; W is normal, over the square root of k.
    """
    dtype, precision = KINDS[kind]
    out_dtype = out_dtype or dtype
    parsed = Chain.parse(chain.format(groups=groups))
    n = groups * channels

    def normal(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, device=device).to(kind)

    draw = torch.rand if uniform else torch.randn
    sizes = {"channel": (n,), "element": (m, n), "row": (m, 1)}
    operands = tuple(normal(*sizes[kind], kind=out_dtype) for kind in parsed.operand_kinds)
    inputs = Inputs(
        (draw(m, k, device=device) + offset).to(dtype),
        (torch.randn(n, k, device=device) / k**0.5).to(dtype),
        normal(n) if bias else None,
        normal(n, kind=out_dtype) if norm_weight else None,
        normal(n, kind=out_dtype) if norm_bias else None,
        operands,
    )
    problem = Problem(
        chain=parsed,
        m=m,
        k=k,
        n=n,
        dtype=dtype,
        norm_dtype=out_dtype,
        out_dtype=out_dtype,
        has_bias=bias,
        has_norm_weight=norm_weight,
        has_norm_bias=norm_bias,
        training=training,
        device=inputs.x.device,
        precision=precision,
    )
    return ProductCase(problem, inputs)


def fitted(problem: Problem, tile: Tile) -> Tile:
    """The tile with as many stages as fit, unless it says how many."""
    if tile.stages:
        return tile
    stages = largest_stages(hopper_plan.instance_for(problem, tile))
    return dataclasses.replace(tile, stages=min(stages, hopper_plan.MOST_STAGES))


def split(values: Tensor, planes: int) -> Planes:
    """Split a (rows, columns) fp32 matrix, columns contiguous, into one or two planes."""
    rows, columns = values.shape
    split_rows = splitter(planes, columns, rows, 0, values.device)
    buffer = torch.empty(split_rows.nbytes, dtype=torch.uint8, device=values.device)
    if rows:
        split_rows(buffer.data_ptr(), values)
    return split_rows.planes_in(buffer)


@memo()
def _forward(problem: Problem, core: Core) -> SingleForward:
    return SingleForward(problem, core)


def plane_products(
    problem: Problem, core: Core = "hopper", writes_planes: bool | None = None
) -> PlaneProducts:
    """dX and dW from planes, fast or not; dz is written as planes where the plan would."""
    planes = problem.planes
    if writes_planes is None:
        writes_planes = core == "hopper" and worthwhile(problem, planes)
    beside = writes_planes and beside_dx(problem, planes)
    choice = BackwardChoice(core, True, True, writes_planes, beside, False, False)
    return PlaneProducts(problem, choice, NormBackward(problem))


@contextlib.contextmanager
def forced_tile(tile: Tile) -> Iterator[None]:
    """Within, the Hopper kernel takes this tile for every problem (stages 0: as many as fit), but
    for a weight that it cannot convert on the way."""
    before = hopper_plan.choose_tile

    def chosen(
        problem: Problem, sms: int, prepacked: bool = False, converts: bool = True
    ) -> Tile | None:
        if tile.converts and (prepacked or not converts):
            return before(problem, sms, prepacked, False)
        return fitted(problem, tile)

    hopper_plan.choose_tile = chosen
    clear()
    try:
        yield
    finally:
        hopper_plan.choose_tile = before
        clear()
