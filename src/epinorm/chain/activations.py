"""Every pointwise operation of a chain, each defined once.

A definition holds the operation's PyTorch meaning, two C++ function bodies that serve both the
CUDA and the CPU kernels, and how users spell it. ``forward`` computes y from x, ``backward`` the
gradient of x from the gradient g of y. The bodies are written for a type ``T`` (float or double)
and take NaN and kinks the way PyTorch's own kernels do: comparisons are ordered so that a NaN falls
through to the branch that keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from operator import add, mul, sub
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from epinorm.chain.dropout import check_probability, drop

OperandKind = Literal["channel", "element", "row", "seed"]
"""What a tensor operand is: one value per output channel (N,), one per output element (M, N), or an
int64 (1,) of which kernels make a value per element (chain/dropout.py)."""


@dataclass(frozen=True)
class Definition:
    """One kind of pointwise operation; what has no default cannot be forgotten.

    parameters: each constant's name, which is also PyTorch's name of the argument, and its default
    (None: required).

    modules: the classes that compute it, each with the attributes that are its constants, in the
    parameters' order. Exact types: a subclass may compute anything.

    functions: what computes it as f(input, *constants): functions, ATen operators (one in place is
    found under its plain name), and names of Tensor's methods. ``partial``: those that take some of
    the constants only, with these. ``where``: further attributes and arguments, and the values that
    they have where this operation is meant.

    kinks: from the constants to the places where the derivative jumps. homogeneous: whether
    f(c x) = c f(x) for every c > 0. selects: whether it gives x or one of its bounds. shorter_at:
    values of constants at which the bodies become shorter, and which are compiled in; all other
    constants are arguments of the kernels.
    ``result_backward``: the body of ``backward`` with y where x stands, and ``result_gradient`` the
    same in PyTorch, f(g, y): where PyTorch's own layer keeps its result instead of its input.
    ``operand_backward`` is the C++ body for the gradient of the tensor operand ``t``, before any
    sum over rows; a seed has none. complemented: constants that kernels get as 1 - c, so that it is
    rounded there and not before. check: raises ValueError for constants that make no sense.
    """

    name: str
    apply: Callable[..., Tensor]
    forward: str
    backward: str
    parameters: Mapping[str, float | None] = field(default_factory=dict)
    _: KW_ONLY
    modules: Mapping[type[nn.Module], tuple[str, ...]]
    functions: tuple[Any, ...]
    kinks: Callable[..., tuple[float, ...]]
    homogeneous: bool
    selects: bool = False
    partial: Mapping[Any, tuple[str, ...]] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    shorter_at: Mapping[str, float] = field(default_factory=dict)
    operand: OperandKind | None = None
    operand_backward: str | None = None
    result_backward: str | None = None
    result_gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    complemented: tuple[str, ...] = ()
    check: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        for cls, attributes in self.modules.items():
            declared = set(getattr(cls, "__constants__", ())) - {"inplace"}
            missing = declared - {*attributes, *self.where}
            if missing or len(attributes) != len(self.parameters):
                raise ValueError(
                    f"{self.name} must name an attribute of {cls.__name__} for each of its "
                    f"parameters ({', '.join(self.parameters) or 'none'}), and all that PyTorch "
                    f"declares to be its constants ({', '.join(sorted(declared)) or 'none'}); "
                    f"got {attributes}"
                )


_OR_AT = "=" if TorchVersion(torch.__version__) < "2.14" else ""
"""torch.clamp passes the gradient at its bounds themselves before 2.14; hardtanh never does."""


def _smooth(*_: float) -> tuple[float, ...]:
    return ()


_aten = torch.ops.aten

CPP_FUNCTIONS = """\
// a / (1 + exp(-x)): a times x's sigmoid, rounded as PyTorch rounds it.
template <typename T>
EPINORM_FUNCTION T gated(T a, T x) {
  return a / (T(1) + exp(-x));
}

// The standard normal distribution and its density; and GELU's approximation of both.
template <typename T>
EPINORM_FUNCTION T normal_cdf(T x) {
  return T(0.5) * (T(1) + erf(x * T(0.7071067811865476)));
}
template <typename T>
EPINORM_FUNCTION T normal_pdf(T x) {
  return T(0.3989422804014327) * exp(T(-0.5) * x * x);
}
template <typename T>
EPINORM_FUNCTION T tanh_of_cubic(T x) {
  return tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x));
}
template <typename T>
EPINORM_FUNCTION T tanh_cdf(T x) {
  return T(0.5) * (T(1) + tanh_of_cubic(x));
}
template <typename T>
EPINORM_FUNCTION T tanh_pdf(T x) {
  const T h = tanh_of_cubic(x);
  return T(0.5) * (T(1) - h * h) * (T(0.7978845608028654) * (T(1) + T(0.134145) * (x * x)));
}
"""
"""What several bodies share, made of what ``pointwise.cpp_function`` names. Kernels may have
functions of these names of their own, where results are stored in 16 bit: chain_short.cuh."""

_SIGMOID = "const T s = gated(T(1), x); "
# tanh(log1p(exp(x))) by the definitions of both: no branch, so that values overlap. 1 above 20.
_MISH = (
    "const T e = exp(at_most(x, T(20))); const T n = e * (e + T(2)); "
    "const T h = quotient(n, n + T(2)); "
)
_ARITHMETIC: Any = {"modules": {}, "functions": (), "kinks": _smooth, "homogeneous": False}
"""What users write with operators, whose other side decides what is meant: capture/spelling.py."""
_SMOOTH: Any = {"kinks": _smooth, "homogeneous": False}
_RECTIFIER: Any = {"kinks": lambda *_: (0.0,), "homogeneous": True}


def _with_tensor(
    name: str,
    apply: Callable[..., Tensor],
    forward: str,
    backward: str,
    operand_backward: str,
    operand: OperandKind,
    homogeneous: bool = False,
) -> Definition:
    """An operation of two tensors; the bodies are expressions."""
    bodies = f"return {forward};", f"return {backward};"
    facts = _ARITHMETIC | {"homogeneous": homogeneous, "operand": operand}
    return Definition(name, apply, *bodies, operand_backward=f"return {operand_backward};", **facts)


ACTIVATIONS = (
    Definition(
        *("identity", lambda x: x, "return x;", "return g;"),
        modules={nn.Identity: ()},
        functions=(),
        kinks=_smooth,
        homogeneous=True,
        selects=True,
    ),
    Definition(
        "leaky_relu",
        F.leaky_relu,
        "return x > T(0) ? x : x * negative_slope;",
        "return x > T(0) ? g : g * negative_slope;",
        {"negative_slope": 0.01},
        modules={nn.LeakyReLU: ("negative_slope",)},
        functions=(F.leaky_relu, F.leaky_relu_, _aten.leaky_relu),
        **_RECTIFIER,
    ),
    Definition(
        *("relu", F.relu, "return x <= T(0) ? T(0) : x;", "return x <= T(0) ? T(0) : g;"),
        modules={nn.ReLU: ()},
        functions=(F.relu, torch.relu, torch.relu_, _aten.relu, "relu"),
        **_RECTIFIER,
        selects=True,
        result_backward="return x <= T(0) ? T(0) : g;",
        result_gradient=lambda g, y: _aten.threshold_backward(g, y, 0),
    ),
    # nn.ReLU6 is a Hardtanh, with bounds that can be changed.
    Definition(
        "relu6",
        F.relu6,
        "return x < T(0) ? T(0) : (x > T(6) ? T(6) : x);",
        "return x <= T(0) || x >= T(6) ? T(0) : g;",
        modules={},
        functions=(F.relu6, _aten.relu6),
        kinks=lambda: (0.0, 6.0),
        homogeneous=False,
        selects=True,
    ),
    Definition(
        "elu",
        F.elu,
        "return x <= T(0) ? alpha * expm1(x) : x;",
        "return x <= T(0) ? g * alpha * exp(x) : g;",
        {"alpha": 1.0},
        modules={nn.ELU: ("alpha",)},
        functions=(F.elu, F.elu_, _aten.elu),
        **_RECTIFIER | {"homogeneous": False},
    ),
    Definition(
        "silu",
        F.silu,
        "return gated(x, x);",
        _SIGMOID + "return g * s * (T(1) + x * (T(1) - s));",
        modules={nn.SiLU: ()},
        functions=(F.silu, _aten.silu),
        **_SMOOTH,
    ),
    Definition(  # CLIP's, in classes and functions of other libraries: read by what it computes
        "quick_gelu",
        lambda x: x * torch.sigmoid(1.702 * x),
        "return gated(x, T(1.702) * x);",
        "const T s = gated(T(1), T(1.702) * x); "
        "return g * s + T(1.702) * (g * x * (T(1) - s) * s);",
        modules={},
        functions=(),
        **_SMOOTH,
    ),
    Definition(
        "gelu",
        F.gelu,
        "return x * normal_cdf(x);",
        "return g * (normal_cdf(x) + x * normal_pdf(x));",
        modules={nn.GELU: ()},
        functions=(F.gelu, _aten.gelu),
        where={"approximate": "none"},
        **_SMOOTH,
    ),
    Definition(
        "gelu_tanh",
        lambda x: F.gelu(x, approximate="tanh"),
        "return x * tanh_cdf(x);",
        "return g * (tanh_cdf(x) + x * tanh_pdf(x));",
        modules={nn.GELU: ()},
        functions=(F.gelu, _aten.gelu),
        where={"approximate": "tanh"},
        **_SMOOTH,
    ),
    Definition(
        "mish",
        F.mish,
        _MISH + "return x * h;",
        # tanh once more, as a difference from 1: exactly that for large x, however quotients round.
        _MISH + "const T near = T(1) - quotient(T(2), n + T(2)); "
        "return g * (h + x * quotient(e, T(1) + e) * (T(1) - near * near));",
        modules={nn.Mish: ()},
        functions=(F.mish, _aten.mish),
        **_SMOOTH,
    ),
    Definition(
        *("tanh", torch.tanh, "return tanh(x);", "const T h = tanh(x); return g * (T(1) - h * h);"),
        modules={nn.Tanh: ()},
        functions=(F.tanh, torch.tanh, torch.tanh_, _aten.tanh, "tanh"),
        **_SMOOTH,
        result_backward="return g * (T(1) - x * x);",
        result_gradient=_aten.tanh_backward,
    ),
    Definition(
        "sigmoid",
        torch.sigmoid,
        "return gated(T(1), x);",
        _SIGMOID + "return g * (T(1) - s) * s;",
        modules={nn.Sigmoid: ()},
        functions=(F.sigmoid, torch.sigmoid, torch.sigmoid_, _aten.sigmoid, "sigmoid"),
        **_SMOOTH,
        result_backward="return g * (T(1) - x) * x;",
        result_gradient=_aten.sigmoid_backward,
    ),
    Definition(
        "hardtanh",
        F.hardtanh,
        "return at_most(at_least(x, min_val), max_val);",
        "return x <= min_val || x >= max_val ? T(0) : g;",
        {"min_val": -1.0, "max_val": 1.0},
        modules={nn.Hardtanh: ("min_val", "max_val"), nn.ReLU6: ("min_val", "max_val")},
        functions=(F.hardtanh, F.hardtanh_, _aten.hardtanh),
        kinks=lambda low, high: (low, high),
        homogeneous=False,
        selects=True,
    ),
    Definition(
        "clamp",
        torch.clamp,
        "return at_most(at_least(x, min), max);",
        f"return x >{_OR_AT} min && x <{_OR_AT} max ? g : T(0);",
        {"min": -math.inf, "max": math.inf},
        modules={},
        functions=(
            *(torch.clamp, torch.clamp_, torch.clip, torch.clip_),
            *(_aten.clamp, _aten.clip, "clamp", "clip"),
        ),
        partial={
            **dict.fromkeys((torch.clamp_min, _aten.clamp_min, "clamp_min"), ("min",)),
            **dict.fromkeys((torch.clamp_max, _aten.clamp_max, "clamp_max"), ("max",)),
        },
        kinks=lambda low, high: (low, high),
        homogeneous=False,
        selects=True,
    ),
    Definition(
        "hardswish",
        F.hardswish,
        "const T u = x + T(3); const T r = u < T(0) ? T(0) : (u > T(6) ? T(6) : u); "
        "return x * r / T(6);",
        "return x <= T(-3) ? T(0) : (x < T(3) ? g * (x / T(3) + T(0.5)) : g);",
        modules={nn.Hardswish: ()},
        functions=(F.hardswish, _aten.hardswish),
        kinks=lambda: (-3.0, 3.0),
        homogeneous=False,
    ),
    Definition(
        "softplus",
        F.softplus,
        "return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;",
        "const T e = exp(x * beta); return x * beta > threshold ? g : g * e / (e + T(1));",
        {"beta": 1.0, "threshold": 20.0},
        modules={nn.Softplus: ("beta", "threshold")},
        functions=(F.softplus, _aten.softplus),
        shorter_at={"beta": 1.0},
        kinks=lambda beta, threshold: (threshold / beta,) if beta else (),
        homogeneous=False,
    ),
    Definition(
        *("scale", mul, "return x * factor;", "return g * factor;", {"factor": None}),
        **_ARITHMETIC | {"homogeneous": True},
    ),
    Definition(
        *("add", add, "return x + constant;", "return g;", {"constant": None}), **_ARITHMETIC
    ),
    _with_tensor("mul_channel", mul, "x * t", "g * t", "g * x", "channel", homogeneous=True),
    _with_tensor("add_channel", add, "x + t", "g", "g", "channel"),
    _with_tensor("sub_channel", sub, "x - t", "g", "-g", "channel"),
    _with_tensor("add_residual", add, "x + t", "g", "g", "element"),
    _with_tensor("mul_element", mul, "x * t", "g * t", "g * x", "element", homogeneous=True),
    # One number for each row, which asks for no gradient: stochastic depth's.
    Definition(
        *("mul_row", mul, "return x * t;", "return g * t;"),
        **_ARITHMETIC | {"homogeneous": True, "operand": "row"},
    ),
    # t is 0 or 1 / (1 - p): a product as in PyTorch, which makes NaN of a dropped infinity.
    Definition(
        *("dropout", drop, "return x * t;", "return g * t;"),
        {"p": 0.5},
        modules={nn.Dropout: ("p",)},
        functions=(F.dropout,),
        where={"training": True},
        kinks=_smooth,
        homogeneous=True,
        operand="seed",
        complemented=("p",),
        check=check_probability,
    ),
)
