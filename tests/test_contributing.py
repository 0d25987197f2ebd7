"""CONTRIBUTING is true: an activation, a norm, a GPU and a kernel take what it names alone.

Each is added to a copy of the library, which then computes with it in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from processes import run_python

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")

Edits = dict[str, list[tuple[str, str]]]
"""By file: what stands there, and what stands there then."""

ACTIVATION: Edits = {
    "chain/activations.py": [
        (
            "ACTIVATIONS = (\n",
            """ACTIVATIONS = (
    Definition(
        "celu",
        F.celu,
        "return x > T(0) ? x : alpha * expm1(x / alpha);",
        "return x > T(0) ? g : g * exp(x / alpha);",
        {"alpha": 1.0},
        modules={nn.CELU: ("alpha",)},
        functions=(F.celu, torch.celu, _aten.celu),
        kinks=lambda alpha: () if alpha == 1 else (0.0,),
        homogeneous=False,
    ),
""",
        )
    ]
}

USES_ACTIVATION = """
import copy
import torch, torch.nn.functional as F
from torch import nn
import epinorm

torch.manual_seed(0)
for model in (
    nn.Sequential(nn.Linear(24, 64), nn.GroupNorm(8, 64), nn.CELU(0.7)),
    nn.Sequential(nn.Linear(24, 64), nn.CELU(), nn.LayerNorm(64)),
):
    fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu", strict=True)
    for alpha in (None, 1.5):
        for one in (model, fused):
            for layer in one:
                if isinstance(layer, nn.CELU) and alpha is not None:
                    layer.alpha = alpha
        x = torch.randn(40, 24)
        exact = copy.deepcopy(model).double()
        dy = torch.randn(40, 64)
        results = []
        for one in (exact, model, fused):
            one.zero_grad()
            y = one(x.to(next(one.parameters()).dtype))
            y.backward(dy.to(y.dtype))
            results.append([y.detach(), *(p.grad for p in one.parameters())])
        for truth, eager, ours in zip(*results):
            allowed = max((eager - truth).norm().item(), 4 * 2**-23 * truth.norm().item())
            assert (ours - truth).norm().item() <= 1.005 * allowed
        if alpha is None:
            (row,) = epinorm.explain(fused).rows
            assert row.fused and row.strategy == "cpu" and "celu" in row.chain
"""

NORM: Edits = {
    "chain/norms.py": [
        (
            "Norm = GroupNorm | LayerNorm | RMSNorm | BatchNorm\n",
            """@dataclass(frozen=True)
class GroupRMSNorm(GroupNorm):
    centred: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"group_rms_norm({self.num_groups},{format_number(self.eps)})"


Norm = GroupNorm | LayerNorm | RMSNorm | BatchNorm | GroupRMSNorm
""",
        ),
        ('"rms_norm", "batch_norm")', '"rms_norm", "batch_norm", "group_rms_norm")'),
        ('grouped = name == "group_norm"', 'grouped = name in ("group_norm", "group_rms_norm")'),
    ],
    "chain/reference.py": [
        (
            "    if isinstance(norm, GroupNorm):\n",
            """    if not norm.centred and isinstance(norm, GroupNorm):
        parts = z.unflatten(-1, (norm.num_groups, -1))
        y = F.rms_norm(parts, (parts.size(-1),), None, norm.eps).flatten(-2)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    if isinstance(norm, GroupNorm):
""",
        )
    ],
    "backends/reference.py": [
        (
            "    if isinstance(norm, GroupNorm):\n        u = u",
            """    if not norm.centred and isinstance(norm, GroupNorm):
        parts = u.unflatten(-1, (norm.num_groups, -1))
        y, rstd = torch.ops.aten._fused_rms_norm(parts, [parts.size(-1)], None, norm.eps)
        y = y.flatten(-2) if weight is None else y.flatten(-2) * weight
        return y if bias is None else y + bias, u.new_empty(0), rstd
    if isinstance(norm, GroupNorm):
        u = u""",
        )
    ],
}

USES_NORM = """
import torch
from epinorm.chain import Chain, reference
from epinorm.chain.norms import GroupRMSNorm
import epinorm

torch.manual_seed(0)
norm = GroupRMSNorm(8)
text = "gelu|group_rms_norm(8,1e-05)|leaky_relu(0.01)"
assert str(Chain.build(norm, "gelu", "leaky_relu")) == text == str(Chain.parse(text))
x, w = torch.rand(40, 24) + 1, torch.randn(64, 24)
vectors = [torch.randn(64) for _ in range(3)]
dy = torch.randn(40, 64)


def results(compute, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (x, w, *vectors)]
    y = compute(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


def by_pytorch(x, w, b, weight, bias):
    return reference.linear_norm(x, w, b, Chain.parse(text), weight, bias)


def by(strategy):
    return lambda x, w, b, weight, bias: epinorm.linear_norm(
        x, w, b, norm=norm, pre="gelu", post="leaky_relu", norm_weight=weight, norm_bias=bias,
        strategy=strategy,
    )


truth, eager = results(by_pytorch, torch.float64), results(by_pytorch, torch.float32)
for strategy in ("cpu", "reference"):
    for exact, theirs, ours in zip(truth, eager, results(by(strategy), torch.float32)):
        allowed = max((theirs - exact).norm().item(), 4 * 2**-23 * exact.norm().item())
        assert (ours - exact).norm().item() <= 1.005 * allowed, strategy

from epinorm.backends.cuda.norm.forward import forward_plan, forward_source
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.problem import Problem

problem = Problem(
    Chain.parse(text), 40, 24, 64, *(torch.float32,) * 3, *(True,) * 3, training=True,
    device=torch.device("cuda", 0), precision="native",
)
source = forward_source(problem, forward_plan(problem, 4, 227 * 1024, "sm_90a"), "sm_90a")
assert "kCentred = false" in str(source)
assert compiled(source).spill_bytes == 0
"""

GPU: Edits = {
    "backends/cuda/plan/portable.py": [
        ("_MULTIPLY_ADDS = {(8, 0): 1024.0,", "_MULTIPLY_ADDS = {(8, 0): 1024.0, (11, 0): 2048.0,"),
        ("_MEMORY_BYTES = {(8, 0): 9.0,", "_MEMORY_BYTES = {(8, 0): 9.0, (11, 0): 20.0,"),
    ]
}

USES_GPU = """
import torch
from epinorm.backends.cuda.plan import portable
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.chain import Chain
from epinorm.problem import Problem

problem = Problem(
    Chain.parse("group_norm(512,1e-05)|relu"), 1024, 8192, 8192, *(torch.bfloat16,) * 3,
    *(True,) * 3, training=False, device=torch.device("cuda", 0), precision="native",
)
new, unknown = (Gpu((major, 0), 132, 232448, 233472) for major in (11, 13))
assert portable.microseconds(problem, new) < 0.5 * portable.microseconds(problem, unknown)
"""

KERNEL: Edits = {
    "backends/cuda/plan/norm_forward.py": [
        (
            'Kind = Literal["registers", ',
            'Kind = Literal["serial", "registers", ',
        ),
        (
            "_KERNELS: dict[Kind, tuple[str, str]] = {\n",
            """_KERNELS: dict[Kind, tuple[str, str]] = {
    "serial": ("norm_forward_serial", "a thread holds so small a group"),
""",
        ),
        (
            "    tile = _warp_teams(problem, channels, vector)\n",
            """    if channels <= 4:
        tile = NormTile(vector, 1, channels // vector, 1, 1, BLOCK_WARPS)
        return ForwardPlan("serial", tile), wide
    tile = _warp_teams(problem, channels, vector)
""",
        ),
    ]
}

KERNEL_FILE = "backends/cuda/norm/norm_forward_serial.cu"
KERNEL_TEXT = """
#include "common/dependent.cuh"
#include "common/variance.cuh"
#include "norm/norm_layout.cuh"

static_assert(kLanes == 1 && kRows == 1, "a thread a (row, group)");

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocksPerSm)
norm_forward_serial(const Z* __restrict__ z, i64 z_stride, const Z* __restrict__ bias,
                    const P* __restrict__ gamma, const P* __restrict__ beta, Y* __restrict__ y,
                    T* __restrict__ mean, T* __restrict__ rstd, i64 rows,
                    int groups EPINORM_CHAIN_PARAMETERS EPINORM_SUM_PARAMETER) {
  wait_for_previous_kernel();
  const Sources from = {bias, gamma, beta, EPINORM_OPERAND_POINTERS, EPINORM_OPERAND_STRIDES,
                        EPINORM_CONSTANTS,
                        chain::drops_of<T>(EPINORM_CONSTANTS, EPINORM_OPERAND_POINTERS)};
  constexpr T kInverse = T(1) / T(kChannels);
  const Position at(groups);
  if (!at.live) return;
  const i64 columns = i64(groups) * kChannels;
  for (i64 row = blockIdx.y * kRowsPerPass + at.row; row < rows; row += gridDim.y * kRowsPerPass) {
    Channels channels[kVectors];
    Elements elements[kVectors];
    T v[kVectors][kVector], t[chain::kSlots], sum = T(0), squares = T(0), distances = T(0);
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      channels[e].load(from, at.column(e));
      elements[e].load(from, row, at.column(e));
      const auto raw = loaded<Z, kVector>(z + row * z_stride + at.column(e));
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        operands_at(from, channels[e], elements[e], j, t);
        const T biased = channels[e].with_bias(raw.template get<T>(j), j);
        v[e][j] = chain::pre_apply<T>(from.constants, biased, t);
        sum += v[e][j];
      }
      if constexpr (kWritesSum) {
        Vector<S, kVector> packed;
        packed.set(v[e]);
        packed.store(EPINORM_SUM + row * columns + at.column(e));
      }
    }
    const T centre = chain::kCentred ? sum * kInverse : T(0);
#pragma unroll
    for (int e = 0; e < kVectors; ++e)
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        v[e][j] -= centre;
        squares += v[e][j] * v[e][j];
        distances += v[e][j];
      }
    const T shift = chain::kCentred ? distances * kInverse : T(0);
    const T spread =
        chain::kCentred ? variance<kChannels>(squares, distances, shift) : squares * kInverse;
    const T scale = reciprocal_sqrt(spread + chain::epsilon<T>());
    const Applied applied(centre, shift, scale);
#pragma unroll
    for (int e = 0; e < kVectors; ++e) {
      T out[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        operands_at(from, channels[e], elements[e], j, t);
        const T normal = channels[e].normalized(v[e][j], applied.shift, applied.rstd, j);
        out[j] = chain::post_apply<T>(from.constants, normal, t);
      }
      Vector<Y, kVector> packed;
      packed.set(out);
      packed.store(y + row * columns + at.column(e));
    }
    if (kKeepStatistics) {
      if (chain::kCentred) mean[row * groups + at.group] = centre + shift;
      rstd[row * groups + at.group] = scale;
    }
  }
}
"""

USES_KERNEL = """
import torch
import epinorm
from epinorm.backends.cuda.norm.forward import forward_plan, forward_source
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.problem import Problem
from imaginary import imaginary_h200, launches

M, K, N, NORM, PRE, POST = 300, 72, 132, epinorm.GroupNorm(33), "", "leaky_relu(0.01)"


def problem_of(dtype, device):
    chain = Chain.build(NORM, PRE, POST)
    kinds = (dtype,) * 3, (True,) * 3
    return Problem(chain, M, K, N, *kinds[0], *kinds[1], training=True, device=device,
                   precision="native")


# It compiles for each architecture and spills nothing.
for arch in ("sm_80", "sm_90a", "sm_100"):
    problem = problem_of(torch.float32, torch.device("cuda", 0))
    plan = forward_plan(problem, 4, 227 * 1024, arch)
    assert plan.kernel == "norm_forward_serial"
    assert compiled(forward_source(problem, plan, arch)).spill_bytes == 0

# The plan shows it with its reason, and it is what a call launches.
with imaginary_h200() as api:
    planned = plan_cuda(problem_of(torch.float64, torch.device("cpu")), "auto")
    found = launches(api, M, K, N, NORM, PRE, POST, torch.float64, True)
    names = [one["kernel"] for one in found if "kernel" in one]
    assert names == [step.kernel for step in (*planned.forward, *planned.backward)], names
assert "norm_forward_serial" in names
assert "a thread holds so small a group" in str(planned)

# Values and gradients, where there is a GPU.
if torch.cuda.is_available():
    tensors = [torch.rand(M, K), torch.randn(N, K), *torch.randn(3, N)]
    dy = torch.randn(M, N)

    def results(dtype, strategy):
        x, w, *vectors = (t.to("cuda", dtype).requires_grad_() for t in tensors)
        y = epinorm.linear_norm(
            x, w, vectors[0], norm=NORM, norm_weight=vectors[1], norm_bias=vectors[2], pre=PRE,
            post=POST, strategy=strategy,
        )
        return [y.detach(), *torch.autograd.grad(y, (x, w, *vectors), dy.to(y))]

    truth, eager = results(torch.float64, "reference"), results(torch.float32, "reference")
    for exact, theirs, ours in zip(truth, eager, results(torch.float32, "epilogue")):
        allowed = max((theirs - exact).norm().item(), 4 * 2**-23 * exact.norm().item())
        assert (ours - exact).norm().item() <= 1.005 * allowed
"""

SECTIONS = {
    "Add an activation": (ACTIVATION, USES_ACTIVATION),
    "Add a norm": (NORM, USES_NORM),
    "Add a GPU": (GPU, USES_GPU),
    "Add a kernel": (KERNEL, USES_KERNEL),
}


def files_named(section: str) -> list[str]:
    """The library's files that a section asks to touch whatever is added."""
    text = CONTRIBUTING.split(f"### {section}\n", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
    always = text.split("\n\nOnly where", 1)[0]
    found = re.findall(r"`(?:src/epinorm/)?([\w/]+\.py)`", always)
    return sorted({name for name in found if not name.startswith("tests/")})


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_section_names_is_all_that_it_takes(section: str, tmp_path: Path) -> None:
    edits, program = SECTIONS[section]
    assert files_named(section) == sorted(edits)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "tools")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    for name, changes in edits.items():
        path = tmp_path / "src" / "epinorm" / name
        text = path.read_text("utf-8")
        for old, new in changes:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        path.write_text(text, "utf-8")
    if section == "Add a kernel":
        (tmp_path / "src" / "epinorm" / KERNEL_FILE).write_text(KERNEL_TEXT, "utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path / "src"), str(ROOT / "tests"))),
        "EPINORM_CACHE_DIR": str(tmp_path / "cache"),
    }
    fails = "import warnings\nwarnings.simplefilter('error', UserWarning)\n"
    done = run_python(fails + program, environment, tmp_path)
    assert done.returncode == 0, done.stderr
