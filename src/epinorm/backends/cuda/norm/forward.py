"""The fused norm-activation kernel, forward: z → y and, in training, mean and rstd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from epinorm.backends.cuda.norm.text import (
    chain_signature,
    matrix_arguments,
    norm_text,
    parameters_at,
)
from epinorm.backends.cuda.plan.norm_forward import ForwardPlan, forward_plans
from epinorm.backends.cuda.plan.norm_tile import LARGEST_ACCESS_BYTES, ceil_div, vector_width
from epinorm.backends.cuda.runtime.device import arch_of, max_shared_bytes, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled, load
from epinorm.backends.cuda.runtime.prepared import new_tensor, starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.problem import Forward, Inputs, Problem

SIGNATURE = "pl" + "pppppp" + "li"
"""z and its row stride, bias, gamma, beta, y, mean, rstd, rows, groups. Then the
operands, the chain's constants and, where it is a result, the sum."""

LARGEST_GRID_Y = 65535
WAVES = {2: 2, 4: 8, 8: 8}
"""By bytes of a value: blocks for this many rounds over the GPU. Few even out badly; many read the
parameters too often, which costs more the smaller the values are (measured on an H200). One where a
block has its next row on its way."""


def forward_plan(problem: Problem, vector: int, shared_limit: int, arch: str) -> ForwardPlan:
    """The first plan that ptxas compiles without spilling, else the last one."""
    plans = forward_plans(problem, vector, shared_limit)
    for plan in plans[:-1]:
        if compiled(forward_source(problem, plan, arch)).spill_bytes <= 0:
            return plan
    return plans[-1]


def forward_source(problem: Problem, plan: ForwardPlan, arch: str) -> KernelSource:
    """The kernel of this problem and plan for one architecture."""
    writes_sum = problem.chain.returns_sum
    more = {"kKeepStatistics": problem.training, "kCached": plan.kind == "shared"}
    more["kWritesSum"] = writes_sum
    extra = "#define EPINORM_SUM_PARAMETER " + ", S* __restrict__ sums" * writes_sum
    extra += "\n#define EPINORM_SUM " + ("sums\n" if writes_sum else "static_cast<S*>(nullptr)\n")
    text = norm_text(f"norm/{plan.kernel}", problem, plan.tile, more, extra)
    return KernelSource(plan.kernel, text, arch)


class NormForward:
    """y, z, mean and rstd from z (M, N) in ``dtype``, the linear's output without its bias."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.groups = problem.groups
        self.channels = problem.n // self.groups
        self.itemsize = problem.dtype.itemsize
        self.has_mean = problem.chain.centred
        self.widest = vector_width(self.channels, self.itemsize, ())
        self.launches: dict[int, Callable[..., None]] = {}

    def __call__(self, z: Tensor, inputs: Inputs) -> Forward:
        """z may have a row stride; of ``inputs``, all behind the weight is read. The result is
        described at ``epinorm.problem.Forward``."""
        return self.bind(z.stride(0), tuple(z.shape))(z, *inputs[2:])

    def bind(
        self, z_stride: int, z_size: tuple[int, ...], over_z: bool = False
    ) -> Callable[..., Forward]:
        """The function of z and of ``Inputs`` from bias on; y has z's size.

        over_z: y is z, whose rows lie one behind another, of y's size and dtype and nobody else's.
        In all kernels the thread that writes an element is the only one that reads z there, for the
        last time for that very value.
        """
        problem, channels, itemsize = self.problem, self.channels, self.itemsize
        outputs, launches, widest = self._outputs(z_size, over_z), self.launches, self.widest
        chain_arguments = ChainArguments(problem.chain, problem.stats_dtype)
        sizes, training, stride_bytes = (
            (problem.m, self.groups),
            problem.training,
            z_stride * itemsize,
        )

        def run(
            z: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: Sequence[Tensor],
            constants: tuple[float, ...] = (),
        ) -> Forward:
            out = outputs(z)
            y, _, mean, rstd, total = out
            z_at = z.data_ptr()
            bias_at, gamma_at, beta_at = parameters_at(bias, gamma, beta)
            given, aligned = matrix_arguments(operands) if operands else ((), 0)
            aligned |= z_at | stride_bytes | bias_at | gamma_at | beta_at
            vector = widest
            if aligned % LARGEST_ACCESS_BYTES:
                vector = vector_width(channels, itemsize, (z, bias, gamma, beta, *operands))
            launch = launches.get(vector) or self._prepare(z.device, vector)
            launch(
                *(z_at, z_stride, bias_at, gamma_at, beta_at, y.data_ptr()),
                *((mean.data_ptr(), rstd.data_ptr()) if training else (0, 0)),
                *sizes,
                *given,
                *chain_arguments(constants),
                *(() if total is None else (total.data_ptr(),)),
            )
            return out

        return run if problem.m else lambda z, *_: outputs(z)

    def _outputs(self, z_size: tuple[int, ...], over_z: bool) -> Callable[[Tensor], Forward]:
        """A function that makes what a call returns, not filled in; z is kept as it is, or not."""
        problem, device, stats = self.problem, self.problem.device, self.problem.stats_dtype
        new_y = new_tensor(z_size, problem.out_dtype, device)
        nothing = torch.empty((0,), dtype=stats, device=device)
        new_total = None
        if problem.chain.returns_sum:
            new_total = new_tensor((problem.m, problem.n), problem.sum_dtype, device)
        new_mean = new_rstd = lambda: nothing
        if problem.training:
            new_rstd = new_tensor((problem.m, self.groups), stats, device)
            new_mean = new_rstd if self.has_mean else new_mean
        elif new_total is None:
            no_z = torch.empty((0,), dtype=problem.dtype, device=device)
            if over_z:
                return lambda z: Forward(z, no_z, nothing, nothing)
            return lambda z: Forward(new_y(), no_z, nothing, nothing)
        if new_total is None:
            return lambda z: Forward(new_y(), z, new_mean(), new_rstd())
        if problem.keeps_z:
            return lambda z: Forward(new_y(), z, new_mean(), new_rstd(), new_total())
        return lambda _: Forward(new_y(), nothing, new_mean(), new_rstd(), new_total())

    def _prepare(self, device: torch.device, vector: int) -> Callable[..., None]:
        problem = self.problem
        arch = arch_of(device)
        plan = forward_plan(problem, vector, max_shared_bytes(device), arch)
        kernel = load(forward_source(problem, plan, arch), device)
        shared_bytes = plan.shared_bytes(problem)
        tile = plan.tile
        resident = kernel.blocks_per_sm(tile.threads, shared_bytes) * sm_count(device)
        strips = ceil_div(self.groups, tile.groups_per_block)
        waves = WAVES[problem.dtype.itemsize]
        most = resident // strips if tile.prefetch else ceil_div(waves * resident, strips)
        grid_y = max(1, min(ceil_div(problem.m, tile.rows_per_pass), most, LARGEST_GRID_Y))
        signature = SIGNATURE + chain_signature(problem) + "p" * problem.chain.returns_sum
        launch = kernel.prepare(
            signature,
            (strips, grid_y),
            tile.threads,
            shared_bytes=shared_bytes,
            dependent=starts_early(device),
        )
        self.launches[vector] = launch
        return launch
