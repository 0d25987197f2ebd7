"""Adding a weight's gradient into the ``.grad`` that it has already, instead of beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = ["accumulate_in_place", "existing_gradient"]

ALIGNMENT = 16
"""Bytes at which a gradient must begin."""

# Whether a node runs in the backward pass under way, and a device's current stream as a number;
# PyTorch promises neither.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_streams: list[tuple[int, ...]] = []
"""For each block that was entered: the devices' current streams at that time."""


@contextmanager
def accumulate_in_place() -> Iterator[None]:
    """Within, ``backward`` adds into Linear weights' gradients in one pass, on CUDA GPUs.

    For gradient accumulation: from the second micro-batch on, ``weight.grad`` is there already.
    PyTorch computes the new gradient into memory of its own and then adds it; here the matrix
    product adds it, which saves a pass over both and the memory for one. ``.grad`` is the same
    tensor as without, and holds the same up to rounding (in fp32, what is below its normal range
    counts as 0)::

        for x, target in micro_batches:
            with epinorm.accumulate_in_place():
                loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    It holds for all threads, while any thread is inside. Not for models in DistributedDataParallel,
    FSDP or anything else that waits for each gradient in autograd's own nodes, which then see none;
    that is why it must be asked for. Where a weight has hooks, its gradient has another dtype or
    layout, a graph of the gradient is wanted, or backward runs on another stream than was current
    at the beginning, autograd adds as usual; so it does for 16-bit copies under autocast, compiled
    graphs, and whatever is not computed on a CUDA GPU.
    """
    streams = _streams_now()
    _streams.append(streams)
    try:
        yield
    finally:
        _streams.remove(streams)


def _streams_now() -> tuple[int, ...]:
    if _current_stream is None or not torch.cuda.is_initialized():
        return ()
    return tuple([_current_stream(device) for device in range(_device_count())])


@cache
def _device_count() -> int:
    return torch.cuda.device_count()


def existing_gradient(weight: Any) -> Tensor | None:
    """``weight.grad`` if the gradient of the backward pass under way may be added to it."""
    if not _streams or _will_execute is None or not weight.is_cuda or not weight.is_leaf:
        return None
    grad = weight.grad
    if grad is None or type(grad) is not Tensor or grad.requires_grad:
        return None
    if grad.dtype != weight.dtype or grad.device != weight.device or not grad.is_contiguous():
        return None
    if grad.data_ptr() % ALIGNMENT or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    device = weight.device.index
    here = _streams_now()[device : device + 1]
    if not here or any(streams[device : device + 1] != here for streams in _streams):
        return None
    try:
        # torch.autograd.grad leaves .grad alone; so does backward(inputs=...) of other tensors.
        return grad if _will_execute(get_gradient_edge(weight).node) else None
    except RuntimeError:
        return None
