"""The operators as PyTorch's library holds them: schemas, kernels, and shapes without values.

``linear_norm`` returns y alone. Where a gradient may be wanted, ``linear_norm_forward`` runs in its
place, which also returns what ``linear_norm_backward`` needs; both are operators of their own, so
that a compiled graph holds them and never traces into a kernel. ``linear_norm_backward_begin`` and
``linear_norm_backward_end`` are the backward pass in two: such a graph holds what an operator is
given until it ends, and so gives dy and z back before dX is allocated. ``linear_norm_sum`` and
``linear_norm_sum_forward`` are the same of chains with a second result: what enters the norm, or
the batch's statistics, in the sum's place. Registered by
``Library.define/impl``, whose calls cost a third of ``torch.library.custom_op``'s.

``linear_norm_spending_x`` and ``linear_norm_sum_spending_x`` may write over x (``SPENDING_X``),
``linear_norm_backward_spending_dy`` and ``linear_norm_backward_begin_spending_dy`` over dy
(``spending_dy``).
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.chain.reference import Results
from epinorm.operator.calls import run_backward, run_forward, run_inference
from epinorm.operator.checks import check_backward, check_call
from epinorm.operator.flops import register_formulas, register_spending_dy
from epinorm.operator.halves import begun, ended
from epinorm.operator.shortcuts import distinct, shorten_backward, shorten_end, shorten_forward
from epinorm.problem import Inputs, Later

_TENSORS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor[] operands"
)
# out_dtype: of y and, but for what ``norm_dtype_of`` says, of the norm's parameters, where autocast
# makes it differ from x's dtype.
_FACTS = "str chain, str strategy, bool strict, ScalarType? out_dtype"

# Where an operator's arguments split: six of Inputs, then four facts; backward has dy first, then
# z, mean and rstd between the two, then ``wanted`` and, if it is given, dsum.


def _kernel(*arguments: Any) -> Results:
    return run_inference(arguments[:6], arguments[6:])


def _spending_kernel(*arguments: Any) -> Results:
    return run_inference(arguments[:6], arguments[6:], spends_x=True)


def _forward_kernel(*arguments: Any) -> tuple[Tensor, ...]:
    return distinct(run_forward(arguments[:6], arguments[6:]))


def _backward_kernel(dy: Tensor, *rest: Any, **more: Any) -> list[Tensor]:
    return run_backward(rest[:6], rest[9:13], rest[6:9], dy, *rest[13:], **more)


def _begin_kernel(dy: Tensor, *rest: Any, **more: Any) -> list[Tensor]:
    later: Later = []
    return begun(_backward_kernel(dy, *rest, later=later, **more), later, dy)


def _end_kernel(token: Tensor, weight: Tensor, m: int, k: int, dz: Tensor | None = None) -> Tensor:
    return ended(token, weight, dz)


def _fake(*arguments: Any) -> Results:
    inputs, chain = Inputs(*arguments[:6]), Chain.parse(arguments[6])
    x, dtype = inputs.x, arguments[9] or inputs.x.dtype
    check_call(inputs, chain, dtype)
    y = x.new_empty((x.shape[0], inputs.weight.shape[0]), dtype=dtype)
    if chain.returns_statistics:
        return y, y.new_empty((2, y.shape[1]), dtype=_stats_dtype(x))
    if not chain.returns_sum:
        return y
    return y, y.new_empty(y.shape, dtype=chain.sum_dtype(x.dtype, dtype))


def _stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    made, x, chain = _fake(*arguments), arguments[0], Chain.parse(arguments[6])
    y, *second = made if isinstance(made, tuple) else (made,)
    z = x.new_empty(y.shape if chain.keeps_z else 0)
    if chain.norm is None:
        return y, z, x.new_empty(0), x.new_empty(0)
    rstd = x.new_empty(chain.statistics_shape(*y.shape), dtype=_stats_dtype(x))
    mean = torch.empty_like(rstd) if chain.centred else rstd.new_empty(0)
    return y, z, mean, rstd, *second


def _fake_backward(dy: Tensor, *rest: Any) -> list[Tensor]:
    inputs, chain = Inputs(*rest[:6]), Chain.parse(rest[9])
    dtype = rest[12] or inputs.x.dtype
    check_call(inputs, chain, dtype)
    check_backward(dy, inputs, rest[6:9], chain, dtype, *rest[13:])
    tensors: Any = (*inputs[:5], *inputs.operands)
    wanted = [t for t, want in zip(tensors, rest[13], strict=True) if want]
    return [t.new_empty(t.shape) for t in wanted if t is not None]


def _fake_begin(dy: Tensor, *rest: Any) -> list[Tensor]:
    return [*_fake_backward(dy, *rest)[1:], dy.new_empty(0)]


def _fake_end(begun: Tensor, weight: Tensor, m: int, k: int, dz: Tensor | None = None) -> Tensor:
    return begun.new_empty((m, k))


_FOUR = "Tensor, Tensor, Tensor, Tensor"
_FORWARD = f"({_TENSORS}, {_FACTS}) -> "
_SPENDING = _FORWARD.replace("Tensor x", "Tensor(a!) x", 1)
# dsum: the sum's gradient; z: a result, where the chain ``saves_sum`` or ``saves_y``.
_BACKWARD = (
    f"(Tensor dy, {_TENSORS}, Tensor z, Tensor mean, Tensor rstd, {_FACTS}, bool[] wanted,"
    " Tensor? dsum=None) -> Tensor[]"
)
# What begins the backward pass returns all gradients but x's, which is wanted, and, last, a tensor
# without values that knows how to go on: for x's gradient, (m, k), fp32.
# The weight is given again: who changes it waits for this operator as well. So is dy, for dz, where
# that was written over it: a graph gives memory that nobody reads any more to other results.
_END = "(Tensor begun, Tensor weight, SymInt m, SymInt k, Tensor? dz=None) -> Tensor"
library = torch.library.Library("epinorm", "DEF")
for _name, _schema, _run, _run_fake in (
    ("linear_norm", _FORWARD + "Tensor", _kernel, _fake),
    ("linear_norm_sum", _FORWARD + "(Tensor, Tensor)", _kernel, _fake),
    ("linear_norm_spending_x", _SPENDING + "Tensor", _spending_kernel, _fake),
    ("linear_norm_sum_spending_x", _SPENDING + "(Tensor, Tensor)", _spending_kernel, _fake),
    ("linear_norm_forward", f"{_FORWARD}({_FOUR})", _forward_kernel, _fake_forward),
    ("linear_norm_sum_forward", f"{_FORWARD}({_FOUR}, Tensor)", _forward_kernel, _fake_forward),
    ("linear_norm_backward", _BACKWARD, _backward_kernel, _fake_backward),
    ("linear_norm_backward_begin", _BACKWARD, _begin_kernel, _fake_begin),
    ("linear_norm_backward_end", _END, _end_kernel, _fake_end),
):
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"epinorm::{_name}", _run_fake, lib=library)
linear_norm = torch.ops.epinorm.linear_norm.default
linear_norm_forward = torch.ops.epinorm.linear_norm_forward.default
linear_norm_sum = torch.ops.epinorm.linear_norm_sum.default
linear_norm_sum_forward = torch.ops.epinorm.linear_norm_sum_forward.default
linear_norm_backward = torch.ops.epinorm.linear_norm_backward.default
linear_norm_backward_begin = torch.ops.epinorm.linear_norm_backward_begin.default
linear_norm_backward_end = torch.ops.epinorm.linear_norm_backward_end.default
linear_norm_spending_x = torch.ops.epinorm.linear_norm_spending_x.default
linear_norm_sum_spending_x = torch.ops.epinorm.linear_norm_sum_spending_x.default
for _operator in (linear_norm, linear_norm_sum):
    shorten_forward(_operator, training=False)
for _operator in (linear_norm_spending_x, linear_norm_sum_spending_x):
    shorten_forward(_operator, training=False, spends_x=True)
for _operator in (linear_norm_forward, linear_norm_sum_forward):
    shorten_forward(_operator, training=True)
shorten_backward(linear_norm_backward)
shorten_backward(linear_norm_backward_begin, begins=True)
shorten_end(linear_norm_backward_end)
register_formulas()
SPENDING_X = {linear_norm: linear_norm_spending_x, linear_norm_sum: linear_norm_sum_spending_x}
"""What takes an operator's place where nobody reads x afterwards, and leaves anything there. Behind
AOTAutograd alone, so that it has no rule for autograd, autocast or torch.func. Made last: what
calls an operator is what it is hashed by."""
OPERATORS = (
    *(linear_norm, linear_norm_sum, linear_norm_forward, linear_norm_sum_forward),
    linear_norm_backward,
)


@cache
def spending_dy() -> dict[tuple[Any, int], Any]:
    """What takes an operator's place, by it and how many gradients it returns, where nobody reads
    dy afterwards. Defined when a graph is first compiled, as few processes need them.

    TorchInductor holds an operator that writes over an argument only where each of its results
    stands in its schema, so there is an overload for each count.
    """
    found = {}
    schema = _BACKWARD.replace("Tensor dy", "Tensor(a!) dy", 1).split(" -> ")[0]
    for ordinary, run, fake in (
        (linear_norm_backward, _backward_kernel, _fake_backward),
        (linear_norm_backward_begin, _begin_kernel, _fake_begin),
    ):
        of = ordinary._schema.name.removeprefix("epinorm::") + "_spending_dy"
        for count in range(2, _MOST_GRADIENTS + 1):
            name, results = f"{of}.of_{count}", ", ".join(["Tensor"] * count)
            tags = (torch.Tag.pt2_compliant_tag,)
            library.define(f"{name}{schema} -> ({results})", tags=tags)
            library.impl(name, partial(run, spends_dy=True), "CompositeExplicitAutograd")
            torch.library.register_fake(f"epinorm::{name}", fake, lib=library)
            made = getattr(getattr(torch.ops.epinorm, of), f"of_{count}")
            shorten_backward(made, begins=run is _begin_kernel, spends_dy=True)
            found[ordinary, count] = made
    register_spending_dy()
    return found


_MOST_GRADIENTS = 6
