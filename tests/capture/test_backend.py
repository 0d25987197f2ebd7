"""torch.compile(model, backend="epinorm"): the same chains, and Inductor for the rest."""

from __future__ import annotations

import copy
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from epinorm.capture.backend import compile_graph
from processes import run_python

K, N, ROWS = 12, 16, 6
HERE = Path(__file__).resolve()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(N, N), nn.LayerNorm(N)
        self.up = nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.fc(x) + x)) * torch.sigmoid(self.up(x))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Stream(Block):
    """What enters the norm is read behind it too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) + x
        return F.gelu(self.norm(h)) * torch.sigmoid(self.up(x)) + h.tanh()


class Weighted(Block):
    """Rows with weights that were learnt before."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(ROWS, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.fc(x) * self.weights.detach()))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What AOTAutograd hands to Inductor, which it does not compile here: that takes a minute."""
    seen: list[str] = []
    compile_fx = torch._inductor.compile_fx.compile_fx

    def inner(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(gm.code)
        return gm

    def without_code(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        seen.append(str(kwargs["config_patches"]))
        return compile_fx(gm, inputs, inner_compile=inner)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", without_code)
    return seen


def gradients(model: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Block, (ROWS, N)), (Block, (2, 3, N)), (Checkpointed, (ROWS, N)), (Stream, (2, 3, N))],
)
def test_forward_and_backward(make: Any, shape: Any, graphs: list[str]) -> None:
    model = make().double()
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    for rows in (shape, (shape[0] + 3, *shape[1:])):
        x = torch.randn(rows, dtype=torch.float64)
        for a, b in zip(gradients(compiled, x), gradients(model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    text = "\n".join(graphs)
    forward = "linear_norm_sum_forward" if make is Stream else "linear_norm_forward"
    assert f"torch.ops.epinorm.{forward}" in text
    assert "torch.ops.epinorm.linear_norm_backward" in text
    assert "native_layer_norm" not in text


def test_a_parameter_that_is_detached_asks_for_no_gradient(graphs: list[str]) -> None:
    """Though what is compiled reads the parameter itself."""
    model, x = Weighted().double(), torch.randn(ROWS, N, dtype=torch.float64)
    compiled, found = torch.compile(model, backend=compile_graph, fullgraph=True), []
    for run in (compiled, model):
        model.zero_grad()
        y = run(x)
        y.square().sum().backward()
        found.append([y, model.fc.weight.grad, model.norm.weight.grad, model.weights.grad])
    assert found[0].pop() is found[1].pop() is None
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert any("mul_row" in text and "linear_norm_forward" in text for text in graphs)


def test_inference(graphs: list[str]) -> None:
    model = Block().double().eval()
    x = torch.randn(ROWS, N, dtype=torch.float64)
    with torch.no_grad():
        y = torch.compile(model, backend=compile_graph)(x)
        torch.testing.assert_close(y, model(x))
    assert "torch.ops.epinorm.linear_norm.default" in graphs[-1]


def test_mode_and_options_are_inductors(graphs: list[str]) -> None:
    x = torch.randn(ROWS, N)
    torch.compile(Block(), backend=compile_graph, mode="max-autotune-no-cudagraphs")(x)
    assert "'max_autotune': True" in graphs[0]
    options = {"epilogue-fusion": False, "strategy": "reference"}
    torch.compile(Block(), backend=compile_graph, options=options)(x)
    assert any("'epilogue_fusion': False" in text for text in graphs)
    assert "'reference'" in graphs[-1]
    with pytest.raises(Exception, match="unknown strategy 'fast'"):
        torch.compile(Block(), backend=compile_graph, options={"strategy": "fast"})(x)


def test_strict_says_what_is_not_fused(graphs: list[str]) -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            return self.norm(h.relu()) + h

    with pytest.raises(Exception, match=r"strict=True, .* used more than once"):
        torch.compile(Twice(), backend=compile_graph, options={"strict": True})(torch.ones(2, N))


@pytest.mark.slow
def test_the_entry_point_and_inductor_itself(tmp_path: Path) -> None:
    """No import of epinorm: the name alone, as an installed package brings it; profilers see it."""
    root = HERE.parents[2]
    entry = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    ((group, named),) = entry.items()
    (tmp_path / "epinorm-0.dist-info").mkdir()
    (tmp_path / "epinorm-0.dist-info" / "METADATA").write_text("Name: epinorm\nVersion: 0\n")
    (tmp_path / "epinorm-0.dist-info" / "entry_points.txt").write_text(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in named.items())
    )
    code = """
import torch
from torch import nn
last = nn.Linear(16, 4, bias=False)  # no kernel of Inductor's own, which takes seconds to compile
m = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), last).double()
x, dy = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
c = torch.compile(m, backend="epinorm", options={"strategy": "reference"})
with torch.profiler.profile() as profile:
    c(x).backward(dy)
seen = {event.key for event in profile.key_averages()}
assert {"epinorm::linear_norm_forward", "epinorm::linear_norm_backward"} <= seen, seen
got = [c(x), *(p.grad for p in m.parameters())]
m.zero_grad(); m(x).backward(dy)
for a, b in zip(got, [m(x), *(p.grad for p in m.parameters())]):
    torch.testing.assert_close(a, b)
"""
    paths = os.pathsep.join([str(tmp_path), str(root / "src")])
    environment = os.environ | {"PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "c")}
    done = run_python(code, environment)
    assert done.returncode == 0, done.stderr


def test_copies_compile_too(graphs: list[str]) -> None:
    model = Block()
    x = torch.randn(ROWS, N)
    expected = torch.compile(model, backend=compile_graph)(x)
    again = torch.compile(copy.deepcopy(model), backend=compile_graph)(x)
    torch.testing.assert_close(again, expected)
