"""What computes a problem. Each backend is imported when it is first asked."""

from __future__ import annotations

from epinorm.backends.engine import register
from epinorm.problem import CUDA_STRATEGIES, Executable, Layout, Plan, Problem, Strategy

__all__: list[str] = []


def _plan_cuda(problem: Problem, strategy: Strategy) -> Plan:
    from epinorm.backends.cuda.plan.strategy import plan_cuda

    return plan_cuda(problem, strategy)


def _compile_cuda(problem: Problem, plan: Plan, layout: Layout) -> Executable:
    from epinorm.backends.cuda.executable import CudaExecutable

    return CudaExecutable(problem, plan, layout)


def _plan_cpu(problem: Problem, strategy: Strategy) -> Plan:
    from epinorm.backends.cpu import plan_cpu

    return plan_cpu(problem, strategy)


def _compile_cpu(problem: Problem, plan: Plan, layout: Layout) -> Executable:
    from epinorm.backends.cpu.backend import CpuExecutable

    return CpuExecutable(problem, plan, layout)


def _compile_reference(problem: Problem, plan: Plan, layout: Layout) -> Executable:
    from epinorm.backends.reference import ReferenceExecutable

    return ReferenceExecutable(problem, plan, layout)


register(CUDA_STRATEGIES, _compile_cuda, "cuda", _plan_cuda)
register(("cpu",), _compile_cpu, "cpu", _plan_cpu)
register(("reference",), _compile_reference)
