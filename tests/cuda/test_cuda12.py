"""CUDA 12's NVRTC takes the kernels, too: it reads some C++ otherwise than CUDA 13's."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.runtime.jit import KernelSource

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from problems import problem_of

from imaginary import CASES, KINDS, imaginary_h200, launches

pytestmark = pytest.mark.slow


OTHER_NVRTC = Path(__file__).with_name("other_nvrtc.py")


@pytest.fixture(scope="module")
def nvrtc() -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = [lib for each in folders for lib in Path(each).glob("cuda_nvrtc/lib/libnvrtc.so.12")]
    if not found:
        pytest.skip("needs the package nvidia-cuda-nvrtc-cu12 (requirements-dev.txt)")
    return str(found[0])


def log_of(nvrtc: str, source: KernelSource) -> tuple[int, str]:
    """NVRTC's verdict, 0 for none, and what it and ptxas say."""
    command = [sys.executable, str(OTHER_NVRTC), nvrtc, source.arch]
    done = subprocess.run(command, input=source.text, capture_output=True, text=True, check=True)
    verdict, log = done.stdout.split("\n", 1)
    return int(verdict), log


@pytest.mark.parametrize("kind", ["bf16", "high", "highest"])
@pytest.mark.parametrize("name", ["wide_sum", "operands", "dropout_768", "groups_12", "batch_norm"])
def test_kernels_of_a_training_step(nvrtc, name, kind):
    """And that ptxas makes no product wait for the one before it."""
    dtype, precision = KINDS[kind]
    torch.set_float32_matmul_precision(precision)
    with imaginary_h200() as api:
        launches(api, *CASES[name], dtype, True)
    sources = {source.text: source for source in api.sources}
    assert len(sources) > 1
    for source in sources.values():
        verdict, log = log_of(nvrtc, source)
        said = re.findall("error: .*|C75..", log)
        assert (verdict, said) == (0, []), source.entry


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", ["add_residual|layer_norm", "layer_norm"])
def test_rows_in_halves_keep_their_registers(nvrtc, chain, training):
    """But for six, as by CUDA 13's (test_hopper_compile.py)."""
    problem = problem_of(16384, 768, 768, 1, "high", training, chain)
    tiles = hopper_plan.candidates(problem)
    (tile,) = (tile for tile in tiles if tile.in_halves and not tile.converts)
    source = linear_norm_source(hopper_plan.instance_for(problem, tile))
    verdict, log = log_of(nvrtc, source)
    found = re.search(r"(\d+) bytes stack frame", log)
    assert verdict == 0
    assert found is not None
    assert int(found[1]) <= 24
