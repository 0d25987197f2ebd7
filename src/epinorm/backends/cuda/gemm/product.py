"""Products by planes on either core, nothing after them: dX and dW of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.hopper.product import add_splits, hopper_product
from epinorm.backends.cuda.gemm.launch import Operands
from epinorm.backends.cuda.gemm.portable.launch import portable_product
from epinorm.backends.cuda.plan.hopper_product import Choice, ProductShape
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.memo import memo


class Product:
    """c (rows, columns) = a · b of fp16 planes into fp32, ready to launch, with this tile of the
    one core or the other.

    a: (rows, length), or (length, rows) unless ``major_k_a``, its row i counts scale[i]; b:
    (length, columns).
    """

    def __init__(
        self,
        shape: ProductShape,
        choice: Choice | PortableTile,
        major_k_a: bool,
        device: torch.device,
    ) -> None:
        self.new = new_tensor((shape.rows, shape.columns), torch.float32, device)
        self.add: Callable[..., None] | None = None
        if isinstance(choice, PortableTile):
            self.kernel = portable_product(shape, choice, major_k_a, device)
            return
        self.kernel = hopper_product(shape, choice, major_k_a, device)
        if choice.parts > 1:
            self.count = count = shape.rows * shape.columns
            self.new_parts = new_tensor((choice.parts * count,), torch.float32, device)
            self.add = add_splits(choice.parts, count, device)

    def __call__(self, key: Any, operands: Callable[[], Operands], scale: int) -> Tensor:
        """Multiply; operands: a's planes hi and lo, then b's, asked for where ``key``, all that
        their place in memory depends on, is new."""
        launch, given, numbers = self.kernel
        first = given(key, operands)
        result = self.new()
        if self.add is None:
            launch(*first, result.data_ptr(), scale, *numbers)
            return result
        parts = self.new_parts()
        launch(*first, parts.data_ptr(), scale, *numbers)
        self.add(parts.data_ptr(), result.data_ptr(), self.count)
        return result


prepare_product = memo()(Product)
"""The product of this shape, made once."""
