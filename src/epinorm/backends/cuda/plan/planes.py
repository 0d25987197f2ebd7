"""Strategy `planes` in two parts, each a problem of its own: the product, and what follows it."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from epinorm.backends.cuda.plan.norm_batch import may_find_moments
from epinorm.backends.cuda.plan.plane_layout import LONGEST_KEPT_ROW, PlaneLayout
from epinorm.chain import Chain
from epinorm.problem import Problem


@lru_cache(maxsize=4096)
def product_of(problem: Problem) -> Problem:
    """The product, as a problem of its own, whose y is what ``rest_of`` begins with.

    Training keeps z without its bias, where gradients need it; else what comes before the norm is
    computed on the way.
    """
    on_the_way, chain = not problem.keeps_z, problem.chain
    pre = chain.pre if on_the_way else ()
    return dataclasses.replace(
        problem,
        chain=Chain(None, pre),
        out_dtype=problem.dtype,
        has_bias=problem.has_bias and on_the_way,
        has_norm_weight=False,
        has_norm_bias=False,
        column_moments=chain.returns_statistics and may_find_moments(problem),
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


def over_x(problem: Problem) -> bool:
    """Whether x's planes may be written over x, where Hopper's core multiplies by planes and x's
    rows lie one behind another from 16 bytes on: nobody reads x later, and its planes fit its rows,
    which are held in registers meanwhile."""
    padded = PlaneLayout(problem.planes, problem.k, problem.m, 0).padded
    return problem.spends_x and not problem.training and padded == problem.k <= LONGEST_KEPT_ROW
