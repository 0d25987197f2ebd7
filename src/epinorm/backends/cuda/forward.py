"""The forward pass on a CUDA GPU: the one place that turns a plan's strategy into kernels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from epinorm.backends.cuda import planes_forward as by_planes
from epinorm.backends.cuda.gemm.hopper import forward as hopper
from epinorm.backends.cuda.gemm.portable.forward import portable_forward
from epinorm.backends.cuda.norm import forward as norm
from epinorm.problem import CUDA_STRATEGIES, Forward, Inputs, Plan, Problem, Run

__all__ = ["bind", "forward"]


def forward(problem: Problem, plan: Plan, inputs: Inputs) -> Forward:
    """y and what backward needs, on the inputs' GPU and its current stream.

    Raises ``ValueError`` for a strategy that this backend does not have.
    """
    if plan.strategy == "epilogue":
        return _epilogue(problem, inputs)
    if plan.strategy == "single":
        if plan.core == "portable":
            return portable_forward(problem, inputs)
        return hopper.hopper_forward(problem, inputs)
    if plan.strategy == "planes":
        return by_planes.planes_forward(problem, plan.core or "hopper", inputs)
    raise ValueError(
        f"the CUDA backend has no strategy {plan.strategy!r}: expected one of "
        f"{', '.join(map(repr, CUDA_STRATEGIES))}"
    )


def _epilogue(problem: Problem, inputs: Inputs) -> Forward:
    """A library product, in PyTorch's precision setting; then the norm kernel."""
    bias = inputs.bias if problem.bias_in_z else _no_bias(problem)
    return norm.norm_forward(problem, linear(inputs.x, inputs.weight, bias), inputs)


@lru_cache(maxsize=1024)
def _zeros(n: int, device: torch.device) -> Tensor:
    return torch.zeros(n, device=device)


def _no_bias(problem: Problem) -> Tensor | None:
    """Zeros where the layer adds a bias in fp32: PyTorch then takes other kernels, as eager does.

    Without it the error is another too: 1.85 times eager's for 16 rows of 8192.
    """
    if problem.dtype != torch.float32 or not problem.has_bias:
        return None
    if _captured(problem):  # what is allocated now belongs to the graph
        return torch.zeros(problem.n, device=problem.device)
    return _zeros(problem.n, problem.device)


def _captured(problem: Problem) -> bool:
    return problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def bind(problem: Problem, plan: Plan, inputs: Inputs, y_size: tuple[int, ...]) -> Run | None:
    """``forward`` for tensors like ``inputs``: see ``epinorm.problem.Run``; y_size: y's size.

    None where nothing shorter than ``forward`` exists.
    """
    if plan.strategy == "single":
        return None if plan.core == "portable" else hopper.bind(problem, inputs, y_size)
    if plan.strategy == "planes":
        return None if plan.core == "portable" else by_planes.bind(problem, inputs, y_size)
    if _captured(problem):
        return None
    normalise = norm.bind(problem, y_size)
    no_bias, bias_in_z = _no_bias(problem), problem.bias_in_z

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
        constants: tuple[float, ...],
    ) -> Forward:
        z = linear(x, weight, bias if bias_in_z else no_bias)
        return normalise(z, bias, norm_weight, norm_bias, operands, constants)

    return run
