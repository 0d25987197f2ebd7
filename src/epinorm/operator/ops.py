"""The operators with everything that PyTorch asks of them, and the shortest way to call one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epinorm.chain import returns_sum
from epinorm.chain.reference import Results
from epinorm.operator.autograd import differentiable
from epinorm.operator.calls import constants_of, eager_for, executable_for_call, run_inference
from epinorm.operator.schema import (
    linear_norm,
    linear_norm_sum,
)
from epinorm.operator.undisturbed import is_plain
from epinorm.problem import Strategy


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    operands: Sequence[Tensor],
    chain: str,
    strategy: Strategy = "auto",
    strict: bool = False,
) -> Results:
    """``linear_norm`` for x (M, K) → y (M, N), past the dispatcher where nothing waits there; y and
    the sum where the chain returns it.

    That saves two thirds of a call's overhead. The operator itself is called for everything that
    hangs on it: compiling, autocast, torch.func, tensor subclasses, modes, tracing, profiling.
    """
    tensors = (x, weight, bias, norm_weight, norm_bias, *operands)
    if torch.compiler.is_compiling() or not is_plain(tensors):
        operator = linear_norm_sum if returns_sum(chain) else linear_norm
        return operator(
            *(x, weight, bias, norm_weight, norm_bias, operands, chain, strategy, strict, None)
        )
    facts = (chain, strategy, strict, None)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        inputs = (x, weight, bias, norm_weight, norm_bias, operands)
        executable = executable_for_call(inputs, facts, True, True)
        eager = eager_for(executable)
        if eager is not None:
            return eager.results(constants_of(facts), *tensors)
        return differentiable(executable, facts, tensors)
    return run_inference((x, weight, bias, norm_weight, norm_bias, operands), facts)
