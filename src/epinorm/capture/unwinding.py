"""What a graph entered is left where an error, or Ctrl-C, ends its run: Dynamo writes a ``with`` of
the model's as two calls, of which the second would be missed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import attention

from epinorm.capture.spelling import name_of

_LEFT_BY = {  # torch.func's are in no graph of ours
    "_enter_autocast": "_exit_autocast",
    "_enter_inference_mode": "_exit_inference_mode",
    "_record_function_enter_new": "_record_function_exit",
}
_SET_GRADIENTS, _SET_KERNELS = "_set_grad_enabled", "_sdpa_kernel"
_SETS_KERNELS = "epinorm_sets_kernels"
"""In the meta of a graph that enters or sets anything: whether it is attention's kernels."""


class _Entered(threading.local):
    """What this thread's graphs are in: how each is left, and its token."""

    def __init__(self) -> None:
        self.stack: list[tuple[Callable[[Any], Any], Any]] = []


_entered = _Entered()


class _Entering:
    """What stands for a call that enters something."""

    def __init__(self, enter: Any, leave: Any) -> None:
        self.enter, self.leave = enter, leave
        self.__name__, self.__module__ = str(getattr(enter, "__name__", "enter")), "epinorm"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = self.enter(*args, **kwargs)
        _entered.stack.append((self.leave, token))
        return token


class _Leaving:
    """What stands for the call that leaves it."""

    def __init__(self, leave: Any) -> None:
        self.leave = leave
        self.__name__, self.__module__ = str(getattr(leave, "__name__", "leave")), "epinorm"

    def __call__(self, token: Any) -> Any:
        _entered.stack.pop()
        return self.leave(token)


def leave_what_is_entered(gm: fx.GraphModule) -> None:
    """Let the graph leave, and set back, at an error what it has entered and set by then."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    named = {_name(node): node for node in calls}
    entering = [node for node in calls if _LEFT_BY.get(_name(node)) in named]
    if not entering and not named.keys() & {_SET_GRADIENTS, _SET_KERNELS}:
        return
    left_by = {_LEFT_BY[_name(node)] for node in entering}
    for node in entering:
        node.target = _Entering(node.target, named[_LEFT_BY[_name(node)]].target)
    for node in calls:
        if _name(node) in left_by:
            node.target = _Leaving(node.target)
    gm.recompile()
    gm.meta[_SETS_KERNELS] = _SET_KERNELS in named


def _name(node: fx.Node) -> str:
    return name_of(node).partition(".")[0]


def running(gm: fx.GraphModule) -> Callable[..., Any]:
    """What runs the graph, and unwinds what ``leave_what_is_entered`` found."""
    if _SETS_KERNELS not in gm.meta:
        return gm.forward
    return partial(_run, gm.forward, gm.meta[_SETS_KERNELS])


def _run(forward: Callable[..., Any], sets_kernels: bool, *args: Any) -> Any:
    stack, depth, gradients = _entered.stack, len(_entered.stack), torch.is_grad_enabled()
    kernels = attention._cur_sdpa_kernel_backends(True) if sets_kernels else ()
    try:
        return forward(*args)
    except BaseException:
        while len(stack) > depth:
            leave, token = stack.pop()
            leave(token)
        torch._C._set_grad_enabled(gradients)
        if sets_kernels:
            attention._sdpa_kernel(kernels, True)
        raise
