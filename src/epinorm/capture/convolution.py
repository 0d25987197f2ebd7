"""Convolutions of one tap as Linears over channels, where that is estimated to be faster.

Rows of channels lie so in memory where an image is channels-last. Else x is turned before and the
result back behind, each a copy: decisions/0029-conv1d.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.backends.cuda.plan import costs
from epinorm.backends.cuda.runtime.device import HOPPER, capability
from epinorm.backends.engine import plan_for
from epinorm.capture.chains import Search
from epinorm.capture.layouts import is_unseen
from epinorm.capture.obstacles import IN_DISGUISE
from epinorm.capture.paying import Settings, pays
from epinorm.capture.purity import arguments, changed_argument, is_pure, tensor_of, value_of
from epinorm.capture.sites import problem_of
from epinorm.capture.spelling import checkpoints, computed, name_of, read_pointwise, same_shape
from epinorm.capture.trace import StaysWhole, Trace, check_alike, erase
from epinorm.precision import convolutions_take_tf32, fp32_precision
from epinorm.problem import Problem

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_KERNELS = {F.conv1d: 1, F.conv2d: 2}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WITHOUT_ORDER = ("movedim", "amax", "max", "mean", "sum")
"""What reads a result as fast however it lies: a convolution that is a Linear too, reductions."""


def open_convolutions(graph: fx.Graph, settings: Settings, is_guarded: bool) -> None:
    """Put a Linear in the place of each convolution that is faster so, with what follows it.

    is_guarded: the graph is captured again where convolutions come to take TF32, or no longer do.
    """
    # Backwards, so that what reads a result is seen to read it in any order.
    turned: list[fx.Node] = []
    for node in reversed([node for node in graph.nodes if _is_of_one_tap(node)]):
        with suppress(StaysWhole):
            turned += _open(graph, node, settings, is_guarded)
    for node in turned:
        _turn_gradient_back(graph, node)


def depends_on_tf32(gm: fx.GraphModule) -> bool:
    """Whether what is made of the graph depends on how convolutions are computed on a GPU."""
    if any(_is_of_one_tap(node) and tensor_of(node).is_cuda for node in gm.graph.nodes):
        return True
    return any(depends_on_tf32(inner) for _, inner in checkpoints(gm))


def _is_of_one_tap(node: fx.Node) -> bool:
    """Whether the node is x (B, K, ...) by weight (N, K, 1, ...), at each place of x, all in one
    of ``_DTYPES``.

    Not of one channel, whose layout is both; nor where to ask for layouts raises: of sizes that
    have no value while they are captured, and within vmap.
    """
    dims = _KERNELS.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if dims is None:
        return False
    given = arguments(node, *_NAMES)
    tensors = [value_of(given.get(name)) for name in ("input", "weight", "bias")]
    x, weight, bias = tensors
    there = [t for t in (*tensors, value_of(node)) if t is not None]
    if x is None or weight is None or (bias is None and given.get("bias") is not None):
        return False
    return (
        all(_is_plain(t) and t.dtype == x.dtype for t in there)
        and x.dim() == dims + 2
        and not any(same_shape((channels,), (1,)) for channels in weight.shape[:2])
        and same_shape(weight.shape[1:], (x.shape[1], *(1,) * dims))
        and _is(given.get("stride", 1), 1)
        and (_is(given.get("padding", 0), 0) or given["padding"] in ("valid", "same"))
        and given.get("groups", 1) == 1
        and all(isinstance(d, int) and d > 0 for d in _each(given.get("dilation", 1)))
    )


def _is_plain(value: Tensor) -> bool:
    return (
        value.dtype in _DTYPES
        and value.layout is torch.strided
        and not value.is_nested
        and not is_traceable_wrapper_subclass(value)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and all(isinstance(size, int) or size.node.hint is not None for size in value.shape)
    )


def _is(sizes: Any, number: int) -> bool:
    """Whether a number, or each of several, is this one."""
    return {*_each(sizes)} == {number}


def _each(sizes: Any) -> Sequence[Any]:
    return sizes if isinstance(sizes, (tuple, list)) else (sizes,)


def _behind(node: fx.Node) -> list[fx.Node]:
    """Operations of its elements alone that follow the convolution, as far as only they read it
    and no mode changes in between."""
    steps: list[fx.Node] = []
    last, at = node, node.next
    while at.op != "output" and (is_pure(at) or changed_argument(at) is not None):
        if at in last.users:
            operation, value = read_pointwise(at, last), value_of(at)
            if len(last.users) > 1 or operation is None or operation.operand is not None:
                break
            if value is None or value.dtype != tensor_of(node).dtype:
                break
            steps.append(at)
            last = at
        at = at.next
    return steps


def _open(graph: fx.Graph, node: fx.Node, settings: Settings, is_guarded: bool) -> list[fx.Node]:
    """Open one convolution; where that is not to be, leave all as it was. Returns what turns an x
    whose gradient is contiguous in eager."""
    steps = _behind(node)
    last, copied = [node, *steps][-1], [False, False]
    contiguous = tensor_of(node).is_contiguous()  # and so is then x's gradient

    def body(input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any) -> Any:
        rows = input.movedim(1, -1)
        copied[0] = not rows.is_contiguous()
        # Of a channels-last weight the gradient has its strides too: optimizers compare them.
        as_last = weight.stride()[-1] != 1
        weight = weight.movedim(1, -1).flatten(0, -2) if as_last else weight.flatten(1)
        y = F.linear(rows.contiguous() if copied[0] else rows, weight, bias)
        for step in steps:
            y = _applied(step, y)
        return y.movedim(-1, 1)

    trace = Trace(graph, node, {})
    with trace.opening():
        end = trace.run(body)
        if end.stride() != tensor_of(last).stride():
            copied[1] = not _lies_unseen(last, end)
            end = trace.run(lambda *_, **__: end.contiguous()) if copied[1] else end
        elif not torch.is_grad_enabled():
            # A view that was made so may not be changed in place where gradients are enabled.
            end = trace.run(lambda *_, **__: end.detach())
        check_alike(end, value_of(last), layout=copied[1])
        result = trace.node_of(end)
    new = trace.nodes
    (linear,) = (each for each in new if each.target is F.linear)
    linear.meta[IN_DISGUISE] = True
    if _pays(Search(graph, settings.rounding), linear, settings, is_guarded, *copied):
        last.replace_all_uses_with(result)
        erase(graph, [node, *steps])
        return new[:1] if copied[0] and contiguous else []
    erase(graph, new)
    return []


def _turn_gradient_back(graph: fx.Graph, turning: fx.Node) -> None:
    """Let the gradient of the x that a node turns be contiguous, as the convolution's is: hooks and
    functions of the user's may view it. Nobody sees that of another Linear's rows."""
    x = turning.args[0]
    value = tensor_of(x)
    if not value.requires_grad or value.movedim(1, -1).is_contiguous():
        return
    trace = Trace(graph, turning, {})
    with trace.opening():
        # The gradient of a view as one row is one.
        same = trace.node_of(trace.run(lambda x, *_: x.flatten(1).view_as(x)))
    turning.replace_input_with(x, same)  # type: ignore[arg-type]


def _applied(step: fx.Node, y: Tensor) -> Any:
    """What an operation makes of another value than its own."""
    return computed(step, lambda given: y if isinstance(given, fx.Node) else given)


def _lies_unseen(last: fx.Node, value: Tensor) -> bool:
    """Whether the result need not be turned back: nobody sees it, and what reads it is no slower
    for it."""
    return all(name_of(u) in _WITHOUT_ORDER for u in last.users) and is_unseen({last: value})


def _pays(
    search: Search,
    linear: fx.Node,
    settings: Settings,
    is_guarded: bool,
    turns_x: bool,
    turns_y: bool,
) -> bool:
    """Whether the Linear with its copies is faster than cuDNN, by a careful estimate.

    In full fp32 that is what PyTorch's own Linear is estimated to take without copies: of an H200's
    convolutions none was faster. In TF32 and 16 bit, that and going over the result once more for
    the bias; there only images that need no copy are taken, and the Linear may be PyTorch's own.
    """
    places: Sequence[Any] = search.linears([linear])
    if not places or places[0].found is None:
        return False
    if settings.of(False)[0] == "reference":
        return True
    problem = problem_of(places[0].found)
    if search.drops:
        problem = replace(problem, training=True)
    if problem.device.type != "cuda":
        return False
    in_full = problem.dtype == torch.float32 and not convolutions_take_tf32()
    if in_full:
        if fp32_precision() != "highest" or not pays(places[0], settings):
            return False  # fp32 was asked for
    elif turns_x or turns_y or not _is_like_cudnn(problem, is_guarded):
        return False
    plan = plan_for(replace(problem, whole_step=problem.training))
    if plan.gain is None or plan.microseconds is None:
        return False
    if not in_full:
        return _is_faster_than_cudnn(problem, plan.microseconds)
    passes = 2 if problem.training else 1
    copies = [problem.m * problem.k] * turns_x + [problem.m * problem.n] * turns_y
    turning = sum(costs.turning(problem, values) for values in copies)
    ours = plan.microseconds + costs.HOST_LAYER + passes * turning
    if copies:
        ours = max(ours, _HOST_TURNED[problem.training])
    return ours < plan.gain * plan.microseconds


def _is_like_cudnn(problem: Problem, is_guarded: bool) -> bool:
    """Whether a Linear is as accurate as cuDNN in TF32 and 16 bit, whatever is set; and the GPU one
    of Hopper's, where both were measured."""
    if capability(problem.device) != HOPPER:
        return False
    if problem.dtype == torch.float16:
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    # Products in full fp32 are so still when convolutions no longer take TF32.
    return problem.dtype != torch.float32 or is_guarded or fp32_precision() == "highest"


def _is_faster_than_cudnn(problem: Problem, ours: float) -> bool:
    """The same where cuDNN is fast, without copies."""
    same = replace(problem, precision="high") if problem.dtype == torch.float32 else problem
    cudnn = costs.eager(same) + problem.has_bias * costs.passes(same, 2)
    return max(ours, _HOST_VIEWED[problem.training]) < cudnn


_HOST_TURNED = {False: 110.0, True: 700.0}
"""Microseconds of the host, with copies, their views, autograd's nodes; in training both ways."""
_HOST_VIEWED = {False: 45.0, True: 480.0}
"""The same with views alone."""
