"""BatchNorm's running statistics in a graph whose chain has the batch's own as a second result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from epinorm.capture.found import Found
from epinorm.capture.purity import storage_of
from epinorm.capture.spelling import name_of
from epinorm.chain.reference import Results

_STOPPED: Any = getattr(checkpoint, "_StopRecomputationError", ())
"""Raised from within a call that checkpointing runs again, once it has saved all that is wanted."""


def statistics_met(found: Found) -> str | None:
    """What reads or changes a BatchNorm's running statistics between the norm and the chain's end,
    where they are then changed, or reads them in the chain itself."""
    running, node = found.norm.running, found.norm_node
    if running is None or node is None:
        return None
    memory = {storage_of(running.mean), storage_of(running.variance)}
    if None in memory or memory.intersection(map(storage_of, found.reads)):
        return "the chain reads the running statistics that its BatchNorm changes"
    inside = set(found.nodes)
    while node is not found.nodes[-1]:
        node = node.next
        if node not in inside and memory.intersection(map(storage_of, node.all_input_nodes)):
            return f"{name_of(node)} reads its running statistics before the chain ends"
    return None


def update_running(mean: Tensor, variance: Tensor, statistics: Tensor, momentum: float) -> None:
    """Let running statistics (N,) take over so much of the batch's, (2, N), as PyTorch's layer."""
    # As by its kernels, no version is counted: another call of the module may have saved them.
    both = [mean.data, variance.data]
    with torch.no_grad():
        is_alike = mean.dtype == variance.dtype == statistics.dtype
        # Inductor's backward pass writes over a buffer of which _foreach changed what it saved. In
        # PyTorch up to 2.11 only AOTAutograd's modes show that a graph is compiled.
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        if is_alike and not is_traced:
            torch._foreach_lerp_(both, list(statistics.unbind()), momentum)
            return
        for running, now in zip(both, statistics.unbind(), strict=True):
            if is_alike:
                running.lerp_(now, momentum)
                continue
            running.copy_(torch.lerp(running.to(now.dtype), now, momentum))


class Updating:
    """A call of a chain with a BatchNorm, given the running statistics first, if there are any,
    which it changes; it gives y alone."""

    def __init__(self, apply: Callable[..., Results], momentum: float | None) -> None:
        self.apply, self.momentum = apply, momentum
        self.__name__ = getattr(apply, "__name__", "linear_norm")
        self.__module__ = "epinorm"

    def __call__(self, *given: Any) -> Tensor:
        if self.momentum is None:
            return self.apply(*given)[0]
        mean, variance, *inputs = given
        try:
            y, statistics = self.apply(*inputs)
        except _STOPPED:
            # PyTorch's layer has changed them by the time that it saves its own.
            with torch.no_grad():
                self._update(mean, variance, *self.apply(*inputs))
            raise
        self._update(mean, variance, y, statistics)
        return y

    def _update(self, mean: Tensor, variance: Tensor, y: Tensor, statistics: Tensor) -> None:
        if self.momentum is not None and y.shape[0]:  # no rows change nothing, as in eager
            update_running(mean, variance, statistics, self.momentum)
