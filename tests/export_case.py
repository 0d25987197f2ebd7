"""Exported files of the example, loaded, and what the compiler says about their kernels."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.tools.export.export import export

__all__ = ["EXAMPLE", "MODES", "check_kernels", "exported_of", "load"]

EXAMPLE = Path(__file__).parents[1] / "examples" / "matmul_groupnorm_leakyrelu_sum.py"
MODES = ("float32 highest", "float32 high", "bfloat16", "float16")

SHARED_BYTES = {
    (8, 0): 166912, (8, 6): 101376, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448,
    (12, 0): 101376,
}  # fmt: skip
"""Of a block, by compute capability: CUDA programming guide."""


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported_of(folder: Path, m: int, k: int, n: int) -> ModuleType:
    """The example with these sizes and 16 channels a group, with products of our own; as if built
    with CUDA 13."""
    problem, path = folder / "problem.py", folder / "model_new.py"
    text = EXAMPLE.read_text().replace("batch_size = 1024", f"batch_size = {m}")
    text = text.replace("input_size = 8192", f"input_size = {k}")
    text = text.replace("hidden_size = 8192", f"hidden_size = {n}").replace("512", str(n // 16))
    problem.write_text(text)
    path.write_text(export(problem, "own").text)
    exported = load(path, "sized_export")
    exported.CUDA_VERSION = (13, 0)
    return exported


def check_kernels(
    definitions: str,
    text: str,
    capability: tuple[int, int],
    shared_bytes: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Compile all kernels of an exported text: no spills, and shared memory is within the GPU's.

    shared_bytes: constants of the text that say how much dynamic shared memory a launch asks for,
    and what they must be. Returns how many kernels there are.
    """
    assert (definitions + text).isascii()
    limit = SHARED_BYTES[capability]
    assert all(size <= limit for size in shared_bytes.values())
    text = text.split("// ---- launches")[0]
    assert not re.search(r"@[A-Z]", text), "a mark is left"
    for name, size in shared_bytes.items():
        text += f'\nstatic_assert({name} == {size}, "as the library adds it up");'
    # Theirs are C++ names, one in each namespace.
    text += '\nextern "C" __global__ void nothing() {}\n'
    arch = "sm_90a" if capability == (9, 0) else "sm_{}{}".format(*capability)
    log = compiled(KernelSource("nothing", definitions + text, arch)).log
    used = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes (?:spill|stack frame)", log)
    assert len(spills) >= len(used) > 1, log
    assert not any(map(int, spills)), log
    static = max([0, *map(int, re.findall(r"(\d+) bytes smem", log))])
    guard = re.search(r"#define RESCUE_BYTES (\d+)", definitions)
    assert guard is None or int(guard[1]) + static <= limit
    return len(used) - 1
