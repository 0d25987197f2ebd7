"""Processes on GPUs of one host that copy into each other's memory, by PyTorch's symmetric memory.

Such copies take a GPU's copy engines and no multiprocessor, so that they run beside a product that
fills the GPU, where a collective of NCCL's takes a fifth of it (decision 23).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as distributed
from torch import Tensor

from epinorm.said import log_once

try:  # which PyTorch does not promise
    from torch.distributed import _symmetric_memory as symmetric_memory
except ImportError:
    symmetric_memory = None  # type: ignore[assignment]

MOST_PROCESSES = 8
"""Of one host."""
LEAST_RATE = 150e3
"""Bytes a µs of a copy from each other process: more than any link but NVLink has, on which alone
a process may wait for another by what it writes here."""
_PROBED = 32 << 20
_known: WeakKeyDictionary[Any, Peers | None] = WeakKeyDictionary()
_meetings = 0
"""How often this process has met others to share memory: PyTorch counts these for all groups
together, so that processes wait in vain where they differ."""


def peers_of(group: Any, device: torch.device) -> Peers | None:
    """The group's; None where its processes are not GPUs of one host with fast links, or cannot
    share memory, and while a CUDA graph is captured, at whose replay nobody would know who reads
    the memory. The first call is a collective, and every process is answered alike."""
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return None
        if group not in _known:
            _known[group] = _found(group, device)
    return _known[group]


def _found(group: Any, device: torch.device) -> Peers | None:
    if distributed.get_world_size(group) > MOST_PROCESSES:
        return None
    try:
        host, reason = host_of(group, device), ""
        peers = Peers(group, device)
        probe = torch.empty(_PROBED, dtype=torch.uint8, device=device)
    except Exception as error:
        host, reason = "", _text(error)
    said = _from_all((host, reason), group)
    reasons = [reason for _, reason in said]
    if not any(reasons) and len({host for host, _ in said}) > 1:
        reasons = ["its processes are on several hosts"]
    if not any(reasons) and not peers.make_room(_PROBED):
        reasons = ["no memory can be shared"]
    if not any(reasons):
        reasons = _from_all(peers.probed(probe), group)
    for reason in filter(None, reasons):
        log_once(f"a process group's rows are exchanged by NCCL alone: {reason}")
        return None
    return peers


def host_of(group: Any, device: torch.device) -> str:
    """What two machines, or two containers, never have in common; raises where memory cannot be
    shared."""
    if type(group._get_backend(device)).__name__ != "ProcessGroupNCCL":
        raise RuntimeError("its backend is not NCCL")
    if torch.version.hip is not None or symmetric_memory.get_backend(device) != "CUDA":
        raise RuntimeError("symmetric memory is not CUDA's own")
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return " ".join((boot, *spaces, tempfile.gettempdir()))


def _from_all(said: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, said, group=group)
    return found


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Peers:
    """A group's memory, of which each process has a part that the others read and write.

    It is one part for all uses, each of which is an ``exchange``, on the current stream, in the
    same order in each process. Copies run on ``stream``.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        # First in the queue: what it launches is short, and the others wait for it.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.is_broken, self._meets = False, 0
        self._name, self._device = group.group_name, device
        self._group = WeakKeyDictionary({group: None})
        timeout = group._get_backend(device).options._timeout
        self.milliseconds = int(timeout.total_seconds() * 1000)
        self._made: Any = None
        self._shared: Any = None
        self._nbytes = self._refused = 0

    def make_room(self, nbytes: int) -> bool:
        """Whether each part has so many bytes; where it has to grow this is a collective."""
        global _meetings
        if nbytes <= self._nbytes:
            return True
        if self._refused and nbytes >= self._refused:
            return False
        nbytes = 1 << (nbytes - 1).bit_length()
        (group,) = self._group
        with torch.cuda.device(self._device):
            made, reason = self._allocated(nbytes)
            said = _from_all((reason, _meetings), group)
            if not any(reason for reason, _ in said) and len({count for _, count in said}) == 1:
                _meetings += 1
                shared = None
                try:
                    shared = symmetric_memory.rendezvous(made, self._name)
                except Exception as error:
                    log_once(f"memory is not shared: {_text(error)}")
                if all(_from_all(shared is not None, group)):
                    self._made, self._shared, self._nbytes = made, shared, nbytes
                    return True
        self._refused = nbytes
        return False

    def _allocated(self, nbytes: int) -> tuple[Any, str]:
        """Bytes, or why there are none. PyTorch's own allocator may hold what is free."""
        reason = ""
        for _ in range(2):
            try:
                torch.cuda.synchronize()  # what reads the memory that is let go
                of: Any = {"dtype": torch.uint8, "device": self._device}
                return symmetric_memory.empty(nbytes, **of), ""
            except Exception as error:
                reason = _text(error)
                torch.cuda.empty_cache()
        return None, reason

    def probed(self, like: Tensor) -> str:
        """Empty if copies from each other process are as fast as over NVLink, else why not. No GPU
        waits for another: over other links its signals may be lost."""
        (group,) = self._group
        slowest, reason = 0.0, ""
        for other in self.others():
            for _ in range(3):
                _from_all(None, group)
                try:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    like.copy_(self.part(other, like, like.shape))
                    end.record()
                    end.synchronize()
                    taken = begin.elapsed_time(end) * 1e3
                except Exception as error:
                    reason = _text(error)
            slowest = max(slowest, 0.0 if reason else taken)
        return reason or ("copies are slow" if slowest * LEAST_RATE > _PROBED else "")

    def part(self, rank: int, like: Tensor, shape: tuple[int, ...], index: int = 0) -> Tensor:
        """The index-th tensor of this shape in a process' part."""
        size = torch.Size(shape).numel()
        found: Tensor = self._shared.get_buffer(rank, shape, like.dtype, index * size)
        return found

    def others(self) -> list[int]:
        """All but this one, each process beginning with another."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """One use of the memory, within which processes ``meet`` twice. What raises before the
        second time leaves this process out of step with the others, if they did not raise too: it
        begins no other."""
        self.wait()  # until the others have read what the last use left, whatever stream it was on
        self._meets, self.is_broken = 0, True
        try:
            yield
        finally:
            self.wait()
            self.follow()

    def follow(self) -> None:
        """Let copies wait for what the current stream has been given."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Launch on ``stream``, behind what the current stream has been given."""
        self.follow()
        with torch.cuda.stream(self.stream):
            yield

    def copied(self) -> Callable[[], None]:
        """Within ``copying``: what lets the current stream, later, wait for what was launched."""
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)

    def wait(self) -> None:
        """Let the current stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def meet(self) -> None:
        """Let the current stream wait until each process' has come here, at most for the group's
        timeout, behind which CUDA reports a failure."""
        self.barrier()
        self._meets += 1
        self.is_broken = self._meets < 2

    def barrier(self) -> None:
        """As ``meet``, of which nobody keeps account."""
        self._shared.barrier(channel=0, timeout_ms=self.milliseconds)
