"""`hopper_fp32_weight.cu` and `hopper_fp32_input.cu`: fp32 without a pass that makes planes of W,
or at `high` of x. `plan/hopper.py` says when: where the other matrix has few rows.

Three launches: the other matrix becomes one plane or two while the scales of this one's rows are
estimated (in halves the product finds them), the product with the chain in its epilogue, and the
range guard (rescue.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.fp32.planes import (
    ORDERED_MULTIPLE,
    TOLERANCE,
    VECTOR_BYTES,
    SplitShape,
    split_prelude,
    split_shape,
    splitter,
)
from epinorm.backends.cuda.fp32.planes import THREADS as SPLIT_THREADS
from epinorm.backends.cuda.fp32.rescue import rescue_launch
from epinorm.backends.cuda.gemm.hopper.linear_norm import prepare_persistent
from epinorm.backends.cuda.gemm.hopper.text import ARCH, wgmma_a_in_halves_text, wgmma_a_text
from epinorm.backends.cuda.gemm.launch import (
    Bound,
    KeptOperands,
    Launch,
    chain_signature,
    dense,
)
from epinorm.backends.cuda.norm.text import matrix_arguments, parameters_at
from epinorm.backends.cuda.plan.hopper import instance_for
from epinorm.backends.cuda.plan.hopper_tile import (
    BLOCK_N,
    STEP_BYTES,
    Tile,
    fp32_shared_bytes,
    fp32_step_boxes,
    holds_operand,
    stages_of_fp32,
)
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import new_tensor
from epinorm.backends.cuda.runtime.tensor_map import tensor_map
from epinorm.backends.cuda.text.instance import Instance, epilogue_prelude, rows_aligned
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.problem import Forward, Inputs, Problem, StepForward

SIGNATURE = "mm" + "ppppp" + "ppp" + "plpppp" + "iiii"
"""Maps of the plane and of the converted matrix; y, z, bias, gamma, beta; the plane's scale, mean,
rstd; the converted matrix and its row stride, scale, flags, spoilt columns, plane; m, n, k, the
plane's columns."""
PREPARING_SIGNATURE = "pl" + "ppppp" + "pl" + "ppp" + "iiii"
"""The matrix that becomes a plane and its row stride; plane, ordered plane (or both, ordered, where
there are two), scale, flags, spoilt columns; the converted one and its row stride, scale, flags,
spoilt columns; the rows of either, k, the plane's columns."""


def readable(at: int, stride: int) -> bool:
    """Can the copy engine read fp32 rows from this address, so many numbers apart?"""
    return not (at | stride * 4) % VECTOR_BYTES


class Converting(Launch):
    """One problem's launches; ``leaves``: x's and W's planes, for the backward pass."""

    def __init__(self, problem: Problem, tile: Tile, leaves: bool = False) -> None:
        super().__init__(problem)
        self.tile, self.leaves = tile, leaves
        self.maps = KeptOperands(self._maps_of)
        m, n, k, device = problem.m, problem.n, problem.k, problem.device
        planes = problem.planes
        self.of_x = splitter(planes, k, m, 0, device)
        self.of_weight = splitter(planes, k, n, 0, device)
        self.ordered = -(-k // ORDERED_MULTIPLE) * ORDERED_MULTIPLE
        # Of the splitters' layouts all but the planes, where these are not left.
        self.missing = (0, 0) if leaves else (self.of_x.spoilt, self.of_weight.spoilt)
        nbytes_x = self.of_x.nbytes - self.missing[0]
        nbytes_weight = self.of_weight.nbytes - self.missing[1]
        self.new_x = new_tensor((nbytes_x,), torch.uint8, device)
        self.new_weight = new_tensor((nbytes_weight,), torch.uint8, device)
        # Rows of the matrix that becomes a plane, and of the one that is converted on the way.
        self.rows = (m, n) if tile.fp32_weight else (n, m)
        ordered = planes * self.rows[0], self.ordered
        self.new_ordered = new_tensor(ordered, torch.float16, device)
        # From the ordered hi to lo, where there are two.
        self.low = (planes - 1) * self.rows[0] * self.ordered * 2
        self.kernels: dict[bool, tuple[Callable[..., None], Callable[..., None]]] = {}
        if m:
            self.launch = self._prepare()
            self._load(aligned=True)  # now: a CUDA graph may be captured when it is first needed

    @property
    def nbytes_left(self) -> int:
        """Bytes of the planes that are left for the backward pass."""
        return self.of_x.nbytes + self.of_weight.nbytes

    def bind_leaving(self, *layout: Any) -> Bound:
        """As ``bind``, of an instance that ``leaves``."""
        return self.bind(*layout)

    def _prepare(self) -> Callable[..., None]:
        instance = instance_for(self.problem, self.tile)
        kinds = self.problem.chain.operand_kinds
        self.held = kinds.index("element") if holds_operand(instance) else None
        kernel = load(converting_source(instance, self.leaves), self.problem.device)
        signature = "m" * (self.held is not None) + SIGNATURE + chain_signature(self.problem)
        return prepare_persistent(kernel, instance, signature, fp32_shared_bytes(instance))

    def _load(self, aligned: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        """Of the kernel before the product and the one behind; aligned: the matrix that becomes a
        plane is, as the other must be."""
        problem, device = self.problem, self.problem.device
        of_plane, converted = self.rows
        shape = split_shape(of_plane, problem.k, sm_count(device))
        samples = not self.tile.in_halves
        source = split_and_sample_source(
            problem.planes, problem.k, aligned, shape, self.leaves, samples
        )
        per_block = SPLIT_THREADS // 32 if samples else SPLIT_THREADS
        blocks = -(-of_plane // shape.block_rows) + -(-converted // per_block)
        kernel = load(source, device)
        convert = kernel.prepare(PREPARING_SIGNATURE, blocks, SPLIT_THREADS, dependent=True)
        found = convert, rescue_launch(problem, aligned, flags_late=True)
        self.kernels[aligned] = found
        return found

    def bind(self, x_stride: int, w_stride: int, y_size: tuple[int, ...]) -> Bound:
        """A forward pass of this ``Layout``, for a converted matrix that is ``readable``."""
        outputs = self.outputs(y_size)
        if not self.problem.m:  # nothing was prepared
            return lambda *_: outputs()
        launch, maps, kernels = self.launch, self.maps, self.kernels
        new_x, new_ordered, new_weight = self.new_x, self.new_ordered, self.new_weight
        of_x, of_weight, sizes, rows = self.of_x, self.of_weight, self.sizes, self.rows
        missing_x, missing_weight = self.missing
        numbers = (*sizes, of_x.padded)
        leaves, chain_arguments, of_input = self.leaves, self.constants, self.tile.fp32_input
        low, held, size = self.low, self.held, (self.problem.m, self.problem.n)

        def run(inputs: Inputs) -> Forward:
            x, w, bias, gamma, beta, operands, constants = inputs
            out, numbers_of_chain = outputs(), chain_arguments(constants)
            of_rows, of_columns, ordered = new_x(), new_weight(), new_ordered()
            x_plane = of_rows.data_ptr() - missing_x
            w_plane = of_columns.data_ptr() - missing_weight
            first = (x, x_stride, x_plane, of_x)
            second = (w, w_stride, w_plane, of_weight)
            if of_input:
                first, second = second, first
            plain, plain_stride, plane, of_plain = first
            fp32, stride, own_plane, of_fp32 = second
            plain_at, fp32_at, ordered_at = plain.data_ptr(), fp32.data_ptr(), ordered.data_ptr()
            scale, flags = plane + of_plain.scale, plane + of_plain.flags
            own = own_plane + of_fp32.scale, own_plane + of_fp32.flags, own_plane + of_fp32.spoilt
            planes = (plane, own_plane) if leaves else (0, 0)
            aligned = not (plain_at | plain_stride * 4) % VECTOR_BYTES
            convert, guard = kernels.get(aligned) or self._load(aligned)
            hi, lo = (ordered_at, ordered_at + low) if low else (planes[0], ordered_at)
            convert(
                plain_at, plain_stride, hi, lo, scale, flags,
                plane + of_plain.spoilt, fp32_at, stride, *own, *rows, *numbers[2:],
            )  # fmt: skip
            key = ordered_at, fp32_at, stride
            found = maps(key, lambda: (ordered, fp32.view(-1, fp32.shape[-1])))
            parameters = parameters_at(bias, gamma, beta)
            y, z, mean, rstd = targets = out.addresses
            of_chain = dense(operands, held)
            if held is not None:
                element = of_chain[held].view(size)
                found = (tensor_map(element, BLOCK_N, STEP_BYTES // 4), *found)
            launch(
                *found, y, z, *parameters, scale, mean, rstd,
                fp32_at, stride, *own, planes[1], *numbers,
                *[operand.data_ptr() for operand in of_chain], *numbers_of_chain,
            )  # fmt: skip
            given = matrix_arguments(operands)[0] if operands else ()
            guard(
                x.data_ptr(), x_stride, w.data_ptr(), w_stride, *parameters,
                x_plane + of_x.flags, w_plane + of_weight.flags,
                x_plane + of_x.scale, w_plane + of_weight.scale,
                *targets, *sizes, *given, *numbers_of_chain,
            )  # fmt: skip
            if not leaves:
                return out
            more = StepForward._make(out)
            more.left = KeptPlanes(of_rows, of_columns)
            return more

        return run

    def _maps_of(self, operands: tuple[Tensor, ...]) -> tuple[bytes, ...]:
        """Of the ordered planes and of the converted matrix."""
        (ordered, fp32), tile = operands, self.tile
        rows = tile.block_m if tile.fp32_weight else tile.box_n
        columns = STEP_BYTES // 4
        of_step = columns * fp32_step_boxes(tile)
        of_plane = tensor_map(ordered, rows, of_step, swizzle=2 * of_step)
        return of_plane, tensor_map(fp32, BLOCK_N, columns)


def converting_source(instance: Instance[Tile], writes_plane: bool) -> KernelSource:
    """The kernel that reads W, or x, as fp32 and converts it on the way; compiles without a GPU.

    writes_plane: of what is converted, kept for the backward pass; not with two planes.
    """
    tile, name = instance.tile, "fp32_weight" if instance.tile.fp32_weight else "fp32_input"
    plane_rows = tile.block_m if tile.fp32_weight else tile.block_n
    planes = instance.problem.planes
    numbers: dict[str, int | bool | str] = {
        "kBlockN": BLOCK_N,
        "kBlockM": plane_rows,
        "kStagesW": stages_of_fp32(instance),
        "kStagesX": tile.stages,
        "kTileGroup": tile.group,
        "kClusterN": tile.cluster_n,
        "kStepBoxes": fp32_step_boxes(tile),
        "kWritesPlane": writes_plane,
        "kPlanes": planes,
        "kTolerance": TOLERANCE[planes],
    }
    more = {"kLendsRing": tile.fp32_weight}
    if tile.fp32_input:
        more["kAlignedRows"] = rows_aligned(instance.problem)
    product = wgmma_a_text(plane_rows)
    if tile.in_halves:
        product = wgmma_a_in_halves_text(plane_rows, 64 * fp32_step_boxes(tile))
    prelude = constants(numbers) + product + epilogue_prelude(instance)
    holds = holds_operand(instance)
    held = "const __grid_constant__ TensorMap element," if holds else ""
    prelude += "#define HOLDS_OPERAND\n" * holds + f"#define HELD_PARAMETER {held}\n"
    if planes == 2:
        prelude += wgmma_a_text(plane_rows, adds=False)
    text = kernel_text(f"gemm/hopper/hopper_{name}.cu", prelude + constants(more))
    return KernelSource(f"linear_norm_{name}", text, ARCH)


def split_and_sample_source(
    planes: int, columns: int, aligned: bool, shape: SplitShape, both: bool, samples: bool = True
) -> KernelSource:
    """The kernel that makes x's planes and estimates the scales of W's rows.

    aligned: each row of x starts on 16 bytes. both: x's, one, is written as it is, too. samples:
    else the scales are found by who multiplies, and W's rows are given flags alone.
    """
    prelude = split_prelude(planes, columns, aligned, shape, "both" if both else "ordered")
    prelude += constants({"kSamples": samples})
    return KernelSource("split_and_sample", kernel_text("fp32/split_and_sample.cu", prelude), ARCH)
