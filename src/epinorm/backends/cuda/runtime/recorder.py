"""A GPU that is not there, for whom an executable is planned, compiled and run all the same.

Within ``recording(gpu)`` that is done as for that GPU, on tensors of the CPU that nothing reads;
``replay.recording`` within it notes what is launched. So what repeats it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epinorm.backends import memo
from epinorm.backends.cuda.runtime import launch
from epinorm.backends.cuda.runtime.arguments import layout_of
from epinorm.backends.cuda.runtime.device import Gpu, standing_in
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled

WARPS_OF_MULTIPROCESSOR = {(8, 6): 48, (8, 9): 48, (12, 0): 48, (12, 1): 48}
"""64 elsewhere. CUDA programming guide, compute capabilities."""
BLOCKS_OF_MULTIPROCESSOR = {(8, 6): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}
"""32 elsewhere."""
REGISTERS, REGISTER_UNIT, WARP_UNIT, SHARED_UNIT, SHARED_RESERVED = 65536, 256, 4, 128, 1024
MULTIPROCESSORS_OF_GPC = 16
"""A cluster of blocks stays within one. Some have 18."""


@dataclass(frozen=True)
class Launched:
    """What a launch's kernel, as ``Recording`` notes it, stands for: the first is 1."""

    source: KernelSource
    cluster: tuple[int, int, int]
    dependent: bool


class Recorder(TorchDispatchMode):
    """Stands in for a GPU; PyTorch's own products are not computed."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.launches: list[Launched] = []

    def kernel(self, source: KernelSource) -> _Kernel:
        return _Kernel(source, self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            rows, matrix = args[-2:]
            return rows.new_empty(rows.shape[0], matrix.shape[1])
        return func(*args, **(kwargs or {}))


class _Kernel(launch.Kernel):
    """Notes its launches, and answers from what the compiler says where it is asked for more."""

    def __init__(self, source: KernelSource, recorder: Recorder) -> None:
        super().__init__(0, source.entry, 0, launch.Compiled(b"", "", 0, 0, 0, 0))
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
        numbers = (*launch.three(grid), *launch.three(block), shared_bytes)
        launches, layout = self.recorder.launches, layout_of(signature)
        launches.append(Launched(self.source, launch.three(cluster or 1), dependent))
        number = len(launches)

        def note(*values: int | float | bytes, stream: launch.Stream = None) -> None:
            if launch.recording is not None:
                launch.recording.note_launch(number, numbers, (0, 0), layout, values)

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
def planning(gpu: Gpu) -> Iterator[Recorder]:
    """Plan within as for this GPU. What is kept between calls is forgotten before and after."""
    recorder = Recorder(gpu)
    memo.clear()
    try:
        with standing_in(recorder):
            yield recorder
    finally:
        memo.clear()


@contextmanager
def recording(gpu: Gpu) -> Iterator[Recorder]:
    """Note what is launched within, as if on this GPU; tensors are the CPU's."""
    with planning(gpu) as recorder, torch.no_grad(), recorder:
        yield recorder
