"""The named shapes that results are given for.

Each is Linear → (+ residual) → norm → activation; with the chain of KernelBench's problem 62,
LeakyReLU(0.01) → x + x, where nothing else is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["SHAPES", "Block", "LinearNormLeakyDouble", "Shape"]


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


class Block(nn.Module):
    """act(norm(fc(x))), or act(norm(fc(x) + residual))."""

    def __init__(self, fc: nn.Linear, norm: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.fc, self.norm, self.act = fc, norm, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.fc(x)))


class ResidualBlock(Block):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.act(self.norm(self.fc(x) + residual))


@dataclass(frozen=True)
class Shape:
    """m rows of k features to n channels in ``groups`` groups (None: a norm over all n).

    ``rules`` says what its time is ruled by. ``block``: "kb62", or the norm and the activation of a
    ``Block``; ``residual``: that is added in front of the norm.
    """

    name: str
    m: int
    k: int
    n: int
    groups: int | None
    rules: str
    block: str = "kb62"
    residual: bool = False

    def make(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model and its inputs, x (m, k) and the residual (m, n), uniform in [0, 1)."""
        torch.manual_seed(seed)
        with torch.device(device):
            model = self._model().to(dtype)
            sizes = [(self.m, self.k), (self.m, self.n)][: 1 + self.residual]
            inputs = tuple(torch.rand(size).to(dtype) for size in sizes)
        return model, inputs

    def _model(self) -> nn.Module:
        if self.block == "kb62":
            return LinearNormLeakyDouble(self)
        norm, act = self.block.split()
        kind = ResidualBlock if self.residual else Block
        return kind(nn.Linear(self.k, self.n), NORMS[norm](self.n), ACTIVATIONS[act]())


NORMS = {
    "layer": nn.LayerNorm,
    "bert": lambda n: nn.LayerNorm(n, eps=1e-12),
    "rms": lambda n: nn.RMSNorm(n, eps=1e-4),
}
ACTIVATIONS = {
    "none": nn.Identity, "gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "mish": nn.Mish,
}  # fmt: skip

_ALL = (
    Shape("kb62", 1024, 8192, 8192, 512, "arithmetic"),
    Shape("kb62_v0", 128, 512, 256, 8, "launch overhead"),
    Shape("skinny", 65536, 128, 128, 32, "memory"),
    Shape("mid", 16384, 1024, 1024, 32, "arithmetic and memory"),
    Shape("wide_groups", 8192, 4096, 4096, 32, "arithmetic"),
    Shape("decode_1", 1, 8192, 8192, 512, "reading W"),
    Shape("decode_16", 16, 8192, 8192, 512, "reading W"),
    Shape("layer_norm_512", 4096, 512, 512, None, "arithmetic and memory"),
    Shape("bert_out", 16384, 768, 768, None, "memory", "bert none", residual=True),
    Shape("bert_ffn", 16384, 3072, 768, None, "arithmetic and memory", "bert none", residual=True),
    Shape("wide_ln", 8192, 4096, 4096, None, "arithmetic", "layer gelu"),
    Shape("kb_ln", 1024, 8192, 8192, None, "arithmetic"),
    Shape("dreamer", 1024, 1024, 1024, None, "launch overhead", "rms silu"),
    Shape("tdmpc2", 1280, 512, 512, None, "launch overhead", "layer mish"),
    Shape("ln256", 65536, 256, 256, None, "memory", "layer relu"),
    Shape("groups_12", 16384, 768, 768, 64, "memory"),
    Shape("groups_1024", 8192, 2048, 8192, 8, "arithmetic"),
)

SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}
"""By name."""
