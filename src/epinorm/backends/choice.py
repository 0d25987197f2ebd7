"""Which backend computes a problem, and its functions."""

from __future__ import annotations

import importlib
import warnings
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from epinorm.problem import (
    CUDA_STRATEGIES,
    BackwardFunction,
    Forward,
    ForwardFunction,
    Inputs,
    Plan,
    Problem,
    Run,
    Step,
    Strategy,
    check_strategy,
)

__all__ = ["backend_of", "bound", "plan_for"]


@lru_cache(maxsize=4096)
def plan_for(problem: Problem, strategy: Strategy = "auto", strict: bool = False) -> Plan:
    """Decide how ``problem`` is computed; the same problem always gets the same plan.

    ``auto`` takes the fastest strategy that serves the problem, PyTorch's own layers where they
    are it. Where nothing else serves on a CUDA device it warns, once for each reason; under
    ``strict`` what is left to PyTorch is a RuntimeError. A strategy asked for by name that cannot
    serve the problem is a RuntimeError with the reason.
    """
    check_strategy(strategy)
    if strategy == "reference":
        return Plan("reference", "asked for by name")
    if problem.device.type == "cuda" and strategy != "cpu":
        plan = _plan_cuda(problem, strategy)
    elif problem.device.type == "cpu" and strategy in ("auto", "cpu"):
        plan = _plan_cpu(problem)
    else:
        plan = Plan("reference", f"it does not run on a {problem.device.type} device")
    if plan.strategy != "reference":
        return plan
    if strategy != "auto":
        raise RuntimeError(f"strategy {strategy!r} cannot serve this chain: {plan.reason}")
    if strict:
        raise RuntimeError(f"strict=True, and nothing faster than PyTorch serves: {plan.reason}")
    if problem.device.type == "cuda" and not plan.chosen:
        _warn_once(plan.reason)
    return plan


def _plan_cpu(problem: Problem) -> Plan:
    why_not = importlib.import_module("epinorm.backends.cpu").supports(problem)
    if why_not is not None:
        return Plan("reference", why_not)
    reason = "blocks of rows stay in cache from the product to the last operation"
    forward = (Step("epinorm_forward", "y, z, mean, rstd" if problem.training else "y", reason),)
    backward = (Step("epinorm_backward", "all gradients", reason),) if problem.training else ()
    return Plan("cpu", "the fused CPU kernel serves it", forward=forward, backward=backward)


def _plan_cuda(problem: Problem, strategy: Strategy) -> Plan:
    cuda = importlib.import_module("epinorm.backends.cuda.plan.strategy")
    return cuda.plan_cuda(problem, strategy)


@cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"epinorm computes through plain PyTorch here: {reason} (strict=True makes this an error)",
        stacklevel=2,
    )


@cache
def backend_of(strategy: Strategy) -> tuple[ForwardFunction, BackwardFunction]:
    """The two functions that compute a plan of this strategy."""
    if strategy in CUDA_STRATEGIES:
        forward = importlib.import_module("epinorm.backends.cuda.forward").forward
        return forward, importlib.import_module("epinorm.backends.cuda.backward").backward
    name = "epinorm.backends.cpu.backend" if strategy == "cpu" else "epinorm.backends.reference"
    backend = importlib.import_module(name)
    return backend.forward, backend.backward


def bound(problem: Problem, plan: Plan, inputs: Inputs, y_size: tuple[int, ...]) -> Run:
    """The forward function of ``backend_of`` for tensors like ``inputs``; see ``Run``.

    y_size: of y, which is (M, N) but for its leading dimensions.
    """
    if plan.strategy in CUDA_STRATEGIES:
        cuda = importlib.import_module("epinorm.backends.cuda.forward")
        run: Run | None = cuda.bind(problem, plan, inputs, y_size)
        if run is not None:
            return run
    forward, size = backend_of(plan.strategy)[0], inputs.x.shape
    if len(y_size) == 2:
        return lambda *tensors: forward(problem, plan, Inputs(*tensors))

    def folded(x: Tensor, *rest: Any) -> Forward:
        found = forward(problem, plan, Inputs(x.view(size), *rest))
        return found._replace(y=found.y.view(y_size))

    return folded
