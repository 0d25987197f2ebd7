"""What ``torch.utils.flop_counter`` counts of the operators: their products, as PyTorch's own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"

Shape = Sequence[int]
_WANTED = 11
"""Of ``linear_norm_backward``'s arguments behind the weight (schema.py)."""


def register_formulas() -> None:
    """Once the operators are defined: when the counter, which loads Triton, is imported."""
    sys.meta_path.insert(0, _WhenImported())
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _register(counter)


class _WhenImported:
    """Finds the counter where others do, and registers our formulas behind its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register
        return spec


def _register(counter: ModuleType) -> None:
    register, ops = counter.register_flop_formula, torch.ops.epinorm
    computing_y = [
        *(ops.linear_norm, ops.linear_norm_forward, ops.linear_norm_spending_x),
        *(ops.linear_norm_sum, ops.linear_norm_sum_forward, ops.linear_norm_sum_spending_x),
    ]
    register(computing_y)(_forward)
    register(ops.linear_norm_backward)(_backward)
    register(ops.linear_norm_backward_begin)(_begin)
    register(ops.linear_norm_backward_end)(_end)
    register_spending_dy(counter)


def register_spending_dy(counter: ModuleType | None = None) -> None:
    """Those of ``schema.spending_dy``, if they are defined and the counter is there."""
    counter, ops = counter or sys.modules.get(_COUNTER), torch.ops.epinorm
    if counter is None or not hasattr(ops, "linear_norm_backward_begin_spending_dy"):
        return
    counter.register_flop_formula(ops.linear_norm_backward_spending_dy)(_backward)
    counter.register_flop_formula(ops.linear_norm_backward_begin_spending_dy)(_begin)


def _forward(x: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


def _backward(_dy: Shape, x: Shape, weight: Shape, *rest: Any, **__: Any) -> int:
    wanted = rest[_WANTED]
    return _forward(x, weight) * (wanted[0] + wanted[1])


def _begin(_dy: Shape, x: Shape, weight: Shape, *rest: Any, **__: Any) -> int:
    return _forward(x, weight) * int(rest[_WANTED][1])


def _end(_begun: Shape, weight: Shape, m: int, k: int, *_: Any, **__: Any) -> int:
    return 2 * m * k * weight[0]
