"""Compiling without a GPU: figures, errors, options, and what the cache's key holds."""

import importlib.metadata
import logging
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from epinorm.backends import cache, memo
from epinorm.backends.cuda.runtime import device, jit
from epinorm.backends.cuda.runtime.jit import KernelSource, compile_cubin
from processes import imported_by

TEXT = """
extern "C" __global__ void other(float* y) { y[threadIdx.x] = 1.f; }
extern "C" __global__ void sum32(const float* __restrict__ x, float* __restrict__ y, int n) {
    __shared__ float values[64];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    values[threadIdx.x % 64] = i < n ? x[i] : 0.f;
    __syncthreads();
    if (i < n) y[i] = values[(threadIdx.x + 1) % 64] * 2.f;
}
"""
# 200 live values under a limit of 32 registers: they cannot but spill.
SPILLING = """
extern "C" __global__ void BOUNDS spills(const float* x, float* y) {
    float v[200];
    #pragma unroll
    for (int i = 0; i < 200; ++i) v[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 200; ++i) y[i * 32 + threadIdx.x] = v[i] * v[199 - i];
}
"""
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_figures_of_the_entry_are_reported(arch: str) -> None:
    result = compile_cubin(KernelSource("sum32", TEXT, arch))
    assert result.cubin.startswith(b"\x7fELF")
    assert 4 <= result.registers <= 64
    assert result.spill_bytes == 0
    assert result.stack_bytes == 0
    assert result.shared_bytes == 64 * 4
    other = compile_cubin(KernelSource("other", TEXT, arch))
    assert other.shared_bytes == 0
    assert other.registers > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_spills_are_reported(arch: str) -> None:
    bound = "__launch_bounds__(1024, 2)"  # 32 registers of each thread
    result = compile_cubin(KernelSource("spills", SPILLING.replace("BOUNDS", bound), arch))
    assert result.registers <= 32
    assert result.spill_bytes > 100
    assert result.stack_bytes > 100
    free = SPILLING.replace("BOUNDS", "")
    assert compile_cubin(KernelSource("spills", free, arch)).spill_bytes == 0


def test_a_log_without_figures_does_not_pass_for_no_spills() -> None:
    result = jit._read_log(KernelSource("k", "", "sm_80"), b"", "")
    assert (result.registers, result.spill_bytes, result.shared_bytes, result.stack_bytes) == (
        -1,
        -1,
        -1,
        -1,
    )


def test_an_error_carries_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match=r'compiling k for sm_90a failed(.|\n)*"missing" is und'):
        compile_cubin(KernelSource("k", 'extern "C" __global__ void k() { missing(); }', "sm_90a"))


def test_an_entry_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match='has no kernel absent: is it declared extern "C"'):
        compile_cubin(KernelSource("absent", TEXT, "sm_80"))


def test_what_a_first_call_waits_for_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    progress, source = jit.Progress(), KernelSource("sum32", TEXT, "sm_80")
    with caplog.at_level(logging.WARNING, logger="epinorm"):
        for seconds in (2.0, 0.5, 1.0, 2.0, 4.0):
            progress.add(source, seconds)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "3 in 4 s",
        "5 in 10 s",
    ]


def test_the_key_holds_all_that_changes_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = KernelSource("sum32", TEXT, "sm_80")
    variants = [
        base,
        replace(base, entry="other"),
        replace(base, text=TEXT + " "),
        replace(base, arch="sm_90a"),
        # The same characters, parted differently.
        replace(base, text=TEXT + "s", entry="um32"),
    ]
    keys = [jit.cache_key(variant) for variant in variants]
    assert jit.cache_key(replace(base)) == keys[0]
    version = importlib.metadata.version
    packages = (named.rpartition(" ")[0] for named in jit._versions())
    for package in [name for name in packages if name != "nvrtc"]:  # of no package

        def newer(name: str, package: str = package) -> str:
            return "99.0" if name == package else version(name)

        monkeypatch.setattr(importlib.metadata, "version", newer)
        memo.clear()
        keys.append(jit.cache_key(base))
    monkeypatch.setattr(importlib.metadata, "version", version)
    memo.clear()
    assert jit.cache_key(base) == keys[0]
    monkeypatch.setattr(cache, "FORMAT_VERSION", "next")
    keys.append(jit.cache_key(base))
    assert len(set(keys)) == len(keys)


def test_the_second_time_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path / "cache"))
    source = KernelSource("sum32", TEXT, "sm_90a")
    first = jit.compiled(source)

    def fail(source: KernelSource) -> None:
        raise AssertionError(f"compiled {source.entry} again")

    monkeypatch.setattr(jit, "compile_cubin", fail)
    assert jit.compiled(source) == first
    with pytest.raises(AssertionError, match="compiled other again"):
        jit.compiled(replace(source, entry="other"))


def test_threads_compile_side_by_side() -> None:
    results: dict[int, bytes] = {}

    def work(i: int) -> None:
        results[i] = compile_cubin(KernelSource("sum32", TEXT, ARCHITECTURES[i % 3])).cubin

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] == results[i + 3] for i in range(3)] == [True] * 3


@pytest.mark.slow
def test_importing_the_machinery_imports_no_compiler() -> None:
    assert imported_by("import epinorm.backends.cuda.runtime.jit", ["cuda"]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_machine_without_a_gpu_is_said() -> None:
    assert device.supported() == "the CUDA kernels need an NVIDIA GPU, but PyTorch sees none"
    assert "but the device is cpu" in str(device.supported(torch.device("cpu")))
    with pytest.raises(ValueError, match="expected a CUDA device, but got cpu"):
        device.device_index("cpu")


def test_the_architecture_of_a_capability() -> None:
    found = [device.arch_of_capability(*c) for c in [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]]
    assert found == ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"]


def test_a_gpu_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(device, "gpu_at", lambda index: device.Gpu((7, 5), 40, 65536, 65536))
    device._supported.cache_clear()
    assert device.supported(0) == (
        "the CUDA kernels need compute capability 8.0 or newer, but Tesla T4 has 7.5"
    )
    device._supported.cache_clear()


def test_the_compilers_version_is_its_packages_or_what_it_says_itself(monkeypatch):
    """Loading NVRTC to ask it takes most of a start from the cache."""
    installed = {"nvidia-cuda-nvrtc": "13.0.88", "cuda-core": "1.2", "cuda-bindings": "13.0.3"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    memo.clear()
    assert jit._versions() == ("nvidia-cuda-nvrtc 13.0.88", "cuda-core 1.2", "cuda-bindings 13.0.3")
    del installed["nvidia-cuda-nvrtc"]
    memo.clear()
    nvrtc, *wrappers = jit._versions()
    assert re.fullmatch(r"nvrtc \d+\.\d+", nvrtc)
    assert wrappers == ["cuda-core 1.2", "cuda-bindings 13.0.3"]
    installed |= {"nvidia-cuda-nvrtc": f"{nvrtc[6:]}.88", "nvidia-cuda-nvrtc-cu12": "12.0.1"}
    memo.clear()  # both: cuda-bindings takes the one that the process has loaded
    assert jit._versions() == (f"nvidia-cuda-nvrtc {nvrtc[6:]}.88", *wrappers)
    monkeypatch.undo()
    memo.clear()
