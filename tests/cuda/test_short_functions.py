"""chain_short.cuh's functions on the host, with exact ones in the place of the hardware's two, and
beside them what fp32 takes: all numbers of 16 bits. On a GPU: tests/gpu/test_rounding.py."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import problems
import pytest
import torch
from test_codegen import HOST
from test_norm_kernels_compile import problem_of

from epinorm.backends.cuda.text.chain_text import chain_text, stored_type
from epinorm.backends.cuda.text.instance import Instance, epilogue_prelude
from epinorm.backends.cuda.text.source import read_kernel
from epinorm.chain import Chain

sys.path.insert(0, str(Path(__file__).parents[1]))

from activation_errors import NAMES, SMALL, check_as_accurate, eagers, numbers

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

HARDWARE = """
static float to_normal(double x) { return std::abs(x) < 0x1p-126 ? 0.0f : float(x); }
static float exp2_to_normal(float x) { return to_normal(std::exp2(double(x))); }
static float reciprocal_to_normal(float x) { return to_normal(1 / double(x)); }
"""
RUN = """
extern "C" void NAME(long n, const float* x, float* y, float* dx) {
  for (long i = 0; i < n; ++i) {
    float t[chain::kSlots], dt[chain::kSlots];
    const chain::Constants<float> c = {CONSTANTS};
    y[i] = chain::post_apply<float>(c, x[i], t);
    dx[i] = chain::post_backward<float>(c, 1.0f, x[i], t, dt);
  }
}
"""


def host_text(name: str, stored: str | None) -> str:
    chain = Chain.parse(f"layer_norm|{name}")
    text = chain_text(chain, stored)
    for header in ("chain", "chain_functions", "chain_drops"):
        text = text.replace(read_kernel(f"common/{header}.cuh"), "")
    pattern = r"EPINORM_FUNCTION float \w+_to_normal\(float x\) {\n  float y;\n  asm.*\n.*\n}\n"
    text, replaced = re.subn(pattern, "", text)
    assert replaced == 2 * (stored is not None)
    constants = ", ".join(f"{c}f" for c in chain.arguments)
    run = RUN.replace("NAME", f"{name}_{stored}").replace("CONSTANTS", constants)
    return f"namespace of_{name}_{stored} {{\n{text}{run}}}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("short")
    texts = [host_text(name, stored) for name in NAMES for stored in (None, *DTYPES.values())]
    (folder / "all.cpp").write_text(HOST + HARDWARE + "".join(texts))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "all.cpp", "-o", "all.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_numbers_are_as_accurate_as_eagers(
    name: str, dtype: torch.dtype, library: ctypes.CDLL
) -> None:
    x = numbers(dtype)

    def run(stored: str | None) -> list[torch.Tensor]:
        wide = x.float()
        found = [torch.empty_like(wide) for _ in range(2)]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (wide, *found)]
        getattr(library, f"{name}_{stored}")(ctypes.c_long(len(x)), *pointers)
        return [y.to(dtype) for y in found]

    # What fp32 takes is as PyTorch has it on a GPU, NaN and infinities too.
    for one in zip(run(DTYPES[dtype]), run(None), eagers(name, x.double()), SMALL, strict=True):
        check_as_accurate(*one)


@pytest.mark.parametrize("kind,found", [("high", True), ("highest", False), ("bfloat16", True)])
def test_an_epilogue_at_high_takes_those_of_bf16(kind: str, found: bool) -> None:
    """They have all of fp32's range, and are far more accurate than its products."""
    problem = problems.problem_of(kind=kind, chain="group_norm({groups})|gelu")
    text = epilogue_prelude(Instance(problem, None, kind != "bfloat16"))
    assert ("EPINORM_FOR(normal_cdf, bf16)(x)" in text) == found


def test_all_must_be_stored_in_16_bits() -> None:
    for dtype, name in DTYPES.items():
        assert stored_type(problem_of(16, dtype, "layer_norm|gelu")) == name
        assert stored_type(problem_of(16, dtype, "layer_norm|gelu", autocast=True)) is None
    assert stored_type(problem_of(16, torch.float32, "layer_norm|gelu")) is None
