"""The range guard of fp32: what fp16 planes could not hold, computed again in plain fp32.

`split_rows.cuh` flags the rows of x and of W that scaled planes of fp16 do not hold. The product of
planes is garbage where one of them takes part; this kernel, launched right after it, overwrites
just that. The flags never leave the GPU, so nothing waits and a CUDA graph replays it with other
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.norm.text import chain_signature
from epinorm.backends.cuda.plan.norm_batch import MOMENT_ROWS
from epinorm.backends.cuda.plan.strategy import LARGEST_GUARDED_GROUP, WIDEST_TILE
from epinorm.backends.cuda.runtime.device import arch_of, max_shared_bytes, sm_count
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.launch import Kernel
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments, chain_text, constant_list
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo
from epinorm.problem import Problem

SIGNATURE = "plpl" + "ppp" + "pppp" + "pppp" + "iii"
"""x, w and their row strides; bias, gamma, beta; flags and scales of x's and w's rows; y, z or the
sum, mean, rstd; m, n, k."""

THREADS = 256
VECTOR_BYTES = 16
CHUNK_ROWS = 1024
LARGEST_SHARED = 232448
"""Bytes that a block of any GPU so far can have."""

MOST_SPLITS = 8
"""Blocks of a cluster of any GPU that has clusters."""
SHORTEST_SPLIT = 512
"""Values of the summed index that are worth a block of their own."""

SURELY = 2.0**10
"""Times their scales products are surely large enough: kSurely there."""

_VALUES = 128 * 128  # of a tile: 64 a thread
_PAD = 4  # values between rows in shared memory
STATIC_BYTES = 1024  # of shared memory that the kernels have besides, at most


@dataclass(frozen=True)
class RescueTile:
    """What a block computes at once: ``rows`` by ``width`` products, of which ``columns`` are used
    (whole groups, so that a group's statistics stay in the block; or one of the ``parts`` of a
    group, which the blocks of a cluster share). limit: bytes of shared memory that a block can
    have; 99 KB suffice."""

    rows: int
    width: int
    columns: int
    limit: int = LARGEST_SHARED
    parts: int = 1

    @property
    def block_k(self) -> int:
        """Values of K in a stage of the ring. Longer ones are faster (kb62 on an H200, before sums
        were shared, one flagged row and all of them: 427 and 3758 us against 473 and 3919), but
        spill in the wide tile."""
        return 32 if self.width == 128 else 16

    @property
    def stages(self) -> int:
        """Slots of the ring."""
        most = 3 if self.width == 128 else 4
        return most if most * self._slot_bytes <= self.limit - STATIC_BYTES else most - 1

    @property
    def _slot_bytes(self) -> int:
        return (self.rows + self.width) * (self.block_k + _PAD) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as `rescue_product.cuh` lays it out."""
        finished = self.rows * (self.width + _PAD) * 4
        return max(self.stages * self._slot_bytes, finished)

    def items(self, m: int, n: int) -> int:
        """How many shares the work has if all is flagged (`rescue_items.cuh`)."""
        strips = -(-n // (self.columns * self.parts))
        return -(-m // CHUNK_ROWS) * strips * (CHUNK_ROWS // self.rows)

    def takers(self, m: int, n: int, at_once: int) -> int:
        """How many blocks, or clusters of them, take these shares in turn, of ``at_once`` that run
        together.

        The shares that one flagged column makes are as many apart as there are strips of columns:
        a number of takers without a divisor in common with that gets them in different hands.
        """
        strips = -(-n // (self.columns * self.parts))
        takers = min(self.items(m, n), max(at_once, 1))
        while takers < self.items(m, n) and math.gcd(takers, strips) > 1:
            takers -= 1
        return takers


def rescue_tile(group: int, limit: int = LARGEST_SHARED) -> RescueTile:
    """The tile that wastes the fewest columns on groups of ``group`` channels.

    limit: as in ``RescueTile``. Raises `ValueError` for a group that does not fit: 1, 2, the
    multiples of 4 up to 256 and, shared by a cluster's blocks, those of 8 up to 2048 do that one of
    2 to 8 divides into parts of whole 4 channels.
    """
    tiles = []
    if group in (1, 2) or (group % 4 == 0 and 4 <= group <= WIDEST_TILE):
        for width in (128, WIDEST_TILE):
            if width >= group:
                tiles.append(RescueTile(_VALUES // width, width, width // group * group, limit))
    elif group % 8 == 0 and WIDEST_TILE < group <= LARGEST_GUARDED_GROUP:
        for parts in range(2, MOST_SPLITS + 1):
            columns = group // parts
            if group % (4 * parts) == 0 and columns <= WIDEST_TILE:
                width = 128 if columns <= 128 else WIDEST_TILE
                tiles.append(RescueTile(_VALUES // width, width, columns, limit, parts))
    if not tiles:
        raise ValueError(
            "the range guard serves groups of 1, 2 or a multiple of 4 channels up to "
            f"{WIDEST_TILE}, or of 8 up to {LARGEST_GUARDED_GROUP} that 2 to {MOST_SPLITS} blocks "
            f"can share, but got {group}"
        )
    return max(tiles, key=lambda tile: tile.columns / tile.width)


def _group_of(problem: Problem) -> int:
    """Channels that must be computed together: without a norm each is by itself."""
    return 1 if problem.chain.norm is None else problem.n // problem.groups


def _product_in(problem: Problem) -> int:
    """Where the kernel finds the linear's output without bias: kNowhere, kInZ or kInY there."""
    chain = problem.chain
    if problem.matrix_dtype is not None and not chain.returns_sum:
        return 1
    bare = chain.norm is None and not chain.pre and not chain.post and not problem.has_bias
    return 2 if bare else 0


def splits_of(tile: RescueTile, rows: int, columns: int, length: int, multiprocessors: int) -> int:
    """How many blocks, 1, 2, 4 or 8, share each sum of ``length`` products of a (rows, columns)
    result: until one flag, of a row or of a column, keeps more than a quarter of the GPU at
    work.

    One is what chance brings: a row by estimate in one of ten random dz of 16384 x 1024, a column
    in one of ten or twenty random W of 8192 x 8192. The same whatever is flagged, so that a result
    does not depend on its neighbours' flags.
    """
    tiles = min(-(-rows // tile.rows), -(-columns // tile.columns))
    splits = 1
    while (
        splits < MOST_SPLITS
        and tile.parts == 1
        and tiles * splits * 4 <= multiprocessors
        and length >= splits * 2 * SHORTEST_SPLIT
    ):
        splits *= 2
    return splits


def rescue_source(
    problem: Problem,
    aligned: bool,
    arch: str,
    limit: int = LARGEST_SHARED,
    flags_late: bool = False,
    splits: int = 1,
    spent: bool = False,
) -> KernelSource:
    """The kernel's text for ``problem``'s chain and group size; compiles without a GPU.

    aligned: each row of x and of weight begins at a multiple of 16 bytes. limit: as in
    ``RescueTile``. flags_late: the kernel before it writes flags. splits: blocks that share a sum,
    1 before sm_90. spent: x's planes lie over x (``split_over.cu``).
    Raises `ValueError` for a problem that is not fp32 throughout, or a group that does not fit.
    """
    dtypes = (problem.dtype, problem.norm_dtype, problem.out_dtype)
    if any(dtype != torch.float32 for dtype in dtypes):
        raise ValueError(f"the range guard is for float32 throughout, but got {dtypes}")
    group = _group_of(problem)
    tile = rescue_tile(group, limit)
    numbers = {
        "kRows": tile.rows,
        "kColumns": tile.columns,
        "kWidth": tile.width,
        "kBlockK": tile.block_k,
        "kStages": tile.stages,
        "kSplitK": splits,
        "kGroupParts": tile.parts,
        "kAligned": aligned,
        "kGroup": group,
        "kHasBias": problem.has_bias,
        "kHasGamma": problem.has_norm_weight,
        "kHasBeta": problem.has_norm_bias,
        "kSaveForBackward": problem.matrix_dtype is not None,
        "kKeepsSum": problem.chain.returns_sum,
        "kKeepStatistics": problem.keeps_statistics,
        "kProduct": _product_in(problem) if tile.parts == 1 else 0,
        "kFlagsLate": flags_late,
        "kMomentRows": MOMENT_ROWS * problem.column_moments,
        **({"kPlanes": problem.planes} if spent else {}),
    }
    count = len(problem.chain.operand_kinds)
    parameters = "".join(f", const float* operand{i}, long long stride{i}" for i in range(count))
    operands = ", ".join(f"operand{i}" for i in range(count)) or "nullptr"
    strides = ", ".join(f"stride{i}" for i in range(count)) or "0"
    arguments = ChainArguments(problem.chain, torch.float32)
    prelude = (
        chain_text(problem.chain)
        + constants({name: int(value) for name, value in numbers.items()})
        + f"#define CHAIN_PARAMETERS {parameters}{arguments.parameters}\n"
        + f"#define OPERAND_LIST {{{operands}}}\n"
        + f"#define STRIDE_LIST {{{strides}}}\n"
        + f"#define CONSTANT_LIST {constant_list(arguments.names)}\n"
    )
    name = "fp32/rescue_spent.cu" if spent else "fp32/rescue.cu"
    return KernelSource("rescue", kernel_text(name, prelude), arch)


def prepare_guard(
    kernel: Kernel,
    device: torch.device,
    signature: str,
    tile: RescueTile,
    splits: int,
    shape: tuple[int, int],
) -> Callable[..., None]:
    """A function of ``signature``'s arguments that launches a guard of a result of this shape, of
    which ``splits`` blocks share each sum."""
    # No more clusters than run at once: each takes its items in turn, so one that started when
    # others have ended would take as long again.
    cluster = splits * tile.parts
    at_once = (
        kernel.clusters_at_once(cluster, THREADS, tile.shared_bytes)
        if cluster > 1
        else sm_count(device)
    )
    return kernel.prepare(
        signature,
        tile.takers(*shape, at_once) * cluster,
        THREADS,
        shared_bytes=tile.shared_bytes,
        cluster=cluster if cluster > 1 else None,
        dependent=starts_early(device),
    )


@memo()
def rescue_launch(
    problem: Problem, aligned: bool, flags_late: bool = False, spent: bool = False
) -> Callable[..., None]:
    """A function of the arguments of ``SIGNATURE`` and the chain's that overwrites y and, in
    training, z, mean and rstd wherever a flagged row or column takes part.

    aligned: each row of x and of weight begins at a multiple of 16 bytes. Flags are uint8, at
    addresses that are multiples of 4, and complete before the last kernel of the stream begins but
    with ``flags_late``, where that one writes them; scales are those of the planes that were
    multiplied. spent: x's planes lie over x, but for flagged rows. (row, group)s without a flag
    keep their bits. Every launch of the same values gives the same bits. Raises `ValueError` as
    `rescue_source` does.
    """
    device, limit = problem.device, max_shared_bytes(problem.device)
    tile = rescue_tile(_group_of(problem), limit)
    m, n = problem.m, problem.n
    # Clusters came with sm_90, as early starts did.
    clusters = starts_early(device)
    splits = splits_of(tile, m, n, problem.k, sm_count(device)) if clusters else 1
    source = rescue_source(problem, aligned, arch_of(device), limit, flags_late, splits, spent)
    signature = SIGNATURE + chain_signature(problem)
    return prepare_guard(load(source, device), device, signature, tile, splits, (m, n))
