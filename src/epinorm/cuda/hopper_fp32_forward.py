"""The launches of `hopper_fp32_weight.cu`: fp32 at `high` without a pass that makes a plane of W.

Four: the scales of W's rows are estimated (sample_rows.cu), x becomes a plane (split.cu), the product
with the chain in its epilogue, and the range guard (rescue.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from epinorm.cuda.device import sm_count
from epinorm.cuda.hopper import STEP_BYTES
from epinorm.cuda.hopper_fp32_weight import (
    BLOCK_K,
    BLOCK_N,
    THREADS,
    Fp32WeightTile,
    fp32_weight_source,
    instance_for,
    sample_source,
    shared_bytes,
)
from epinorm.cuda.hopper_launch import Launch, addresses
from epinorm.cuda.hopper_plan import persistent_blocks
from epinorm.cuda.jit import load
from epinorm.cuda.kept_planes import KeptPlanes
from epinorm.cuda.norm_text import matrix_arguments
from epinorm.cuda.planes import ORDERED_MULTIPLE, VECTOR_BYTES, splitter
from epinorm.cuda.prepared import new_tensor
from epinorm.cuda.rescue import rescue_launch
from epinorm.plan import Forward, Problem, StepForward

__all__ = ["Fp32Weight", "readable"]

SIGNATURE = "mm" + "ppppp" + "ppp" + "plppp" + "iiii"
"""Maps of x and W; y, z, bias, gamma, beta; x's scale, mean, rstd; W and its row stride, scale,
flags, plane; m, n, k, the plane's columns."""
SAMPLE_SIGNATURE = "pl" + "pp" + "ii"
SAMPLE_THREADS = 256


def readable(w_at: int, w_stride: int) -> bool:
    """Can the copy engine read W's rows from this address, so many numbers apart?"""
    return not (w_at | w_stride * 4) % VECTOR_BYTES


class Fp32Weight(Launch):
    """One problem's launches; where ``tile.writes_plane``, x's and W's planes are left for the
    backward pass."""

    def __init__(self, problem: Problem, tile: Fp32WeightTile) -> None:
        super().__init__(problem)
        self.tile = tile
        m, n, k, device = problem.m, problem.n, problem.k, problem.device
        order = "both" if tile.writes_plane else "ordered"
        self.split = splitter(1, k, m, 0, device, order)
        self.of_weight = splitter(1, k, n, 0, device)
        self.ordered = -(-k // ORDERED_MULTIPLE) * ORDERED_MULTIPLE
        self.new_buffer = new_tensor((self.split.nbytes,), torch.uint8, device)
        self.new_ordered = new_tensor((2 * m * self.ordered,), torch.uint8, device)
        # Of W's buffer all but the plane, where that is not written.
        self.missing = 0 if tile.writes_plane else self.of_weight.scale
        self.new_weight = new_tensor((self.of_weight.nbytes - self.missing,), torch.uint8, device)
        self.kernels: dict[bool, tuple[Callable[..., None], Callable[..., None]]] = {}
        if m:
            self.launch, self.sample = self._prepare()
            self._load(aligned=True)  # now: a CUDA graph may be captured when it is first needed

    @property
    def nbytes_left(self) -> int:
        """Bytes of the planes that are left for the backward pass."""
        return self.split.nbytes + self.of_weight.nbytes

    def _prepare(self) -> tuple[Callable[..., None], Callable[..., None]]:
        problem, tile = self.problem, self.tile
        device = problem.device
        instance = instance_for(problem, tile)
        dynamic = shared_bytes(tile)
        tiles = -(-problem.m // tile.block_m) * -(-problem.n // BLOCK_N)
        launch = load(fp32_weight_source(instance), device, dynamic).prepare(
            SIGNATURE + "p" * len(problem.chain.operand_kinds),
            persistent_blocks(tiles, sm_count(device)),
            THREADS,
            shared_bytes=dynamic,
            dependent=True,
        )
        blocks = -(-problem.n // (SAMPLE_THREADS // 32))
        kernel = load(sample_source(), device)
        return launch, kernel.prepare(SAMPLE_SIGNATURE, blocks, SAMPLE_THREADS, dependent=True)

    def _load(self, aligned: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Of the splitting kernel and of the range guard's; aligned: x is, as W must be."""
        guard = rescue_launch(self.problem, aligned, flags_late=True)
        found = self.kernels[aligned] = (self.split.launch(aligned), guard)
        return found

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Callable[..., Forward]:
        """As ``Launch.bind``, for a W that is ``readable``."""
        outputs, launch, sample, maps = self.outputs(y_size), self.launch, self.sample, self.maps
        new_buffer, new_ordered, new_weight = self.new_buffer, self.new_ordered, self.new_weight
        split, of_weight, kernels, sizes = self.split, self.of_weight, self.kernels, self.sizes
        leaves, missing = self.tile.writes_plane, self.missing
        _, n, k = sizes

        def run(
            x: Tensor,
            w: Tensor,
            bias: Tensor | None,
            gamma: Tensor | None,
            beta: Tensor | None,
            operands: tuple[Tensor, ...],
        ) -> Forward:
            out = outputs()
            buffer, weight = new_buffer(), new_weight()
            ordered = new_ordered() if leaves else buffer
            x_at, w_at, at, ordered_at = (t.data_ptr() for t in (x, w, buffer, ordered))
            plane = weight.data_ptr() - missing
            w_scale, w_flags = plane + of_weight.scale, plane + of_weight.flags
            scale, flags = at + split.scale, at + split.flags
            aligned = not (x_at | x_stride * 4) % VECTOR_BYTES
            convert, guard = kernels.get(aligned) or self._load(aligned)
            sample(w_at, w_stride, w_scale, w_flags, n, k)
            convert(x_at, x_stride, 0, 0, at, ordered_at, scale, flags, *split.numbers)
            key = ordered_at, w_at, w_stride
            found = maps.get(key) or self._new_maps(key, ordered, w)
            parameters = (
                0 if bias is None else bias.data_ptr(),
                0 if gamma is None else gamma.data_ptr(),
                0 if beta is None else beta.data_ptr(),
            )
            y, z, mean, rstd = targets = addresses(out)
            dense = [operand.contiguous() for operand in operands] if operands else ()
            launch(
                *found, y, z, *parameters, scale, mean, rstd,
                w_at, w_stride, w_scale, w_flags, plane, *sizes, of_weight.padded,
                *[operand.data_ptr() for operand in dense],
            )  # fmt: skip
            given = matrix_arguments(operands)[0] if operands else ()
            matrices = x_at, x_stride, w_at, w_stride
            guard(*matrices, *parameters, flags, w_flags, *targets, *sizes, *given)
            if not leaves:
                return out
            more = StepForward._make(out)
            more.left = KeptPlanes(buffer, weight)
            return more

        return run if self.problem.m else lambda *_: outputs()

    def _new_maps(self, key: tuple[int, ...], ordered: Tensor, w: Tensor) -> tuple[bytes, ...]:
        plane_bytes = 2 * self.problem.m * self.ordered
        plane = ordered[:plane_bytes].view(torch.float16).view(self.problem.m, self.ordered)
        columns = STEP_BYTES // 4
        return self.keep_maps(key, [(plane, self.tile.block_m, BLOCK_K), (w, BLOCK_N, columns)])
