"""The fused chain on the CPU.

PyTorch's matrix product on blocks of rows that stay in cache, and a small C++ kernel, compiled for
the chain and the machine when it is first used, that does everything else to a block before it
leaves the cache.
"""

from __future__ import annotations

import torch

from epinorm.backends.cpu import build
from epinorm.backends.cpu.codegen import CPP_TYPES, kernel_source
from epinorm.chain import LayerNorm
from epinorm.problem import Plan, Problem, Step, Strategy
from epinorm.said import warn_once

__all__ = ["plan_cpu", "supports"]

_PLAIN_LAYER_NORM = "PyTorch's own layers: its LayerNorm of whole rows is as fast as one fused"

# Measured on two cores (decisions/0014-cpu_blocks.md): beyond these, cutting the product into parts
# loses more than one pass over its result wins.
LAYER_NORM_ROWS, LAYER_NORM_CHANNELS = 16, 128
LONE_ROWS = 4
LONE_WEIGHT = 2**20
DOUBLE_WEIGHT = 2**20


def plan_cpu(problem: Problem, strategy: Strategy) -> Plan:
    """The plan by the fused CPU kernels, or for the reference with the reason."""
    why_not = supports(problem)
    if why_not is not None:
        return Plan("reference", why_not)
    if strategy == "auto" and _plain_layer_norm(problem):
        return Plan("reference", _PLAIN_LAYER_NORM, chosen=True)
    reason = "blocks of rows stay in cache from the product to the last operation"
    forward = (Step("epinorm_forward", problem.made_by_forward, reason),)
    backward = (Step("epinorm_backward", "all gradients", reason),) if problem.training else ()
    return Plan("cpu", "the fused CPU kernel serves it", forward=forward, backward=backward)


def supports(problem: Problem) -> str | None:
    """None where the fused CPU kernels serve the problem and pay, else one sentence why not.

    Compiles nothing: a build that fails later is remembered and named from then on. Where only a
    compiler is missing or failed, warns once in a process.
    """
    if problem.device.type != "cpu":
        return f"the tensors are on {problem.device}, not on the CPU"
    if problem.chain.norm is None:
        return "without a norm, PyTorch's product and its operations serve as they are"
    for dtype in (problem.dtype, problem.norm_dtype, problem.out_dtype):
        if dtype not in CPP_TYPES:
            return f"the CPU kernels know float32, float64 and bfloat16, not {dtype}"
    if not (problem.m and problem.k and problem.n):
        return f"there is nothing to compute for shape ({problem.m}, {problem.k}) → {problem.n}"
    if (reason := _does_not_pay(problem)) is not None:
        return reason
    reason = build.compiler_problem() or build.failure(kernel_source(problem))
    if reason is not None:
        warn_once(f"epinorm computes with PyTorch's own layers: {reason}")
    return reason


def _plain_layer_norm(problem: Problem) -> bool:
    """A LayerNorm with at most one operation beside it, in float32, of sizes as measured.

    On one thread, 64 to 2048 rows of 256 to 768 channels, fused steps took 1.05 to 1.6 times as
    long as eager's, forward passes 1.05 to 1.4 times.
    """
    chain = problem.chain
    beside = len(chain.pre) + len(chain.post)
    one = isinstance(chain.norm, LayerNorm) and beside <= 1
    large = problem.m >= LAYER_NORM_ROWS and problem.n >= LAYER_NORM_CHANNELS
    return one and large and problem.dtype == problem.out_dtype == torch.float32


def _does_not_pay(problem: Problem) -> str | None:
    """Where the product is nearly all of the work and PyTorch computes it faster in one piece."""
    values = problem.k * problem.n
    if problem.m < LONE_ROWS and values > LONE_WEIGHT:
        return (
            f"reading a weight of {problem.n} × {problem.k} for {problem.m} rows is all of the "
            "work, and PyTorch's product alone does it best"
        )
    if problem.dtype == torch.float64 and values > DOUBLE_WEIGHT:
        return (
            f"a float64 product with a weight of {problem.n} × {problem.k} is nearly all of the "
            "work, and PyTorch's product in one piece is faster than in tiles"
        )
    return None
