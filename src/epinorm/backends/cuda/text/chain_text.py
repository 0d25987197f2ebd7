"""From a chain to the CUDA text that computes it, usable from any kernel.

``chain_text(chain)`` is self-contained and may be put before or into any kernel. It declares, for T
float or double:

    namespace chain {
    constexpr bool kCentred;            // false for RMSNorm: no mean
    template <T> T epsilon();           // the norm's eps
    constexpr int kOperands;            // tensor operands, in the chain's order, pre before post
    constexpr int kSlots;               // max(kOperands, 1): the length of the arrays below
    constexpr bool is_channel(int i);   // operand i is (N,); otherwise (M, N)
    T pre_apply(T x, const T (&t)[kSlots]);
    T post_apply(T x, const T (&t)[kSlots]);
    T pre_backward(T g, T x, const T (&t)[kSlots], T (&dt)[kSlots]);
    T post_backward(T g, T x, const T (&t)[kSlots], T (&dt)[kSlots]);
    }

x is what enters the operations: for ``pre`` the linear's output with its bias, for ``post`` the
norm's output with gamma and beta. t holds the operands' values at this element, all of them in each
array; each function reads and writes only its own. The backward functions take the gradient g of
what leaves, return that of x, and set dt[i] to the gradient of operand i at this element, which a
kernel adds up over rows for a channel operand. Index the arrays with constants (unrolled loops), so
that they stay in registers; what is not used costs nothing.

The text does not depend on the number of groups: chains that differ in that alone share it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from epinorm.backends.cuda.text.source import read_kernel
from epinorm.chain import Chain, RMSNorm
from epinorm.chain.pointwise import Pointwise, cpp_function

__all__ = ["chain_text"]


def chain_text(chain: Chain) -> str:
    """The chain as CUDA functions in the namespace ``chain``; see the top of this file."""
    kinds = chain.operand_kinds
    pre_operands = sum(1 for op in chain.pre if op.operand)
    lines = [
        read_kernel("common/chain.cuh") + "namespace chain {",
        f"constexpr bool kCentred = {_bool(not isinstance(chain.norm, RMSNorm))};",
        _epsilon(chain),
        f"constexpr int kOperands = {len(kinds)};",
        f"constexpr int kSlots = {max(len(kinds), 1)};",
        _is_channel(kinds),
        *_stage("pre", chain.pre, 0),
        *_stage("post", chain.post, pre_operands),
        "}  // namespace chain\n",
    ]
    return "\n".join(lines)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _epsilon(chain: Chain) -> str:
    eps = chain.norm.eps
    if eps is None:  # the machine epsilon of T, as PyTorch's rms_norm
        value = f"sizeof(T) == 8 ? T({sys.float_info.epsilon!r}) : T({2.0**-23!r})"
    else:
        value = f"T({eps!r})"
    return f"template <typename T> EPINORM_FUNCTION constexpr T epsilon() {{ return {value}; }}"


def _is_channel(kinds: Sequence[str]) -> str:
    mask = sum(1 << index for index, kind in enumerate(kinds) if kind == "channel")
    return (
        f"EPINORM_FUNCTION constexpr bool is_channel(int i) {{ return ({mask}ull >> i & 1) != 0; }}"
    )


def _stage(name: str, operations: Sequence[Pointwise], first: int) -> list[str]:
    """The functions of one side of the norm; ``first`` is the place of its first operand."""
    slots: list[int | None] = []
    for operation in operations:
        slots.append(first if operation.operand else None)
        first += operation.operand is not None
    lines = []
    for index, operation in enumerate(operations):
        lines.append(cpp_function(f"{name}{index}", operation, "forward"))
        lines.append(cpp_function(f"{name}{index}_backward", operation, "backward"))
        if operation.operand:
            body = f"{name}{index}_operand_backward"
            lines.append(cpp_function(body, operation, "operand_backward"))
    return [*lines, _apply(name, slots), _backward(name, slots)]


def _operand(slot: int | None) -> str:
    return "" if slot is None else f", t[{slot}]"


def _apply(name: str, slots: Sequence[int | None]) -> str:
    steps = "".join(f" x = {name}{i}<T>(x{_operand(slot)});" for i, slot in enumerate(slots))
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}_apply(T x, const T (&t)[kSlots]) "
        f"{{{steps} return x; }}"
    )


def _backward(name: str, slots: Sequence[int | None]) -> str:
    """Every operation's input again (only those that a derivative reads survive), then back."""
    steps = [
        f"const T x{i + 1} = {name}{i}<T>(x{i}{_operand(slot)});"
        for i, slot in enumerate(slots[:-1])
    ]
    for i, slot in reversed(list(enumerate(slots))):
        if slot is not None:
            steps.append(f"dt[{slot}] = {name}{i}_operand_backward<T>(g, x{i}{_operand(slot)});")
        steps.append(f"g = {name}{i}_backward<T>(g, x{i}{_operand(slot)});")
    body = "".join(f"\n  {step}" for step in steps)
    return (
        f"template <typename T> EPINORM_FUNCTION T {name}_backward"
        f"(T g, T x0, const T (&t)[kSlots], T (&dt)[kSlots]) {{{body}\n  return g;\n}}"
    )
