"""Time whole models: every row is verified in a process of its own beside the others, timed alone.

    PYTHONPATH=src python3 benchmarks/models.py                   # all rows of README and docs
    PYTHONPATH=src python3 benchmarks/models.py bert_base:highest:training vit_b:high

A row is MODEL, MODEL:SETTING or MODEL:SETTING:PASS. A process holds OUT/.lock shared while it
compiles and verifies, and alone while it times, so that nothing runs beside what is timed. Rows go
into OUT/models/<gpu>.json. The exit code is 0 only if every row was verified and timed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import torch

from epinorm.tools.models import NAMED, SETTINGS, bench_model, load_subject
from epinorm.tools.results import device_name, device_slug, merge_rows

HERE = Path(__file__).resolve().parent
PASSES = ("forward", "training")
AT_ONCE = 12
"""Verifying takes memory: a training step of BERT-base in float64 15 GB."""
COMPILERS = 3
"""Of TorchInductor's, a row; and threads on the CPU."""
VERIFYING = 0.6
"""Of --seconds; a row that is not verified by then is left out, for the others' sake."""


def main() -> int:
    chosen = parser().parse_args()
    if chosen.child is not None:
        return measure(chosen.rows[0], chosen)
    rows = [row for text in chosen.rows or NAMED for row in rows_of(text)]
    chosen.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for first in range(0, len(rows), AT_ONCE):
        failed += run_beside(rows[first : first + AT_ONCE], chosen)
    return 1 if failed else 0


def rows_of(text: str) -> Iterable[str]:
    model, *rest = text.split(":")
    settings = rest[:1] or SETTINGS
    return [f"{model}:{s}:{p}" for s in settings for p in (rest[1:] or PASSES)]


def run_beside(rows: list[str], chosen: argparse.Namespace) -> int:
    """Run a process for each row; how many of them failed.

    Each starts with its share of the lock: none is timed before the last has come to verifying.
    """
    began = time.monotonic()
    env = dict(os.environ, OMP_NUM_THREADS=str(COMPILERS))
    env["TORCHINDUCTOR_COMPILE_THREADS"] = str(COMPILERS)
    command = [sys.executable, "-W", "ignore", *sys.argv]
    own = [argument for argument in command if argument not in chosen.rows]
    children = {}
    with contextlib.ExitStack() as opened:
        locks = [opened.enter_context((chosen.out / ".lock").open("w")).fileno() for _ in rows]
        for lock in locks:
            fcntl.flock(lock, fcntl.LOCK_SH)
        for row, lock in zip(rows, locks, strict=True):
            arguments = [*own, "--child", str(lock), row]
            children[row] = subprocess.Popen(arguments, env=env, pass_fds=[lock])
    try:
        if chosen.seconds:
            wait(children.values(), began + VERIFYING * chosen.seconds)
            for row, child in children.items():
                if child.poll() is None and not ready_file(chosen.out, child.pid).exists():
                    child.kill()
                    print(f"{row}: not verified in time", flush=True)
        wait(children.values(), began + chosen.seconds if chosen.seconds else None)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
            ready_file(chosen.out, child.pid).unlink(missing_ok=True)
    return sum(child.returncode != 0 for child in children.values())


def wait(children: Iterable[subprocess.Popen[bytes]], until: float | None) -> None:
    for child in children:
        try:
            child.wait(None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def ready_file(out: Path, pid: int) -> Path:
    return out / f".ready-{pid}"


def measure(text: str, chosen: argparse.Namespace) -> int:
    """Measure one row and put it into the results."""
    began = time.monotonic()
    model, setting, pass_ = text.split(":")
    device = torch.device(chosen.device)
    with open(chosen.child, "w") as lock:
        row = bench_model(
            load_subject(model, chosen.small),
            SETTINGS[setting],
            pass_ == "training",
            device,
            [name for name in chosen.competitors.split(",") if name],
            notify=lambda stage, share: reached(stage, text, began, lock, chosen.out),
        )
        merge_rows(chosen.out / "models" / f"{device_slug(device_name(device))}.json", [row])
    times = {name: getattr(row, f"{name}_ms") for name in ("eager", "compile", "fused", "backend")}
    shown = ", ".join(f"{name} {ms:.4g} ms" for name, ms in times.items() if ms is not None)
    print(f"{text}: {shown}; {row.reasons or ''} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0 if row.verified and row.fused_ms is not None else 1


def reached(stage: str, text: str, began: float, lock: IO[str], out: Path) -> None:
    """Wait until nobody verifies or times, before this row is timed."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # others need it
    ready = ready_file(out, os.getpid())
    if stage == "timing" and not ready.exists():
        print(f"{text}: verified after {time.monotonic() - began:.0f} s", flush=True)
        ready.touch()
        fcntl.flock(lock, fcntl.LOCK_EX)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("rows", nargs="*")
    made.add_argument("--competitors", default="compile,backend")
    made.add_argument("--out", type=Path, default=HERE / "results")
    made.add_argument("--seconds", type=float, help="end after so many")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--small", action="store_true", help="models for a CPU")
    made.add_argument("--child", type=int, help=argparse.SUPPRESS)  # its lock
    return made


if __name__ == "__main__":
    sys.exit(main())
