"""A chain in a captured graph: its steps, what they make together, and whether the operator
computes the same in shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from epinorm.capture import distributed
from epinorm.capture.layouts import is_unseen, replayed
from epinorm.capture.norms import NormRead
from epinorm.capture.operands import lies_in_order
from epinorm.capture.purity import arguments, tensor_of, unwrapped, value_of
from epinorm.capture.spelling import Linear
from epinorm.chain import BatchNorm, Chain, GroupNorm, Rounding
from epinorm.chain.chain import AUTOCAST_TO_FP32
from epinorm.chain.pointwise import Pointwise
from epinorm.operator.undisturbed import is_distributed

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Step:
    """From one value of a chain to the next: ``nodes``, of which the last one is that value.

    "turn" puts parts of rows, or what leaves the norm, in another order, as views do. "move" does
    it with rows in front of the norm, which the Linear's x then comes in; "swap" where ``operand``
    is that x. scaled: what the value is multiplied by before the operation. broadcasts: the operand
    is expanded to the Linear's result.
    """

    kind: Literal["view", "turn", "move", "cast", "swap", "pointwise", "operand", "norm"]
    nodes: tuple[fx.Node, ...]
    operation: Pointwise | None = None
    operand: fx.Node | None = None
    norm: NormRead | None = None
    broadcasts: bool = False
    scaled: float | None = None

    @property
    def end(self) -> fx.Node:
        return self.nodes[-1]


@dataclass
class Found:
    """A chain that can be fused, by the nodes that it replaces and those that it reads.

    broadcast: the places of operands that are expanded to the Linear's result. moves: what x goes
    through before it is multiplied, as the Linear's result did.
    spelt: the node of each operation, pre before post, and ``norm_node`` that of the norm. kept:
    what enters the norm, where others read it too; ``kept_views`` of the views lead to it.
    """

    linear: Linear
    bias: fx.Node | None
    norm: NormRead
    pre: list[Pointwise] = field(default_factory=list)
    post: list[Pointwise] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    broadcast: list[int] = field(default_factory=list)
    moves: list[fx.Node] = field(default_factory=list)
    views: list[fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    spelt: list[fx.Node] = field(default_factory=list)
    rounding: Rounding = "once"
    norm_node: fx.Node | None = None
    kept: fx.Node | None = None
    kept_views: int = 0

    @property
    def chain(self) -> Chain:
        sides = tuple(self.pre), tuple(self.post)
        return Chain(self.norm.norm, *sides, self.rounding, self.kept is not None)

    @property
    def drops(self) -> bool:
        return "seed" in self.chain.operand_kinds

    @property
    def leading(self) -> Sequence[Any]:
        """The dimensions of x as it is multiplied, but for its last."""
        value = tensor_of(self.moves[-1] if self.moves else self.linear.x)
        return value.shape[:-1]

    @property
    def reads(self) -> list[fx.Node]:
        """Every tensor that the chain reads."""
        given = (self.linear.x, self.linear.weight, self.bias, self.norm.weight, self.norm.bias)
        return [*(node for node in given if node is not None), *self.operands]


@dataclass(frozen=True)
class Place:
    """Where a Linear's result reaches a norm: with ``found``, or the obstacle and the path.

    norm: None for a Linear with what follows it, and no norm, as a chain of its own. taken: whether
    our operation is to compute what was found.
    """

    linear: fx.Node
    norm: fx.Node | None
    path: tuple[fx.Node, ...]
    found: Found | None = None
    obstacle: str = ""
    ends: str = ""
    taken: bool = True

    @property
    def has_norm(self) -> bool:
        """Whether the chain's operation has a norm, which BatchNorm in eval mode is none of."""
        return self.found is not None and self.found.norm.norm is not None


def gather(linear: Linear, steps: Iterable[Step], rounding: Rounding, kept_at: int = -1) -> Found:
    """What steps make together; kept_at: how many lead to what others read too, -1 for nothing."""
    found = Found(linear, linear.bias, NormRead(None), nodes=[*linear.nodes], rounding=rounding)
    seen_norm = False
    for i, step in enumerate(steps):
        if i == kept_at:
            found.kept, found.kept_views = found.nodes[-1], len(found.views)
        found.nodes += step.nodes
        if step.scaled is not None:
            (found.post if seen_norm else found.pre).append(Pointwise("scale", (step.scaled,)))
            found.spelt.append(step.end)
        if step.norm is not None:
            found.norm, found.norm_node, seen_norm = step.norm, step.end, True
        elif step.kind in ("view", "turn"):
            found.views.append(step.end)
        elif step.kind == "swap" and step.operand is not None:
            found.linear, found.views = replace(found.linear, x=step.operand), []
        elif step.kind == "move":
            found.moves, found.views = [*found.moves, *found.views, step.end], []
        elif step.operation is not None and not _absorb(found, step, seen_norm):
            (found.post if seen_norm else found.pre).append(step.operation)
            found.broadcast += [len(found.operands)] if step.broadcasts else []
            found.operands += [] if step.operand is None else [step.operand]
            found.spelt.append(step.end)
    return found


def _absorb(found: Found, step: Step, seen_norm: bool) -> bool:
    """Take a multiplication or sum per channel for the weight or bias that is not there."""
    norm, operand = found.norm, step.operand
    if found.rounding == "eager" or value_of(operand) is None or step.operation is None:
        return False
    name = step.operation.name
    if not seen_norm and name == "add_channel" and found.bias is None and not found.pre:
        found.bias = operand
    elif not seen_norm or found.post:
        return False
    elif name == "mul_channel" and norm.weight is None and norm.bias is None:
        found.norm = replace(norm, weight=operand)
    elif name == "add_channel" and norm.bias is None:
        found.norm = replace(norm, bias=operand)
    else:
        return False
    return True


def unfit(found: Found, steps: Sequence[Step]) -> str | None:
    """Why the operator would not compute what these nodes compute, in shapes and dtypes."""
    values = [value for node in found.reads if (value := value_of(node)) is not None]
    if len(values) < len(found.reads):
        return "something other than a tensor takes part in it"
    for value in values:
        strided = value.layout is torch.strided and not value.is_nested
        subclass = is_traceable_wrapper_subclass(value) and not is_distributed((value,))
        if subclass or not strided:
            return f"a {type(value).__name__} of layout {value.layout} takes part in it"
    if (obstacle := distributed.unfit(found, values)) is not None:
        return obstacle
    linear, end = tensor_of(found.linear.nodes[-1]), tensor_of(found.nodes[-1])
    kinds = {step.kind for step in steps}
    is_moved = bool(kinds & {"swap", "move", "turn"})
    if (is_moved or _lies_otherwise(found)) and not _lies_unseen(found, linear):
        if not is_moved:
            return "its result lies in memory as what it is added to, not as rows, and is so seen"
        what, way_out = "rows are", ""
        if "turn" in kinds:
            what, way_out = "heads are", "; turned behind the norm they are served"
        return f"its {what} turned to another order, which its result shows in memory{way_out}"
    if found.linear.turned and linear.dtype.itemsize == 2:
        return (
            "its weight is kept as (in, out), as Conv1D does: in 16 bit turning it at each call "
            "costs what fusing saves; an nn.Linear with the transposed weight is served"
        )
    if linear.dtype not in _DTYPES:
        return f"a linear layer in {linear.dtype} is not served"
    reached = (*values, *map(value_of, found.nodes))
    if len({value.device for value in reached if value is not None}) > 1:
        return "its tensors are on several devices"
    return _unfit_dtypes(found, steps, values, linear, end)


def _lies_otherwise(found: Found) -> bool:
    """Whether a result lies in eager as no rows do: a sum has the layout of its first operand."""
    results = (found.nodes[-1], found.kept)
    values = (tensor_of(node) for node in results if node is not None)
    return any(not lies_in_order(unwrapped(value)) for value in values)


def _lies_unseen(found: Found, linear: Tensor) -> bool:
    """Whether nobody sees that the chain's results are views of rows, one behind another; within
    vmap nothing can be run to find that out."""
    if unwrapped(linear) is not linear:
        return False
    rows = linear.new_empty((*found.leading, linear.shape[-1]))
    counts = {found.nodes[-1]: len(found.views)}
    if found.kept is not None:
        counts = {found.kept: found.kept_views} | counts
    laid = {}
    for node, count in counts.items():
        made = replayed(found.views[:count], rows.to(tensor_of(node).dtype))
        if made is None:
            return False
        laid[node] = made
    return is_unseen(laid, found.nodes)


def _unfit_dtypes(
    found: Found, steps: Sequence[Step], values: list[Tensor], linear: Tensor, end: Tensor
) -> str | None:
    changes_dtype = any(
        tensor_of(step.end).dtype != tensor_of(arguments(step.end, "input")["input"]).dtype
        for step in steps
        if step.kind == "norm" and len(step.nodes) == 1
    )
    mixes = changes_dtype or {v.dtype for v in values[:2]} != {linear.dtype}  # autocast
    alike = values
    for what, of in zip(("input", "weight"), values, strict=False):
        if not of.is_floating_point():
            return f"the Linear's {what} is of {of.dtype}, which it does not multiply"
    if mixes and linear.device.type != "cuda":
        return f"under autocast PyTorch's layers mix dtypes on {linear.device.type}"
    if found.chain.returns_statistics:
        if (obstacle := _unfit_batch_norm(found, steps, mixes, linear.dtype)) is not None:
            return obstacle
        given = () if mixes else (found.bias, *found.operands)
        alike = [tensor_of(node) for node in given if node is not None]
    elif mixes:
        kept, operands = value_of(found.kept), (tensor_of(node).dtype for node in found.operands)
        if kept is not None and kept.dtype != found.chain.sum_dtype_in_eager(
            linear.dtype, operands
        ):
            return "autocast gives what enters the norm another dtype"
        return None if end.dtype == torch.float32 else "autocast gives it another dtype"
    if any(v.dtype != linear.dtype for v in alike):
        dtypes = sorted({str(v.dtype).removeprefix("torch.") for v in alike})
        return f"its tensors are of several dtypes: {', '.join(dtypes)}"
    kept = value_of(found.kept)
    if kept is not None and kept.dtype != linear.dtype:
        return f"what enters the norm is {kept.dtype}, the linear layer's result {linear.dtype}"
    if end.dtype != linear.dtype:
        return f"its result is {end.dtype}, the linear layer's is {linear.dtype}"
    wide = linear.dtype.itemsize
    for value in map(value_of, found.nodes):
        if (
            value is not None
            and value.dtype != linear.dtype
            and (value.dtype.itemsize <= wide or found.rounding == "eager")
        ):
            return f"it rounds to {value.dtype} on its way"
    norm = found.norm.norm
    of_matrix = isinstance(norm, (GroupNorm, BatchNorm)) and len(found.leading) != 1
    if of_matrix and is_distributed(values):
        return f"{type(norm).__name__} of DTensors after a reshape to rows is not served"
    return None


def _unfit_batch_norm(
    found: Found, steps: Sequence[Step], mixes: bool, dtype: torch.dtype
) -> str | None:
    """Which dtypes keep a BatchNorm from being fused: its parameters may be fp32 where all else has
    16 bits, under autocast too. mixes: autocast is on."""
    vectors = [tensor_of(n) for n in (found.norm.weight, found.norm.bias) if n is not None]
    parameters = {vector.dtype for vector in vectors} or {dtype}
    if len(parameters) > 1 or parameters - {dtype, torch.promote_types(dtype, torch.float32)}:
        names = ", ".join(sorted(str(each).removeprefix("torch.") for each in parameters))
        return f"its BatchNorm's parameters are {names}, and what it normalises is {dtype}"
    if found.operands and (mixes or parameters != {dtype}):
        return "under autocast, or next to fp32 parameters, a BatchNorm's chain has no operands"
    widens = any(op.name in AUTOCAST_TO_FP32 for op in (*found.pre, *found.post))
    if (mixes or widens) and any(tensor_of(step.end).dtype != dtype for step in steps):
        return "autocast gives it another dtype"
    return None
