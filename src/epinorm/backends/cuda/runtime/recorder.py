"""Launches written down instead of made: what an executable would do on a GPU that is not there.

Within ``recording(gpu)`` a plan is made and compiled as for that GPU, and run on tensors of the CPU
that nothing reads. Each launch is noted with the memory that it is given, each allocation, and each
of PyTorch's own operations. So a table of launches repeats the executable, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.backends import memo
from epinorm.backends.cuda.runtime import launch
from epinorm.backends.cuda.runtime.compiled import Compiled
from epinorm.backends.cuda.runtime.device import Gpu, standing_in
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.backends.cuda.runtime.tensor_map import TENSOR_MAP_BYTES

WARPS_OF_MULTIPROCESSOR = {(8, 6): 48, (8, 9): 48, (12, 0): 48, (12, 1): 48}
"""64 elsewhere. CUDA programming guide, compute capabilities."""
BLOCKS_OF_MULTIPROCESSOR = {(8, 6): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
"""32 elsewhere."""
REGISTERS, REGISTER_UNIT, WARP_UNIT, SHARED_UNIT, SHARED_RESERVED = 65536, 256, 4, 128, 1024
MULTIPROCESSORS_OF_GPC = 16
"""A cluster of blocks stays within one. Some have 18."""


@dataclass(frozen=True)
class Allocated:
    """A tensor not filled in; ``zeros``: or filled with them."""

    tensor: Tensor
    zeros: bool = False


@dataclass(frozen=True)
class Launched:
    """A launch; values: as the bare arguments of ``Kernel.prepare``, a ``Mapped`` for a map."""

    source: KernelSource
    signature: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: tuple[int, int, int]
    dependent: bool
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Mapped:
    """The arguments of ``tensor_map`` by what the driver needs of them."""

    address: int
    dtype: torch.dtype
    rows: int
    columns: int
    row_bytes: int
    box_rows: int
    box_columns: int
    swizzle: int
    l2_promotion: int


@dataclass(frozen=True)
class Operated:
    """One of PyTorch's own products, and its result."""

    name: str
    arguments: tuple[Tensor, ...]
    result: Tensor


Event = Allocated | Launched | Operated


class Recorder(TorchDispatchMode):
    """What happened so far, in order; it keeps every tensor, so that addresses are unique."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.events: list[Event] = []
        self._maps: list[Mapped] = []

    def kernel(self, source: KernelSource) -> _Kernel:
        return _Kernel(source, self)

    def tensor_map(
        self, tensor: Tensor, box_rows: int, box_columns: int, swizzle: int, l2_promotion: int
    ) -> bytes:
        rows, columns = tensor.shape
        row_bytes = (tensor.stride(0) if rows > 1 else max(tensor.stride(0), columns)) * (
            tensor.itemsize
        )
        box = box_rows, box_columns, swizzle, l2_promotion
        self._maps.append(
            Mapped(tensor.data_ptr(), tensor.dtype, rows, columns, -(-row_bytes // 16) * 16, *box)
        )
        return (len(self._maps) - 1).to_bytes(TENSOR_MAP_BYTES, "little")

    def mapped(self, data: bytes) -> Mapped:
        """What ``tensor_map`` gave these bytes for."""
        return self._maps[int.from_bytes(data, "little")]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "linear"):
            rows, matrix = [t for t in args if isinstance(t, Tensor)][-2:]
            result = rows.new_empty(rows.shape[0], matrix.shape[name != "linear"])
            given = tuple(t for t in args if isinstance(t, Tensor))
            self.events.append(Operated(name, given, result))
            return result
        result = func(*args, **(kwargs or {}))
        if name in ("empty", "empty_like", "new_empty", "empty_strided", "zeros"):
            self.events.append(Allocated(result, name == "zeros"))
        elif name not in ("view", "slice", "t", "transpose", "as_strided", "select", "detach"):
            raise RuntimeError(f"{func} cannot be written down")
        return result


class _Kernel(launch.Kernel):
    """Notes its launches, and answers from what the compiler says where it is asked for more."""

    def __init__(self, source: KernelSource, recorder: Recorder) -> None:
        super().__init__(0, source.entry, 0, Compiled(b"", "", 0, 0, 0, 0))
        self.source, self.recorder = source, recorder

    def prepare(
        self,
        signature: str,
        grid: launch.Dimensions,
        block: launch.Dimensions,
        *,
        shared_bytes: int = 0,
        cluster: launch.Dimensions | None = None,
        dependent: bool = False,
    ) -> Callable[..., None]:
        how = (
            *(launch.three(grid), launch.three(block), shared_bytes),
            *(launch.three(cluster or 1), dependent),
        )
        recorder = self.recorder

        def note(*values: int | float | bytes, stream: launch.Stream = None) -> None:
            given = tuple([recorder.mapped(v) if isinstance(v, bytes) else v for v in values])
            recorder.events.append(Launched(self.source, signature, *how, given))

        return note

    def reserve(self, shared_bytes: int, cluster_size: int = 1) -> None:
        """Whoever repeats the launch does."""

    def blocks_per_sm(self, block_threads: int, shared_bytes: int = 0) -> int:
        """As the occupancy calculator of CUDA counts them."""
        gpu, facts = self.recorder.gpu, compiled(self.source)
        warps = -(-block_threads // 32)
        of_warp = -(-max(facts.registers, 1) * 32 // REGISTER_UNIT) * REGISTER_UNIT
        by_registers = REGISTERS // of_warp // WARP_UNIT * WARP_UNIT // warps
        by_warps = WARPS_OF_MULTIPROCESSOR.get(gpu.capability, 64) // warps
        shared = max(facts.shared_bytes, 0) + shared_bytes + SHARED_RESERVED
        by_shared = gpu.shared_of_multiprocessor // (-(-shared // SHARED_UNIT) * SHARED_UNIT)
        most = BLOCKS_OF_MULTIPROCESSOR.get(gpu.capability, 32)
        return min(by_registers, by_warps, by_shared, most)

    def clusters_at_once(self, cluster: int, block_threads: int, shared_bytes: int = 0) -> int:
        """An estimate: the driver alone knows how many multiprocessors each GPC has."""
        blocks = self.blocks_per_sm(block_threads, shared_bytes)
        of_gpc = MULTIPROCESSORS_OF_GPC * blocks // cluster
        return max(of_gpc * (self.recorder.gpu.multiprocessors // MULTIPROCESSORS_OF_GPC), 1)


@contextmanager
def recording(gpu: Gpu) -> Iterator[Recorder]:
    """Note what is launched within, as if on this GPU; tensors are the CPU's. What is kept between
    calls is forgotten before and after."""
    recorder = Recorder(gpu)
    memo.clear()
    try:
        with standing_in(recorder), torch.no_grad(), recorder:
            yield recorder
    finally:
        memo.clear()
