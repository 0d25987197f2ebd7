"""What every test shares: markers, a GPU check, seeds, and caches that stay inside the test run."""

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# Threads of OpenMP that wait would spin, here and in the processes that tests start: others use
# the cores. It is read as PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from epinorm.backends import cpu, memo
from epinorm.backends.cpu import build

GPU_TESTS = Path(__file__).parent / "gpu"

# Under pytest-xdist each worker would otherwise start as many threads as there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Inductor would start a pool of processes that each import PyTorch, for a handful of files, compile
# seven programs to see which vector instructions there are, and all PyTorch's headers beforehand;
# and optimise what only starts its kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")


gc.disable()
"""Until all is collected: imports leave no garbage, and a quarter of that time would seek it."""


def pytest_collection_finish() -> None:
    gc.enable()


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
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "epinorm-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPINORM_CACHE_DIR", str(folder))
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", str(base / "inductor")
        )  # else those of earlier runs
        if "CXX" not in os.environ and shutil.which("g++"):
            patch.setenv("CXX", _remembering_compiler(base))
        yield folder


REMEMBERING = """#!/bin/sh
case " $* " in *" -o kernel.so "*) ;; *) exec g++ "$@";; esac
made={folder}/$({{ cat *.h *.cpp; echo "$@"; }} 2>/dev/null | sha256sum | cut -c1-64)
command -v flock >/dev/null && exec 9>$made.lock && flock 9
[ -e $made ] || {{ g++ "$@" && cp kernel.so $made.$$ && mv $made.$$ $made; }} && cp $made kernel.so
"""


def _remembering_compiler(base: Path) -> str:
    """g++ that compiles each text once in the test run, whatever cache folder asks for it."""
    folder = base / "compiled"
    folder.mkdir(exist_ok=True)
    path = folder / f"g++{os.getpid()}"
    path.write_text(REMEMBERING.format(folder=folder))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session", autouse=True)
def compiling_is_not_observed() -> Iterator[None]:
    """PyTorch times the guards of all that it compiles, with caches flushed: half of a small
    model's compilation; and pytest would keep what it notes for a log of its own."""
    from torch._dynamo import guards
    from torch._logging import _internal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        patch.setattr(_internal.trace_log, "handlers", [])
        patch.setattr(_internal.trace_log, "addHandler", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_calls() -> Iterator[None]:
    """Let `auto` take chains on the CPU that are too small to gain: tests compute little."""
    with mock.patch.multiple(cpu, LEAST_VALUES=0, LEAST_VALUES_TRAINING=0):
        yield


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_searched() -> None:
    """A full collection of garbage walks through all that is imported and cached, up to a second:
    half of the time of tests that ask for one. What there is before a module stays out of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, alone or in the suite."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():  # else torch.manual_seed notes where it was called, for later
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="module")
def kernels_that_compile_fast() -> Iterator[None]:
    """Where a chain's kernel for the CPU is to compute, not to be fast: to optimise it takes more
    than half of the compiler's time. Other modules get none of these kernels."""
    before = set(build._loaded)
    flags = tuple("-O0" if flag == "-O3" else flag for flag in build.KERNEL_FLAGS)
    with mock.patch.object(build, "KERNEL_FLAGS", flags):
        yield
    for source in set(build._loaded) - before:
        if "epinorm_describe" in source:  # the text of a kernel, neither the runner nor a module
            del build._loaded[source]
    memo.clear()


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
    torch.backends.cudnn.allow_tf32 = True


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
