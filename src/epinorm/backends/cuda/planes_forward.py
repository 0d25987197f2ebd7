"""Strategy `planes`: an fp32 product by fp16 planes, then the norm kernel, for groups of any width.

The product is the single kernel of the chain without a norm (gemm/forward.py), its range guard
included, so prepacked weights, tuned tiles and planes kept for
the backward pass are the same. z goes through memory once; the norm kernel starts early behind the
guard. A sum that is a result is the matrix between the two, where backward needs no z besides.
"""

from __future__ import annotations

from epinorm.backends.cuda.gemm import forward as single
from epinorm.backends.cuda.gemm.launch import Bound
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.backends.cuda.plan.planes import product_of, rest_of
from epinorm.problem import Core, Forward, Inputs, Layout, Problem, StepForward


def _counts(problem: Problem) -> tuple[int, int]:
    """How many operands and constants the operations before the norm have."""
    pre = problem.chain.pre
    return sum(op.operand is not None for op in pre), sum(len(op.arguments) for op in pre)


def bind(problem: Problem, core: Core, layout: Layout) -> Bound:
    """The forward pass of tensors of this layout."""
    of_pre, constants_of_pre = _counts(problem)
    keeps_z, returns_sum = problem.keeps_z, problem.chain.returns_sum
    multiply = single.bind(product_of(problem), core, layout)
    normalise = NormForward(rest_of(problem)).bind(problem.n, layout.y_size)

    def run(inputs: Inputs) -> Forward:
        x, weight, bias, norm_weight, norm_bias, operands, constants = inputs
        if keeps_z:
            made = multiply(Inputs(x, weight, None, None, None, ()))
            return _with_left(normalise(made.y, *inputs[2:]), made)
        before = operands[:of_pre], constants[:constants_of_pre]
        behind = operands[of_pre:], constants[constants_of_pre:]
        made = multiply(Inputs(x, weight, bias, None, None, *before))
        out = normalise(made.y, None, norm_weight, norm_bias, *behind)
        if not returns_sum:
            return out
        return _with_left(Forward(out.y, made.z, out.mean, out.rstd, made.y), made)

    return run


def _with_left(out: Forward, made: Forward) -> Forward:
    """``out`` with the planes that the product left for the backward pass, if it did."""
    if not isinstance(made, StepForward):
        return out
    more = StepForward._make(out)
    more.left = made.left
    return more
