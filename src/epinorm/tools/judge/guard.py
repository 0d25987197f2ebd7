"""Stands between the judge and a solution's process: no process of the solution outlives it.

Run by its path, with the standard library alone::

    python -I -S guard.py LIFE STATUS COMMAND...

It starts COMMAND with fewer rights (see ``confine``) and waits until COMMAND ends or LIFE, a pipe
whose other end the judge holds, is closed: by the judge, or by the kernel when the judge is no
more. Then it kills whatever descends from it. Orphans come to it (PR_SET_CHILD_SUBREAPER), so a
process that forked twice is found. It writes JSON lines to STATUS: what it could hold, how COMMAND
ended, and whether anything is left. ``docs/judging.md`` says what follows from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

DUMPABLE, DROP_CAPABILITY, SUBREAPER, NO_NEW_PRIVS = 4, 24, 36, 38
"""prctl(2): PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS."""
GET = {DUMPABLE: 3, SUBREAPER: 37}
"""How prctl(2) reads what these set."""

KEPT_CAPABILITIES = sum(1 << number for number in (0, 1, 2, 3, 4, 14))
"""Those about files' owners, which say nothing about processes, and CAP_IPC_LOCK."""

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""landlock(7), the same numbers on every machine."""
MAKE_BLOCK, REFER = 1 << 11, 1 << 13
SCOPES = 3
"""Abstract sockets and signals."""

SWEEP_SECONDS = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


def set_process(option: int, value: int) -> bool:
    """prctl(option, value) for this process; whether it was taken."""
    return bool(_libc.prctl(option, value, 0, 0, 0) == 0)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """This process cannot be read or traced by its user's others, and orphans below come to it."""
    before = {option: _get(option) for option in (DUMPABLE, SUBREAPER)}
    set_process(DUMPABLE, 0)
    set_process(SUBREAPER, 1)
    try:
        yield
    finally:
        for option, value in before.items():
            set_process(option, value)


def _get(option: int) -> int:
    if option == DUMPABLE:
        return int(_libc.prctl(GET[option], 0, 0, 0, 0))
    value = ctypes.c_int()
    _libc.prctl(GET[option], ctypes.byref(value), 0, 0, 0)
    return value.value


def confine() -> list[str]:
    """Take rights from this process for good, and from what it starts; the names of what held."""
    held = []
    with contextlib.suppress(OSError):  # where memory runs out, the solution is in the way first
        Path("/proc/self/oom_score_adj").write_text("1000")
    if set_process(NO_NEW_PRIVS, 1):
        held.append("no new privileges")
    if _drop_capabilities():
        held.append("no capabilities")
    return held + _landlock()


def _drop_capabilities() -> bool:
    for number in range(64):
        if not KEPT_CAPABILITIES >> number & 1:
            set_process(DROP_CAPABILITY, number)
    header = struct.pack("Ii", 0x20080522, 0)
    now = ctypes.create_string_buffer(24)
    if _libc.capget(header, now):
        return False
    words = [
        w & (KEPT_CAPABILITIES if i < 3 else 0) for i, w in enumerate(struct.unpack("6I", now))
    ]
    return not _libc.capset(header, struct.pack("6I", *words))


def _landlock() -> list[str]:
    """A domain of its own: processes outside cannot be traced, nor their memory and files reached
    through /proc, by root neither; from Linux 6.12 they cannot be sent signals."""
    version = _libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 2:  # the first one forbids to move files between folders
        return []
    attribute = struct.pack("QQQ", MAKE_BLOCK | REFER, 0, SCOPES if version >= 6 else 0)
    size = ctypes.c_size_t(24 if version >= 6 else 8)
    ruleset = _libc.syscall(CREATE_RULESET, attribute, size, 0)
    root = os.open("/", os.O_PATH)
    rule = struct.pack("=Qi", REFER, root)
    added = ruleset >= 0 and _libc.syscall(ADD_RULE, ruleset, 1, rule, 0) == 0
    held = added and _libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(root)
    if ruleset >= 0:
        os.close(ruleset)
    if not held:
        return []
    return ["no access to other processes", *(["no signals"] if version >= 6 else [])]


def descendants(ancestor: int) -> list[tuple[int, str]]:
    """Process numbers and names of everything that descends from ``ancestor``, without itself."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            head, _, tail = Path("/proc", entry, "stat").read_bytes().rpartition(b")")
            state, parent = tail.split()[:2]
            if state not in (b"Z", b"X"):
                name = head.partition(b"(")[2].decode(errors="replace")
                children.setdefault(int(parent), []).append((int(entry), name))
    found, left = [], [ancestor]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += [pid for pid, _ in below]
    return found


def sweep(spared: frozenset[int] = frozenset()) -> bool:
    """Kill all descendants but the ``spared`` ones, and reap; whether none is left."""
    end = time.monotonic() + SWEEP_SECONDS
    while True:
        below = [pid for pid, _ in descendants(os.getpid()) if pid not in spared]
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not spared:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if not below:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.002)


class Group:
    """A control group (version 2) of its own, where one can be made: all of it dies at once."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            with contextlib.suppress(OSError, StopIteration):
                lines = Path("/proc/self/cgroup").read_text().splitlines()
                here = next(line[3:] for line in lines if line.startswith("0::"))
                folder = Path(f"{mount}{here}", f"epinorm-judge-{os.getpid()}")
                if (folder.parent / "cgroup.procs").exists():
                    folder.mkdir()
                    self.folder = folder
                    return

    def enter(self) -> list[str]:
        """Put this process into the group."""
        with contextlib.suppress(OSError):
            if self.folder and (self.folder / "cgroup.kill").exists():
                (self.folder / "cgroup.procs").write_text("0")
                return ["a control group"]
        return []

    def end(self) -> None:
        """Kill what is in it."""
        if self.folder:
            with contextlib.suppress(OSError):
                (self.folder / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Remove the empty group."""
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _start(command: list[str], status: int, group: Group, held: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        held = [*held, *group.enter(), *confine()]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.write(status, json.dumps({"held": held, "worker": os.getpid()}).encode() + b"\n")
        os.execv(command[0], command)
    finally:
        os._exit(127)


def main(life: int, status: int, command: list[str]) -> None:
    """Guard one command until it ends or the judge does."""
    held = ["orphans"] if set_process(SUBREAPER, 1) else []
    set_process(DUMPABLE, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the judge's end ends it, and what it guards
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    os.set_inheritable(life, False)
    os.set_inheritable(status, False)
    group = Group()
    child = _start(command, status, group, held)
    code = None
    while code is None:
        if life in select.select([life, awake], [], [])[0]:
            break
        os.read(awake, 4096)
        with contextlib.suppress(ChildProcessError):
            while code is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
    group.end()
    left = not sweep()
    group.remove()
    with contextlib.suppress(OSError):
        os.write(status, json.dumps({"ended": code, "left": left}).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
