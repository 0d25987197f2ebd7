"""The launches of `hopper_fp32_weight.cu`: fp32 at `high` without a pass that makes a plane of W.

Three: x becomes a plane while the scales of W's rows are estimated, the product with the chain in
its epilogue, and the range guard (rescue.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.fp32.planes import ORDERED_MULTIPLE, VECTOR_BYTES, split_shape, splitter
from epinorm.backends.cuda.fp32.planes import THREADS as SPLIT_THREADS
from epinorm.backends.cuda.fp32.rescue import rescue_launch
from epinorm.backends.cuda.gemm.hopper.fp32_weight import (
    fp32_weight_source,
    split_and_sample_source,
)
from epinorm.backends.cuda.gemm.hopper.launch import Launch
from epinorm.backends.cuda.norm.text import matrix_arguments, parameters_at
from epinorm.backends.cuda.plan.hopper import instance_for, persistent_blocks
from epinorm.backends.cuda.plan.hopper_tile import STEP_BYTES, Tile
from epinorm.backends.cuda.plan.hopper_tile import fp32_weight_shared_bytes as shared_bytes
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.jit import load
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.problem import Forward, Inputs, Problem, StepForward

__all__ = ["Fp32Weight", "readable"]

SIGNATURE = "mm" + "ppppp" + "ppp" + "plpppp" + "iiii"
"""Maps of x and W; y, z, bias, gamma, beta; x's scale, mean, rstd; W and its row stride, scale,
flags, spoilt columns, plane; m, n, k, the plane's columns."""
PREPARING_SIGNATURE = "pl" + "ppppp" + "pl" + "ppp" + "iiii"
"""x and its row stride; plane, ordered plane, scale, flags, spoilt columns; W and its row stride,
scale, flags, spoilt columns; m, n, k, the plane's columns."""


def readable(w_at: int, w_stride: int) -> bool:
    """Can the copy engine read W's rows from this address, so many numbers apart?"""
    return not (w_at | w_stride * 4) % VECTOR_BYTES


class Fp32Weight(Launch):
    """One problem's launches; ``leaves``: x's and W's planes, for the backward pass."""

    def __init__(self, problem: Problem, tile: Tile, leaves: bool = False) -> None:
        super().__init__(problem)
        self.tile, self.leaves = tile, leaves
        m, n, k, device = problem.m, problem.n, problem.k, problem.device
        self.of_x, self.of_weight = splitter(1, k, m, 0, device), splitter(1, k, n, 0, device)
        self.ordered = -(-k // ORDERED_MULTIPLE) * ORDERED_MULTIPLE
        # Of the splitters' layouts all but the planes, where these are not left.
        self.missing = (0, 0) if leaves else (self.of_x.spoilt, self.of_weight.spoilt)
        nbytes_x = self.of_x.nbytes - self.missing[0]
        nbytes_weight = self.of_weight.nbytes - self.missing[1]
        self.new_x = new_tensor((nbytes_x,), torch.uint8, device)
        self.new_weight = new_tensor((nbytes_weight,), torch.uint8, device)
        self.new_ordered = new_tensor((m, self.ordered), torch.float16, device)
        self.kernels: dict[bool, tuple[Callable[..., None], Callable[..., None]]] = {}
        if m:
            self.launch = self._prepare()
            self._load(aligned=True)  # now: a CUDA graph may be captured when it is first needed

    @property
    def nbytes_left(self) -> int:
        """Bytes of the planes that are left for the backward pass."""
        return self.of_x.nbytes + self.of_weight.nbytes

    def leaving(self, inputs: Inputs) -> Forward:
        """As a call, of an instance that ``leaves``."""
        return self(inputs)

    def _prepare(self) -> Callable[..., None]:
        problem, tile = self.problem, self.tile
        dynamic = shared_bytes(tile)
        source = fp32_weight_source(instance_for(problem, tile), self.leaves)
        tiles = -(-problem.m // tile.block_m) * -(-problem.n // tile.block_n)
        return load(source, problem.device, dynamic).prepare(
            SIGNATURE + self.chain_signature,
            persistent_blocks(tiles, sm_count(problem.device)),
            tile.threads,
            shared_bytes=dynamic,
            dependent=True,
        )

    def _load(self, aligned: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Of the kernel before the product and the one behind; aligned: x is, as W must be."""
        problem, device = self.problem, self.problem.device
        shape = split_shape(problem.m, problem.k, sm_count(device))
        source = split_and_sample_source(problem.k, aligned, shape, self.leaves)
        blocks = -(-problem.m // shape.block_rows) + -(-problem.n // (SPLIT_THREADS // 32))
        kernel = load(source, device)
        convert = kernel.prepare(PREPARING_SIGNATURE, blocks, SPLIT_THREADS, dependent=True)
        found = convert, rescue_launch(problem, aligned, flags_late=True)
        self.kernels[aligned] = found
        return found

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        """As ``Launch.bind``, for a W that is ``readable``."""
        outputs, launch, maps, kernels = self.outputs(y_size), self.launch, self.maps, self.kernels
        new_x, new_ordered, new_weight = self.new_x, self.new_ordered, self.new_weight
        of_x, of_weight, sizes = self.of_x, self.of_weight, self.sizes
        missing_x, missing_weight = self.missing
        numbers = (*sizes, of_x.padded)
        leaves, chain_arguments = self.leaves, self.constants

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: tuple[Tensor, ...],
            constants: tuple[float, ...],
        ) -> Forward:
            out, numbers_of_chain = outputs(), chain_arguments(constants)
            of_rows, of_columns, ordered = new_x(), new_weight(), new_ordered()
            x_at, w_at, ordered_at = x.data_ptr(), w.data_ptr(), ordered.data_ptr()
            x_plane, w_plane = (
                of_rows.data_ptr() - missing_x,
                of_columns.data_ptr() - missing_weight,
            )
            scale, flags = x_plane + of_x.scale, x_plane + of_x.flags
            w_flags = w_plane + of_weight.flags
            of_w = w_plane + of_weight.scale, w_flags, w_plane + of_weight.spoilt
            matrices = x_at, x_stride, w_at, w_stride
            aligned = not (x_at | x_stride * 4) % VECTOR_BYTES
            convert, guard = kernels.get(aligned) or self._load(aligned)
            convert(
                x_at, x_stride, x_plane, ordered_at, scale, flags, x_plane + of_x.spoilt,
                w_at, w_stride, *of_w, *numbers,
            )  # fmt: skip
            key = ordered_at, w_at, w_stride
            found = maps.get(key) or self._new_maps(key, ordered, w)
            parameters = parameters_at(bias, gamma, beta)
            y, z, mean, rstd = targets = out.addresses
            dense = [operand.contiguous() for operand in operands] if operands else ()
            launch(
                *found, y, z, *parameters, scale, mean, rstd,
                w_at, w_stride, *of_w, w_plane, *numbers,
                *[operand.data_ptr() for operand in dense], *numbers_of_chain,
            )  # fmt: skip
            given = matrix_arguments(operands)[0] if operands else ()
            guard(
                *matrices, *parameters, flags, w_flags, *targets, *sizes, *given, *numbers_of_chain
            )
            if not leaves:
                return out
            more = StepForward._make(out)
            more.left = KeptPlanes(of_rows, of_columns)
            return more

        return run if self.problem.m else lambda *_: outputs()

    def _new_maps(self, key: tuple[int, ...], ordered: Tensor, w: Tensor) -> tuple[bytes, ...]:
        tile = self.tile
        of_w = w, tile.block_n, STEP_BYTES // 4
        return self.keep_maps(key, [(ordered, tile.block_m, tile.block_k), of_w])
