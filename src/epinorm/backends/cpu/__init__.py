"""The fused chain on the CPU.

PyTorch's matrix product on blocks of rows that stay in cache, and a small C++ kernel, compiled for
the chain and the machine when it is first used, that does everything else to a block before it
leaves the cache.
"""

from __future__ import annotations

import torch

from epinorm.backends.cpu import build
from epinorm.backends.cpu.codegen import CPP_TYPES, kernel_source
from epinorm.chain import GroupNorm, RMSNorm
from epinorm.problem import Plan, Problem, Step, Strategy
from epinorm.said import warn_once

__all__ = ["plan_cpu", "supports"]

# Measured on two cores (decisions/0014-cpu_blocks.md): beyond these, cutting the product into parts
# loses more than one pass over its result wins.
LONE_ROWS = 4
LONE_WEIGHT = 2**20
DOUBLE_WEIGHT = 2**20
LEAST_VALUES, LEAST_VALUES_TRAINING = 2**14, 2**16
"""Results of the product from which on what a fused call saves is more than what it costs the
host, in a forward pass and in a step: 15 to 25 us and 60 to 100 us a chain, measured under ``fuse``
on one thread."""
PLAIN_VALUES, PLAIN_VALUES_RMS_TRAINING = 2**14, 2**18
"""From the first on, and up to the second, norms of whole rows with one operation beside them take
1.05 to 2 times as long fused, measured at up to 2048 rows and 768 channels."""


def plan_cpu(problem: Problem, strategy: Strategy) -> Plan:
    """The plan by the fused CPU kernels, or for the reference with the reason."""
    why_not = supports(problem)
    if why_not is not None:
        return Plan("reference", why_not)
    if strategy == "auto" and (why_not := _gains_nothing(problem)) is not None:
        return Plan("reference", why_not, chosen=True)
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
        return "without a norm, PyTorch's product and its operations serve a CPU as they are"
    if problem.chain.returns_statistics:
        return "on a CPU PyTorch's own BatchNorm reads no more than a fused one would"
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


def _gains_nothing(problem: Problem) -> str | None:
    """Why PyTorch's own layers are as fast or faster, by decisions/0014-cpu_blocks.md."""
    values, chain = problem.m * problem.n, problem.chain
    # Dropout is of training steps: checkpointing runs their forward pass without gradients first.
    training = problem.training or "seed" in chain.operand_kinds
    if values < (LEAST_VALUES_TRAINING if training else LEAST_VALUES):
        return (
            f"PyTorch's own layers: {problem.m} × {problem.n} values are so few that calling the "
            "fused kernel costs more than it saves"
        )
    one = len(chain.pre) + len(chain.post) <= 1
    fp32 = problem.dtype == problem.out_dtype == torch.float32
    if not (one and fp32 and values >= PLAIN_VALUES) or isinstance(chain.norm, GroupNorm):
        return None
    if isinstance(chain.norm, RMSNorm) and training and values >= PLAIN_VALUES_RMS_TRAINING:
        return None
    return "PyTorch's own layers: its norm of whole rows is as fast as one fused"


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
