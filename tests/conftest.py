"""What every test shares: markers, a GPU check, seeds, and caches that stay inside the test run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from epinorm.backends import cpu

GPU_TESTS = Path(__file__).parent / "gpu"

# Under pytest-xdist each worker would otherwise start as many threads as there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu, and skip what is marked where there is no GPU."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep compiled kernels out of the user's cache folder: one folder for the test run, which
    pytest-xdist's workers share, so that each kernel is compiled once.

    A folder named by EPINORM_CACHE_DIR is used as it is, so that repeated runs can start warm.
    """
    if named := os.environ.get("EPINORM_CACHE_DIR"):
        yield Path(named)
        return
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "epinorm-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    os.environ["EPINORM_CACHE_DIR"] = str(folder)
    yield folder
    del os.environ["EPINORM_CACHE_DIR"]


@pytest.fixture(scope="session", autouse=True)
def small_calls() -> Iterator[None]:
    """Let `auto` take chains on the CPU that are too small to gain: tests compute little."""
    with mock.patch.multiple(cpu, LEAST_VALUES=0, LEAST_VALUES_TRAINING=0):
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, alone or in the suite."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what TorchDynamo captured and counted, before a test and after it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def pytorch_settings() -> Iterator[None]:
    """Undo what a test changes in PyTorch's process-wide settings."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    # Both interfaces for fp32 products, the old one first: it also sets the new one, and reading it
    # raises while the two disagree. "none" is how a process starts: nothing was asked for.
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a chain went the short way (`epinorm.operator.dispatch`)."""
    from epinorm.operator.dispatch import Caller
    from epinorm.operator.native_calls import NativeCalls

    ways: list[bool] = []
    again, find = Caller.again, NativeCalls.find

    def found(calls: NativeCalls, tensors: Any) -> torch.Tensor | None:
        y = find(calls, tensors)
        if y is not None:
            ways.append(True)
        return y

    def noted(caller: Caller, *given: Any) -> torch.Tensor | None:
        y = again(caller, *given)
        ways.append(y is not None)
        return y

    monkeypatch.setattr(Caller, "again", noted)
    monkeypatch.setattr(NativeCalls, "find", found)
    return ways
