"""What of a run's time is the GPU's, and what the host's."""

from __future__ import annotations

import time

import torch

from epinorm.tools.timing import CYCLES_PER_US, Runner, Settings, gpu_times, wall_times

DEVICE = torch.device("cuda")
SETTINGS = Settings(runs=5, wall_calls=5, wall_blocks=3)


def busy(microseconds: float) -> None:
    torch.cuda._sleep(int(microseconds * CYCLES_PER_US))


def test_the_hosts_time_is_no_time_of_the_gpu() -> None:
    def slow_host() -> None:
        busy(50)
        time.sleep(1e-3)
        busy(50)

    runners = {"both": Runner(slow_host), "gpu": Runner(lambda: (busy(50), busy(50)))}
    on_gpu, wall = (f(runners, DEVICE, SETTINGS) for f in (gpu_times, wall_times))
    assert 100 <= on_gpu["gpu"] < 300  # the clock may be slower than what busy counts with
    assert abs(on_gpu["both"] - on_gpu["gpu"]) < 20
    assert wall["both"] > 1000


def test_a_run_that_waits_for_the_gpu_has_no_time_of_its_own() -> None:
    runner = Runner(lambda: (busy(10), torch.cuda.synchronize()))
    assert gpu_times({"a": runner}, DEVICE, Settings(runs=1)) == {"a": None}
