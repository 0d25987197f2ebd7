"""What every launch of a Hopper kernel with the chain in its epilogue has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.runtime.launch import tensor_map
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.problem import Forward, Inputs, Problem

__all__ = ["Launch"]

MOST_MAPS = 512
MOST_BOUND = 64


class Launch:
    """Everything about a problem's launch that does not change from call to call."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = (problem.m, problem.n, problem.k)
        self.constants = ChainArguments(problem.chain, torch.float32)
        self.maps: dict[Any, tuple[bytes, ...]] = {}
        self.bound: dict[Any, Callable[..., Forward]] = {}

    def __call__(self, inputs: Inputs, *more: Any) -> Forward:
        strides = inputs.x.stride(0), inputs.weight.stride(0)
        run = self.bound.get(strides)
        if run is None:
            if len(self.bound) >= MOST_BOUND:
                self.bound.clear()
            run = self.bound[strides] = self.bind(*strides, self.sizes[:2])
        return run(*inputs, *more)

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        """A ``Run`` for these strides of rows."""
        raise NotImplementedError

    @property
    def chain_signature(self) -> str:
        """The launch arguments of the chain's operands, which are dense, and of its constants."""
        return "p" * len(self.problem.chain.operand_kinds) + self.constants.signature

    def outputs(self, y_size: tuple[int, ...]) -> Callable[[], Forward]:
        """A function that makes what a call returns, not filled in."""
        problem, device = self.problem, self.problem.device
        new_y = new_tensor(y_size, problem.out_dtype, device)
        nothing = torch.empty((0,), dtype=torch.float32, device=device)
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

    def keep_maps(self, key: Any, boxes: Iterable[tuple[Tensor, int, int]]) -> tuple[bytes, ...]:
        """Encode the maps of matrices, each with the rows and columns of its boxes; the key holds
        what differs between calls."""
        if len(self.maps) >= MOST_MAPS:
            self.maps.clear()
        maps = self.maps[key] = tuple(tensor_map(*box).data for box in boxes)
        return maps
