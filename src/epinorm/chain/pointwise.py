"""Every pointwise operation of a chain, each defined once.

A definition holds the operation's PyTorch meaning and two C++ function bodies that serve both the
CUDA and the CPU kernels: ``forward`` computes y from x, ``backward`` computes the gradient of x
from the gradient g of y. The bodies are written for a type ``T`` (float or double) and take NaN
and kinks the way PyTorch's own kernels do: comparisons are ordered so that a NaN falls through to
the branch that keeps it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "DEFINITIONS",
    "Definition",
    "OperandKind",
    "Pointwise",
    "PointwiseLike",
    "as_pointwise",
    "as_pointwise_list",
    "cpp_function",
    "format_number",
    "parse_pointwise",
]

OperandKind = Literal["channel", "element"]
"""What a tensor operand is: one value per output channel (N,), or one per output element (M, N)."""


@dataclass(frozen=True)
class Definition:
    """One kind of pointwise operation: its meaning in PyTorch and in C++.

    ``parameters`` maps each constant's name to its default (None: required). ``operand_backward``
    is the C++ body for the gradient of the tensor operand ``t``, before any sum over rows.
    """

    name: str
    apply: Callable[..., Tensor]
    forward: str
    backward: str
    parameters: Mapping[str, float | None] = field(default_factory=dict)
    operand: OperandKind | None = None
    operand_backward: str | None = None


def _clamp(x: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(x, low, high)


_SIGMOID = "const T s = T(1) / (T(1) + exp(-x)); "
_TANH_INNER = (
    "const T u = T(0.7978845608028654) * (x + T(0.044715) * x * x * x); const T h = tanh(u); "
)

_DEFINITIONS = (
    Definition("identity", lambda x: x, "return x;", "return g;"),
    Definition(
        "leaky_relu",
        F.leaky_relu,
        "return x > T(0) ? x : x * negative_slope;",
        "return x > T(0) ? g : g * negative_slope;",
        {"negative_slope": 0.01},
    ),
    Definition("relu", F.relu, "return x <= T(0) ? T(0) : x;", "return x <= T(0) ? T(0) : g;"),
    Definition(
        "relu6",
        F.relu6,
        "return x < T(0) ? T(0) : (x > T(6) ? T(6) : x);",
        "return x <= T(0) || x >= T(6) ? T(0) : g;",
    ),
    Definition(
        "elu",
        F.elu,
        "return x <= T(0) ? alpha * expm1(x) : x;",
        "return x <= T(0) ? g * alpha * exp(x) : g;",
        {"alpha": 1.0},
    ),
    Definition(
        "silu",
        F.silu,
        "return x / (T(1) + exp(-x));",
        _SIGMOID + "return g * s * (T(1) + x * (T(1) - s));",
    ),
    Definition(
        "gelu",
        F.gelu,
        "return T(0.5) * x * (T(1) + erf(x * T(0.7071067811865476)));",
        "const T cdf = T(0.5) * (T(1) + erf(x * T(0.7071067811865476))); "
        "const T pdf = T(0.3989422804014327) * exp(T(-0.5) * x * x); return g * (cdf + x * pdf);",
    ),
    Definition(
        "gelu_tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        _TANH_INNER + "return T(0.5) * x * (T(1) + h);",
        _TANH_INNER
        + "const T du = T(0.7978845608028654) * (T(1) + T(0.134145) * x * x); "
        + "return g * (T(0.5) * (T(1) + h) + T(0.5) * x * (T(1) - h * h) * du);",
    ),
    Definition(
        "mish",
        F.mish,
        "return x * tanh(log1p(exp(x)));",
        _SIGMOID + "const T h = tanh(log1p(exp(x))); return g * (h + x * s * (T(1) - h * h));",
    ),
    Definition(
        "tanh", torch.tanh, "return tanh(x);", "const T h = tanh(x); return g * (T(1) - h * h);"
    ),
    Definition(
        "sigmoid",
        torch.sigmoid,
        "return T(1) / (T(1) + exp(-x));",
        _SIGMOID + "return g * (T(1) - s) * s;",
    ),
    Definition(
        "hardtanh",
        F.hardtanh,
        "return x < low ? low : (x > high ? high : x);",
        "return x <= low || x >= high ? T(0) : g;",
        {"low": -1.0, "high": 1.0},
    ),
    # torch.clamp passes the gradient at the bounds themselves, hardtanh does not.
    Definition(
        "clamp",
        _clamp,
        "return x < low ? low : (x > high ? high : x);",
        "return x >= low && x <= high ? g : T(0);",
        {"low": -math.inf, "high": math.inf},
    ),
    Definition(
        "hardswish",
        F.hardswish,
        "const T u = x + T(3); const T r = u < T(0) ? T(0) : (u > T(6) ? T(6) : u); "
        "return x * r / T(6);",
        "return x <= T(-3) ? T(0) : (x < T(3) ? g * (x / T(3) + T(0.5)) : g);",
    ),
    Definition(
        "softplus",
        F.softplus,
        "return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;",
        "const T e = exp(x * beta); return x * beta > threshold ? g : g * e / (e + T(1));",
        {"beta": 1.0, "threshold": 20.0},
    ),
    Definition(
        "scale", lambda x, c: x * c, "return x * factor;", "return g * factor;", {"factor": None}
    ),
    Definition("add", lambda x, c: x + c, "return x + constant;", "return g;", {"constant": None}),
    Definition(
        "mul_channel",
        lambda x, t: x * t,
        "return x * t;",
        "return g * t;",
        operand="channel",
        operand_backward="return g * x;",
    ),
    Definition(
        "add_channel",
        lambda x, t: x + t,
        "return x + t;",
        "return g;",
        operand="channel",
        operand_backward="return g;",
    ),
    Definition(
        "add_residual",
        lambda x, t: x + t,
        "return x + t;",
        "return g;",
        operand="element",
        operand_backward="return g;",
    ),
)

DEFINITIONS: Mapping[str, Definition] = MappingProxyType({d.name: d for d in _DEFINITIONS})


@dataclass(frozen=True)
class Pointwise:
    """One pointwise operation with its constants, e.g. ``Pointwise("leaky_relu", (0.01,))``.

    Missing constants take their defaults. Raises ValueError for an unknown name (and names the
    nearest known one) and for a wrong number or value of constants.
    """

    name: str
    constants: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        definition = DEFINITIONS.get(self.name)
        if definition is None:
            raise ValueError(_unknown_operation(self.name))
        defaults = tuple(definition.parameters.values())
        given = tuple(float(c) for c in self.constants)
        if len(given) > len(defaults):
            raise ValueError(
                f"{self.name} takes at most {len(defaults)} constants, got {len(given)}"
            )
        filled = given + defaults[len(given) :]
        if any(value is None for value in filled):
            names = ", ".join(definition.parameters)
            raise ValueError(f"{self.name} needs a value for {names}, e.g. {self.name}(2)")
        if any(math.isnan(value) for value in filled if value is not None):
            raise ValueError(f"{self.name} takes finite or infinite constants, got nan")
        object.__setattr__(self, "constants", filled)

    @property
    def definition(self) -> Definition:
        return DEFINITIONS[self.name]

    @property
    def operand(self) -> OperandKind | None:
        """Which tensor the operation takes besides x; None for none."""
        return self.definition.operand

    def __call__(self, x: Tensor, operand: Tensor | None = None) -> Tensor:
        """Apply the operation's PyTorch meaning to x (..., N) of any floating dtype."""
        if self.operand is None:
            return self.definition.apply(x, *self.constants)
        return self.definition.apply(x, operand)

    def __str__(self) -> str:
        if not self.constants:
            return self.name
        return f"{self.name}({','.join(format_number(c) for c in self.constants)})"


PointwiseLike = Pointwise | str | nn.Module


def _unknown_operation(name: str) -> str:
    near = difflib.get_close_matches(name, DEFINITIONS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown pointwise operation {name!r}; {hint}known are {', '.join(DEFINITIONS)}"


def format_number(value: float) -> str:
    """The shortest text that reads back as the same float: 2.0 is ``2``, 0.01 is ``0.01``."""
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


def parse_number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"cannot read {text!r} in {where!r} as a number") from None


def parse_pointwise(text: str) -> Pointwise:
    """Read one operation such as ``leaky_relu(0.01)``; raises ValueError saying what is wrong."""
    name, arguments = split_call(text)
    return Pointwise(name, tuple(parse_number(a, text) for a in arguments))


# How each nn.Module spells the operation. Exact types only: a subclass may compute anything.
_MODULES: Mapping[type[nn.Module], Callable[[Any], Pointwise]] = {
    nn.Identity: lambda m: Pointwise("identity"),
    nn.LeakyReLU: lambda m: Pointwise("leaky_relu", (m.negative_slope,)),
    nn.ReLU: lambda m: Pointwise("relu"),
    nn.ReLU6: lambda m: Pointwise("relu6"),
    nn.ELU: lambda m: Pointwise("elu", (m.alpha,)),
    nn.SiLU: lambda m: Pointwise("silu"),
    nn.GELU: lambda m: Pointwise("gelu_tanh" if m.approximate == "tanh" else "gelu"),
    nn.Mish: lambda m: Pointwise("mish"),
    nn.Tanh: lambda m: Pointwise("tanh"),
    nn.Sigmoid: lambda m: Pointwise("sigmoid"),
    nn.Hardtanh: lambda m: Pointwise("hardtanh", (m.min_val, m.max_val)),
    nn.Hardswish: lambda m: Pointwise("hardswish"),
    nn.Softplus: lambda m: Pointwise("softplus", (m.beta, m.threshold)),
}


def as_pointwise(operation: PointwiseLike) -> Pointwise:
    """Turn an operation's text, activation module or Pointwise into a Pointwise.

    Raises ValueError for an unknown text and TypeError for a module that is not one of PyTorch's
    own activations.
    """
    if isinstance(operation, Pointwise):
        return operation
    if isinstance(operation, str):
        return parse_pointwise(operation)
    convert = _MODULES.get(type(operation))
    if convert is None:
        known = ", ".join(m.__name__ for m in _MODULES)
        raise TypeError(
            f"{type(operation).__name__} is not a pointwise operation; pass a text such as "
            f"'leaky_relu(0.01)' or one of the modules {known}"
        )
    return convert(operation)


def as_pointwise_list(
    operations: str | PointwiseLike | Iterable[PointwiseLike],
) -> tuple[Pointwise, ...]:
    """Turn ``"leaky_relu(0.01)|scale(2)"``, one operation, or several into a tuple of Pointwise."""
    if isinstance(operations, str):
        return tuple(parse_pointwise(part) for part in operations.split("|") if part.strip())
    if isinstance(operations, (Pointwise, nn.Module)) and not isinstance(
        operations, (nn.Sequential, nn.ModuleList)
    ):
        return (as_pointwise(operations),)
    return tuple(as_pointwise(operation) for operation in operations)


def _cpp_constant(value: float) -> str:
    if math.isinf(value):
        return f"T({'-' if value < 0 else ''}EPINORM_INFINITY)"
    return f"T({value!r})"


def cpp_function(
    name: str, operation: Pointwise, body: Literal["forward", "backward", "operand_backward"]
) -> str:
    """The operation as one C++ function template over T, for CUDA and for the host.

    ``forward`` is ``T name(T x)``, the other two are ``T name(T g, T x)``; an operation with a
    tensor operand takes its value as a last argument ``T t``. The text needs EPINORM_FUNCTION (the
    function's specifiers), EPINORM_INFINITY, and exp, expm1, log1p, tanh and erf overloaded on T.
    """
    definition = operation.definition
    text = getattr(definition, body)
    if text is None:
        raise ValueError(f"{operation.name} has no tensor operand, so no {body}")
    arguments: Sequence[str] = ("T x",) if body == "forward" else ("T g", "T x")
    if definition.operand is not None:
        arguments = (*arguments, "T t")
    constants = "".join(
        f"const T {key} = {_cpp_constant(value)}; "
        for key, value in zip(definition.parameters, operation.constants, strict=True)
        if key in text
    )
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}({', '.join(arguments)}) "
        f"{{ {constants}{text} }}"
    )
