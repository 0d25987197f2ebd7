"""Strategy `planes` in two parts, each a problem of its own: the product, and what follows it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from epinorm.chain import Chain
from epinorm.problem import Problem

__all__ = ["product_of", "rest_of"]


@lru_cache(maxsize=4096)
def product_of(problem: Problem) -> Problem:
    """The product, as a problem of its own, whose y is what ``rest_of`` begins with.

    Training keeps z without its bias; else what comes before the norm is computed on the way.
    """
    pre = () if problem.training else problem.chain.pre
    return dataclasses.replace(
        problem,
        chain=Chain(None, pre),
        out_dtype=problem.dtype,
        has_bias=problem.has_bias and not problem.training,
        has_norm_weight=False,
        has_norm_bias=False,
    )


@lru_cache(maxsize=4096)
def rest_of(problem: Problem) -> Problem:
    """What the norm kernel computes from the product's y."""
    if problem.training:
        return problem
    chain = dataclasses.replace(problem.chain, pre=())
    return dataclasses.replace(problem, chain=chain, has_bias=False)
