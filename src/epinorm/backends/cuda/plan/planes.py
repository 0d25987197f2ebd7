"""Strategy `planes` in two parts, each a problem of its own: the product, and what follows it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from epinorm.chain import Chain
from epinorm.problem import Problem


@lru_cache(maxsize=4096)
def product_of(problem: Problem) -> Problem:
    """The product, as a problem of its own, whose y is what ``rest_of`` begins with.

    Training keeps z without its bias, where gradients need it; else what comes before the norm is
    computed on the way.
    """
    on_the_way = not problem.keeps_z
    pre = problem.chain.pre if on_the_way else ()
    return dataclasses.replace(
        problem,
        chain=Chain(None, pre),
        out_dtype=problem.dtype,
        has_bias=problem.has_bias and on_the_way,
        has_norm_weight=False,
        has_norm_bias=False,
    )


def sum_is_z(problem: Problem) -> bool:
    """Whether the library's product is the sum that is a result: nothing comes between them."""
    return problem.chain.returns_sum and not problem.chain.pre


@lru_cache(maxsize=4096)
def rest_of(problem: Problem) -> Problem:
    """What the norm kernel computes from the product's y."""
    if problem.keeps_z:
        return problem
    chain = dataclasses.replace(problem.chain, pre=(), returns_sum=False)
    return dataclasses.replace(problem, chain=chain, has_bias=False)
