"""Products of 16-bit matrices or planes on either core, nothing after them: dX and dW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.gemm.hopper.product import add_splits, hopper_product
from epinorm.backends.cuda.gemm.launch import Operands, ProductForm
from epinorm.backends.cuda.gemm.portable.launch import portable_product
from epinorm.backends.cuda.plan.hopper_product import Choice, ProductShape
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.memo import memo


class Product:
    """c (rows, columns) = a · b, ready to launch, with this tile of the one core or the other."""

    def __init__(
        self,
        shape: ProductShape,
        choice: Choice | PortableTile,
        form: ProductForm,
        device: torch.device,
    ) -> None:
        self.new = new_tensor((shape.rows, shape.columns), form.out_dtype, device)
        self.add: Callable[..., None] | None = None
        if isinstance(choice, PortableTile):
            self.kernel = portable_product(shape, choice, form, device)
            return
        self.kernel = hopper_product(shape, choice, form, device)
        if choice.parts > 1:
            self.count = count = shape.rows * shape.columns
            self.new_parts = new_tensor((choice.parts * count,), torch.float32, device)
            self.add = add_splits(choice.parts, count, form.out_dtype, device)

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
