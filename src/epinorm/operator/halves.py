"""A backward pass in two operators: when a compiled graph holds it so, and what stands between."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from epinorm.chain import Chain
from epinorm.operator.calls import Facts, as_dense
from epinorm.precision import product_precision
from epinorm.problem import Inputs, Later, Rest

DEVICES = ("cuda",)
LARGE = {"highest": 1 << 31, "high": 1 << 32}
"""Multiplications of a product: an H200 takes as long for the pass as the host for both halves,
some 55 us once they were recorded, as for one operator."""


def pays_in_two(dy: Tensor, tensors: Sequence[Any], wanted: Sequence[bool], facts: Facts) -> bool:
    """Whether a graph that is compiled is to hold the backward pass in two: large ones whose dX
    comes last, by planes (``backward_choice``), but where dz is dy or a gradient too, which dX's
    product cannot keep for itself. A graph holds dy and z to the end of an operator, so that they
    would be there beside dX."""
    x, weight = tensors[:2]
    if not isinstance(dy, FunctionalTensor) or torch.is_grad_enabled() or _may_be_cut():
        return False
    sizes = (*x.shape, weight.shape[0])
    if x.device.type not in DEVICES or x.dtype != torch.float32 or not all(wanted[:2]):
        return False
    if not all(isinstance(size, int) for size in sizes):
        return False
    m, k, n = sizes
    large = LARGE.get(product_precision(x.dtype, x.device.type, sizes), math.inf)
    return m > n and m * k * n >= large and not dz_is_given(Chain.parse(facts[0]), wanted)


def dz_is_given(chain: Chain, wanted: Sequence[bool]) -> bool:
    """Whether dz, the gradient of the linear's result, is dy or a gradient too."""
    first = Inputs._fields.index("operands")
    return chain.is_linear or (chain.begins_with_residual and wanted[first])


def _may_be_cut() -> bool:
    """Whether TorchInductor may cut the graph into CUDA graphs between the halves: these know no
    memory but that of their results."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config.triton.cudagraphs and config.graph_partition)


_REST, _DY = "epinorm_rest", "epinorm_dy"


def begun(found: list[Tensor], later: Later, dy: Tensor) -> list[Tensor]:
    """What begins the pass returns: all gradients but x's, and a tensor without values that knows
    how to go on, and where dy is if dz was written over it. later: what was left for it; else x's
    is the first of those found."""
    rest = later[0] if later else Rest([found.pop(0)], lambda carried, _: carried.pop())
    token = dy.new_empty(0)
    is_spent = any(t is dy for t in rest.carried)
    token.__dict__.update({_REST: rest, _DY: dy.data_ptr() if is_spent else None})
    return [*found, token]


def ended(token: Tensor, weight: Tensor, dz: Tensor | None = None) -> Tensor:
    """x's gradient; raises RuntimeError for any tensor but one that ``begun`` made, once, and for a
    dz that is not where dy was spent: what is there may be another's by now."""
    rest, spent = token.__dict__.pop(_REST, None), token.__dict__.pop(_DY, None)
    if rest is None:
        raise RuntimeError(
            "linear_norm_backward_end ends, once, what linear_norm_backward_begin began, but was "
            "given another tensor"
        )
    if dz is not None and spent not in (None, dz.data_ptr()):
        raise RuntimeError(
            "linear_norm_backward_end was given another dz than linear_norm_backward_begin has "
            "written: the graph holds a copy of dy; please report this"
        )
    return cast("Tensor", rest(as_dense(weight)))  # as the first half had it
