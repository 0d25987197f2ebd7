"""The C++ text of one chain's CPU kernel: its types, its norm and its operations.

The text is the same for any shape, number of groups, eps and constants, so these share one compiled
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epinorm.chain.dropout import CPP_FUNCTIONS
from epinorm.chain.pointwise import Pointwise, cpp_function
from epinorm.problem import Problem

CPP_TYPES = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bf16"}
"""The dtypes that the kernels know, by their names in lanes.h."""

_TEMPLATE = """\
#include "elementary.h"

#define EPINORM_FUNCTION EPINORM_INLINE

namespace epinorm {{
{random}
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


def _functions(stage: str, operations: Sequence[Pointwise]) -> list[str]:
    texts = []
    for index, operation in enumerate(operations):
        name = f"{stage}{index}"
        texts.append(cpp_function(f"{name}_forward", operation, "forward"))
        texts.append(cpp_function(f"{name}_backward", operation, "backward"))
        if operation.definition.operand_backward is not None:
            texts.append(cpp_function(f"{name}_operand", operation, "operand_backward"))
    return texts


def _operand_indices(operations: Sequence[Pointwise], first: int) -> list[int | None]:
    indices: list[int | None] = []
    for operation in operations:
        indices.append(None if operation.operand is None else first)
        first += operation.operand is not None
    return indices


def _with_gradients(
    operations: Sequence[Pointwise], indices: Sequence[int | None]
) -> list[int | None]:
    """The same for operands that have a gradient."""
    pairs = zip(operations, indices, strict=True)
    return [i if op.definition.operand_backward is not None else None for op, i in pairs]


def _given(
    operations: Sequence[Pointwise], indices: Sequence[int | None], constants: int
) -> list[str]:
    """What each operation takes besides x; constants: the place of the first one's first."""
    texts = []
    for operation, index in zip(operations, indices, strict=True):
        text = "" if index is None else f", v.t{index}"
        for _ in operation.arguments:
            text, constants = f"{text}, k.of[{constants}]", constants + 1
        texts.append(text)
    return texts


def _forward(stage: str, given: Sequence[str], rounded: Sequence[str]) -> str:
    """``rounded``: what rounds what enters each operation, and what leaves the last."""
    steps = [f"x = {rounded[0]}(x);"] if rounded[0] else []
    for i, more in enumerate(given):
        steps.append(f"x = {rounded[i + 1]}({stage}{i}_forward(x{more}));")
    return "\n    ".join([*steps, "return x;"])


def _backward(
    stage: str, given: Sequence[str], indices: Sequence[int | None], rounded: Sequence[str]
) -> str:
    """Recompute what went into each operation, then walk back through them."""
    last = len(indices) - 1
    steps = [f"x0 = {rounded[0]}(x0);"] if rounded[0] else []
    for i in range(max(last, 0)):
        steps.append(f"const T x{i + 1} = {rounded[i + 1]}({stage}{i}_forward(x{i}{given[i]}));")
    for i in range(last, -1, -1):
        if indices[i] is not None:
            steps.append(f"d.t{indices[i]} = {stage}{i}_operand(g, x{i}{given[i]});")
        steps.append(f"g = {stage}{i}_backward(g, x{i}{given[i]});")
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


def _keep(indices: Sequence[int | None]) -> str:
    return " ".join(f"o[{t}][c * kLanes + l] = d.t{t};" for t in indices if t is not None)


def kernel_source(problem: Problem) -> str:
    """The translation unit of the problem's chain and dtypes; raises KeyError for other dtypes."""
    chain = problem.chain
    kinds = chain.operand_kinds
    pre = _operand_indices(chain.pre, 0)
    post = _operand_indices(chain.post, sum(t is not None for t in pre))
    given_pre = _given(chain.pre, pre, 0)
    given_post = _given(chain.post, post, sum(len(op.arguments) for op in chain.pre))
    rounded_pre, rounded_post = _roundings(problem)
    loads = [
        f"o[{i}][{'c' if kind == 'channel' else 'c * kLanes + l'}]" for i, kind in enumerate(kinds)
    ]
    with_gradient = _with_gradients(chain.pre, pre), _with_gradients(chain.post, post)
    return _TEMPLATE.format(
        random=CPP_FUNCTIONS,
        functions="\n".join([*_functions("pre", chain.pre), *_functions("post", chain.post)]),
        stats=CPP_TYPES[problem.stats_dtype],
        dtype=CPP_TYPES[problem.dtype],
        norm_dtype=CPP_TYPES[problem.norm_dtype],
        out_dtype=CPP_TYPES[problem.out_dtype],
        sum_dtype=CPP_TYPES[problem.sum_dtype],
        returns_sum=str(chain.returns_sum).lower(),
        saves_sum=str(chain.saves_sum).lower(),
        centred=str(chain.centred).lower(),
        has_pre=str(bool(chain.pre)).lower(),
        operands=len(kinds),
        channel_operands=sum(kind == "channel" for kind in kinds),
        is_element=", ".join([str(kind != "channel").lower() for kind in kinds] or ["false"]),
        is_row=", ".join([str(kind == "row").lower() for kind in kinds] or ["false"]),
        keep_of=", ".join([str(place) for place in chain.keep_places] or ["-1"]),
        constants=max(len(chain.arguments), 1),
        members=" ".join(f"T t{i};" for i in range(len(kinds))),
        load=f"return {{{', '.join(loads)}}};",
        keep_pre=_keep(with_gradient[0]),
        keep_post=_keep(with_gradient[1]),
        pre=_forward("pre", given_pre, rounded_pre),
        post=_forward("post", given_post, rounded_post),
        pre_backward=_backward("pre", given_pre, with_gradient[0], rounded_pre),
        post_backward=_backward("post", given_post, with_gradient[1], rounded_post),
    )
