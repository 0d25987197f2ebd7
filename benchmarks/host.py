"""Host time of small models, from call to call in a loop, and what a large one's first call takes.

    python benchmarks/host.py [NAME ...] [--competitors eager fuse] [--out FOLDER]

Models so small that the host decides: forward without gradients, and a training step (forward and
backward). All ways of a model are interleaved; a row has medians of each one's faster half in µs a
call, and the strategies that ours took. ``bert_base``: seconds of the first call of a new process
behind one of eager's, without anything in epinorm's cache and with what that left there. Rows go to
benchmarks/results/host, those of ways that compute what they should. Several such processes may
run side by side: one at a time measures, while the others compile.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import epinorm
from epinorm.capture.backend import compile_graph
from epinorm.tools.accuracy import allowed_error, relative_error
from epinorm.tools.models import SETTINGS, load_subject
from epinorm.tools.results import commit, device_name, device_slug, put_values, rounded, today

ROUNDS, CALLS, WARM_UP = 15, 100, 8
ROOT = Path(__file__).resolve().parents[1]
TURN = Path(tempfile.gettempdir()) / "epinorm-host.turn"
KEY = ("name", "blocks", "setting", "pass", "gpu")


Block = Callable[[int, int], list[nn.Module]]
"""(features in, features out) → the layers of a block."""


def _with_groups(count: int) -> Block:
    return lambda k, n: [nn.Linear(k, n), nn.GroupNorm(count, n), nn.LeakyReLU()]


# name: rows, features in and out (equal for several blocks), and a block's layers
SHAPES: dict[str, tuple[int, int, int, Block]] = {
    "blocks_512": (1024, 512, 512, _with_groups(32)),
    "blocks_512_layer_norm": (
        *(1024, 512, 512),
        lambda k, n: [nn.Linear(k, n), nn.LayerNorm(n), nn.LeakyReLU()],
    ),
    "blocks_64": (32, 64, 64, _with_groups(4)),
    "kb62_v0": (128, 512, 256, _with_groups(8)),
    # Nothing is gained in bf16, in one block of these, nor in several Linears without a norm.
    "norm_first_512": (
        *(1024, 512, 512),
        lambda k, n: [nn.LayerNorm(k), nn.Linear(k, n), nn.GELU()],
    ),
    "linears_512": (1024, 512, 512, lambda k, n: [nn.Linear(k, n), nn.GELU()]),
}
FIRST = "bert_base"
PASSES = ("forward", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*SHAPES, FIRST], metavar="NAME")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--settings", nargs="+", default=["bf16", "highest"], choices=SETTINGS)
    parser.add_argument("--competitors", nargs="+", default=[*_ways(nn.Identity())])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "host")
    parser.add_argument("--first-call", choices=PASSES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.first_call:
        print(json.dumps(first_call(given.settings[0], given.first_call, device)))
        return
    facts = {"gpu": device_name(device), "torch": torch.__version__, "commit": commit()}
    for name in given.names:
        for setting in given.settings:
            made = (
                first_calls(setting)
                if name == FIRST
                else loops(name, setting, given.blocks, device, given.competitors)
            )
            for row in made:
                row |= facts | {"date": today()}
                print(json.dumps(row), flush=True)
                with _turn():
                    put_values(given.out / f"{device_slug(row['gpu'])}.json", rounded(row), KEY)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    with TURN.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ways(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """How to make each competitor of a model."""

    def compiled(**how: Any) -> Callable[[], Any]:
        return lambda: torch.compile(copy.deepcopy(model), **how)

    return {
        "eager": lambda: model,
        "fuse": lambda: epinorm.fuse(copy.deepcopy(model)),
        "inductor": compiled(),
        "backend": compiled(backend=compile_graph),
        "inductor_graphs": compiled(mode="reduce-overhead"),
        "backend_graphs": compiled(backend=compile_graph, mode="reduce-overhead"),
    }


def loops(
    name: str, setting: str, counts: list[int], device: torch.device, competitors: list[str]
) -> Iterator[dict[str, Any]]:
    """A row for each number of blocks and each pass."""
    m, k, n, block = SHAPES[name]
    how = SETTINGS[setting]
    for count in counts if k == n else [1]:
        torch._dynamo.reset()
        layers = [layer for _ in range(count) for layer in block(k, n)]
        model = nn.Sequential(*layers).to(device, how.dtype)
        x, dy = (torch.randn(m, size, device=device, dtype=how.dtype) for size in (k, n))
        ways = {w: make() for w, make in _ways(model).items() if w in competitors}
        exact = copy.deepcopy(model).double()(x.double())
        with torch.no_grad():
            error = {w: relative_error(run(x), exact) for w, run in ways.items()}
        least = allowed_error(relative_error(model(x), exact), how.dtype)
        ways = {w: run for w, run in ways.items() if error[w] <= 1.2 * count * least}

        def forward(run: Callable[..., Any], x: torch.Tensor = x) -> Callable[[], Any]:
            return torch.no_grad()(lambda: run(x))

        def step(
            run: Callable[..., Any], x: torch.Tensor = x, dy: torch.Tensor = dy
        ) -> Callable[[], Any]:
            return lambda: run(x).backward(dy)

        for what, way in zip(PASSES, (forward, step), strict=True):
            times = wall_times({w: way(run) for w, run in ways.items()}, device)
            facts = {"name": name, "blocks": count, "setting": setting, "pass": what}
            yield facts | {"us": times, "strategies": _strategies(ways.get("fuse"))}


def _strategies(fused: Any) -> list[str]:
    if fused is None:
        return []
    told = epinorm.explain(fused)
    return sorted({row.strategy for row in (*told.rows, *told.linears)})


def wall_times(runs: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Medians of each run's faster half, in µs a call."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    if device.type == "cuda":
        from epinorm.backends.cuda.runtime.native import settle

        settle()
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    with _turn():
        for _ in range(ROUNDS):
            for name, run in runs.items():
                _synchronize(device)
                start = time.perf_counter()
                for _ in range(CALLS):
                    run()
                _synchronize(device)
                found[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: median(sorted(times)[: ROUNDS // 2]) for name, times in found.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def first_calls(setting: str) -> list[dict[str, Any]]:
    """A row for each pass: seconds with an empty cache, and with what that left there."""

    def both(what: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--settings", setting, "--first-call", what]
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"EPINORM_CACHE_DIR": cache}
            found = {}
            for state in ("cold", "warm"):
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
                found[state] = json.loads(done.stdout.splitlines()[-1])
                print(setting, what, state, found[state], file=sys.stderr, flush=True)
        return {"name": FIRST, "blocks": 12, "setting": setting, "pass": what, "seconds": found}

    with ThreadPoolExecutor() as pool:
        return list(pool.map(both, PASSES))


def first_call(setting: str, what: str, device: torch.device) -> dict[str, float]:
    """Seconds of eager's second call, and of the fused model's first and second."""
    how = SETTINGS[setting]
    torch.set_float32_matmul_precision("highest" if how.precision == "native" else how.precision)
    model, inputs = load_subject(FIRST, small=device.type == "cpu").make(how, device)

    def run() -> float:
        start = time.perf_counter()
        with torch.set_grad_enabled(what == "training"):
            y = how.call(model, *inputs)
            if what == "training":
                y.backward(torch.ones_like(y))
        _synchronize(device)
        return time.perf_counter() - start

    run()
    eager = run()
    epinorm.fuse(model)
    return {"eager": eager, "first": run(), "second": run()}


if __name__ == "__main__":
    main()
