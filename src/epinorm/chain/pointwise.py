"""One pointwise operation with its constants: from a text, a module or a call, and to C++.

The operations themselves stand in activations.py, one definition each; all tables are made of them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epinorm.chain.activations import ACTIVATIONS, Definition, OperandKind

DEFINITIONS: dict[str, Definition] = {}
_MODULES: dict[type[nn.Module], list[Definition]] = {}
_FUNCTIONS: dict[Any, list[tuple[Definition, tuple[str, ...]]]] = {}


def define(definition: Definition) -> None:
    """Make an operation known: its text, its modules and functions, its kernels.

    Raises ValueError for a name or a spelling that another operation has.
    """
    if definition.name in DEFINITIONS:
        raise ValueError(f"{definition.name!r} is defined already")
    signatures = dict.fromkeys(definition.functions, tuple(definition.parameters))
    signatures |= definition.partial
    for others in (*map(_MODULES.get, definition.modules), *map(_FUNCTIONS.get, signatures)):
        for entry in others or ():
            other = entry if isinstance(entry, Definition) else entry[0]
            if other.where.keys() != definition.where.keys() or other.where == definition.where:
                raise ValueError(f"{definition.name!r} is spelled as {other.name!r} is")
    DEFINITIONS[definition.name] = definition
    for cls in definition.modules:
        _MODULES.setdefault(cls, []).append(definition)
    for target, names in signatures.items():
        _FUNCTIONS.setdefault(target, []).append((definition, names))


for _definition in ACTIVATIONS:
    define(_definition)


@dataclass(frozen=True)
class Argument:
    """Stands for a constant that differs between chains of the same kernels."""

    name: str


class Constants(tuple[float | Argument, ...]):
    """Numbers that are equal where their signs are too, as those of 0.0 and -0.0 are not."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other or (
            tuple.__eq__(self, other) is True and _signs(self) == _signs(other)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other


def _signs(values: Any) -> list[float]:
    return [0.0 if isinstance(c, Argument) else math.copysign(1.0, c) for c in values]


@dataclass(frozen=True)
class Pointwise:
    """One pointwise operation with its constants, e.g. ``Pointwise("leaky_relu", (0.01,))``.

    Missing constants take their defaults. Raises ValueError for an unknown name (and names the
    nearest known one) and for a wrong number or value of constants.
    """

    name: str
    constants: tuple[float | Argument, ...] = ()

    def __post_init__(self) -> None:
        definition = DEFINITIONS.get(self.name)
        if definition is None:
            raise ValueError(_unknown_operation(self.name))
        defaults = tuple(definition.parameters.values())
        given = tuple(c if isinstance(c, Argument) else float(c) for c in self.constants)
        if len(given) > len(defaults):
            raise ValueError(
                f"{self.name} takes at most {len(defaults)} constant"
                f"{'s' * (len(defaults) != 1)}, got {len(given)}"
            )
        filled = given + defaults[len(given) :]
        if any(value is None for value in filled):
            names = ", ".join(definition.parameters)
            raise ValueError(f"{self.name} needs a value for {names}, e.g. {self.name}(2)")
        if any(math.isnan(value) for value in filled if isinstance(value, float)):
            raise ValueError(f"{self.name} takes finite or infinite constants, got nan")
        if definition.check is not None and not any(isinstance(c, Argument) for c in filled):
            definition.check(*filled)
        object.__setattr__(self, "constants", Constants(c for c in filled if c is not None))

    @property
    def definition(self) -> Definition:
        return DEFINITIONS[self.name]

    @property
    def kinks(self) -> tuple[float, ...]:
        """The places where the derivative jumps."""
        return tuple(x for x in self.definition.kinks(*self.constants) if math.isfinite(x))

    @property
    def reads_input(self) -> bool:
        """Whether its gradient, or its operand's, depends on the x that went in."""
        bodies = (self.definition.backward, self.definition.operand_backward or "")
        return any(re.search(r"\bx\b", body) for body in bodies)

    @property
    def reads_operand(self) -> bool:
        """Whether the gradient of its x depends on the tensor that it takes besides."""
        return re.search(r"\bt\b", self.definition.backward) is not None

    @property
    def operand(self) -> OperandKind | None:
        """Which tensor the operation takes besides x; None for none."""
        return self.definition.operand

    @property
    def arguments(self) -> tuple[float | Argument, ...]:
        """The constants that kernels take as arguments."""
        return tuple(self.constants[i] for i in self._argument_places())

    @property
    def structure(self) -> Pointwise:
        """The operation with names in the place of these numbers."""
        names = tuple(self.definition.parameters)
        constants = list(self.constants)
        for i in self._argument_places():
            value = constants[i]
            if isinstance(value, float):
                is_power = self.name == "scale" and value > 0 and math.frexp(value)[0] == 0.5
                name = "power_of_two" if is_power else names[i]
                constants[i] = Argument(name + OF_16_BITS * self.keeps_16_bits)
        return Pointwise(self.name, tuple(constants))

    @property
    def keeps_16_bits(self) -> bool:
        """Whether it makes numbers of bf16 of such, and numbers of fp16 of such: rounding them once
        more changes nothing. Of a structure: whether that is so of all that share it."""
        return self.definition.selects and all(
            c.name.endswith(OF_16_BITS) if isinstance(c, Argument) else _has_16_bits(c)
            for c in self.constants
        )

    def filled(self, values: Iterator[float]) -> Pointwise:
        """A structure with the next values in the place of its names."""
        return Pointwise(
            self.name, tuple(next(values) if isinstance(c, Argument) else c for c in self.constants)
        )

    @property
    def complemented(self) -> tuple[bool, ...]:
        """Of ``arguments``: whether kernels get 1 - c in the place of c."""
        names = tuple(self.definition.parameters)
        return tuple(names[i] in self.definition.complemented for i in self._argument_places())

    def _argument_places(self) -> tuple[int, ...]:
        """Of ``constants``: all but those that shorten the operation."""
        shorter = self.definition.shorter_at
        pairs = zip(self.definition.parameters, self.constants, strict=True)
        return tuple(i for i, (name, c) in enumerate(pairs) if shorter.get(name, None) != c)

    def __call__(self, x: Tensor, operand: Tensor | None = None) -> Tensor:
        """Apply the operation's PyTorch meaning to x (..., N) of any floating dtype."""
        if self.operand is None:
            return self.definition.apply(x, *self.constants)
        return self.definition.apply(x, operand, *self.constants)

    def __str__(self) -> str:
        if not self.constants:
            return self.name
        return f"{self.name}({','.join(format_number(c) for c in self.constants)})"


OF_16_BITS = "_of_16_bits"
"""Behind an argument's name where bf16 and fp16 have its values."""


def _has_16_bits(value: float) -> bool:
    """Whether both bf16 and fp16 have the value."""
    mantissa, exponent = math.frexp(value)
    return math.isinf(value) or ((mantissa * 256).is_integer() and -13 <= exponent <= 16)


SCALE_BY_POWER_OF_TWO = Pointwise("scale", (2.0,)).structure

PointwiseLike = Pointwise | str | nn.Module | Callable[..., Tensor]


def _unknown_operation(name: str) -> str:
    near = difflib.get_close_matches(name, DEFINITIONS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown pointwise operation {name!r}; {hint}known are {', '.join(DEFINITIONS)}"


def format_number(value: float | Argument) -> str:
    """The shortest text that reads back as the same float: 2.0 is ``2``, 0.01 is ``0.01``."""
    if isinstance(value, Argument):
        return value.name
    if math.isfinite(value) and value == int(value) and abs(value) < 1e16:
        return str(int(value)) if value or math.copysign(1.0, value) > 0 else "-0.0"
    return repr(value)


def split_call(text: str) -> tuple[str, tuple[str, ...]]:
    """Split ``name(a,b)`` or ``name`` into the name and its argument texts."""
    text = text.strip()
    if "(" not in text:
        return text, ()
    name, _, rest = text.partition("(")
    if not rest.endswith(")"):
        raise ValueError(f"cannot read {text!r}: expected name(number, ...)")
    arguments = tuple(part.strip() for part in rest[:-1].split(",")) if rest[:-1].strip() else ()
    return name.strip(), arguments


def rounded_number(value: float, dtype: torch.dtype) -> float:
    """A number >= 0 as the dtype has it."""
    info = torch.finfo(dtype)
    ulp = max(2.0 ** (math.frexp(value)[1] - 1), info.smallest_normal) * info.eps
    return round(value / ulp) * ulp


def parse_number(text: str, where: str) -> float:
    """A number of a chain's text; raises ValueError that says where it stands."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"cannot read {text!r} in {where!r} as a number") from None


def parse_pointwise(text: str) -> Pointwise:
    """Read one operation such as ``leaky_relu(0.01)``; raises ValueError saying what is wrong."""
    name, arguments = split_call(text)
    return Pointwise(name, tuple(parse_number(a, text) for a in arguments))


def of_module(module: nn.Module) -> Pointwise | None:
    """The operation that a module computes, by its type and constants; None: none of ours."""
    for definition in _MODULES.get(type(module), ()):
        if all(getattr(module, name) == value for name, value in definition.where.items()):
            pairs = zip(definition.parameters, definition.modules[type(module)], strict=True)
            return _with_constants(definition, {key: getattr(module, name) for key, name in pairs})
    return None


def of_call(
    target: Any, arguments: Sequence[Any] = (None,), named: Mapping[str, Any] | None = None
) -> Pointwise | None:
    """The operation that a call applies to its first argument; None where it is none of ours.

    target: a function, an ATen operator or the name of a Tensor's method, in place or not;
    arguments and named: those of the call, as a node of torch.fx has them.
    """
    for definition, names in _FUNCTIONS.get(_out_of_place(target), ()):
        order = ("input", *names, *definition.where)
        if not all(isinstance(value, bool) for value in arguments[len(order) :]):
            continue  # what follows the constants is ``inplace`` alone
        given = dict(zip(order, arguments, strict=False)) | dict(named or {})
        where = {key: given.get(key, value) for key, value in definition.where.items()}
        if where != definition.where or given.keys() - {*order, "self", "inplace"}:
            continue
        return _with_constants(definition, given)
    return None


def _out_of_place(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        space, _, name = target._qualified_op_name.partition("::")
        plain = getattr(torch.ops, space)
        return getattr(plain, name[:-1], target) if name.endswith("_") else target
    if isinstance(target, str) and target.endswith("_") and not target.startswith("_"):
        return target[:-1]
    return target if isinstance(target, Hashable) else None


def _with_constants(definition: Definition, given: Mapping[str, Any]) -> Pointwise | None:
    """The operation with the constants that PyTorch was given; None where one is no number.

    An infinite default is that of a bound, for which PyTorch takes None too.
    """
    constants = []
    for name, default in definition.parameters.items():
        value = given.get(name, default)
        if value is None and default is not None and math.isinf(default):
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            return None
        constants.append(float(value))
    return Pointwise(definition.name, tuple(constants))


def as_pointwise(operation: PointwiseLike, drops: bool | None = None) -> Pointwise:
    """Turn an operation's text, module, PyTorch function or Pointwise into a Pointwise.

    drops: whether an nn.Dropout does; None: in training, as its own mode says.

    Raises ValueError for an unknown text and TypeError for anything that is not one of PyTorch's
    own activations.
    """
    if isinstance(operation, Pointwise):
        return operation
    if isinstance(operation, str):
        return parse_pointwise(operation)
    if type(operation) is nn.Dropout:
        training = operation.training if drops is None else drops
        return Pointwise("dropout", (operation.p,)) if training else Pointwise("identity")
    found = of_module(operation) if isinstance(operation, nn.Module) else of_call(operation)
    if found is None:
        name = getattr(operation, "__name__", type(operation).__name__)
        known = ", ".join(cls.__name__ for cls in _MODULES)
        raise TypeError(
            f"{name} is not a pointwise operation; pass a text such as 'leaky_relu(0.01)', a "
            f"function such as torch.relu, or an instance of one of the modules {known}"
        )
    return found


def as_pointwise_list(
    operations: str | PointwiseLike | Iterable[PointwiseLike], drops: bool | None = None
) -> tuple[Pointwise, ...]:
    """Turn ``"leaky_relu(0.01)|scale(2)"``, one operation, or several into a tuple of Pointwise.

    drops: see ``as_pointwise``.
    """
    if isinstance(operations, str):
        return tuple(parse_pointwise(part) for part in operations.split("|") if part.strip())
    if isinstance(operations, (nn.Sequential, nn.ModuleList)):
        return tuple(as_pointwise(operation, drops) for operation in operations)
    if isinstance(operations, nn.Module) or not isinstance(operations, Iterable):
        return (as_pointwise(operations, drops),)
    return tuple(as_pointwise(operation, drops) for operation in operations)


def complement(values: Sequence[float], complemented: Sequence[bool]) -> tuple[float, ...]:
    """``Chain.arguments`` as kernels get them: see ``Definition.complemented``."""
    pairs = zip(values, complemented, strict=True)
    return tuple(1.0 - value if of_one else value for value, of_one in pairs)


def cpp_function(
    name: str,
    operation: Pointwise,
    body: Literal["forward", "backward", "operand_backward", "result_backward"],
) -> str:
    """The operation as one C++ function template over T, for CUDA and for the host.

    ``forward`` is ``T name(T x)``, the others are ``T name(T g, T x)``; an operation with a
    tensor operand takes its value as one more argument ``T t``, and ``operation.arguments`` come
    last. The text needs EPINORM_FUNCTION (the function's specifiers); exp, expm1, log1p, tanh, erf,
    at_least and at_most (of x and a bound; NaN where x is) and quotient (of numbers from 1e-38 to
    1e37), overloaded on T.
    """
    definition = operation.definition
    text = getattr(definition, body)
    if text is None:
        raise ValueError(f"{operation.name} has no {body}")
    arguments: Sequence[str] = ("T x",) if body == "forward" else ("T g", "T x")
    if definition.operand is not None:
        arguments = (*arguments, "T t")
    names, places = tuple(definition.parameters), operation._argument_places()
    arguments = (*arguments, *(f"T {names[i]}" for i in places))
    constants = "".join(
        f"const T {key} = T({operation.constants[i]!r}); "
        for i, key in enumerate(names)
        if key in text and i not in places
    )
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}({', '.join(arguments)}) "
        f"{{ {constants}{text} }}"
    )
