"""A chain one of whose results is kept for gradients, as the backward pass's kernels see it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache

from epinorm.chain import Chain
from epinorm.chain.activations import OperandKind
from epinorm.problem import Problem


@dataclass(frozen=True)
class BackwardChain(Chain):
    """``begins_at_result``: what stands in z's place has come through ``pre``: the sum, which
    enters the norm as it is, or y.
    ``adds_gradient``: the last operand is the sum's gradient, added to that of the norm's input."""

    begins_at_result: bool = False
    adds_gradient: bool = False

    @property
    def operand_kinds(self) -> tuple[OperandKind, ...]:
        gradient: tuple[OperandKind, ...] = ("element",)
        return super().operand_kinds + gradient * self.adds_gradient


@lru_cache(maxsize=4096)
def backward_problem(problem: Problem, has_dsum: bool) -> Problem:
    """What the backward pass's kernels compute; has_dsum: the sum has a gradient."""
    chain = problem.chain
    if not (chain.returns_sum or chain.saves_y):
        return problem
    own = {field.name: getattr(chain, field.name) for field in dataclasses.fields(chain)}
    begins_at_result = chain.saves_sum or chain.saves_y
    seen = BackwardChain(**own, begins_at_result=begins_at_result, adds_gradient=has_dsum)
    return dataclasses.replace(problem, chain=seen)


def backward_elements(chain: Chain) -> tuple[int, ...]:
    """The places of the element operands that the backward pass reads."""
    elements = [i for i, kind in enumerate(chain.operand_kinds) if kind == "element"]
    if not isinstance(chain, BackwardChain) or not chain.begins_at_result:
        return tuple(elements)
    before = [op.definition for op in chain.pre if op.operand is not None]
    bodies = [f"{one.backward} {one.operand_backward}" for one in before]
    unread = {i for i, body in enumerate(bodies) if not re.search(r"\bt\b", body)}
    return tuple(i for i in elements if i not in unread)
