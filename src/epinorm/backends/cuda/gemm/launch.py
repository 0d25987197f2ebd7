"""What every launch of a kernel with the chain in its epilogue has in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from epinorm.backends.cuda.plan.norm_batch import MOMENT_ROWS
from epinorm.backends.cuda.plan.norm_tile import ceil_div
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.problem import Forward, Inputs, Problem

MOST_KEPT = 512

Bound = Callable[[Inputs], Forward]
"""A forward pass of tensors of one layout."""

Operands = tuple[Tensor, ...]
"""a's planes hi and lo, then b's; where there is one plane, or none, it stands twice."""


class LinearNorm(Protocol):
    """A core's kernel of strategy `single`, with its tile: what one core does unlike another."""

    by_planes: bool
    """Whether it multiplies fp32 by planes; else x and W are its operands as they are."""
    held: int | None
    """The chain's operand, (m, n), that it takes behind the product's; None: it has no such."""

    def length(self, padded: int) -> int:
        """What it takes for the summed index of planes whose rows were padded to this."""
        ...

    def readable(self, matrix: Tensor) -> Tensor:
        """The matrix itself, or a copy where the kernel cannot read its rows."""
        ...

    def given(self, operands: Operands) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The launch for these operands, and its arguments in front of all others."""
        ...


def dense(operands: tuple[Tensor, ...], held: int | None) -> tuple[Tensor, ...]:
    """The chain's operands as kernels take them; the copy engine reads the one that is held."""
    found = [operand.contiguous() for operand in operands]
    if held is not None and found[held].data_ptr() % 16:
        found[held] = found[held].clone()
    return tuple(found)


class KeptOperands:
    """What ``make`` makes of a product's operands, as they were asked for so far."""

    def __init__(self, make: Callable[[Operands], tuple[Any, ...]]) -> None:
        self.make = make
        self.kept: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, key: Any, operands: Callable[[], Operands]) -> tuple[Any, ...]:
        """operands: asked for where ``key``, all that their place in memory depends on, is new."""
        found = self.kept.get(key)
        if found is None:
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()
            found = self.kept[key] = self.make(operands())
        return found


class ProductKernel(NamedTuple):
    """A core's product: what launches it, makes its first arguments, and its last, numbers."""

    launch: Callable[..., None]
    given: KeptOperands
    numbers: tuple[int, ...]


def chain_signature(problem: Problem) -> str:
    """The launch arguments of the chain's operands, which are dense, and of its constants."""
    constants = ChainArguments(problem.chain, torch.float32).signature
    return "p" * len(problem.chain.operand_kinds) + constants


class Launch:
    """Everything about a problem's launch that does not change from call to call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = (problem.m, problem.n, problem.k)
        self.constants = ChainArguments(problem.chain, torch.float32)

    def outputs(self, y_size: tuple[int, ...]) -> Callable[[], Forward]:
        """A function that makes what a call returns, not filled in; moments in the mean's place."""
        problem, device = self.problem, self.problem.device
        new_y = new_tensor(y_size, problem.out_dtype, device)
        nothing = torch.empty((0,), dtype=torch.float32, device=device)
        if problem.column_moments:
            parts = ceil_div(problem.m, MOMENT_ROWS)
            new_moments = new_tensor((parts, 2, problem.n), torch.float32, device)
            return lambda: Forward(new_y(), nothing, new_moments(), nothing)
        if problem.matrix_dtype is None:
            return lambda: Forward(new_y(), nothing, nothing, nothing)
        new_matrix = new_tensor((problem.m, problem.n), problem.matrix_dtype, device)
        new_mean = new_rstd = lambda: nothing
        if problem.keeps_statistics:
            new_rstd = new_tensor((problem.m, problem.groups), torch.float32, device)
            new_mean = new_rstd if problem.keeps_mean else new_mean
        if problem.chain.returns_sum:
            return lambda: Forward(new_y(), nothing, new_mean(), new_rstd(), new_matrix())
        return lambda: Forward(new_y(), new_matrix(), new_mean(), new_rstd())
