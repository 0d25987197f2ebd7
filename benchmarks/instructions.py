"""Instructions that a call of a small model takes on the host, counted without a GPU.

    python benchmarks/instructions.py [CASE ...] [--out FOLDER]

Times of a machine that others use say little; valgrind's counts are those of the last run, to a per
cent or two. Each case is called N and 2 N times under callgrind, and the difference divided by N.
``fused``: benchmarks/host.py's kb62_v0 in bf16 on the imaginary H200 of tests/imaginary.py, by
all that a user's call passes: nn.Module, TorchDynamo, guards, the graph's code, native code.
``left``: a norm in front of a Linear, where nothing is gained, over eager's own. Forward passes
without gradients. Not covered: the driver's launch, CUDA's allocator, waits for memory.

Needs valgrind with its headers and g++. Rows go to benchmarks/results/instructions.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import gc
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import epinorm
from epinorm.backends import unpromised
from epinorm.backends.cuda.runtime import driver, replay
from epinorm.backends.cuda.runtime.native import settle
from epinorm.tools.results import commit, put_values, today
from host import SHAPES
from imaginary import imaginary_h200

ROOT = Path(__file__).resolve().parents[1]
CALLS, WARM_UP = 50, 30
WITHIN = "EPINORM_COUNTER"
HELPER = """#include <valgrind/callgrind.h>
extern "C" void start() { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
extern "C" void stop(const char* name) {
  CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS_AT(name);
}
extern "C" int nothing() { return 0; }
"""
Case = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*MAKERS], metavar="CASE")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/instructions")
    given = parser.parse_args()
    if helper := os.environ.get(WITHIN):
        count(given.cases, ctypes.PyDLL(helper))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = counted(given.cases, Path(folder))
    eager = found.pop("eager", 0)
    for case, instructions in found.items():
        instructions -= eager if case == "left" else 0
        row = {"case": case, "instructions": instructions, "torch": torch.__version__}
        row |= {"python": sys.version.split()[0], "commit": commit(), "date": today()}
        print(json.dumps(row))
        put_values(given.out / "callgrind.json", row, ("case", "torch"))


def counted(cases: list[str], folder: Path) -> dict[str, int]:
    """Instructions of a call by what was counted."""
    helper = folder / "helper.so"
    (folder / "helper.cpp").write_text(HELPER)
    build = ["g++", "-O1", "-shared", "-fPIC", str(folder / "helper.cpp"), "-o", str(helper)]
    subprocess.run(build, check=True)
    environment = os.environ | {WITHIN: str(helper), "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__, *cases]
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder}/out",
    ]
    subprocess.run(command, env=environment, check=True)  # what is compiled is on disk then
    subprocess.run([*valgrind, *command], env=environment, check=True)
    found: dict[str, dict[int, int]] = {}
    for part in folder.glob("out.*"):
        text = part.read_text()
        if named := re.search(r"Client Request: (\w+):(\d+)$", text, re.M):
            total = re.search(r"^totals: (\d+)", text, re.M)
            found.setdefault(named[1], {})[int(named[2])] = int(total[1]) if total else 0
    return {name: (c[2 * CALLS] - c[CALLS]) // CALLS for name, c in found.items()}


def count(cases: list[str], helper: ctypes.PyDLL) -> None:
    """Call each case among instructions that are counted, if valgrind runs this."""
    torch.set_num_threads(1)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for name, run in (named for case in cases for named in MAKERS[case](stack, helper)):
            for _ in range(WARM_UP):
                run()
            gc.collect()
            gc.disable()
            for calls in (CALLS, 2 * CALLS):
                helper.start()
                for _ in range(calls):
                    run()
                helper.stop(f"{name}:{calls}".encode())
            gc.enable()


def fused(stack: contextlib.ExitStack, helper: ctypes.PyDLL) -> Iterator[tuple[str, Case]]:
    stack.enter_context(imaginary_h200())
    nothing = ctypes.CDLL(helper._name).nothing
    names = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", *driver.GRAPHS)
    api = SimpleNamespace(**dict.fromkeys(names, nothing))
    device, stream = itertools.repeat(0).__next__, (5,).__getitem__  # in C, as PyTorch's are
    for target, name, value in (
        (replay, "driver", lambda: api),
        (unpromised, "current_device", device),
        (unpromised, "current_stream", stream),
    ):
        stack.enter_context(mock.patch.object(target, name, value))
    settle()
    m, k, n, block = SHAPES["kb62_v0"]
    model, x = nn.Sequential(*block(k, n)).bfloat16(), torch.randn(m, k).bfloat16()
    fused = epinorm.fuse(model)
    for _ in range(WARM_UP):
        fused(x)
    yield "fused", lambda: fused(x)


def left(*_: Any) -> Iterator[tuple[str, Case]]:
    _, k, n, block = SHAPES["norm_first_512"]
    model, x = nn.Sequential(*block(k, n)), torch.randn(1, k)
    fused = epinorm.fuse(copy.deepcopy(model))
    yield "eager", lambda: model(x)
    yield "left", lambda: fused(x)


MAKERS = {"fused": fused, "left": left}


if __name__ == "__main__":
    main()
