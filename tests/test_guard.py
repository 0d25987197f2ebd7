"""What a judge's guard holds by itself, where the kernel has no Landlock: no torch takes part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from epinorm.tools.judge import guard

PYTHON = [sys.executable, "-I", "-S", "-c"]
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

REACHES = """
import contextlib, os
above = os.getppid()
with open(f"/proc/{above}/stat") as file:
    parents = {"guard": above, "judge": int(file.read().rpartition(")")[2].split()[1])}
for name, pid in parents.items():
    with contextlib.suppress(OSError):
        os.close(os.open(f"/proc/{pid}/mem", os.O_WRONLY))
        print(name, flush=True)
"""

JUDGE = """
import os, subprocess, sys
text, command = sys.argv[1], sys.argv[2:]
names = {"__name__": "guard"}
exec(text, names)
names["confine"]()  # root could reach whatever it likes
with names["alone"]():
    (life, _end), (_said, status) = os.pipe(), os.pipe()
    guard = [sys.executable, "-I", "-S", "-c", text, str(life), str(status), *command]
    subprocess.run(guard, pass_fds=(life, status))
"""


def reached(text: str) -> list[str]:
    """Whose memory a guarded process opens; judge, guard and process have the same rights."""
    command = [*PYTHON, JUDGE, text, *PYTHON, REACHES]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_neither_judge_nor_guard_is_dumpable() -> None:
    text = Path(guard.__file__).read_text()
    without_landlock = text.replace("return held + _landlock()", "return held")
    assert without_landlock != text
    assert reached(without_landlock) == []
    if YAMA.exists() and YAMA.read_text().strip() != "0":
        pytest.skip("this kernel lets no process reach its parent at all")
    dumpable = without_landlock.replace("set_process(DUMPABLE, 0)", "set_process(DUMPABLE, 1)")
    assert reached(dumpable) == ["guard", "judge"]


LEAVES = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_control_group_alone_leaves_nothing() -> None:
    """By a guard that sends no signals itself, and waits for what it guards as long as always."""
    text = (
        Path(guard.__file__).read_text().replace("os.kill(pid, signal.SIGKILL)", "os.kill(pid, 0)")
    )
    assert "SIGKILL" not in text
    (life, end), (said, status) = os.pipe(), os.pipe()
    command = [*PYTHON, text, str(life), str(status), *PYTHON, LEAVES]
    guarding = subprocess.Popen(command, pass_fds=(life, status), stdout=subprocess.PIPE)
    assert guarding.stdout is not None
    left = int(guarding.stdout.readline())
    for number in (life, end, status):
        os.close(number)
    guarding.wait(20)
    guarding.stdout.close()
    with os.fdopen(said) as file:
        first, last = map(json.loads, file)
    if last["left"]:
        for pid in (left, first["worker"]):
            os.kill(pid, signal.SIGKILL)
    if "a control group" not in first["held"]:
        pytest.skip("no control group of version 2 can be made here")
    assert not last["left"]
