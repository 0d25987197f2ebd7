"""From a chain to the CUDA text that computes it, usable from any kernel.

``chain_text(chain)`` is self-contained and may be put before or into any kernel. It declares, for T
float or double:

    namespace chain {
    constexpr bool kCentred;            // false for RMSNorm: no mean
    constexpr bool kLayerNorm;
    T eagers_rstd<columns>(T rstd, T mean);  // NaN where PyTorch's layer_norm has NaN
    template <T> T epsilon();           // the norm's eps
    template <T> struct Constants { T of[]; };    // Chain.arguments, which differ from call to call
    constexpr int kOperands;            // tensor operands, in the chain's order, pre before post
    constexpr int kPreOperands;         // of which so many stand before the norm
    constexpr int kSlots;               // max(kOperands, 1): the length of the arrays below
    constexpr bool is_channel(int i);   // operand i is (N,)
    constexpr bool is_element(int i);   // operand i is (M, N)
    constexpr bool is_row(int i);       // operand i is (M, 1); otherwise a seed (chain/dropout.py)
    constexpr int keep_of(int i);       // of seed i: which of Constants is the probability to keep
    T pre_apply(Constants<T>, T x, const T (&t)[kSlots]);
    T post_apply(Constants<T>, T x, const T (&t)[kSlots]);
    T pre_backward(Constants<T>, T g, T x, const T (&t)[kSlots], T (&dt)[kSlots]);
    T post_backward(Constants<T>, T g, T x, const T (&t)[kSlots], T (&dt)[kSlots]);
    }

x is what enters the operations: for ``pre`` the linear's output with its bias, for ``post`` the
norm's output with gamma and beta. t holds the operands' values at this element, all of them in each
array, a seed's is what it makes of the element; each function reads and writes only its own. The
backward functions take the gradient g of
what leaves, return that of x, and set dt[i] to the gradient of operand i at this element, which a
kernel adds up over rows for a channel operand. Index the arrays with constants (unrolled loops), so
that they stay in registers; what is not used costs nothing.

Of a ``BackwardChain``, x may be a result, the sum or y: pre_apply gives x itself then; and
pre_backward adds the last operand, the sum's gradient, to g.

Under ``rounding="eager"`` what enters an operation or the norm is rounded first, to EPINORM_Z, the
linear layer's type, or to EPINORM_Y, the norm's: macros, with the names that vector.cuh has for
types. Where EPINORM_STATISTICS is one too, mean and rstd are rounded to it before they are applied.

What is rounded to 16 bits, or stored in nothing wider (``stored``, which an epilogue at ``high``
has too), takes functions that are made for that: chain_short.cuh.

The text does not depend on the number of groups or on the constants: chains that differ in those
alone share it. A kernel takes each constant as an argument of its own, which lies in constant
memory and is an instruction's operand from there; ``ChainArguments`` is the host's side of that.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.torch_version import TorchVersion

from epinorm.backends.cuda.runtime.device import stand_in
from epinorm.backends.cuda.text.backward_chain import BackwardChain
from epinorm.backends.cuda.text.source import read_kernel
from epinorm.backends.memo import memo
from epinorm.chain import Chain, GroupNorm, LayerNorm, activations, dropout
from epinorm.chain.pointwise import Pointwise, complement, cpp_function
from epinorm.problem import Problem

CUDA_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The names that the kernels have for dtypes: vector.cuh."""


def begins_at_result(chain: Chain) -> bool:
    """Whether what stands in z's place has come through ``pre``."""
    return isinstance(chain, BackwardChain) and chain.begins_at_result


def stored_type(problem: Problem) -> str | None:
    """The type of 16 bits that all results and gradients are stored in; None: not all are."""
    widest = max(problem.dtype, problem.norm_dtype, problem.out_dtype, key=lambda d: d.itemsize)
    return CUDA_TYPES[problem.out_dtype] if widest.itemsize == 2 else None


def chain_text(chain: Chain, stored: str | None = None) -> str:
    """The chain as CUDA functions in the namespace ``chain``; see the top of this file. stored: of
    ``stored_type``."""
    kinds = chain.operand_kinds
    pre_operands = sum(1 for op in chain.pre if op.operand)
    pre_constants = sum(len(op.arguments) for op in chain.pre)
    pre_types: Sequence[str | None] = [None] * (len(chain.pre) + 1)
    post_types: Sequence[str | None] = [None] * (len(chain.post) + 1)
    rounds = chain.rounding == "eager"
    if rounds:
        results = chain.pre_results_in_norm_dtype
        pre_types = ["EPINORM_Z", *("EPINORM_Y" if norm else "EPINORM_Z" for norm in results)]
        if chain.norm is None:
            pre_types[-1] = "EPINORM_Y"
        post_types = ["EPINORM_Y"] * (len(chain.post) + 1)
    lines = [
        read_kernel("common/chain.cuh") + "namespace chain {",
        f"constexpr bool kLayerNorm = {_bool(isinstance(chain.norm, LayerNorm))};",
        read_kernel("common/chain_functions.cuh") + activations.CPP_FUNCTIONS,
        read_kernel("common/chain_short.cuh") * (rounds or stored is not None),
        read_kernel("common/chain_rounded.cuh") * rounds + dropout.CPP_FUNCTIONS,
        f"constexpr bool kNormalises = {_bool(chain.norm is not None)};",
        f"constexpr bool kCentred = {_bool(chain.centred)};",
        f"constexpr bool kRounds = {_bool(rounds)};",
        _epsilon(chain),
        f"template <typename T> struct Constants {{ T of[{max(len(chain.arguments), 1)}]; }};",
        f"constexpr int kOperands = {len(kinds)};",
        f"constexpr int kPreOperands = {pre_operands};",
        f"constexpr int kSlots = {max(len(kinds), 1)};",
        _is_kind("channel", kinds),
        _is_kind("element", kinds),
        _is_kind("row", kinds),
        _keep_of(chain.keep_places),
        read_kernel("common/chain_drops.cuh"),
        *_stage("pre", chain.pre, 0, 0, pre_types, stored, chain.norm is None, *_of_sum(chain)),
        *_stage("post", chain.post, pre_operands, pre_constants, post_types, stored, True),
        "}  // namespace chain\n",
    ]
    return "\n".join(lines)


def _needed(
    operations: Sequence[Pointwise], types: Sequence[str | None], stored: bool
) -> list[str | None]:
    """The roundings of ``types`` but for those of what has the type already, or is stored as it."""
    has, needed = types[0], [types[0]]
    for operation, to in zip(operations, types[1:], strict=True):
        needed.append(None if operation.keeps_16_bits and to == has else to)
        has = to
    return [*needed[:-1], None] if stored else needed


def _of_sum(chain: Chain) -> tuple[bool, str]:
    """Whether x is a result already, and what is added to the gradient of the sum."""
    if not isinstance(chain, BackwardChain):
        return False, ""
    dsum = f"t[{len(chain.operand_kinds) - 1}]" if chain.adds_gradient else ""
    return chain.begins_at_result, dsum


_KEEPS_STATISTICS = TorchVersion(torch.__version__) >= "2.13"
"""Until then group_norm on a GPU rounded mean and rstd of 16 bit before it applied them."""


def statistics_text(chain: Chain, dtype: torch.dtype) -> str:
    """EPINORM_STATISTICS, where eager rounds the statistics of a norm of this dtype."""
    rounds = chain.rounding == "eager" and isinstance(chain.norm, GroupNorm)
    if not rounds or dtype.itemsize != 2:
        return ""
    line = f"#define EPINORM_STATISTICS {CUDA_TYPES[dtype]}\n"
    if stand_in() is not None:  # an exported file asks the PyTorch that it runs under
        return f"#if PYTORCH_ROUNDS_STATISTICS\n{line}#endif\n"
    return "" if _KEEPS_STATISTICS else line


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _epsilon(chain: Chain) -> str:
    eps = 0.0 if chain.norm is None else chain.norm.eps
    if eps is None:  # the machine epsilon of T, as PyTorch's rms_norm
        value = f"sizeof(T) == 8 ? T({sys.float_info.epsilon!r}) : T({2.0**-23!r})"
    else:
        value = f"T({eps!r})"
    return f"template <typename T> EPINORM_FUNCTION constexpr T epsilon() {{ return {value}; }}"


def _is_kind(name: str, kinds: Sequence[str]) -> str:
    mask = sum(1 << index for index, kind in enumerate(kinds) if kind == name)
    return (
        f"EPINORM_FUNCTION constexpr bool is_{name}(int i) {{ return ({mask}ull >> i & 1) != 0; }}"
    )


def _keep_of(places: Sequence[int]) -> str:
    found = "".join(f"i == {i} ? {place} : " for i, place in enumerate(places) if place >= 0)
    return f"EPINORM_FUNCTION constexpr int keep_of(int i) {{ return {found}0; }}"


def _stage(
    name: str,
    operations: Sequence[Pointwise],
    operands: int,
    constants: int,
    types: Sequence[str | None],
    stored_as: str | None,
    stored: bool,
    applied: bool = False,
    more_gradient: str = "",
) -> list[str]:
    """The functions of one side of the norm, whose first operand and first constant these are.
    types: what enters each operation, and what leaves the last, is rounded to; None: it is not.
    stored_as: the type that results are stored in, where it has 16 bits; stored: the last of these
    roundings is the store's. applied: x has come through them already;
    more_gradient: is added to g."""
    lines, more, slots = [], [], []
    for index, (operation, to) in enumerate(zip(operations, types[1:], strict=True)):
        given = ""
        from_result = applied and operation.reads_input  # the last one, of a chain that saves_y
        if operation.operand:
            given, operands = f", t[{operands}]", operands + 1
        for _ in operation.arguments:
            given, constants = f"{given}, c.of[{constants}]", constants + 1
        more.append(given)
        has_gradient = operation.definition.operand_backward is not None
        slots.append(operands - 1 if has_gradient else None)
        function = f"{name}{index}"
        short = to or stored_as
        lines.append(_for_type(cpp_function(function, operation, "forward"), short))
        body: Any = "result_backward" if from_result else "backward"
        lines.append(_for_type(cpp_function(f"{function}_backward", operation, body), short))
        if operation.definition.operand_backward is not None:
            of_operand = f"{name}{index}_operand_backward"
            lines.append(cpp_function(of_operand, operation, "operand_backward"))
    types = _needed(operations, types, stored)
    apply = _apply(name, (), (None,)) if applied else _apply(name, more, types)
    return [*lines, apply, _backward(name, more, slots, types, more_gradient, applied)]


_SHORT = re.compile(r"\b(exp|quotient|gated|(?:normal|tanh)_[cp]df)\(")


def _for_type(text: str, to: str | None) -> str:
    """Of a result that gets this type: by functions of chain_short.cuh, as its derivative."""
    return text if to is None else _SHORT.sub(rf"EPINORM_FOR(\1, {to})(", text)


def _rounded(value: str, to: str | None) -> str:
    return value if to is None else f"EPINORM_ROUNDED({to}, {value})"


def _apply(name: str, more: Sequence[str], types: Sequence[str | None]) -> str:
    """For one number, and for a pair of them. ``more``: what each operation takes besides x."""
    results = ["x", *(f"{name}{i}<T>(x{given})" for i, given in enumerate(more))]
    rounded = [_rounded(result, to) for result, to in zip(results, types, strict=True)]
    steps = "".join(f" x = {value};" for value in rounded if value != "x")
    pairs = []
    for result, to in zip(results, types, strict=True):
        if result != "x":
            one = result.replace("(x", "(x[i]").replace("t[", "t[i][")
            pairs.append(f"for (int i = 0; i < 2; ++i) x[i] = {one};")
        if to is not None:
            pairs.append(f"EPINORM_ROUND_PAIR({to}, x[0], x[1]);")
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}_apply"
        f"(Constants<T> c, T x, const T (&t)[kSlots]) {{{steps} return x; }}\n"
        f"template <typename T> EPINORM_FUNCTION void {name}_apply"
        f"(Constants<T> c, T (&x)[2], const T (&t)[2][kSlots]) {{ {' '.join(pairs)} }}"
    )


def _backward(
    name: str,
    more: Sequence[str],
    slots: Sequence[int | None],
    types: Sequence[str | None],
    more_gradient: str,
    applied: bool,
) -> str:
    """Every operation's input again (only those that a derivative reads survive), then back.
    slots: of each operation the operand that has a gradient; applied: x0 has come through them all,
    and a derivative reads none of the inputs."""
    steps = [f"g = g + {more_gradient};"] if more_gradient else []
    steps += [f"x0 = {_rounded('x0', types[0])};"] if types[0] and not applied else []
    for i, given in enumerate(() if applied else more[:-1]):
        value = _rounded(f"{name}{i}<T>(x{i}{given})", types[i + 1])
        steps.append(f"const T x{i + 1} = {value};")
    for i, slot in reversed(list(enumerate(slots))):
        x = "x0" if applied else f"x{i}"
        if slot is not None:
            steps.append(f"dt[{slot}] = {name}{i}_operand_backward<T>(g, {x}{more[i]});")
        steps.append(f"g = {name}{i}_backward<T>(g, {x}{more[i]});")
    body = "".join(f"\n  {step}" for step in steps)
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}_backward"
        f"(Constants<T> c, T g, T x0, const T (&t)[kSlots], T (&dt)[kSlots]) "
        f"{{{body}\n  return g;\n}}"
    )


class ChainArguments:
    """A chain's constants as a kernel's arguments: their parameters and their values.

    ``kind``: what the kernel computes in. Numbers are rounded to it as C++ rounds ``T(number)``.
    """

    def __init__(self, chain: Chain, dtype: torch.dtype) -> None:
        self._own, double = chain.arguments, dtype == torch.float64
        count, self._kind = len(self._own), "double" if double else "float"
        self.signature = "df"[not double] * count
        self.names = tuple(f"constant{i}" for i in range(count))
        self._complemented = chain.complemented if any(chain.complemented) else ()
        self._rounded = _as_they_are if double else _rounded_to_float

    @property
    def parameters(self) -> str:
        """Behind a kernel's other parameters."""
        return "".join(f", {self._kind} {name}" for name in self.names)

    def __call__(self, given: tuple[float, ...]) -> tuple[float, ...]:
        """The values of ``Inputs.constants``, or the chain's own where it has them."""
        values = given or cast("tuple[float, ...]", self._own)
        return self._rounded(values, self._complemented)


@memo()
def _rounded_to_float(
    values: tuple[float, ...], complemented: tuple[bool, ...]
) -> tuple[float, ...]:
    values = _as_they_are(values, complemented)
    return tuple([ctypes.c_float(value).value for value in values])  # too large: infinite


def _as_they_are(values: tuple[float, ...], complemented: tuple[bool, ...]) -> tuple[float, ...]:
    return complement(values, complemented) if complemented else values


def constant_list(names: Sequence[str]) -> str:
    """An initialiser of ``chain::Constants``."""
    return f"{{{{{', '.join(names)}}}}}"
