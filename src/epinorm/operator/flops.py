"""What ``torch.utils.flop_counter`` counts of the operators: their products, as PyTorch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = Sequence[int]
_WANTED = 11
"""Of ``linear_norm_backward``'s arguments behind the weight (schema.py)."""


def register_formulas() -> None:
    """Once the operators are defined."""
    ops = torch.ops.epinorm
    computing_y = [
        *(ops.linear_norm, ops.linear_norm_forward, ops.linear_norm_spending_x),
        *(ops.linear_norm_sum, ops.linear_norm_sum_forward, ops.linear_norm_sum_spending_x),
    ]
    register_flop_formula(computing_y)(_forward)
    register_flop_formula(ops.linear_norm_backward)(_backward)
    register_flop_formula(ops.linear_norm_backward_begin)(_begin)
    register_flop_formula(ops.linear_norm_backward_end)(_end)


def _forward(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


def _backward(_dy: Shape, x: Shape, weight: Shape, *rest: Any, **__: Any) -> int:
    wanted = rest[_WANTED]
    return _forward(x, weight) * (wanted[0] + wanted[1])


def _begin(_dy: Shape, x: Shape, weight: Shape, *rest: Any, **__: Any) -> int:
    return _forward(x, weight) * int(rest[_WANTED][1])


def _end(_begun: Shape, weight: Shape, m: int, k: int, **_: Any) -> int:
    return 2 * m * k * weight[0]
