"""The generated text of a chain, compiled for the host and run, and compiled for the device."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.runtime.jit import KernelSource, compile_cubin
from epinorm.backends.cuda.text.chain_text import chain_text
from epinorm.backends.cuda.text.source import read_kernel
from epinorm.chain import Chain
from epinorm.chain.pointwise import DEFINITIONS

CHAINS = (
    "group_norm(4)",
    "gelu|mul_channel|add_residual|group_norm(4)|leaky_relu(0.01)|scale(2)|add_channel",
    "add_channel|mul_channel|silu|layer_norm|mul_channel|tanh|mul_channel|add_residual|softplus",
    "clamp(-0.5,inf)|rms_norm|clamp(-inf,0.75)|elu(1.5)|add(-0.25)",
)

HOST = r"""
#include <cmath>
#define EPINORM_FUNCTION inline
using std::exp; using std::expm1; using std::log1p; using std::tanh; using std::erf;
template <typename T> static T quotient(T a, T b) { return a / b; }
template <typename T> static T at_least(T x, T low) { return x < low ? low : x; }
template <typename T> static T at_most(T x, T high) { return x > high ? high : x; }
"""
EXPORTS = r"""
#define ROW(BODY) for (long long i = 0; i < n; ++i) { \
    T t[chain::kSlots], dt[chain::kSlots] = {}; \
    for (int k = 0; k < chain::kOperands; ++k) t[k] = operands[k * n + i]; \
    chain::Constants<T> c; \
    for (int k = 0; k < sizeof c / sizeof(T); ++k) c.of[k] = constants[k]; \
    BODY \
    for (int k = 0; k < chain::kOperands; ++k) d_operands[k * n + i] = dt[k]; }
using T = double;
extern "C" {
int operands() { return chain::kOperands; }
int is_channel(int i) { return chain::is_channel(i); }
int centred() { return chain::kCentred; }
double eps() { return chain::epsilon<double>(); }
double eps32() { return chain::epsilon<float>(); }
void pre(long long n, T* constants, T* x, T* g, T* operands, T* y, T* dx, T* d_operands) {
  ROW(y[i] = chain::pre_apply<T>(c, x[i], t);
      dx[i] = chain::pre_backward<T>(c, g[i], x[i], t, dt);)
}
void post(long long n, T* constants, T* x, T* g, T* operands, T* y, T* dx, T* d_operands) {
  ROW(y[i] = chain::post_apply<T>(c, x[i], t);
      dx[i] = chain::post_backward<T>(c, g[i], x[i], t, dt);)
}
}
"""


def host_library(chain: Chain, folder: Path) -> ctypes.CDLL:
    text = chain_text(chain)
    device_header = read_kernel("common/chain.cuh")
    assert text.startswith(device_header)
    text = text.removeprefix(device_header)
    # HOST has the host's; dropout has tests of its own.
    text = text.replace(read_kernel("common/chain_functions.cuh"), "")
    text = text.replace(read_kernel("common/chain_drops.cuh"), "")
    (folder / "chain.cpp").write_text(HOST + text + EXPORTS)
    library = folder / "chain.so"
    command = ["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-o", library, folder / "chain.cpp"]
    subprocess.run([str(part) for part in command], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.eps.restype = loaded.eps32.restype = ctypes.c_double
    return loaded


def run_stage(
    function: object,
    constants: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    operands: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs = (torch.empty_like(x), torch.empty_like(x), torch.zeros_like(operands))
    tensors = (constants, x, g, operands, *outputs)
    function(ctypes.c_longlong(x.numel()), *(ctypes.c_void_p(t.data_ptr()) for t in tensors))
    return outputs


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
@pytest.mark.parametrize("text", CHAINS)
def test_stages_equal_pytorch_and_its_gradients(text: str, tmp_path: Path) -> None:
    chain = Chain.parse(text)
    library = host_library(chain, tmp_path)
    kinds = chain.operand_kinds
    assert library.operands() == len(kinds)
    assert [bool(library.is_channel(i)) for i in range(len(kinds))] == [
        k == "channel" for k in kinds
    ]
    assert bool(library.centred()) == ("rms_norm" not in text)

    n = 4096
    first = 0
    constants = torch.tensor([*chain.arguments, 0.0], dtype=torch.float64)
    for name, operations in (("pre", chain.pre), ("post", chain.post)):
        x = (2 * torch.randn(n, dtype=torch.float64)).requires_grad_()
        g = torch.randn(n, dtype=torch.float64)
        operands = torch.randn(len(kinds), n, dtype=torch.float64)
        used = [operands[first + i].clone().requires_grad_() for i in range(count(operations))]
        y = x
        remaining = iter(used)
        for operation in operations:
            y = operation(y, next(remaining) if operation.operand else None)
        expected = torch.autograd.grad(y, (x, *used), g) if operations else (g,)

        actual_y, actual_dx, actual_dt = run_stage(
            getattr(library, name), constants, x.detach(), g, operands
        )
        torch.testing.assert_close(actual_y, y.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(actual_dx, expected[0], rtol=1e-11, atol=1e-12)
        for i in range(len(kinds)):
            mine = first <= i < first + len(used)
            truth = expected[1 + i - first] if mine else torch.zeros(n, dtype=torch.float64)
            torch.testing.assert_close(actual_dt[i], truth, rtol=1e-11, atol=1e-12)
        first += len(used)


def count(operations: tuple) -> int:
    return sum(1 for operation in operations if operation.operand)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_epsilon_is_the_norms_or_that_of_the_type(tmp_path: Path) -> None:
    for index, (text, eps, eps32) in enumerate(
        [("rms_norm", 2.0**-52, 2.0**-23), ("group_norm(2,0.125)", 0.125, 0.125)]
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        library = host_library(Chain.parse(text), folder)
        assert (library.eps(), library.eps32()) == (eps, eps32)


@pytest.mark.parametrize(
    "one,other",
    [
        ("group_norm(4)|relu", "group_norm(512)|relu"),
        (
            "add(1)|softplus(2,3)|group_norm(4)|leaky_relu(0.01)|clamp(0,1)|scale(2)",
            "add(7)|softplus(5,9)|group_norm(4)|leaky_relu(-3)|clamp(-4,2)|scale(0.3)",
        ),
        ("layer_norm|elu(2)|hardtanh(-2,2)", "layer_norm|elu(0.5)|hardtanh(-inf,1)"),
    ],
)
def test_neither_the_number_of_groups_nor_constants_change_the_text(one: str, other: str) -> None:
    assert chain_text(Chain.parse(one)) == chain_text(Chain.parse(other))


def test_structures_have_the_text_of_their_chains() -> None:
    for text in CHAINS:
        chain = Chain.parse(text)
        assert chain_text(chain.structure) == chain_text(chain)
        assert chain.structure.filled(chain.arguments) == chain


def test_every_operation_compiles_for_the_device_without_local_memory() -> None:
    names = [name for name, definition in DEFINITIONS.items() if name not in ("scale", "add")]
    operations = "|".join([*names, "scale(2)", "add(1)"])
    body = r"""
extern "C" __global__ void probe(const float* in, float* out, chain::Constants<float> c) {
  float t[chain::kSlots], dt[chain::kSlots];
  for (int i = 0; i < chain::kSlots; ++i) t[i] = in[i + 8];
  const float x = in[threadIdx.x + 32];
  out[threadIdx.x] = chain::post_backward<float>(c, in[0], x, t, dt);
  out[threadIdx.x] += chain::post_apply<float>(c, x, t);
  for (int i = 0; i < chain::kSlots; ++i) out[i + 1024] = dt[i];
}
"""
    chain = Chain.parse(f"group_norm(2)|{operations}")
    result = compile_cubin(KernelSource("probe", chain_text(chain) + body, "sm_80"))
    assert result.spill_bytes == 0
    assert result.stack_bytes == 0
