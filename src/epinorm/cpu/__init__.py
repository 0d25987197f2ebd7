"""The fused chain on the CPU.

PyTorch's matrix product on blocks of rows that stay in cache, and a small C++ kernel, compiled for
the chain and the machine when it is first used, that does everything else to a block before it
leaves the cache.
"""

from __future__ import annotations

from epinorm.cpu import build
from epinorm.cpu.codegen import CPP_TYPES, kernel_source
from epinorm.plan import Problem

__all__ = ["supports"]


def supports(problem: Problem) -> str | None:
    """None where the fused CPU kernels serve the problem and pay, else one sentence why not.

    Compiles nothing: a build that fails later is remembered and named from then on.
    """
    if problem.device.type != "cpu":
        return f"the tensors are on {problem.device}, not on the CPU"
    for dtype in (problem.dtype, problem.norm_dtype, problem.out_dtype):
        if dtype not in CPP_TYPES:
            return f"the CPU kernels know float32, float64 and bfloat16, not {dtype}"
    if not (problem.m and problem.k and problem.n):
        return f"there is nothing to compute for shape ({problem.m}, {problem.k}) → {problem.n}"
    return build.compiler_problem() or build.failure(kernel_source(problem))
