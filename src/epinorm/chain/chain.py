"""What is fused: Linear → pointwise* → Norm → pointwise*, as one frozen, hashable value.

The canonical text, e.g. ``group_norm(512,1e-05)|leaky_relu(0.01)|scale(2)``, names the chain in
results, caches and operator schemas, and parses back to the same chain. A chain may have no norm:
``gelu``, or ``identity`` where nothing follows the linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, get_args

import torch

from epinorm.chain.activations import OperandKind
from epinorm.chain.norms import NORM_NAMES, NORM_TYPES, BatchNorm, GroupNorm, Norm, parse_norm
from epinorm.chain.pointwise import (
    DEFINITIONS,
    Constants,
    Pointwise,
    PointwiseLike,
    as_pointwise_list,
    parse_pointwise,
    rounded_number,
    split_call,
)

AUTOCAST_TO_FP32 = ("softplus",)
_RETURNS_SUM = "returns(sum)"


Rounding = Literal["once", "eager"]
"""In 16 bit: y alone is rounded, or each layer's result, as PyTorch's own layers round."""


def check_rounding(rounding: Rounding) -> Rounding:
    """Return it; raises ValueError for what is none."""
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be 'once' or 'eager', got {rounding!r}")
    return rounding


@dataclass(frozen=True)
class Chain:
    """The operations after the linear layer: pointwise ``pre``, ``norm``, pointwise ``post``.

    Without a norm all operations are in ``pre``. ``returns_sum``: what enters the norm is a result
    too, the residual stream of a transformer. BatchNorm's statistics of the batch always are.
    """

    norm: Norm | None
    pre: tuple[Pointwise, ...] = ()
    post: tuple[Pointwise, ...] = ()
    rounding: Rounding = "once"
    returns_sum: bool = False

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        if self.returns_sum and self.norm is None:
            raise ValueError("return_sum gives what enters the norm, and this chain has no norm")
        if self.returns_sum and self.returns_statistics:
            raise ValueError("a chain with a BatchNorm returns the batch's statistics, and no sum")
        if self.norm is None:
            together = (op for op in (*self.pre, *self.post) if op.name != "identity")
            object.__setattr__(self, "pre", tuple(together))
            object.__setattr__(self, "post", ())

    @staticmethod
    def build(
        norm: Norm | None,
        pre: str | PointwiseLike | Iterable[PointwiseLike] = (),
        post: str | PointwiseLike | Iterable[PointwiseLike] = (),
        rounding: Rounding = "once",
        return_sum: bool = False,
        drops: bool | None = None,
    ) -> Chain:
        """Make a chain from operations given as texts, activation modules or Pointwise.

        drops: whether an nn.Dropout among them does; None: in training, as its own mode says.
        """
        if norm is not None and (not isinstance(norm, NORM_TYPES) or isinstance(norm, BatchNorm)):
            raise TypeError(
                "norm must be epinorm.GroupNorm, epinorm.LayerNorm, epinorm.RMSNorm or None, "
                f"got {type(norm).__name__}"
            )
        pre, post = as_pointwise_list(pre, drops), as_pointwise_list(post, drops)
        return Chain(norm, pre, post, rounding, bool(return_sum))

    @staticmethod
    def parse(text: str) -> Chain:
        """Read a canonical text back; raises ValueError saying what is wrong with it, TypeError for
        anything but a text."""
        if not isinstance(text, str):
            raise TypeError(f"a chain is read from a str, not {type(text).__name__}")
        # Dynamo traces through the cache, and warns of it each time.
        return _parse.__wrapped__(text) if torch.compiler.is_compiling() else _parse(text)

    def __str__(self) -> str:
        parts = [str(part) for part in (*self.pre, self.norm, *self.post) if part is not None]
        parts += [_RETURNS_SUM] * self.returns_sum
        return "|".join((parts or ["identity"]) + ["rounding(eager)"] * (self.rounding == "eager"))

    @property
    def arguments(self) -> Constants:
        """The constants that kernels take as arguments: those of pre, then those of post."""
        return Constants(c for operation in (*self.pre, *self.post) for c in operation.arguments)

    @property
    def complemented(self) -> tuple[bool, ...]:
        """Of ``arguments``: whether kernels get 1 - c in the place of c."""
        return tuple(c for operation in (*self.pre, *self.post) for c in operation.complemented)

    @property
    def without_dropout(self) -> Chain:
        """The chain of eval mode."""
        pre, post = (
            tuple(op for op in side if op.name != "dropout") for side in (self.pre, self.post)
        )
        return replace(self, pre=pre, post=post)

    @property
    def structure(self) -> Chain:
        """What chains of the same kernels share: names stand for the arguments' values."""
        pre, post = (tuple(op.structure for op in side) for side in (self.pre, self.post))
        return replace(self, pre=pre, post=post)

    def filled(self, arguments: Iterable[float]) -> Chain:
        """A structure with its arguments' values; a chain that has them stays as it is."""
        values = iter(arguments)
        pre, post = (tuple(op.filled(values) for op in side) for side in (self.pre, self.post))
        return replace(self, pre=pre, post=post)

    def rounded_for(self, dtype: torch.dtype, norm_dtype: torch.dtype, device_type: str) -> Chain:
        """The chain as it is computed from a linear layer of this dtype and by a norm of that one:
        32 bits and more are never rounded in between, and on a GPU GroupNorm of 16 bit rounds its
        eps."""
        norm = self.norm
        if dtype.itemsize != 2 or self.rounding == "once":
            return replace(self, rounding="once")
        if device_type == "cuda" and norm_dtype.itemsize == 2 and isinstance(norm, GroupNorm):
            return replace(self, norm=replace(norm, eps=rounded_number(norm.eps, norm_dtype)))
        return self

    @property
    def pre_results_in_norm_dtype(self) -> tuple[bool, ...]:
        """Of each pre operation: does autocast make its result of the norm's dtype already, as a
        parameter of that dtype does, or an operation that it computes in fp32? Else it is of the
        linear layer's."""
        widening = [
            op.operand in ("channel", "element", "row") or op.name in AUTOCAST_TO_FP32
            for op in self.pre
        ]
        return tuple(any(widening[: i + 1]) for i in range(len(widening)))

    @property
    def operand_kinds(self) -> tuple[OperandKind, ...]:
        """The tensor operands in the order in which the chain takes them, pre before post."""
        return tuple(op.operand for op in (*self.pre, *self.post) if op.operand is not None)

    @property
    def keep_places(self) -> tuple[int, ...]:
        """Of each operand: the place among ``arguments`` of dropout's probability; -1: no seed."""
        places, constants = [], 0
        for op in (*self.pre, *self.post):
            places += [constants if op.operand == "seed" else -1] * (op.operand is not None)
            constants += len(op.arguments)
        return tuple(places)

    @property
    def is_linear(self) -> bool:
        """Whether nothing follows the linear layer, whose output's gradient then is y's."""
        return self.norm is None and not self.pre

    @property
    def centred(self) -> bool:
        """Whether the norm takes the mean off, and keeps it for gradients."""
        return self.norm is not None and self.norm.centred

    @property
    def returns_statistics(self) -> bool:
        """Whether the batch's statistics are a result too: (2, N), of each channel over all rows
        its mean and its variance with M - 1 in the denominator, as running statistics take it."""
        return isinstance(self.norm, BatchNorm)

    @property
    def returns_more(self) -> bool:
        """Whether there is a second result beside y: the sum, or the batch's statistics."""
        return self.returns_sum or self.returns_statistics

    @property
    def has_groups(self) -> bool:
        """Whether its norm is over parts of a row, or a GroupNorm."""
        norm = self.norm
        return isinstance(norm, GroupNorm) or (norm is not None and norm.num_groups > 1)

    @property
    def saves_sum(self) -> bool:
        """Whether the sum, a result anyway, is kept for gradients instead of z."""
        return self.returns_sum and not any(op.reads_input for op in self.pre)

    @property
    def begins_with_residual(self) -> bool:
        """Whether the first operand is added to the linear's own result, so that its gradient is
        that result's."""
        return bool(self.pre) and self.pre[0].name == "add_residual"

    @property
    def residual_place(self) -> int:
        """The operand, by its place, that is added last to a sum that is kept, which stands in its
        place among what is kept; -1: none."""
        last = self.saves_sum and self.pre and self.pre[-1].name == "add_residual"
        return sum(op.operand is not None for op in self.pre) - 1 if last else -1

    @property
    def saves_y(self) -> bool:
        """Whether y is kept for gradients instead of z, as PyTorch keeps its last layer's."""
        if self.norm is not None or not self.pre:
            return False
        *before, last = self.pre
        from_result = last.definition.result_backward is not None
        return from_result and not any(op.reads_input for op in before)

    @property
    def reads_z(self) -> bool:
        """Whether a derivative in front of the norm depends on the linear's output."""
        return any(op.reads_input for op in self.pre)

    @property
    def keeps_z(self) -> bool:
        """Whether gradients need the linear's output: not where sums alone follow it."""
        if self.norm is not None:
            return not self.saves_sum
        return self.reads_z and not self.saves_y

    def sum_dtype(self, dtype: torch.dtype, norm_dtype: torch.dtype) -> torch.dtype:
        """What enters the norm has PyTorch's dtype, between those of the linear and the norm."""
        return norm_dtype if any(self.pre_results_in_norm_dtype) else dtype

    def sum_dtype_in_eager(
        self, dtype: torch.dtype, operands: Iterable[torch.dtype]
    ) -> torch.dtype:
        """What PyTorch's own operations, under autocast too, make of the linear layer's dtype and
        those of ``pre``'s operands, seeds left out."""
        remaining = iter(operands)
        for operation in self.pre:
            if operation.operand not in (None, "seed"):
                dtype = torch.promote_types(dtype, next(remaining))
            elif operation.name in AUTOCAST_TO_FP32:
                dtype = torch.promote_types(dtype, torch.float32)
        return dtype

    def groups(self, out_features: int) -> int:
        """Groups per row of ``out_features`` channels; raises ValueError if they do not divide.

        Without a norm, and with one over rows: parts of up to 8 channels, each computed by itself.
        """
        if self.norm is None or self.returns_statistics:
            return out_features // math.gcd(out_features, 8) if out_features else 0
        if out_features % self.norm.num_groups:
            raise ValueError(
                f"num_groups must divide the number of output features: got num_groups="
                f"{self.norm.num_groups} and {out_features} output features"
            )
        return self.norm.num_groups

    def statistics_shape(self, m: int, out_features: int) -> tuple[int, ...]:
        """The shape of mean and rstd as gradients need them."""
        return (out_features,) if self.returns_statistics else (m, self.groups(out_features))

    def channels_per_group(self, out_features: int) -> int:
        """Channels that share one mean and variance; raises ValueError as ``groups`` does."""
        return out_features // max(self.groups(out_features), 1)


def returns_more(text: str) -> bool:
    """``Chain.returns_more`` of a canonical text, without reading the rest of it."""
    return "|" + _RETURNS_SUM in text or BatchNorm.operator in text


@lru_cache(maxsize=1024)
def _parse(text: str) -> Chain:
    parts = [part for part in text.split("|") if part.strip()]
    rounding: Rounding = "once"
    if parts and split_call(parts[-1]) == ("rounding", ("eager",)):
        rounding = "eager"
        del parts[-1]
    returns_sum = bool(parts) and parts[-1].strip() == _RETURNS_SUM
    if returns_sum:
        del parts[-1]
    names = [split_call(part)[0] for part in parts]
    norms = [index for index, name in enumerate(names) if name in NORM_NAMES]
    if parts and all(name in DEFINITIONS for name in names):
        pre = tuple(parse_pointwise(part) for part in parts)
        return Chain(None, pre, (), rounding, returns_sum)
    if len(norms) != 1:
        near = [m for name in names for m in get_close_matches(name, NORM_NAMES, 1, cutoff=0.7)]
        hint = f"; did you mean {near[0]!r}?" if near and not norms else ""
        raise ValueError(
            f"a chain holds exactly one of {', '.join(NORM_NAMES)}, or operations alone; "
            f"{text!r} has {len(norms)}{hint}"
        )
    at = norms[0]
    return Chain(
        parse_norm(parts[at]),
        tuple(parse_pointwise(part) for part in parts[:at]),
        tuple(parse_pointwise(part) for part in parts[at + 1 :]),
        rounding,
        returns_sum,
    )
