"""The operators as PyTorch's library holds them: schemas, kernels, and shapes without values.

``linear_norm`` returns y alone. Where a gradient may be wanted, ``linear_norm_forward`` runs in its
place, which also returns what ``linear_norm_backward`` needs; both are operators of their own, so
that a compiled graph holds them and never traces into a kernel. ``linear_norm_sum`` and
``linear_norm_sum_forward`` are the same of chains that return what enters the norm. Registered by
``Library.define/impl``, whose calls cost a third of ``torch.library.custom_op``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.chain.reference import Results
from epinorm.operator.calls import run_backward, run_forward, run_inference
from epinorm.operator.checks import check_backward, check_call
from epinorm.operator.shortcuts import distinct, shorten_backward, shorten_forward
from epinorm.problem import Inputs

_TENSORS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "Tensor[] operands"
)
# out_dtype: what the norm computes in and y has, where autocast makes it differ from x's dtype.
_FACTS = "str chain, str strategy, bool strict, ScalarType? out_dtype"
_SCHEMAS = {
    "linear_norm": f"({_TENSORS}, {_FACTS}) -> Tensor",
    "linear_norm_forward": f"({_TENSORS}, {_FACTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "linear_norm_sum": f"({_TENSORS}, {_FACTS}) -> (Tensor, Tensor)",
    "linear_norm_sum_forward": f"({_TENSORS}, {_FACTS}) -> ({', '.join(['Tensor'] * 5)})",
    # dsum: the sum's gradient; z: a result, where the chain ``saves_sum`` or ``saves_y``.
    "linear_norm_backward": (
        f"(Tensor dy, {_TENSORS}, Tensor z, Tensor mean, Tensor rstd, {_FACTS}, bool[] wanted,"
        " Tensor? dsum=None) -> Tensor[]"
    ),
}

library = torch.library.Library("epinorm", "DEF")
for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
linear_norm = torch.ops.epinorm.linear_norm.default
linear_norm_forward = torch.ops.epinorm.linear_norm_forward.default
linear_norm_sum = torch.ops.epinorm.linear_norm_sum.default
linear_norm_sum_forward = torch.ops.epinorm.linear_norm_sum_forward.default
linear_norm_backward = torch.ops.epinorm.linear_norm_backward.default
shorten_forward(linear_norm, "linear_norm", training=False)
shorten_forward(linear_norm_sum, "linear_norm_sum", training=False)
shorten_forward(linear_norm_forward, "linear_norm_forward", training=True)
shorten_forward(linear_norm_sum_forward, "linear_norm_sum_forward", training=True)
shorten_backward(linear_norm_backward)

# Where an operator's arguments split: six of Inputs, then four facts; backward has dy first, then
# z, mean and rstd between the two, then ``wanted`` and, if it is given, dsum.


def _kernel(*arguments: Any) -> Results:
    return run_inference(arguments[:6], arguments[6:])


def _forward_kernel(*arguments: Any) -> tuple[Tensor, ...]:
    return distinct(run_forward(arguments[:6], arguments[6:]))


def _backward_kernel(dy: Tensor, *rest: Any) -> list[Tensor]:
    return run_backward(rest[:6], rest[9:13], rest[6:9], dy, *rest[13:])


for _name, _function in (
    ("linear_norm", _kernel),
    ("linear_norm_forward", _forward_kernel),
    ("linear_norm_sum", _kernel),
    ("linear_norm_sum_forward", _forward_kernel),
    ("linear_norm_backward", _backward_kernel),
):
    library.impl(_name, _function, "CompositeExplicitAutograd")


def _fake(*arguments: Any) -> Results:
    y, chain = _fake_y(*arguments), Chain.parse(arguments[6])
    if not chain.returns_sum:
        return y
    return y, y.new_empty(y.shape, dtype=chain.sum_dtype(arguments[0].dtype, y.dtype))


def _fake_y(*arguments: Any) -> Tensor:
    x, weight, bias, norm_weight, norm_bias, operands, text, _strategy, _strict, out = arguments
    dtype = out or x.dtype
    check_call(x, weight, bias, norm_weight, norm_bias, operands, Chain.parse(text), dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    y = _fake_y(*arguments)
    x, chain = arguments[0], Chain.parse(arguments[6])
    norm = chain.norm
    if norm is None:
        z = x.new_empty(y.shape if chain.keeps_z else 0)
        return y, z, x.new_empty(0), x.new_empty(0)
    stats_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = x.new_empty((x.shape[0], chain.groups(y.shape[1])), dtype=stats_dtype)
    mean = torch.empty_like(rstd) if chain.centred else rstd.new_empty(0)
    kept = y, x.new_empty(y.shape if chain.keeps_z else 0), mean, rstd
    if not chain.returns_sum:
        return kept
    return *kept, y.new_empty(y.shape, dtype=chain.sum_dtype(x.dtype, y.dtype))


def _fake_backward(dy: Tensor, *rest: Any) -> list[Tensor]:
    inputs, chain = Inputs(*rest[:6]), Chain.parse(rest[9])
    dtype = rest[12] or inputs.x.dtype
    check_call(*inputs[:6], chain, dtype)
    check_backward(dy, inputs, rest[6:9], chain, dtype, *rest[13:])
    tensors: Any = (*inputs[:5], *inputs.operands)
    wanted = [t for t, want in zip(tensors, rest[13], strict=True) if want]
    return [t.new_empty(t.shape) for t in wanted if t is not None]


for _name, _fake_function in (
    ("linear_norm", _fake),
    ("linear_norm_forward", _fake_forward),
    ("linear_norm_sum", _fake),
    ("linear_norm_sum_forward", _fake_forward),
    ("linear_norm_backward", _fake_backward),
):
    torch.library.register_fake(f"epinorm::{_name}", _fake_function, lib=library)
