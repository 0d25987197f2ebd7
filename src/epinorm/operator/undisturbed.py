"""Whether anything of PyTorch's waits for a call, so that it must go by way of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack as _function_mode_stack

F = TypeVar("F", bound=Callable[..., Any])
_PLAIN_TYPES = frozenset((Tensor, nn.Parameter, type(None)))
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_autocast = is_under_autocast = torch._C._is_any_autocast_enabled
_profiler = torch._C._autograd._profiler_enabled
_trace = torch._C._get_tracing_state
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled


def _is_device(mode: Any) -> bool:
    return type(mode).__name__ == "DeviceContext"


_eval_frame = torch._C._dynamo.eval_frame
_SKIP = _eval_frame._FrameAction.SKIP
_NOT_TRACED = _eval_frame._FrameExecStrategy(_SKIP, _SKIP)


def untraced(function: F) -> F:
    """Let TorchDynamo leave a call, with all that it calls, to Python where that runs under it, as
    a backward pass within a compiled step does; what it inlines is not concerned."""
    _eval_frame.set_code_exec_strategy(function.__code__, _NOT_TRACED)
    return function


def is_undisturbed() -> bool:
    """Whether there is no mode, transform, autocast, profile or trace that may want a call."""
    return not _autocast() and is_under_autocast_alone()


def is_under_autocast_alone() -> bool:
    """Whether nothing of these may want a call but, perhaps, autocast."""
    return (
        not _dispatch_modes()
        and not _function_modes()
        and _transform() is None
        and forward_ad._current_level < 0
        and not _profiler()
        and _trace() is None
    )


def is_only_profiled() -> bool:
    """Whether nothing of these may want a call but, perhaps, a profile, or a default device, which
    is a mode that wants what makes tensors of nothing."""
    return (
        not _autocast()
        and not _dispatch_modes()
        and (not _function_modes() or all(map(_is_device, _function_mode_stack())))
        and _transform() is None
        and forward_ad._current_level < 0
        and _trace() is None
    )


def autograd_records() -> bool:
    """Whether autograd records operations: never within inference mode, whoever enables gradients
    there."""
    return _is_grad_enabled() and not _is_inference()


def wants_gradient(*tensors: Any) -> bool:
    """Whether autograd wants one of what is computed of these tensors, or Nones."""
    return autograd_records() and torch._C._any_requires_grad(*tensors)


def has_plain_types(tensors: Sequence[Any]) -> bool:
    """Whether the tensors, or Nones, are of no subclass."""
    return _PLAIN_TYPES.issuperset(map(type, tensors))


def is_distributed(tensors: Sequence[Any]) -> bool:
    """Whether one of the tensors is a DTensor: known by its attributes, as its class takes 0.4 s to
    load."""
    return any(hasattr(t, "placements") and hasattr(t, "device_mesh") for t in tensors)
