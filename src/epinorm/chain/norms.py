"""The norms of a chain, as frozen, hashable values with a canonical text each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, TypeVar, get_args

from epinorm.chain.pointwise import format_number, parse_number, split_call


def _number(eps: object) -> float:
    """eps as a float: also from a tensor of one element, as PyTorch takes it."""
    if eps is None or isinstance(eps, str):
        raise TypeError(f"eps must be a number >= 0, got {eps!r}")
    value = float(eps)  # type: ignore[arg-type]
    if not value >= 0:
        raise ValueError(f"eps must be a number >= 0, got {eps}")
    return value


class _Norm:
    """What norms have in common."""

    num_groups: int
    eps: float | None
    operator: ClassVar[str]
    centred: ClassVar[bool] = True

    def __post_init__(self) -> None:
        groups = self.num_groups
        if isinstance(groups, bool) or not isinstance(groups, int):
            raise TypeError(f"num_groups must be an int, got {type(groups).__name__}")
        if groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {groups}")
        if self.eps is not None or type(self).eps is not None:
            object.__setattr__(self, "eps", _number(self.eps))

    def __str__(self) -> str:
        """``name(eps)``, or ``name(groups,eps)``; eps left out where it is PyTorch's default."""
        eps = "" if self.eps is None else format_number(self.eps)
        in_groups = self.num_groups > 1 or isinstance(self, GroupNorm)
        given = f"{self.num_groups},{eps}" if in_groups else eps
        return f"{self.operator}({given})" if given else self.operator


C = TypeVar("C")


def _by_name(most: int, call: str) -> Callable[[type[C]], type[C]]:
    """Say what to write where a norm is made as in torch.nn, whose second argument is no eps."""

    def checked(cls: type[C]) -> type[C]:
        init = cls.__init__

        @wraps(init)
        def __init__(self: C, *arguments: Any, **named: Any) -> None:
            if len(arguments) > most:
                raise TypeError(
                    f"write epinorm.{call}: eps is keyword-only, and the number of channels is "
                    f"that of the linear layer's output; got {cls.__name__}{arguments}"
                )
            init(self, *arguments, **named)

        cls.__init__ = __init__  # type: ignore[assignment]
        return cls

    return checked


@_by_name(1, "GroupNorm(num_groups, eps=...)")
@dataclass(frozen=True)
class GroupNorm(_Norm):
    """Group normalisation over each sample's channels in num_groups groups (Wu and He, 2018)."""

    num_groups: int
    eps: float = field(default=1e-5, kw_only=True)
    operator: ClassVar[str] = "group_norm"


@_by_name(0, "LayerNorm(eps=...)")
@dataclass(frozen=True, kw_only=True)
class LayerNorm(_Norm):
    """Layer normalisation over the output features (Ba, Kiros and Hinton, 2016); num_groups: of as
    many equal parts of a row, each by itself, as the heads of q and k are normalised."""

    eps: float = 1e-5
    num_groups: int = 1
    operator: ClassVar[str] = "layer_norm"


@_by_name(0, "RMSNorm(eps=...)")
@dataclass(frozen=True, kw_only=True)
class RMSNorm(_Norm):
    """Root-mean-square normalisation over the output features (Zhang and Sennrich, 2019).

    ``eps=None`` is PyTorch's default: the machine epsilon of the type that it computes in.
    num_groups: see ``LayerNorm``.
    """

    eps: float | None = None
    num_groups: int = 1
    operator: ClassVar[str] = "rms_norm"
    centred: ClassVar[bool] = False


@_by_name(0, "BatchNorm(eps=...)")
@dataclass(frozen=True, kw_only=True)
class BatchNorm(_Norm):
    """Batch normalisation of (M, N) by the batch's own statistics: each channel over all rows
    (Ioffe and Szegedy, 2015). Running statistics are the caller's, who gets the batch's as a second
    result; capture alone makes such chains.
    """

    eps: float = 1e-5
    num_groups: int = field(default=1, init=False)
    operator: ClassVar[str] = "batch_norm"


Norm = GroupNorm | LayerNorm | RMSNorm | BatchNorm
NORM_TYPES = get_args(Norm)  # Dynamo of PyTorch 2.9 knows no union in isinstance
NORM_NAMES = ("group_norm", "layer_norm", "rms_norm", "batch_norm")


def parse_norm(text: str) -> Norm:
    """Read a norm's canonical text back; raises ValueError saying what is wrong with it."""
    name, arguments = split_call(text)
    grouped = name == "group_norm"
    if not grouped <= len(arguments) <= 2 - (name == BatchNorm.operator):
        expected = "num_groups, eps" if grouped else "eps"
        raise ValueError(f"cannot read {text!r}: expected {name}({expected})")
    named: dict[str, Any] = {}
    if grouped or len(arguments) == 2:
        groups = parse_number(arguments[0], text)
        if not groups.is_integer():
            raise ValueError(f"num_groups must be a whole number, got {arguments[0]}")
        named, arguments = {"num_groups": int(groups)}, arguments[1:]
    if arguments and (arguments[0] or name != "rms_norm"):
        named["eps"] = parse_number(arguments[0], text)
    return NORM_TYPES[NORM_NAMES.index(name)](**named)
