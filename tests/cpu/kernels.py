"""The CPU's kernels as two functions, for tests that look below the operator."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from epinorm.backends.cpu.backend import CpuExecutable
from epinorm.problem import Forward, Gradients, Inputs, Layout, Plan, Problem, Wanted

PLAN = Plan("cpu", "a test")


@lru_cache(maxsize=64)
def _executable(problem: Problem) -> CpuExecutable:
    return CpuExecutable(problem, PLAN, Layout(problem.k, problem.k, (problem.m, problem.n)))


def forward(problem: Problem, inputs: Inputs) -> Forward:
    return _executable(problem).forward(*inputs)


def backward(
    problem: Problem, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted
) -> Gradients:
    return _executable(problem).backward(inputs, [kept], dy, want)
