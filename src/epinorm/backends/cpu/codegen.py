"""The C++ text of one chain's CPU kernel: its types, its norm and its operations.

The text is the same for any shape, number of groups, eps and constants, so these share one compiled
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

from epinorm.chain import activations, dropout
from epinorm.chain.pointwise import Pointwise, cpp_function
from epinorm.problem import Problem

CPP_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
"""The dtypes that the kernels know, by their names in lanes.h."""

_TEMPLATE = """\
#include "elementary.h"

#define EPINORM_FUNCTION EPINORM_INLINE

namespace epinorm {{
{shared}
}}  // namespace epinorm

#include "passes.h"

namespace epinorm {{

{functions}

struct Chain {{
  using T = {stats};
  using Z = {dtype};
  using P = {norm_dtype};
  using Y = {out_dtype};
  using S = {sum_dtype};
  using Saved = {saved_dtype};
  static constexpr bool kReturnsSum = {returns_sum};
  static constexpr bool kSavesSum = {saves_sum};
  static constexpr bool kCentred = {centred};
  static constexpr bool kPre = {has_pre};
  static constexpr int kOperands = {operands};
  static constexpr int kChannelOperands = {channel_operands};
  static constexpr bool kIsElement[] = {{{is_element}}};
  static constexpr bool kIsRow[] = {{{is_row}}};
  static constexpr int kKeepOf[] = {{{keep_of}}};  // of a seed: which constant is 1 - p; else -1

  struct Constants {{ T of[{constants}]; }};
  struct Values {{ {members} }};
  EPINORM_INLINE Values values(T* const* o, int64_t c, int l) {{ {load} }}
  EPINORM_INLINE void keep_pre(T* const* o, int64_t c, int l, const Values& d) {{ {keep_pre} }}
  EPINORM_INLINE void keep_post(T* const* o, int64_t c, int l, const Values& d) {{ {keep_post} }}

  EPINORM_INLINE T pre(const Constants& k, T x, const Values& v) {{
    {pre}
  }}
  EPINORM_INLINE T post(const Constants& k, T x, const Values& v) {{
    {post}
  }}
  EPINORM_INLINE T pre_backward(const Constants& k, T g, T x0, const Values& v, Values& d) {{
    {pre_backward}
  }}
  EPINORM_INLINE T post_backward(const Constants& k, T g, T x0, const Values& v, Values& d) {{
    {post_backward}
  }}
}};

}}  // namespace epinorm

EPINORM_EXPORT void epinorm_describe(int64_t n, int64_t groups, EpinormKernel* kernel) {{
  epinorm::describe<epinorm::Chain>(n, groups, kernel);
}}
"""


class _Operation(NamedTuple):
    """An operation of one side of the norm. name: that its functions begin with. given: what they
    take behind x. operand: the number of its tensor, where that has a gradient."""

    name: str
    pointwise: Pointwise
    given: str
    operand: int | None

    def functions(self) -> Iterator[str]:
        """Their texts."""
        for body in ("forward", "backward", "operand_backward"):
            if getattr(self.pointwise.definition, body) is not None:
                yield cpp_function(f"{self.name}_{body}", self.pointwise, body)


def _side(
    stage: str, operations: Sequence[Pointwise], operands: Iterator[int], constants: Iterator[int]
) -> list[_Operation]:
    """operands, constants: the numbers of those that are left."""
    side = []
    for i, operation in enumerate(operations):
        operand = None if operation.operand is None else next(operands)
        given = "" if operand is None else f", v.t{operand}"
        given += "".join(f", k.of[{next(constants)}]" for _ in operation.arguments)
        own = operand if operation.definition.operand_backward is not None else None
        side.append(_Operation(f"{stage}{i}", operation, given, own))
    return side


def _forward(side: Sequence[_Operation], rounded: Sequence[str]) -> str:
    """``rounded``: what rounds what enters each operation, and what leaves the last."""
    steps = [f"x = {rounded[0]}(x);"] if rounded[0] else []
    for op, rounding in zip(side, rounded[1:], strict=True):
        steps.append(f"x = {rounding}({op.name}_forward(x{op.given}));")
    return "\n    ".join([*steps, "return x;"])


def _backward(side: Sequence[_Operation], rounded: Sequence[str]) -> str:
    """Recompute what went into each operation, then walk back through them."""
    steps = [f"x0 = {rounded[0]}(x0);"] if rounded[0] else []
    for i, op in enumerate(side[:-1]):
        steps.append(f"const T x{i + 1} = {rounded[i + 1]}({op.name}_forward(x{i}{op.given}));")
    for i, op in reversed(list(enumerate(side))):
        if op.operand is not None:
            steps.append(f"d.t{op.operand} = {op.name}_operand_backward(g, x{i}{op.given});")
        steps.append(f"g = {op.name}_backward(g, x{i}{op.given});")
    return "\n    ".join([*steps, "return g;"])


def _roundings(problem: Problem) -> tuple[list[str], list[str]]:
    """For pre and for post, the functions of ``_forward``: z comes rounded, y is where it is
    stored."""
    chain = problem.chain
    if chain.rounding == "once":
        return [""] * (len(chain.pre) + 1), [""] * (len(chain.post) + 1)
    linear, norm = (f"rounded_{CPP_TYPES[dtype]}" for dtype in (problem.dtype, problem.out_dtype))
    results = [norm if wide else linear for wide in chain.pre_results_in_norm_dtype]
    return ["", *results], [*[norm] * len(chain.post), ""]


def _keep(side: Sequence[_Operation]) -> str:
    numbers = (op.operand for op in side)
    return " ".join(f"o[{t}][c * kLanes + l] = d.t{t};" for t in numbers if t is not None)


def _list(values: Iterable[Any], nothing: str) -> str:
    """The elements of a C++ array, which has one at least."""
    return ", ".join([str(value).lower() for value in values] or [nothing])


def kernel_source(problem: Problem) -> str:
    """The translation unit of the problem's chain and dtypes; raises KeyError for other dtypes."""
    chain = problem.chain
    kinds = chain.operand_kinds
    numbers = count(), count()
    pre, post = _side("pre", chain.pre, *numbers), _side("post", chain.post, *numbers)
    rounded_pre, rounded_post = _roundings(problem)
    loads = [
        f"o[{i}][{'c' if kind == 'channel' else 'c * kLanes + l'}]" for i, kind in enumerate(kinds)
    ]
    return _TEMPLATE.format(
        shared=activations.CPP_FUNCTIONS + dropout.CPP_FUNCTIONS,
        functions="\n".join(text for op in (*pre, *post) for text in op.functions()),
        stats=CPP_TYPES[problem.stats_dtype],
        dtype=CPP_TYPES[problem.dtype],
        norm_dtype=CPP_TYPES[problem.norm_dtype],
        out_dtype=CPP_TYPES[problem.out_dtype],
        sum_dtype=CPP_TYPES[problem.sum_dtype],
        saved_dtype=CPP_TYPES[problem.saved_dtype],
        returns_sum=str(chain.returns_sum).lower(),
        saves_sum=str(chain.saves_sum).lower(),
        centred=str(chain.centred).lower(),
        has_pre=str(bool(pre)).lower(),
        operands=len(kinds),
        channel_operands=kinds.count("channel"),
        is_element=_list((kind != "channel" for kind in kinds), "false"),
        is_row=_list((kind == "row" for kind in kinds), "false"),
        keep_of=_list(chain.keep_places, "-1"),
        constants=max(len(chain.arguments), 1),
        members=" ".join(f"T t{i};" for i in range(len(kinds))),
        load=f"return {{{', '.join(loads)}}};",
        keep_pre=_keep(pre),
        keep_post=_keep(post),
        pre=_forward(pre, rounded_pre),
        post=_forward(post, rounded_post),
        pre_backward=_backward(pre, rounded_pre),
        post_backward=_backward(post, rounded_post),
    )
