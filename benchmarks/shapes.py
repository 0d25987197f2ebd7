"""The named shapes that results are given for, with the chain of KernelBench's problem 62.

Each is Linear → GroupNorm (or LayerNorm) → LeakyReLU(0.01) → x + x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["SHAPES", "LinearNormLeakyDouble", "Shape"]


class LinearNormLeakyDouble(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(shape.k, shape.n)
        self.norm: nn.GroupNorm | nn.LayerNorm
        if shape.groups is None:
            self.norm = nn.LayerNorm(shape.n)
        else:
            self.norm = nn.GroupNorm(shape.groups, shape.n)
        self.leaky_relu = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaky_relu(self.norm(self.fc(x)))
        return x + x


@dataclass(frozen=True)
class Shape:
    """m rows of k features to n channels in ``groups`` groups (None: LayerNorm over all n).

    ``rules`` says what its time is ruled by.
    """

    name: str
    m: int
    k: int
    n: int
    groups: int | None
    rules: str

    def make(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> tuple[LinearNormLeakyDouble, tuple[Tensor, ...]]:
        """The model and its input x (m, k), uniform in [0, 1), in ``dtype`` on ``device``."""
        torch.manual_seed(seed)
        with torch.device(device):
            model = LinearNormLeakyDouble(self).to(dtype)
            x = torch.rand(self.m, self.k).to(dtype)
        return model, (x,)


_ALL = (
    Shape("kb62", 1024, 8192, 8192, 512, "arithmetic"),
    Shape("kb62_v0", 128, 512, 256, 8, "launch overhead"),
    Shape("skinny", 65536, 128, 128, 32, "memory"),
    Shape("mid", 16384, 1024, 1024, 32, "arithmetic and memory"),
    Shape("wide_groups", 8192, 4096, 4096, 32, "arithmetic"),
    Shape("decode_1", 1, 8192, 8192, 512, "reading W"),
    Shape("decode_16", 16, 8192, 8192, 512, "reading W"),
    Shape("layer_norm_512", 4096, 512, 512, None, "arithmetic and memory"),
)

SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}
