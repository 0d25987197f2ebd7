"""What PyTorch's own ways to compute a problem take, estimated: its products, its layers, our norm.

Microseconds. Rates are an H200's, measured; those of GPUs before and after Hopper are documented
ones (portable.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.planes import sum_is_z
from epinorm.backends.cuda.runtime.device import HOPPER, Gpu, gpu_of
from epinorm.backends.cuda.text.backward_chain import backward_elements
from epinorm.chain import BatchNorm, GroupNorm
from epinorm.chain.pointwise import Pointwise
from epinorm.problem import Problem

FLOPS = {"native": 760e6, "high": 400e6, "highest": 51e6}
"""Of a library product whose tiles fill the GPU, a microsecond."""
DW_SHARE = {"native": 0.93, "high": 0.6, "highest": 0.98}
"""Of that in dW, whose operands both run across the summed index."""
TILES = {
    "native": (((128, 128), 1.0),),
    "high": (((128, 128), 1.0),),
    "highest": (((256, 128), 1.0), ((128, 128), 0.73), ((128, 64), 0.6), ((64, 64), 0.55)),
}
"""Tiles that the library was seen to choose from, with the share of the rate that each reaches."""
SPLIT_LENGTH, SPLIT_GAIN = 1024, 0.45
"""Longer sums of so few tiles that one round has them all are split; what that brings, as a power
of the length."""
SHORTEST_PART, PARTS_GAIN = 512, 0.55
"""Sums of a few tiles are split further, into as many parts as idle multiprocessors and the sum's
length allow; the same of their number. Fitted to forward products: dW's are not split so."""
TF32 = {
    "y": (407e6, 3.5e6, 0.94, 2.0),
    "dX": (400e6, 5.0e6, 1.8, 1.0),
    "dW": (278e6, 5.0e6, 1.8, 1.0),
}
TF32_FEWEST_ROWS, TF32_LAUNCH, TF32_PART, MOST_PARTS = 256, 6.0, 84, 8
"""Products in TF32 of so many rows of x and more: what they multiply and what they move in a
microsecond; passes over the results of a sum's parts; and the power that joins both times, 1 where
they add up, more where they hide each other. The shortest part of a sum that is split so that tiles
fill the GPU, and how many where they do. Half of 3,888 random shapes take 0.93 to 1.1 times as
long, nine of ten 0.79 to 1.3 (decision 10)."""
LONG_SUM, LONG_BIAS = 16384, 4.5
"""Rows from which on the bias' gradient in TF32 takes so many passes over dz."""
FEW_ROWS, FEW_ROWS_COLUMNS, FEW_ROWS_PART = 16, 64, 256
FEW_ROWS_TERM, FEW_ROWS_TERM_ROW = 11e-3, 0.9e-3
"""So few rows of fp32 have kernels of their own: columns of a tile, the shortest part, and what a
term takes before it is split, with each row."""
HALF_A_TILE = 64
"""Up to so many rows of fp32 long sums of tiles for most multiprocessors gain nothing: 32 and 64
rows of 8192 terms and columns take 260 and 350 us."""
BYTES = 3.6e6
"""That a kernel which only moves memory moves a microsecond."""
TURNED = 0.3
"""Of that rate, what PyTorch's copies of rows as columns reach: 268 MB in 235 us, 34 in 40."""
LAUNCH = 2.5
"""What a kernel takes beside its work, back to back with others."""
PRODUCT_LAUNCH = 4.0
# What PyTorch's norms take for each group beside their bytes: a block works on one, however small.
GROUP, GROUP_BACKWARD = 0.55e-3, 1.0e-3
ROW, ROW_BACKWARD = 1.0e-3, 3.4e-3
GROUP_NORM_PASSES = 6
BATCH_NORM_PASSES, BATCH_NORM_PASSES_BACKWARD = 3, 5

# What the host takes, on the machine of that H200: a product called, a layer, and their backward.
HOST_LINEAR, HOST_LAYER = 21.0, 13.0
HOST_LINEAR_BACKWARD, HOST_LAYER_BACKWARD, HOST_NORM_BACKWARD = 110.0, 35.0, 70.0


def _bytes(gpu: Gpu) -> float:
    return BYTES if gpu.capability == HOPPER else portable_plan.bytes_per_microsecond(gpu)


def library_product(problem: Problem, of: Literal["y", "dX", "dW"] = "y") -> float:
    """A product of this problem by PyTorch."""
    gpu, size = gpu_of(problem.device), problem.dtype.itemsize
    m, k, n = problem.m, problem.k, problem.n
    kind = "highest" if problem.dtype == torch.float64 else problem.precision
    moved = size * (m * k + n * k + m * n) / _bytes(gpu)
    if gpu.capability != HOPPER:
        arithmetic = 2.0 * m * k * n / portable_plan.library_flops(problem, gpu)
    else:
        sizes = {"y": (m, n, k), "dX": (m, k, n), "dW": (n, k, m)}[of]
        if kind == "high" and m >= TF32_FEWEST_ROWS:
            return _tf32_product(*sizes, of, gpu)
        arithmetic = _arithmetic(*sizes, kind, of == "dW", gpu)
    return PRODUCT_LAUNCH + max(arithmetic, moved)


def _is_long(problem: Problem, gpu: Gpu) -> bool:
    """Whether `LONG_SUM` says what such a step takes: it was measured on Hopper."""
    high = problem.precision == "high" and gpu.capability == HOPPER
    return high and problem.m >= LONG_SUM


def _arithmetic(
    rows: int, columns: int, length: int, kind: str, of_weight: bool, gpu: Gpu
) -> float:
    """By whole rounds of tiles; a single row or column is left to kernels that memory rules."""
    if min(rows, columns) == 1:
        return 0.0
    if kind == "highest" and rows <= FEW_ROWS:
        tiles = -(-columns // FEW_ROWS_COLUMNS)
        term = FEW_ROWS_TERM + FEW_ROWS_TERM_ROW * rows
        rounds_of_all = max(tiles / gpu.multiprocessors, 1.0)
        return term * length * rounds_of_all / _split_gain(tiles, length, FEW_ROWS_PART, gpu)
    found, rate = [], FLOPS[kind] * (DW_SHARE[kind] if of_weight else 1.0)
    for (tile_rows, tile_columns), share in TILES[kind]:
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        rounds = -(-tiles // gpu.multiprocessors)
        padded = rounds * gpu.multiprocessors * tile_rows * tile_columns * 2.0 * length
        gain = 1.0 if of_weight else _split_gain(tiles, length, SHORTEST_PART, gpu)
        full = kind == "highest" and rows <= HALF_A_TILE and 2 * tiles > gpu.multiprocessors
        if rounds == 1 and length > SPLIT_LENGTH and not full:
            gain = max(gain, (length / SPLIT_LENGTH) ** SPLIT_GAIN)
        found.append(padded / (rate * share * gain))
    # Splitting sums fills the GPU; it does not outrun it.
    return max(min(found), 2.0 * rows * columns * length / rate)


def _tf32_product(
    rows: int, columns: int, length: int, of: Literal["y", "dX", "dW"], gpu: Gpu
) -> float:
    """By tiles of 128 x 128, or half as wide, their sums in as many parts as make it shortest."""
    rate, moves, passes_of_parts, power = TF32[of]
    moved = 4.0 * (rows * columns + rows * length + columns * length) / moves
    if min(rows, columns) <= 1:
        return TF32_LAUNCH + moved
    tile_rows, tile_columns = (64 if size <= 64 else 128 for size in (rows, columns))
    tiles, sms = -(-rows // tile_rows) * -(-columns // tile_columns), gpu.multiprocessors
    flops = 2.0 * tile_rows * tile_columns * length

    def multiplied(parts: int) -> float:
        rounds = -(-tiles * parts // sms)
        joined = passes_of_parts * parts * rows * columns * 4 / BYTES if parts > 1 else 0.0
        return rounds * sms * flops / parts / rate + joined

    most = max(1, min(max(MOST_PARTS, sms // tiles), length // TF32_PART))
    multiplies = min(map(multiplied, range(1, most + 1)))
    return TF32_LAUNCH + float((multiplies**power + moved**power) ** (1 / power))


def _split_gain(tiles: int, length: int, shortest: int, gpu: Gpu) -> float:
    """How many times as fast a sum is that is split over multiprocessors which tiles leave idle."""
    parts = min(gpu.multiprocessors // max(tiles, 1), length // shortest)
    return float(max(parts, 1)) ** PARTS_GAIN


def passes(problem: Problem, count: float, size: int | None = None) -> float:
    """A kernel that goes over so many (M, N) matrices."""
    size = problem.out_dtype.itemsize if size is None else size
    return LAUNCH + count * problem.m * problem.n * size / _bytes(gpu_of(problem.device))


def norm_forward(problem: Problem) -> float:
    """Our kernel behind a product: z and element operands read, y written."""
    elements = problem.chain.operand_kinds.count("element")
    size = problem.dtype.itemsize + problem.out_dtype.itemsize * (1 + elements)
    writes_sum = problem.chain.returns_sum and not sum_is_z(problem)
    size += problem.sum_dtype.itemsize * writes_sum
    if problem.chain.returns_statistics:
        return passes(problem, 1, size + problem.dtype.itemsize) + 2 * LAUNCH
    return passes(problem, 1, size)


def norm_backward(problem: Problem) -> float:
    """Our kernels: dy, z and element operands read, dz written; then the sums over rows."""
    elements = len(backward_elements(problem.chain))
    size = problem.dtype.itemsize + problem.saved_dtype.itemsize
    size += problem.out_dtype.itemsize * (1 + elements)
    if problem.chain.returns_statistics:
        again = problem.saved_dtype.itemsize + problem.out_dtype.itemsize
        return passes(problem, 1, size + again) + 4 * LAUNCH
    return passes(problem, 1, size) + 2 * LAUNCH


def turning(problem: Problem, values: int) -> float:
    """A copy of so many of the problem's values with rows as columns, or columns as rows."""
    moved = 2.0 * values * problem.dtype.itemsize
    return max(LAUNCH + moved / (TURNED * _bytes(gpu_of(problem.device))), HOST_LAYER)


def eager(problem: Problem) -> float:
    """PyTorch's layers one by one; in training their backward too."""
    chain, total = problem.chain, library_product(problem)
    if problem.training:
        total += library_product(problem, "dX") + library_product(problem, "dW")
        bias = LONG_BIAS if _is_long(problem, gpu_of(problem.device)) else 1.0
        total += passes(problem, bias) if problem.has_bias else 0.0
    return total + eager_layers(problem, (*chain.pre, *chain.post))


def eager_layers(problem: Problem, operations: Sequence[Pointwise]) -> float:
    """PyTorch's norm and these operations, as in ``eager``."""
    total = _eager_norm(problem)
    operations = [op for op in operations if op.name != "identity"]
    for op in operations:
        total += passes(problem, 3 if op.operand == "element" else 2)
    for op in operations if problem.training else ():
        if op.name not in ("add_residual", "add_channel", "add"):
            total += passes(problem, 3 if op.reads_input else 2)
        if op.operand == "channel":
            total += passes(problem, 1)
    return total


def _eager_norm(problem: Problem) -> float:
    if problem.chain.norm is None:
        return 0.0
    if isinstance(problem.chain.norm, BatchNorm):
        backward = passes(problem, BATCH_NORM_PASSES_BACKWARD) + LAUNCH
        return passes(problem, BATCH_NORM_PASSES) + LAUNCH + problem.training * backward
    grouped, count = isinstance(problem.chain.norm, GroupNorm), problem.m * problem.groups
    total = passes(problem, GROUP_NORM_PASSES if grouped else 2)
    total += count * (GROUP if grouped else ROW)
    if problem.training:
        total += passes(problem, 3) + passes(problem, 2)
        total += count * (GROUP_BACKWARD if grouped else ROW_BACKWARD)
    return total


def eager_host(problem: Problem) -> float:
    """What the host takes for the same."""
    chain = problem.chain
    linear = HOST_LINEAR + HOST_LINEAR_BACKWARD * problem.training
    return linear + eager_layers_host(problem, len(chain.pre) + len(chain.post))


def eager_layers_host(problem: Problem, layers: int) -> float:
    """What the host takes for PyTorch's norm and so many operations."""
    normed = problem.chain.norm is not None
    total = (layers + normed) * HOST_LAYER
    if problem.training:
        total += layers * HOST_LAYER_BACKWARD + normed * HOST_NORM_BACKWARD
    return total


def parts_of_weight(problem: Problem, copies: bool) -> float:
    """Taking a weight apart, and putting the gradients of its parts together.

    copies: the parts lie between others, and are copied.
    """
    one = LAUNCH + 2 * problem.n * problem.k * problem.dtype.itemsize / _bytes(
        gpu_of(problem.device)
    )
    return HOST_LAYER + one * (copies + problem.training * (1 + copies))
