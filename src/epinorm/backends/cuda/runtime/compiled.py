"""What the compiler made of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compiled:
    """Machine code and what ptxas says about it; a figure that it did not report is -1.

    spill_bytes: spill stores and loads together. shared_bytes: static shared memory of a block.
    stack_bytes: local memory of a thread.
    """

    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int
