"""Many tensors cast at once, as PyTorch's library holds it: compiled graphs call ``casts``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epinorm.operator.schema import library

library.define(
    "casts(Tensor[] tensors, int[] counts, ScalarType dtype) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
casts = torch.ops.epinorm.casts.default
"""tensors, contiguous and of one dtype and device → results of ``dtype``: each is so many of them
as ``counts`` says, in their order, one behind another along the first dimension."""


def _empty(
    tensors: Sequence[Tensor], counts: Sequence[int], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The results, and the part of them that each tensor is cast into."""
    results: list[Tensor] = []
    parts: list[Tensor] = []
    first = 0
    for count in counts:
        given = tensors[first : first + count]
        if count == 1:
            results.append(torch.empty_like(given[0], dtype=dtype))
            parts.append(results[-1])
        else:
            rows = [t.shape[0] for t in given]
            results.append(given[0].new_empty((sum(rows), *given[0].shape[1:]), dtype=dtype))
            parts += results[-1].split(rows)
        first += count
    return results, parts


@torch.library.impl(library, "casts", "CompositeExplicitAutograd")
def _casts(tensors: list[Tensor], counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    results, parts = _empty(tensors, counts, dtype)
    torch._foreach_copy_(parts, tensors)
    return results


@torch.library.register_fake("epinorm::casts", lib=library)
def _fake(tensors: list[Tensor], counts: list[int], dtype: torch.dtype) -> list[Tensor]:
    return _empty(tensors, counts, dtype)[0]
