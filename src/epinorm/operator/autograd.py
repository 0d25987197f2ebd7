"""The operators' gradients, of first order by our kernels and of any higher one by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from epinorm.backends.unpromised import saving_hooks
from epinorm.chain import Chain, returns_more
from epinorm.chain.reference import Results, epilogue
from epinorm.operator.accumulation import added, existing_gradient
from epinorm.operator.calls import Facts, constants_of, fold, fold_operands, run_backward
from epinorm.operator.halves import pays_in_two
from epinorm.operator.schema import (
    library,
    linear_norm,
    linear_norm_backward,
    linear_norm_backward_begin,
    linear_norm_backward_end,
    linear_norm_forward,
    linear_norm_sum,
    linear_norm_sum_forward,
)
from epinorm.operator.undisturbed import (
    has_plain_types,
    is_under_autocast_alone,
    is_undisturbed,
    untraced,
)
from epinorm.problem import Executable, Forward, Inputs, StepForward, StepLeftovers

WEIGHT, BIAS, OPERANDS = map(Inputs._fields.index, ("weight", "bias", "operands"))

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset


def _has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether forward-mode differentiation is under way through one of the tensors."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _in_reference(tensors: Sequence[Any], facts: Facts) -> Results:
    """The chain in PyTorch's own differentiable operations, rounding where the kernels do."""
    x, weight, bias, norm_weight, norm_bias, *operands = tensors
    z = F.linear(x, weight, bias).to(facts[3] or x.dtype)
    return epilogue(z, Chain.parse(facts[0]), norm_weight, norm_bias, operands)


def _savable(tensors: Sequence[Any], chain: Chain) -> list[Any]:
    """The inputs as autograd can save them: a copy of what was made under inference_mode and which
    eager, adding it, does not save."""
    saved = list(tensors)
    if any([t is not None and t.is_inference() for t in saved]):
        operations = (op for op in (*chain.pre, *chain.post) if op.operand is not None)
        added = [OPERANDS + i for i, op in enumerate(operations) if not op.reads_operand]
        for i in (BIAS, *added):
            if saved[i] is not None and saved[i].is_inference():
                saved[i] = saved[i].clone()
    return saved


def _statistics(ctx: Any, kept: Forward) -> list[Tensor]:
    return [] if ctx.returns_sum or kept.second is None else [kept.second]


def _scatter(found: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    remaining = iter(found)
    return [next(remaining) if want else None for want in wanted]


@contextmanager
def _next_level() -> Iterator[None]:
    """Go below autograd, where under torch.func the next level's autograd may wait.

    It must find gradients enabled, which a Function's forward has switched off.
    """
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._functorch.peek_interpreter_stack() is None:
            yield
        else:
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                yield


class SingleLevel(_SingleLevelFunction):
    """A Function that torch.func calls at one of its levels; apply is made in C, unseen by mypy."""

    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key
    if TYPE_CHECKING:
        apply: Any


class _LinearNorm(SingleLevel):
    """``linear_norm`` with its gradient; executable: what computes it where nothing but autograd
    wants it."""

    @staticmethod
    def forward(ctx: Any, executable: Executable | None, facts: Facts, *tensors: Any) -> Any:
        kept = _LinearNorm.keep(ctx, executable, facts, tensors)
        ctx.mark_non_differentiable(*_statistics(ctx, kept))
        return kept.results

    @staticmethod
    def keep(
        ctx: Any, executable: Executable | None, facts: Facts, tensors: Sequence[Any]
    ) -> Forward:
        """Run forward and save what backward reads."""
        x, inputs = tensors[0], (*tensors[:5], tensors[5:])
        if executable is not None and x.dim() != 2:
            # In here: autograd need not record it. y is no view, which could not change in place.
            inputs = (fold(x), *tensors[1:5], fold_operands(tensors[5:], facts))
            kept = executable.forward(*(*inputs, constants_of(facts)))
            for made in (kept.y, kept.second):
                if made is not None:
                    made.resize_(*x.shape[:-1], made.shape[1])
        elif executable is not None:
            kept = executable.forward(*(*inputs, constants_of(facts)))
        else:
            with _next_level():
                forward = linear_norm_sum_forward if returns_more(facts[0]) else linear_norm_forward
                kept = Forward(*forward(*inputs, *facts))
        chain = Chain.parse(facts[0])
        saved = _savable(tensors, chain)
        ctx.returns_sum = chain.returns_sum
        if chain.returns_more:
            ctx.set_materialize_grads(False)  # often one of the results has none
        if (place := chain.residual_place) >= 0:
            saved[OPERANDS + place] = kept.second
        ctx.save_for_backward(kept.saved(chain), kept.mean, kept.rstd, *saved)
        ctx.facts, ctx.executable, ctx.left = facts, executable, None
        if saving_hooks(False) is not None:
            # Hooks may hand back other strides; and what decides by them what is kept, as
            # checkpointing does, would not see what is left besides: it is dropped.
            ctx.executable = None
        elif isinstance(kept, StepForward):
            ctx.left, ctx.weight_at = kept.left, tensors[WEIGHT].data_ptr()
            kept.left.restrict(*ctx.needs_input_grad[2:4])
        return kept

    @staticmethod
    @untraced
    def backward(ctx: Any, dy: Tensor | None, *more: Any) -> Any:
        left, ctx.left = ctx.left, None
        saved = list(ctx.saved_tensors)
        if left is not None and saved[3 + WEIGHT].data_ptr() != ctx.weight_at:
            left.weight_moved()
        dsum = more[-1] if ctx.returns_sum else None
        wanted, let_go = ctx.needs_input_grad[2:], ctx.maybe_clear_saved_tensors
        found = gradients(ctx.executable, ctx.facts, saved, dy, wanted, dsum, left, let_go)
        return None, None, *found


@untraced
def gradients(
    executable: Executable | None,
    facts: Facts,
    saved: list[Any],
    dy: Tensor | None,
    wanted: Sequence[bool],
    dsum: Tensor | None,
    left: StepLeftovers | None,
    let_go: Callable[[], None] = lambda: None,
) -> list[Tensor | None]:
    """The gradients of the inputs from what the forward pass saved, z, mean, rstd and the inputs,
    which is taken out of ``saved``, and from what it left besides; let_go: of what else holds it,
    where no graph is retained. Native code's backward pass calls it where none like it was
    recorded, or autograd asks for more."""
    if dy is None and dsum is not None:
        # The norm has no part in the sum: its parameters get None, and none its NaNs.
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            fresh = _fresh(saved[3:], wanted)
            found = _first_order(None, dsum, fresh, facts, wanted, create_graph)
        return _scatter(found, wanted)
    if dy is None:
        x, n = saved[3], saved[4].shape[0]
        dy = x.new_zeros((*x.shape[:-1], n), dtype=facts[3] or x.dtype)
        del x
    undisturbed = is_under_autocast_alone if facts[3] is not None else is_undisturbed
    plain = not torch.compiler.is_compiling()  # compiled autograd traces this
    plain = plain and undisturbed() and has_plain_types((dy, dsum, *saved))
    kept, tensors = saved[:3], tuple(saved[3:])
    saved.clear()
    given = tensors
    # is_grads_batched vectorises over dy by an older vmap, which knows no rule of ours.
    of_batch = torch._C._functorch.is_legacy_batchedtensor
    batched = of_batch(dy) or (dsum is not None and of_batch(dsum))
    if given[0].dim() != 2 and not batched:
        dy, operands = fold(dy), fold_operands(given[5:], facts)
        kept[0] = kept[0] if kept[0].shape == (0,) else fold(kept[0])
        dsum = None if dsum is None else fold(dsum)
        tensors = (fold(given[0]), *given[1:5], *operands)
    create_graph = torch.is_grad_enabled()
    # The kernels read the sum alone; what goes through the reference, the residual, as tangents do,
    # for which one may not look within a vmap.
    if create_graph or batched or forward_ad._current_level >= 0:
        tensors = _restored(tensors, facts)
    inputs = (*tensors[:5], tensors[5:])
    if batched:
        with torch.enable_grad():
            fresh = _fresh(tensors, wanted)
            found = _first_order(dy, dsum, fresh, facts, wanted, create_graph)
    elif not create_graph and plain:
        # Without a retained graph, z is free once the norm kernel has read it: before dW, whose
        # product is where memory peaks.
        let_go()
        x, weight = tensors[:2]
        into = existing_gradient(weight, x) if wanted[WEIGHT] else None
        known = executable, left, into
        found = run_backward(inputs, facts, kept, dy, wanted, dsum, *known)
        if into is not None and any(gradient is into for gradient in found):
            added(weight, into)
            found = [None if gradient is into else gradient for gradient in found]
    elif pays_in_two(dy, tensors, wanted, facts):
        *found, begun = linear_norm_backward_begin(dy, *inputs, *kept, *facts, wanted, dsum)
        found = [linear_norm_backward_end(begun, tensors[1], *tensors[0].shape), *found]
    else:
        found = linear_norm_backward(dy, *inputs, *kept, *facts, wanted, dsum)
    scattered = _scatter(found, wanted)
    if given is not tensors:
        for i in (0, *range(5, len(given))):
            if (gradient := scattered[i]) is not None:
                scattered[i] = gradient.reshape(given[i].shape)
    return scattered


def _restored(tensors: tuple[Any, ...], facts: Facts) -> tuple[Any, ...]:
    """What was saved with the residual in its place, where the sum stands there. As all of it is
    part of the graph, so are the residual's gradients."""
    chain = Chain.parse(facts[0])
    place = chain.residual_place
    if place < 0:
        return tensors
    before = str(Chain(None, chain.pre[:-1])), *facts[1:]
    at = OPERANDS + place
    rest = _in_reference((*tensors[:3], None, None, *tensors[OPERANDS:at]), before)
    return (*tensors[:at], tensors[at] - rest, *tensors[at + 1 :])


class _LinearNormForward(_LinearNorm):
    """``linear_norm_forward``, or that with the sum, with the gradients of its results: torch.func
    differentiates it level by level.

    Nothing flows back through z and the statistics: the gradient of ``linear_norm_backward``,
    their only reader, is taken with respect to what they were computed from.
    """

    @staticmethod
    def forward(ctx: Any, executable: Executable | None, facts: Facts, *tensors: Any) -> Any:
        kept = _LinearNorm.keep(ctx, executable, facts, tensors)
        ctx.mark_non_differentiable(kept.z, kept.mean, kept.rstd, *_statistics(ctx, kept))
        return tuple(kept) if kept.second is not None else tuple(kept[:4])


class _LinearNormBackward(SingleLevel):
    """``linear_norm_backward`` with its own gradient, which goes through the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        facts: Facts,
        wanted: Sequence[bool],
        kept: Any,
        dy: Tensor,
        dsum: Tensor | None,
        *tensors: Any,
    ) -> Any:
        with _next_level():
            inputs = (*tensors[:5], tensors[5:])
            found = linear_norm_backward(dy, *inputs, *kept, *facts, wanted, dsum)
        ctx.save_for_backward(dy, dsum, *tensors)
        ctx.facts, ctx.wanted = facts, wanted
        return tuple(found)

    @staticmethod
    @untraced
    def backward(ctx: Any, *second: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            has_sum = ctx.saved_tensors[1] is not None
            differentiated = [True, has_sum, *ctx.wanted]
            dy, dsum, *tensors = _fresh(ctx.saved_tensors, differentiated, needed)
            first = _first_order(dy, dsum, tensors, ctx.facts, ctx.wanted)
            leaves = [t for t, need in zip((dy, dsum, *tensors), needed, strict=True) if need]
            found = torch.autograd.grad(
                first, leaves, second, create_graph=create_graph, allow_unused=True
            )
        return None, None, None, *_scatter(found, needed)


def _fresh(tensors: Sequence[Any], *leaves: Sequence[bool]) -> list[Any]:
    """The same values as new nodes of the graph: of two inputs one may have come from the other."""
    fresh = [None if t is None else t.view_as(t) for t in tensors]
    with enable_inplace_requires_grad(True):
        for t, *is_leaf in zip(fresh, *leaves, strict=True):
            if any(is_leaf) and not t.requires_grad:
                t.requires_grad_()
    return fresh


def _first_order(
    dy: Tensor | None,
    dsum: Tensor | None,
    tensors: Sequence[Any],
    facts: Facts,
    wanted: Sequence[bool],
    create_graph: bool = True,
) -> list[Any]:
    """The wanted gradients through the reference, themselves differentiable; None where dy is None
    and the sum does not depend on it."""
    results = _in_reference(tensors, facts)
    pairs = zip(results if isinstance(results, tuple) else (results,), (dy, dsum), strict=False)
    given = [(r, g) for r, g in pairs if g is not None and r.requires_grad]
    leaves = [t for t, want in zip(tensors, wanted, strict=True) if want]
    return list(
        torch.autograd.grad(
            *([r for r, _ in given], leaves, [g for _, g in given]),
            create_graph=create_graph,
            allow_unused=dy is None,
        )
    )


def differentiable(executable: Executable, facts: Facts, tensors: Sequence[Any]) -> Results:
    """Compute ``linear_norm`` by ``executable`` for plain tensors of which one wants a gradient;
    those with rows may have any leading dimensions, which are folded for the executable."""
    return _LinearNorm.apply(executable, facts, *tensors)


@untraced
def _autograd(keyset: Any, *arguments: Any) -> Results:
    # A package of AOTInductor's hands over None in the place of an empty list.
    tensors, facts = (*arguments[:5], *(arguments[5] or ())), arguments[6:]
    if _has_tangent(tensors):
        return _in_reference(tensors, facts)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        # Under torch.func this runs once for each level, each time for that level alone.
        with enable_single_level_autograd_function():
            return _LinearNorm.apply(None, facts, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        operator = linear_norm_sum if returns_more(facts[0]) else linear_norm
        inputs = (*tensors[:5], tensors[5:])
        return operator.redispatch(keyset & _AFTER_AUTOGRAD, *inputs, *facts)


@untraced
def _forward_autograd(keyset: Any, *arguments: Any) -> Any:
    tensors, facts = (*arguments[:5], *arguments[5]), arguments[6:]
    tangent = _has_tangent(tensors)
    if not tangent and torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        with enable_single_level_autograd_function():
            return _LinearNormForward.apply(None, facts, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        operator = linear_norm_sum_forward if returns_more(facts[0]) else linear_norm_forward
        kept = operator.redispatch(keyset & _AFTER_AUTOGRAD, *arguments)
    if not tangent:
        return kept
    results = _in_reference(tensors, facts)
    y, *second = results if isinstance(results, tuple) else (results,)
    return (y, *kept[1:4], *second)


@untraced
def _backward_autograd(keyset: Any, dy: Tensor, *rest: Any) -> list[Tensor]:
    tensors, kept, facts, wanted = (*rest[:5], *rest[5]), rest[6:9], rest[9:13], rest[13]
    dsum = rest[14] if len(rest) > 14 else None
    if _has_tangent((dy, dsum, *tensors)):
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            fresh = _fresh(tensors, wanted)
            try:
                return _first_order(dy, dsum, fresh, facts, wanted, create_graph)
            except NotImplementedError:  # SiLU's gradient, say, has a tangent in a graph alone
                return _first_order(dy, dsum, fresh, facts, wanted)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(dy, dsum, *tensors):
        with enable_single_level_autograd_function():
            return list(_LinearNormBackward.apply(facts, wanted, kept, dy, dsum, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return linear_norm_backward.redispatch(keyset & _AFTER_AUTOGRAD, dy, *rest)


for _name in ("linear_norm", "linear_norm_sum"):
    library.impl(_name, _autograd, "Autograd", with_keyset=True)
    library.impl(f"{_name}_forward", _forward_autograd, "Autograd", with_keyset=True)
library.impl("linear_norm_backward", _backward_autograd, "Autograd", with_keyset=True)
