"""The backward products of an exported file on Hopper: dX = dZ W and dW = dZ^T x on our own core.

For each dtype and precision, the library's own choice of tiles for the problem's sizes. fp32 goes
through planes as in the library: x and W are split, the norm kernel finds what dz's scales are made
from, dz is split for both products, and the range guard follows each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epinorm.backends.cuda.fp32.gradient_planes import gradient_source
from epinorm.backends.cuda.fp32.planes import split_source
from epinorm.backends.cuda.fp32.rescue import splits_of
from epinorm.backends.cuda.fp32.rescue_gradient import TILE as RESCUE_TILE
from epinorm.backends.cuda.fp32.rescue_gradient import rescue_gradient_source
from epinorm.backends.cuda.gemm.hopper.product import BOX, THREADS, add_splits_source
from epinorm.backends.cuda.gemm.hopper.text import ARCH, product_source
from epinorm.backends.cuda.plan.hopper import planes_of
from epinorm.backends.cuda.plan.hopper_product import ProductShape, choose
from epinorm.backends.cuda.plan.hopper_tile import product_shared_bytes
from epinorm.problem import Problem
from epinorm.tools.export.core import ROWS_MULTIPLE, Products
from epinorm.tools.export.text import ELEMENTS, SMS, entry, prelude_of

__all__ = ["products_of"]


@dataclass(frozen=True)
class _Product:
    """dX or dW: its numbers and preludes in the exported file, named after ``name``."""

    name: str
    shape: ProductShape
    dtype: torch.dtype
    scaled: bool
    major_k_a: bool

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.scaled else self.dtype

    def numbers(self) -> dict[str, int | str]:
        choice = choose(self.shape, SMS)
        tile, parts = choice.tile, choice.parts
        numbers: dict[str, int | str] = {
            "BOX": tile.block_m if self.major_k_a else BOX,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "PARTS": parts,
            "BYTES": product_shared_bytes(tile, self.shape.planes),
        }
        return {f"{self.name}_{name}": value for name, value in numbers.items()}

    def preludes(self) -> dict[str, str]:
        choice, shape = choose(self.shape, SMS), self.shape
        dtype = torch.float16 if self.scaled else self.dtype
        source = product_source(
            *(
                choice.tile,
                shape.planes,
                dtype,
                torch.float32 if choice.parts > 1 else self.out_dtype,
            ),
            *(self.scaled, self.major_k_a, False, choice.parts > 1),
        )
        found = {self.name: prelude_of(source, "gemm/hopper/hopper_product.cu")}
        if choice.parts > 1:
            add = add_splits_source(choice.parts, self.out_dtype)
            found[f"ADD_{self.name}"] = prelude_of(add, "gemm/add_splits.cu")
        if self.scaled:
            splits = splits_of(RESCUE_TILE, shape.rows, shape.columns, shape.length, SMS)
            rescue = rescue_gradient_source(not self.major_k_a, True, splits, ARCH)
            found[f"RESCUE_{self.name}"] = prelude_of(rescue, "fp32/rescue_gradient.cu")
        return found


def products_of(mode: str, problem: Problem) -> Products:
    """The products of a training problem that the Hopper kernel serves forward."""
    m, k, n = problem.m, problem.k, problem.n
    if n % ROWS_MULTIPLE or not m:
        reason = f"rows of {n} output features are not a multiple of {ROWS_MULTIPLE}"
        return Products("", left_out=reason)
    split = problem.dtype == torch.float32
    planes = (2 if problem.precision == "highest" else 1) if split else planes_of(problem)
    out_bytes = 4 if split else 2
    numbers: dict[str, int | str] = {
        "SPLIT": int(split),
        "PLANES": planes,
        "ELEMENT_TYPE": ELEMENTS[torch.float16 if split else problem.dtype],
        "ELEMENT_BYTES": 2,
        "BLOCK_K": BOX,
        "MULTIPLY_THREADS": THREADS,
    }
    preludes: dict[str, str] = {}
    if split:
        rows = -(-m // 16) * 16 + n
        numbers["RESCUE_BYTES"] = RESCUE_TILE.shared_bytes
        source = split_source(planes, k, True, ARCH, rows, SMS)
        preludes["SPLIT"] = prelude_of(source, "fp32/split.cu")
        preludes["GRADIENT"] = prelude_of(
            gradient_source(planes, True, True, ARCH), "fp32/split_gradient.cu"
        )
    for name, rows, length in (("DX", m, n), ("DW", n, m)):
        shape = ProductShape(rows, k, length, planes, out_bytes)
        product = _Product(name, shape, problem.dtype, split, name == "DX")
        numbers |= product.numbers()
        preludes |= product.preludes()
    return Products(entry(repr(("hopper", mode)), numbers, preludes))
