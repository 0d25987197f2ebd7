"""Adding a weight's gradient into the ``.grad`` that it has already, instead of beside it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version

ALIGNMENT = 16
"""Bytes at which a gradient must begin."""
DEVICES = ("cuda",)

# Whether a node runs in the backward pass under way; PyTorch does not promise it.
_will_execute = getattr(torch._C, "_will_engine_execute_node", None)

_lock = threading.Lock()
entered = ctypes.c_int(0)
"""Blocks that were entered and not left yet; native code reads it."""


@contextmanager
def accumulate_in_place() -> Iterator[None]:
    """Within, ``backward`` adds into Linear weights' gradients in one pass, on CUDA GPUs.

    For gradient accumulation: from the second micro-batch on, ``weight.grad`` is there already.
    PyTorch computes the new gradient into memory of its own and then adds it; here the matrix
    product adds it, which saves a pass over both. ``.grad`` is the same tensor as without, and
    holds the same up to rounding::

        for x, target in micro_batches:
            with epinorm.accumulate_in_place():
                loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    It holds for all threads, while any thread is inside. A hook on autograd's own node of the
    weight (AccumulateGrad) gets None then. Autograd adds as usual where the weight has hooks of its
    own, where its gradient is not a plain contiguous tensor like it, under ``create_graph``,
    anomaly detection, saved-tensor hooks (so in checkpointing) or a profiler, for 16-bit copies
    under autocast, in compiled graphs, and for whatever is not computed on a CUDA GPU.
    internals/training.md says more, of CUDA graphs too.
    """
    with _lock:
        entered.value += 1
    try:
        yield
    finally:
        with _lock:
            entered.value -= 1


def existing_gradient(weight: Any, x: Tensor) -> Tensor | None:
    """``weight.grad`` if the gradient of the backward pass under way may be added to it.

    x: what the weight's gradient is computed from.
    """
    if not entered.value or _will_execute is None or weight.device.type not in DEVICES:
        return None
    grad = weight.grad if weight.is_leaf else None
    if type(grad) is not Tensor or not _is_like(grad, weight):
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks or torch.is_anomaly_enabled():
        return None
    if grad.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return None
    try:
        # torch.autograd.grad leaves .grad alone; so does backward(inputs=...) of other tensors.
        return grad if _will_execute(get_gradient_edge(weight).node) else None
    except RuntimeError:
        return None


def _is_like(grad: Tensor, weight: Tensor) -> bool:
    """Whether it is memory that a kernel can add a gradient of the weight to."""
    if grad.layout is not torch.strided or grad.shape != weight.shape:
        return False
    if grad.dtype != weight.dtype or grad.device != weight.device:
        return False
    if grad.requires_grad or grad.is_neg() or grad.is_inference():
        return False
    return grad.is_contiguous() and grad.data_ptr() % ALIGNMENT == 0


def added(weight: Tensor, grad: Tensor) -> None:
    """Tell autograd that ``weight.grad`` was added to, on the current stream."""
    increment_version(grad)
    if weight.device.type != "cuda":
        return
    # Autograd orders the node that adds to .grad behind what it is given. It is given nothing, but
    # it may have other gradients to add, and it runs on the stream that was current when it was
    # made: where a weight is used on several streams, that is another one.
    ours = torch.cuda.current_stream(weight.device)

    def wait(_: Any) -> None:
        handle.remove()
        theirs = torch.cuda.current_stream(weight.device)
        if theirs != ours:
            theirs.wait_stream(ours)

    handle = get_gradient_edge(weight).node.register_prehook(wait)
