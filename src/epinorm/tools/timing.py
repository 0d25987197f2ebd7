"""How time and memory are measured: all competitors interleaved in one process, medians.

On CUDA a run is timed by events, after 256 MB have been written so that the L2 cache holds nothing
of the inputs; on the CPU by ``time.perf_counter_ns``. Every round runs each competitor once,
in another order each time, so that drift of clocks and temperature, and what runs before, meet all
alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from epinorm.tools.progress import Progress, silent

FLUSH_BYTES = 256 * 1024 * 1024
"""Written before each timed run: several times the L2 cache of any GPU so far (H200: 50 MB)."""

FIRST_WAIT_US = 200.0
LONGEST_WAIT_US = 20_000.0
CYCLES_PER_US = 2000
"""Of the clock that a waiting GPU counts: 2 GHz, which is as fast as they run."""


@dataclass(frozen=True)
class Settings:
    """How often to run. ``cpu_seconds`` bounds the timing of one row on the CPU, all competitors
    together; there, at least ``cpu_runs`` rounds run whatever they take."""

    runs: int = 30
    warmup: int = 5
    cpu_runs: int = 5
    cpu_seconds: float = 8.0
    wall_calls: int = 50
    wall_blocks: int = 5


DEFAULT_SETTINGS = Settings()


@dataclass(frozen=True)
class Runner:
    """One competitor: ``run`` is timed, ``prepare`` runs before it, outside the timed region."""

    run: Callable[[], object]
    prepare: Callable[[], None] = field(default=lambda: None)


def time_interleaved(
    runners: Mapping[str, Runner],
    device: torch.device,
    settings: Settings = DEFAULT_SETTINGS,
    progress: Progress = silent,
) -> dict[str, float]:
    """Median time in microseconds of each runner, all interleaved."""
    samples = sample_interleaved(runners, device, settings, progress)
    return {name: statistics.median(times) for name, times in samples.items()}


def sample_interleaved(
    runners: Mapping[str, Runner],
    device: torch.device,
    settings: Settings = DEFAULT_SETTINGS,
    progress: Progress = silent,
) -> dict[str, list[float]]:
    """Times in microseconds of each runner, all interleaved, one a round."""
    if device.type == "cuda":
        from epinorm.backends.cuda.runtime.native import settle  # the judge imports this file

        settle()
    for runner in runners.values():
        for _ in range(settings.warmup if device.type == "cuda" else 2):
            runner.prepare()
            runner.run()
    if device.type == "cuda":
        with torch.cuda.device(device):  # events and their stream belong to the current device
            return _time_cuda(runners, device, settings, progress)
    return _time_cpu(runners, settings, progress)


def _rounds(names: list[str], index: int) -> list[str]:
    """The order of round ``index``, the same in every run of the program. Shuffled, not rotated:
    what always follows a long run has its own host time hidden behind it."""
    return random.Random(index).sample(names, len(names))


def _time_cuda(
    runners: Mapping[str, Runner], device: torch.device, settings: Settings, progress: Progress
) -> dict[str, list[float]]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in runners}
    torch.cuda.synchronize(device)
    for index in range(settings.runs):
        for name in _rounds(list(runners), index):
            runners[name].prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            runners[name].run()
            end.record()
            pairs[name].append((start, end))
        # Once a round, so that the host's queue stays short and memory is given back in step.
        torch.cuda.synchronize(device)
        progress((index + 1) / settings.runs)
    return {n: [1000 * start.elapsed_time(end) for start, end in p] for n, p in pairs.items()}


def _time_cpu(
    runners: Mapping[str, Runner], settings: Settings, progress: Progress
) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in runners}
    began = time.perf_counter()
    for index in range(settings.runs):
        spent = time.perf_counter() - began
        if index >= settings.cpu_runs and spent > settings.cpu_seconds:
            break
        for name in _rounds(list(runners), index):
            runners[name].prepare()
            start = time.perf_counter_ns()
            runners[name].run()
            samples[name].append((time.perf_counter_ns() - start) / 1000)
        progress((index + 1) / settings.runs)
    progress(1.0)
    return samples


def gpu_times(
    runners: Mapping[str, Runner],
    device: torch.device,
    settings: Settings = DEFAULT_SETTINGS,
) -> dict[str, float | None]:
    """Median time on the GPU of one run in microseconds, as if the host took none.

    As ``time_interleaved`` on CUDA, but for a wait: the GPU is kept busy until the host has
    enqueued the whole run, so that kernels follow each other as fast as the GPU can start them.
    A run that was not all enqueued in time is repeated with a longer wait. None on a CPU, and for
    what is never enqueued in time, such as a run that waits for the GPU itself.
    """
    if device.type != "cuda":
        return {name: None for name in runners}
    samples: dict[str, list[float]] = {name: [] for name in runners}
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        waits = dict.fromkeys(runners, FIRST_WAIT_US)
        for index in range(settings.runs):
            for name in _rounds(list(runners), index):
                while waits[name] <= LONGEST_WAIT_US:
                    time_us = _gpu_time(runners[name], flush, waits[name])
                    if time_us is not None:
                        samples[name].append(time_us)
                        break
                    waits[name] *= 2
    return {
        name: statistics.median(times) if waits[name] <= LONGEST_WAIT_US else None
        for name, times in samples.items()
    }


def _gpu_time(runner: Runner, flush: torch.Tensor, wait_us: float) -> float | None:
    """One run's; None where the GPU went on before the run was enqueued."""
    runner.prepare()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    flush.zero_()
    torch.cuda._sleep(int(wait_us * CYCLES_PER_US))
    start.record()
    runner.run()
    end.record()
    in_time = not start.query()
    end.synchronize()
    return 1000 * start.elapsed_time(end) if in_time else None


def wall_times(
    runners: Mapping[str, Runner],
    device: torch.device,
    settings: Settings = DEFAULT_SETTINGS,
) -> dict[str, float | None]:
    """Host time of one call in microseconds: N calls in a loop with one synchronisation, over N.

    What a launch-bound caller waits for. Blocks of calls of all runners alternate; the median of
    the blocks is given. ``prepare`` runs inside the loop, as it would in a user's. None on a CPU,
    where a call's time is its wall time.
    """
    if device.type != "cuda":
        return {name: None for name in runners}
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(settings.wall_blocks):
        for name in _rounds(list(runners), index):
            runner = runners[name]
            torch.cuda.synchronize(device)
            start = time.perf_counter_ns()
            for _ in range(settings.wall_calls):
                runner.prepare()
                runner.run()
            torch.cuda.synchronize(device)
            elapsed = time.perf_counter_ns() - start
            samples[name].append(elapsed / 1000 / settings.wall_calls)
    return {name: statistics.median(times) for name, times in samples.items()}


def peak_memory_mb(runner: Runner, device: torch.device) -> float | None:
    """Most memory that one run holds beyond what was allocated before it, in 10^6 bytes.

    Parameters and inputs are there before; outputs, gradients and everything temporary count.
    None on a CPU.
    """
    if device.type != "cuda":
        return None
    runner.prepare()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = runner.run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    runner.prepare()
    return peak / 1e6


def workspace_mb(runner: Runner, device: torch.device) -> float | None:
    """What cuBLAS works in that PyTorch allocates for a run's first product and keeps, in 10^6
    bytes; beside ``peak_memory_mb``, where it is there before. None on a CPU."""
    if device.type != "cuda":
        return None
    torch._C._cuda_clearCublasWorkspaces()
    runner.prepare()
    runner.run()
    runner.prepare()
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return (held - torch.cuda.memory_allocated(device)) / 1e6
