"""Models as users write them, each holding chains that ``epinorm.fuse`` should find.

``ZOO`` maps a name to a Case: how to make the model, its inputs, and how many chains it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

K, N, GROUPS, ROWS = 24, 32, 4, 6


@dataclass(frozen=True)
class Case:
    """``chains`` is how many fused calls one forward makes."""

    make: Callable[[], nn.Module]
    chains: int
    shape: tuple[int, ...] = (ROWS, K)
    kwargs: dict[str, Any] = field(default_factory=dict)


class Benchmark(nn.Module):
    """Problem 62 of level 2 of KernelBench, at a small size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.gn = nn.GroupNorm(num_groups=GROUPS, num_channels=N, eps=1e-5)
        self.leaky_relu = nn.LeakyReLU(negative_slope=0.01)

    def forward(self, x):
        x = self.fc(x)
        x = self.gn(x)
        x = self.leaky_relu(x)
        x = x + x
        return x


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.gn = nn.GroupNorm(GROUPS, N)
        self.slope = 0.2

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)


class OwnParameters(nn.Module):
    """Everything through torch.nn.functional, on parameters of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, K))
        self.bias = nn.Parameter(torch.empty(N))
        self.gamma = nn.Parameter(torch.empty(N))
        self.beta = nn.Parameter(torch.empty(N))
        self.gain = nn.Parameter(torch.empty(N))

    def forward(self, x):
        h = F.linear(x, self.weight, bias=self.bias)
        h = F.silu(h) * self.gain
        h = F.layer_norm(h, (N,), self.gamma, self.beta, 1e-6)
        return torch.add(h, h).sub(0.5) / 4


class Spellings(nn.Module):
    """Operators, methods and functions in all their forms."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)
        self.scale = nn.Parameter(torch.empty(N))
        self.register_buffer("shift", torch.linspace(-1, 1, N))

    def forward(self, x):
        h = -self.fc(x).mul(2).add(0.25)
        h = self.norm(h.tanh())
        h = self.scale * h + self.shift
        h = torch.clamp(h, min=-2.0, max=2.0).clamp(max=1.5)
        h = F.gelu(h, approximate="tanh")
        h = F.softplus(F.hardtanh(h, -1.0, 1.25), beta=2)
        h = F.elu(F.mish(h), 0.5).sigmoid()
        return 3.0 - F.hardswish(F.relu6(h)) if self.scale is None else F.hardswish(F.relu6(h))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.act = nn.ReLU(inplace=True)
        self.gn = nn.GroupNorm(GROUPS, N)

    def forward(self, x):
        h = self.act(self.fc(x))
        h = self.gn(h)
        h += h
        h.sub_(0.5)  # its result is not used, its effect is
        return F.leaky_relu(h, 0.1, inplace=True)


class InPlaceShared(nn.Module):
    """The in-place sum changes ``kept`` too: what a careless rewrite gets wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.RMSNorm(N, eps=1e-6)

    def forward(self, x):
        h = self.norm(self.fc(x))
        kept = h
        h += 1
        return h * kept


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(N, N)
        self.norm = nn.LayerNorm(N)
        self.skip = nn.Linear(N, N)

    def forward(self, x):
        h = F.gelu(self.norm(self.fc(x))) + x
        return self.norm(self.fc(h)).relu() + self.skip(h)


class Meeting(nn.Module):
    """Chains that meet in a sum, before a norm and after."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(K, N)
        self.na, self.nb, self.nc = nn.LayerNorm(N), nn.RMSNorm(N), nn.GroupNorm(GROUPS, N)

    def forward(self, x):
        h = self.na(self.a(x)).relu() + self.nb(self.b(x)).tanh()
        return self.nc(self.a(x) + self.c(x)) + h


class Block(nn.Module):
    def __init__(self, k: int, n: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, bias=bias)
        self.norm = nn.GroupNorm(GROUPS, n)
        self.act = nn.SiLU()

    def forward(self, x, *, gain: float = 1.0):
        return self.act(self.norm(self.linear(x))) * gain


class Row(nn.Module):
    """Several chains in a row, in a ModuleList and as children."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(K, N)
        self.blocks = nn.ModuleList([Block(N, N, bias=False) for _ in range(3)])
        self.head = nn.Linear(N, 5)

    def forward(self, x):
        x = self.first(x, gain=2.0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loop(nn.Module):
    """Layers in two ModuleLists, walked in the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(K if i == 0 else N, N) for i in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(N) for _ in range(3)])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(layer(x)), inplace=True)
        return x


class Untraceable(nn.Module):
    """Its own way depends on the data; its children's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block(K, N)
        self.tail = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N), nn.Tanh())

    def forward(self, x):
        h = self.body(x)
        if h.sum() > 0:
            h = -h
        return self.tail(h)


class Shared(nn.Module):
    """One Linear and one norm used twice, and one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(N, N)
        self.norm = nn.GroupNorm(GROUPS, N)
        self.block = Block(N, N)
        self.again = self.block

    def forward(self, x):
        h = F.relu(self.norm(self.fc(x)))
        h = F.relu(self.norm(self.fc(h)))
        return self.block(h) + self.again(x)


class Tied(nn.Module):
    """Two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(N, N)
        self.b = nn.Linear(N, N, bias=False)
        self.b.weight = self.a.weight
        self.na, self.nb = nn.LayerNorm(N), nn.GroupNorm(GROUPS, N)

    def forward(self, x):
        return self.nb(self.b(self.na(self.a(x)).relu())) * 2


class ManyOutputs(nn.Module):
    """Keyword arguments, defaults, and a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.gn = nn.GroupNorm(GROUPS, N)
        self.out = nn.Linear(N, 3)

    def forward(self, x, mask=None, *, scale: float = 1.0, double: bool = False):
        h = self.gn(self.fc(x))
        h = F.relu(h) * scale
        if double:
            h = h + h
        if mask is not None:
            h = h * mask
        return {"hidden": h, "logits": (self.out(h), x)}


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(self.norm(self.fc(x)).relu())
        return F.dropout(h * 2, 0.25, self.training) + 1


class Transformer(nn.Module):
    """LayerNorm and RMSNorm over sequences, with a chunked gate between."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(K, N, bias=False)
        self.norm = nn.RMSNorm(N)
        self.up = nn.Linear(N, 2 * N)
        self.ln = nn.LayerNorm(2 * N, elementwise_affine=False)

    def forward(self, x):
        h = self.norm(self.proj(x))
        a, b = F.silu(self.ln(self.up(h))).chunk(2, dim=-1)
        return a * b + h


class Noise(nn.Module):
    """A random tensor made in forward, which a trace must not freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)

    def forward(self, x):
        return self.norm(self.fc(x)).relu() + torch.rand(N, dtype=x.dtype)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = self.make_norm()

    def make_norm(self) -> nn.Module:
        return nn.LayerNorm(N, bias=False)

    def activate(self, h):
        return F.leaky_relu(h)

    def forward(self, x):
        return self.activate(self.norm(self.fc(x)))


class Derived(Base):
    """A forward that calls its parent's."""

    def forward(self, x):
        return super().forward(x) * 3


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(K, N), nn.GroupNorm(GROUPS, N), nn.LeakyReLU(0.01))


def nested() -> nn.Module:
    inner = nn.Sequential(nn.Linear(K, N), nn.Hardtanh(), nn.GroupNorm(GROUPS, N))
    outer = nn.Sequential(nn.Linear(N, N), nn.LayerNorm(N), nn.GELU(), nn.Identity(), nn.Dropout(0))
    return nn.Sequential(inner, nn.ReLU(inplace=True), outer, nn.Softplus(), nn.Linear(N, 2))


def no_affine() -> nn.Module:
    norms = (nn.GroupNorm(GROUPS, N, affine=False), nn.LayerNorm(N, elementwise_affine=False))
    return nn.Sequential(
        nn.Linear(K, N, bias=False), norms[0], nn.Mish(),
        nn.Linear(N, N, bias=False), norms[1], nn.ELU(0.5),
        nn.Linear(N, N), nn.RMSNorm(N, elementwise_affine=False), nn.Hardswish(),
    )  # fmt: skip


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Linear(K, N), nn.LayerNorm(N), nn.ReLU(), nn.Linear(N, N), nn.RMSNorm(N)
    )


ZOO: dict[str, Case] = {
    "sequential": Case(sequential, 1),
    "nested sequential": Case(nested, 2),
    "benchmark": Case(Benchmark, 1),
    "functional": Case(Functional, 1),
    "own parameters": Case(OwnParameters, 1),
    "own parameters, 3-D": Case(OwnParameters, 1, (2, 3, K)),
    "spellings": Case(Spellings, 1),
    "in place": Case(InPlace, 1),
    "in place, shared": Case(InPlaceShared, 1),
    "residual": Case(Residual, 2, (ROWS, N)),
    "residual, 3-D": Case(Residual, 2, (2, 3, N)),
    "meeting": Case(Meeting, 3),
    "several in a row": Case(Row, 4),
    "loop over a ModuleList": Case(Loop, 3),
    "untraceable parent": Case(Untraceable, 2),
    "shared modules": Case(Shared, 4, (ROWS, N)),
    "tied weights": Case(Tied, 2, (ROWS, N)),
    "several outputs": Case(ManyOutputs, 1),
    "keyword arguments": Case(ManyOutputs, 1, kwargs={"scale": 0.5, "double": True}),
    "optional tensor": Case(ManyOutputs, 1, kwargs={"mask": torch.linspace(0, 1, N).double()}),
    "without affine": Case(no_affine, 3),
    "3-D": Case(sequence, 2, (2, 3, K)),
    "1-D": Case(sequence, 2, (K,)),
    "empty batch": Case(Benchmark, 1, (0, K)),
    "transformer": Case(Transformer, 2, (2, 3, K)),
    "noise": Case(Noise, 1),
    "inherited": Case(Derived, 1),
    "dropout": Case(Dropout, 1),
}


def randomise(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw every parameter anew, gamma and beta too: at their initial values they prove nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 0.1)
    return model
