"""Guards of solutions without two seconds of imports: forked from a process that has done them.

Only how a worker begins is another way than the judge's: it is the guard's fork, without exec.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from typing import Any

from processes import context


class Guard:
    """What the judge knows of a guard; ``subprocess.Popen`` in its place."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._process = os.pidfd_open(pid)

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None and select.select([self._process], [], [], seconds)[0]:
            self.returncode = 0
            os.close(self._process)
        return self.returncode

    def wait(self) -> None:
        self.poll(60.0)

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


class Guards:
    """The process that guards are forked from; it ends with its socket."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, life: int, status: int, log: int, passed: Any, _: Any) -> Guard:
        """As ``start_guard`` of the judge."""
        socket.send_fds(self.socket, [b"."], [life, status, log, *passed])
        return Guard(int.from_bytes(self.socket.recv(8), "big"))

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.join()


def become_guard(life: int, status: int, log: int, passed: list[int]) -> None:
    """What the judge starts a guard for, in this process."""
    from epinorm.tools.judge import guard, worker

    def work(_path: str, _command: list[str]) -> None:
        os.close(life)
        os.close(status)
        worker.main(*passed)
        sys.stdout.flush()
        os._exit(0)

    os.setsid()
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.execv = work  # type: ignore[assignment]
    sys.modules["__main__"] = worker
    guard.main(life, status, ["worker"])
    os._exit(0)


def serve(channel: socket.socket) -> None:
    """Fork a guard for each message; it gets the descriptors that come with it."""
    import torch

    import epinorm.tools.judge.worker

    assert epinorm  # what is imported here no guard imports again
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        said, given, *_ = socket.recv_fds(channel, 1, 16)
        if not said:
            return
        if (pid := os.fork()) == 0:
            channel.close()
            become_guard(*given[:3], given[3:])
        for number in given:
            os.close(number)
        channel.send(pid.to_bytes(8, "big"))
