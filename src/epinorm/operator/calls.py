"""One call below PyTorch's dispatcher: check it, plan it, run what the plan was compiled to.

What computes a call is kept in a dictionary under everything that it depends on, so that a
call like an earlier one costs a look-up, not a plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from epinorm.backends.engine import executable_for, plan_for
from epinorm.backends.memo import cleared_with
from epinorm.backends.prepack import keeps, marked
from epinorm.chain import Chain
from epinorm.chain.reference import Results, epilogue
from epinorm.operator.checks import check_backward, check_call, check_rows, norm_dtype_of
from epinorm.precision import Precision, product_precision
from epinorm.problem import (
    Executable,
    Forward,
    Gradients,
    Inputs,
    Later,
    Layout,
    Problem,
    StepLeftovers,
    Wanted,
)

Facts = tuple[str, Any, bool, torch.dtype | None]
"""The facts of a call as the operators' schemas order them: chain, strategy, strict, out_dtype."""


class _Structure(NamedTuple):
    """A chain's text taken apart: what its kernels depend on, also as text, its numbers, which of
    its operands have x's leading dimensions, and whether any has one value a row."""

    chain: Chain
    text: str
    constants: tuple[float, ...]
    elements: tuple[bool, ...]
    has_rows: bool


@lru_cache(maxsize=4096)
def _structure_of(text: str) -> _Structure:
    chain = Chain.parse(text)
    structure = chain.structure
    elements = tuple(kind in ("element", "row") for kind in chain.operand_kinds)
    numbers = cast("tuple[float, ...]", chain.arguments)
    return _Structure(structure, str(structure), numbers, elements, "row" in chain.operand_kinds)


def structure_of(text: str) -> str:
    """The text that chains have in common which differ in numbers alone that kernels are given."""
    return _structure_of(text).text


def layers_of(facts: Facts) -> Eager:
    """A chain by PyTorch's own layers."""
    return Eager(_structure_of(facts[0]).chain)


def constants_of(facts: Facts) -> tuple[float, ...]:
    """``Inputs.constants`` of a call with these facts."""
    return _structure_of(facts[0]).constants


_executables: dict[tuple[Any, ...], Executable] = {}
_MOST_EXECUTABLES = 4096
_MOST_CHAINS = 64
_ROWS_WORTH_A_COPY = 256
"""On the CPU: with fewer, a copy of the weight takes as long as a good part of the product."""

planned: list[Callable[[Problem, Inputs], None]] = []
"""Told of each call that is planned: so `epinorm tune` learns which problems a model has."""


class _Remembers(Protocol):
    def forget(self) -> None: ...


remembering: weakref.WeakSet[_Remembers] = weakref.WeakSet()
"""All that keep what calls were found to be."""


def forget_plans() -> None:
    """Plan each call anew."""
    _executables.clear()
    for kinds in list(remembering):
        kinds.forget()


cleared_with(forget_plans)


def executable_of(
    inputs: Inputs,
    facts: Facts,
    training: bool,
    whole_step: bool = False,
    y_size: tuple[int, ...] | None = None,
    spends_x: bool = False,
    spends_dy: bool = False,
) -> Executable:
    """What computes tensors like ``inputs``, which are dense; y_size: of y where its leading
    dimensions are not folded. whole_step and the rest: see ``Problem``."""
    x, weight, bias, norm_weight, norm_bias, operands, _ = inputs
    device = x.device
    chain, text, *_, has_rows = _structure_of(facts[0])
    # What a compiled graph hands over may be a parameter that the model has detached.
    if training and has_rows and torch.is_grad_enabled():
        check_rows([t.requires_grad for t in operands], chain)
    precision = _precision(x, weight)
    prepacked = bool(marked) and keeps(weight)
    key = (
        *(text, *facts[1:], training, whole_step, spends_x, spends_dy),
        *(y_size, precision, prepacked),
        *(x.shape, x.stride(), x.dtype, device),
        *(weight.shape, weight.stride(), weight.dtype, weight.device),
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        None if norm_weight is None else (norm_weight.shape, norm_weight.dtype, norm_weight.device),
        None if norm_bias is None else (norm_bias.shape, norm_bias.dtype, norm_bias.device),
        tuple((t.shape, t.dtype, t.device) for t in operands) if operands else (),
    )
    found = _executables.get(key)
    if found is not None:
        return found
    if len(_executables) >= _MOST_EXECUTABLES:
        _executables.clear()
    spends = spends_x, spends_dy
    problem = _problem(inputs, chain, facts, training, prepacked, whole_step, *spends)
    for tell in planned:
        tell(problem, inputs)
    layout = Layout(x.stride(0), weight.stride(0), y_size or (problem.m, problem.n))
    made = executable_for(problem, plan_for(problem, facts[1], facts[2]), layout)
    _executables[key] = made
    return made


def _precision(x: Tensor, weight: Tensor) -> Precision:
    return product_precision(x.dtype, x.device.type, (*x.shape, *weight.shape[:1]))


def _problem(
    inputs: Inputs,
    chain: Chain,
    facts: Facts,
    training: bool,
    prepacked: bool,
    whole_step: bool,
    spends_x: bool,
    spends_dy: bool,
) -> Problem:
    x = inputs.x
    out_dtype = facts[3] or x.dtype
    check_call(inputs, chain, out_dtype)
    return Problem(
        chain=chain.rounded_for(x.dtype, out_dtype, x.device.type),
        m=x.shape[0],
        k=x.shape[1],
        n=inputs.weight.shape[0],
        dtype=x.dtype,
        norm_dtype=norm_dtype_of(inputs, chain, out_dtype),
        out_dtype=out_dtype,
        has_bias=inputs.bias is not None,
        has_norm_weight=inputs.norm_weight is not None,
        has_norm_bias=inputs.norm_bias is not None,
        training=training,
        device=x.device,
        precision=_precision(x, inputs.weight),
        prepacked=prepacked and not training,
        whole_step=whole_step,
        spends_x=spends_x,
        spends_dy=spends_dy,
    )


def as_dense(t: Tensor) -> Tensor:
    """Make the last dimension contiguous, rows disjoint and memory what the values are; most
    tensors pass as they are."""
    if t.is_neg() or t._is_zerotensor():  # their sign or their zeros stand beside the memory
        t = torch.zeros_like(t).copy_(t)
    if t.is_contiguous() or (t.dim() == 2 and t.stride(1) == 1 and t.stride(0) >= t.shape[1]):
        return t
    return t.contiguous()


def _vector(t: Tensor | None) -> Tensor | None:
    return None if t is None else as_dense(t).contiguous()


def _inputs(tensors: Sequence[Any], constants: tuple[float, ...]) -> Inputs:
    """Dense ones; tensors in the order of ``Inputs``."""
    x, weight, bias, norm_weight, norm_bias, operands = tensors
    return Inputs(
        *(as_dense(x), as_dense(weight), _vector(bias), _vector(norm_weight), _vector(norm_bias)),
        tuple(as_dense(t) for t in operands) if operands else (),
        constants,
    )


def _are_same(inputs: Inputs, dense: Inputs) -> bool:
    pairs = zip((*inputs[:5], *inputs.operands), (*dense[:5], *dense.operands), strict=True)
    return all(a is b for a, b in pairs)


def fold(t: Tensor) -> Tensor:
    """(..., C) → (M, C)."""
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)


def unfold(t: Tensor, leading: Sequence[int]) -> Tensor:
    """(M, C), which nobody else has, → (..., C); as it is where it has these dimensions.

    No view, as eager's is none: a view that was made without gradients can not be changed in place
    by what has one, and none can be detached in place. What autograd recorded is one all the same:
    the chain may have saved it, and then has to see changes.
    """
    size = (*leading, t.shape[-1])
    if t.shape == size:
        return t
    if t.requires_grad or torch.compiler.is_compiling():
        return t.view(size)
    return own_view(t, size)


def own_view(t: Tensor, size: Sequence[int]) -> Tensor:
    """A view of what nobody else reads, which autograd takes for a tensor of its own."""
    own: Tensor = torch.ops.aten._unsafe_view(t, size)
    return own


def fold_operands(operands: Sequence[Tensor], facts: Facts) -> tuple[Tensor, ...]:
    """Those with x's leading dimensions as matrices."""
    if not operands:
        return ()
    # Dynamo traces through the cache, and warns of it each time.
    of = _structure_of.__wrapped__ if torch.compiler.is_compiling() else _structure_of
    pairs = zip(operands, of(facts[0]).elements, strict=True)
    return tuple([fold(t) if is_element else t for t, is_element in pairs])


class Eager:
    """PyTorch's own layers, which autograd may look into: the backward pass is eager's."""

    def __init__(self, structure: Chain) -> None:
        self.structure = structure
        self.chains: dict[tuple[float, ...], Chain] = {}

    def results(self, constants: tuple[float, ...], *tensors: Any) -> Results:
        """From the tensors in the order of ``Inputs``, the operands one by one; x is (..., K)."""
        x, weight, bias, norm_weight, norm_bias, *operands = tensors
        chain = self.chains.get(constants)
        if chain is None:
            if len(self.chains) >= _MOST_CHAINS:
                self.chains.clear()
            chain = self.chains[constants] = self.structure.filled(constants)
        return epilogue(linear(x, weight, bias), chain, norm_weight, norm_bias, operands)


class _Copying:
    """An executable for tensors that are copied first, to be dense."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.problem, self.plan = executable, executable.problem, executable.plan

    def forward(self, *tensors: Any) -> Forward:
        return self.executable.forward(*_inputs(tensors[:6], tensors[6]))

    def backward(self, inputs: Inputs, *rest: Any) -> Gradients:
        return self.executable.backward(_inputs(inputs[:6], inputs.constants), *rest)


def eager_for(executable: Executable) -> Eager | None:
    """PyTorch's own layers where the plan leaves the call to them."""
    return Eager(executable.problem.chain) if executable.plan.strategy == "reference" else None


def executable_for_call(
    tensors: Sequence[Any],
    facts: Facts,
    training: bool,
    whole_step: bool = False,
    y_size: tuple[int, ...] | None = None,
    spends_x: bool = False,
    spends_dy: bool = False,
) -> Executable:
    """What computes tensors in the order of ``Inputs``, dense or not; y_size and the rest: see
    ``executable_of``."""
    given = Inputs(*(*tensors, constants_of(facts)))
    dense = _inputs(tensors, given.constants)
    copied = facts[1] == "auto" and dense.weight is not given.weight
    if copied and dense.x.device.type == "cpu" and len(dense.x) < _ROWS_WORTH_A_COPY:
        facts = (facts[0], "reference", *facts[2:])
    spends = spends_x, spends_dy
    executable = executable_of(dense, facts, training, whole_step, y_size, *spends)
    return executable if _are_same(given, dense) else _Copying(executable)


def run_inference(tensors: Sequence[Any], facts: Facts, spends_x: bool = False) -> Results:
    """Compute y (M, N) for ``tensors`` in the order of ``Inputs``; keep nothing. spends_x: see
    ``Problem``."""
    inputs = _inputs(tensors, constants_of(facts))
    return executable_of(inputs, facts, False, spends_x=spends_x).forward(*inputs).results


def run_forward(tensors: Sequence[Any], facts: Facts) -> Forward:
    """Compute y (M, N) and what backward needs."""
    inputs = _inputs(tensors, constants_of(facts))
    return executable_of(inputs, facts, True).forward(*inputs)


def run_backward(
    tensors: Sequence[Any],
    facts: Facts,
    kept: Sequence[Tensor],
    dy: Tensor,
    wanted: Sequence[bool],
    dsum: Tensor | None = None,
    executable: Executable | None = None,
    left: StepLeftovers | None = None,
    into: Tensor | None = None,
    later: Later | None = None,
    spends_dy: bool = False,
) -> list[Tensor]:
    """Compute the wanted gradients, in the order of ``Inputs``; kept: ``Forward.saved``,
    mean and rstd, which a backend lets go of when it has read them if this is the only list of
    them. dsum: the sum's gradient, if it has one.

    executable: what the forward pass was computed by; left: what it left, see ``StepForward``.
    into: a tensor like the weight that dW may be added to; where it was, it stands in dW's place.
    later: as ``Executable.backward`` takes it; where something was put there, dX is not among the
    gradients. spends_dy: see ``Problem``.
    """
    if executable is not None and _has_the_set_precision(executable.problem):
        inputs, dense = Inputs._make((*tensors, constants_of(facts))), kept
    else:
        inputs = _inputs(tensors, constants_of(facts))
        executable, left = executable_of(inputs, facts, True, spends_dy=spends_dy), None
        problem = executable.problem
        check_backward(dy, inputs, kept, problem.chain, problem.out_dtype, wanted, dsum)
        dense = [as_dense(t).contiguous() for t in kept]  # a hook may have handed back anything
    want = wanted_of(wanted)
    forward = [Forward(dense[0], *dense)]  # backward never reads y
    del dense
    if isinstance(kept, list):
        kept.clear()
    dsum = None if dsum is None else as_dense(dsum)
    known = left, into, dsum, later
    return in_order(executable.backward(inputs, forward, as_dense(dy), want, *known))


def wanted_of(flags: Sequence[bool]) -> Wanted:
    """Flags in the order of ``Inputs``, the operands' one by one, as a backend takes them."""
    return Wanted(flags[0], flags[1], flags[2], flags[3], flags[4], tuple(flags[5:]))


def in_order(found: Gradients) -> list[Tensor]:
    """The gradients that there are, in the order of ``Inputs``."""
    return [g for g in (*found[:5], *found.operands) if g is not None]


def _has_the_set_precision(problem: Problem) -> bool:
    """Whether PyTorch's setting is still the one of the forward pass: backward follows it too."""
    if problem.dtype != torch.float32:
        return True  # no setting decides about it
    sizes = problem.m, problem.k, problem.n
    return product_precision(problem.dtype, problem.device.type, sizes) == problem.precision
