"""Models that are compared with eager by an absolute and relative tolerance, as evaluators do.

Each text is a problem file of the form that KernelBench has, after M, K and N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from export_case import load

__all__ = ["PROBLEMS", "TOLERANCES", "far_off", "loaded", "problem_text", "trials"]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""KernelBench's, both absolute and relative."""

_HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
_TAIL = """
def get_inputs():
    return [torch.rand(M, K)]


def get_init_inputs():
    return []
"""

PROBLEMS: Mapping[str, tuple[int, str]] = {
    # Groups of N // 512: the chain of problem 62.
    "leaky_doubled": (512, """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(K, N)
        self.norm = nn.GroupNorm(GROUPS, N)
        self.act = nn.LeakyReLU(0.01)

    def forward(self, x):
        y = self.act(self.norm(self.linear(x)))
        return y + y
"""),
    # Of problem 30.
    "hardtanh": (16, """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(K, N)
        self.groups = nn.GroupNorm(GROUPS, N)
        self.bounds = nn.Hardtanh(-2.0, 2.0)

    def forward(self, x):
        return self.bounds(self.groups(self.product(x)))
"""),
    # Of problem 94.
    "biased_mish": (256, """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.product = nn.Linear(K, N)
        self.shift = nn.Parameter(torch.randn(N))
        self.bounds = nn.Hardtanh()
        self.smooth = nn.Mish()
        self.groups = nn.GroupNorm(GROUPS, N)

    def forward(self, x):
        return self.groups(self.smooth(self.bounds(self.product(x) + self.shift)))
"""),
}  # fmt: skip


def problem_text(name: str, m: int, k: int, n: int) -> str:
    """The file of these sizes; fewer channels have fewer groups of the same size."""
    groups, model = PROBLEMS[name]
    sizes = f"M, K, N, GROUPS = {m}, {k}, {n}, {max(1, groups * n // 8192)}\n"
    return f"{_HEAD}\n{sizes}\n{model}{_TAIL}"


def loaded(text: str, folder: Path, name: str) -> ModuleType:
    """The text as a module, from a file in the folder."""
    path = folder / f"{name}.py"
    path.write_text(text)
    return load(path, name)


def trials(
    problem: ModuleType, count: int, dtype: torch.dtype, device: str
) -> Iterator[tuple[nn.Module, tuple[Tensor, ...]]]:
    """For each seed the model and its inputs, drawn in fp32 and then converted."""
    for seed in range(count):
        torch.manual_seed(seed)
        with torch.device(device):
            model = problem.Model(*problem.get_init_inputs())
            inputs = tuple(problem.get_inputs())
        yield model.to(dtype), tuple(x.to(dtype) for x in inputs)


def far_off(found: Tensor, expected: Tensor) -> int:
    """How many values an evaluator would call wrong."""
    tolerance = TOLERANCES[expected.dtype]
    return int((~torch.isclose(found, expected, atol=tolerance, rtol=tolerance)).sum())
