"""fp32 matrices as fp16 planes: what the tensor cores multiply in place of fp32.

A row v becomes (hi + lo 2^-11) scale with a power of two for a scale; `fp32/split_rows.cuh`
says how, internals/precision.md why. x and W are split by one launch into one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from epinorm.backends.cuda.plan.plane_layout import LISTED, PlaneLayout
from epinorm.backends.cuda.runtime.device import arch_of, sm_count
from epinorm.backends.cuda.runtime.driver import relaxed_capture
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.source import constants, kernel_text
from epinorm.backends.memo import memo

THREADS = 256
MOST_VECTORS = 8
"""float4 that a thread keeps between finding a row's largest value and splitting it."""
ORDERED_MULTIPLE = 64
"""Columns of a row in the order of weight_fragments.cuh: whole lines of L2."""
VECTOR_BYTES = 16

SIGNATURE = "plpl" + "ppppp" + "iiiii"
"""Both matrices and their row strides; hi, lo, scale, flags, spoilt or 0;
``Splitter.numbers``."""
OVER_SIGNATURE = "plpl" + "pppp" + "iiiii"
"""The same without spoilt."""

# What a plane pair and a single plane must hold of each element, relatively. Two: an fp32 product's
# own error. One: 2^-11 is what TF32 keeps; a little more is let through for values 2^-28 of their
# row's largest, of which every row of a large random matrix has some.
TOLERANCE = {2: "0x1p-20f", 1: "0x1p-8f"}


Order = Literal["plain", "ordered", "both"]
"""Of a plane's columns: as they are, as weight_fragments.cuh wants them, or a plane of each."""


@dataclass(frozen=True)
class Planes:
    """The planes of a (rows, columns) fp32 matrix.

    hi, lo: (rows, ``PlaneLayout.padded``) fp16; lo is hi again where there is one plane. scale:
    (rows,) fp32. flags: (rows,) uint8, 0 where the planes hold the row, 1 where they hold all of it
    but the columns in spoilt, 2 where they do not. spoilt: (rows, 4) int32, in any order, -1 where
    there are fewer; not written but where the flag is 1.
    """

    hi: Tensor
    lo: Tensor
    scale: Tensor
    flags: Tensor
    spoilt: Tensor


@dataclass(frozen=True)
class SplitShape:
    """What splits a row: a team of ``threads``, each of which keeps ``vectors`` float4."""

    threads: int
    vectors: int

    @property
    def block_rows(self) -> int:
        return THREADS // self.threads


def split_shape(rows: int, columns: int, sms: int) -> SplitShape:
    """As few threads as keep a row in registers with four loads in flight each (decision 7).

    More where there are too few rows for all multiprocessors; in rows of 8192 and more, eight.
    """
    threads = 8
    while threads < THREADS and (
        threads * 4 * MOST_VECTORS // 2 < columns
        or (THREADS // threads * sms > rows and threads * 4 < columns)
    ):
        threads *= 2
    return SplitShape(threads, min(MOST_VECTORS, max(1, -(-columns // (threads * 4)))))


def split_prelude(
    planes: int, columns: int, aligned: bool, shape: SplitShape, order: Order = "plain"
) -> str:
    """The constants of `split_rows.cuh`; aligned: each row starts on 16 bytes."""
    return constants(
        {
            "kPlanes": planes,
            "kRowThreads": shape.threads,
            "kRowVectors": shape.vectors,
            "kTolerance": TOLERANCE[planes],
            "kAligned": aligned,
            "kPlain": order != "ordered",
            "kOrdered": order != "plain",
        }
    )


def split_source(
    planes: int, columns: int, aligned: bool, arch: str, rows: int = 1 << 20, sms: int = 132
) -> KernelSource:
    """The kernel that splits ``rows`` rows in all; `aligned`: each starts on 16 bytes."""
    prelude = split_prelude(planes, columns, aligned, split_shape(rows, columns, sms))
    return KernelSource("split", kernel_text("fp32/split.cu", prelude), arch)


def split_over_source(
    planes: int, columns: int, arch: str, rows: int = 1 << 20, sms: int = 132
) -> KernelSource:
    """The kernel that writes the first matrix's planes over it; all rows start on 16 bytes."""
    prelude = split_prelude(planes, columns, True, split_shape(rows, columns, sms))
    return KernelSource("split_over", kernel_text("fp32/split_over.cu", prelude), arch)


class Splitter(PlaneLayout):
    """Splits one matrix, or two with as many columns, into one buffer of ``nbytes`` bytes; or the
    first into its own memory (``over_first``), by ``launch`` alone."""

    def __init__(
        self,
        planes: int,
        columns: int,
        rows: int,
        more_rows: int,
        device: torch.device,
        over_first: bool = False,
        lists: bool = True,
    ) -> None:
        super().__init__(planes, columns, rows, more_rows, over_first, lists)
        self.device = device
        self._launches: dict[bool, Callable[..., None]] = {}

    def __call__(
        self, buffer: int, first: Tensor, second: Tensor | None = None, rest: int | None = None
    ) -> None:
        """Launch; buffer: the address of ``nbytes`` bytes, a multiple of 16. The matrices are fp32
        with contiguous columns; rows may have a stride. rest: the ``origin`` of another buffer, for
        all but the planes."""
        address, stride = first.data_ptr(), first.stride(0)
        more, more_stride = (0, 0) if second is None else (second.data_ptr(), second.stride(0))
        aligned = (address | more | 4 * (stride | more_stride)) % VECTOR_BYTES == 0
        rest = buffer if rest is None else rest
        self.launch(aligned)(
            *(address, stride, more, more_stride),
            *(buffer, buffer + self.lo),
            *(rest + self.scale, rest + self.flags, rest + self.spoilt if self.lists else 0),
            *self.numbers,
        )

    def wait_outside_of_capture(self, event: torch.cuda.Event) -> None:
        """Wait for an event that is no part of the CUDA graph being captured."""
        with relaxed_capture():
            event.synchronize()

    def launch(self, aligned: bool) -> Callable[..., None]:
        """What a call launches, to be kept: a function of the arguments of ``SIGNATURE``, or of
        ``OVER_SIGNATURE``.

        aligned: all rows of the matrices begin at multiples of 16 bytes. Loads the kernel, which is
        not possible while a CUDA graph is captured.
        """
        return self._launches.get(aligned) or self._prepare(aligned)

    def origin(self, buffer: Tensor) -> int:
        """The address from which the layout counts; buffer: of ``nbytes`` bytes, or without the
        planes in front."""
        return buffer.data_ptr() + buffer.numel() - self.nbytes

    def planes_in(self, buffer: Tensor, second: bool = False) -> Planes:
        """The first or the second matrix's planes in a buffer, both beside the matrices; buffer:
        (nbytes,) uint8."""
        begin, rows = (self.second, self.more_rows) if second else (0, self.rows)

        def rows_of(offset: int, width: int, dtype: torch.dtype) -> Tensor:
            start = offset + begin * width * dtype.itemsize
            part = buffer[start : start + rows * width * dtype.itemsize].view(dtype)
            return part.view(rows, width) if width > 1 else part

        return Planes(
            *self.halves_in(buffer, second),
            rows_of(self.scale, 1, torch.float32),
            rows_of(self.flags, 1, torch.uint8),
            rows_of(self.spoilt, LISTED, torch.int32),
        )

    def halves_in(self, buffer: Tensor, second: bool = False) -> tuple[Tensor, Tensor]:
        """hi and lo alone, with ``over_first`` the second's; buffer: as above, or without what is
        behind the planes."""
        begin, rows = (self.begin, self.more_rows) if second else (0, self.rows)
        stored = buffer[: self.spoilt].view(torch.float16).view(self.planes, -1, self.padded)
        stored = stored[:, begin : begin + rows]
        return stored[0], stored[-1]

    def planes_over(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """The first matrix's planes hi and lo over itself; first: (rows, columns), contiguous."""
        halves = first.view(torch.float16).view(self.rows, 2, self.columns)
        return halves.select(1, 0), halves.select(1, self.planes - 1)

    def _prepare(self, aligned: bool) -> Callable[..., None]:
        device, columns, rows = self.device, self.columns, self.all_rows
        sms = sm_count(device)
        arch = arch_of(device)
        source, signature = (
            (split_over_source(self.planes, columns, arch, rows, sms), OVER_SIGNATURE)
            if self.over_first
            else (split_source(self.planes, columns, aligned, arch, rows, sms), SIGNATURE)
        )
        blocks = -(-rows // split_shape(rows, columns, sms).block_rows)
        kernel = load(source, device)
        launch = kernel.prepare(signature, blocks, THREADS, dependent=starts_early(device))
        self._launches[aligned] = launch
        return launch


splitter = memo()(Splitter)
"""The splitter of these sizes, made once; to be kept where it is called often."""
