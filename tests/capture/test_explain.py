"""explain() names every place where a Linear's result reaches a norm, and why it is not fused."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epinorm
from epinorm.backends.cuda.plan.strategy import plan_cuda
from imaginary import imaginary_h200
from processes import Process

K, N, ROWS = 12, 16, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        return self.act(self.norm(self.fc(x)))


def model(forward: Callable[..., Any], **attributes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = type("Probe", (Model,), {"forward": forward})()
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    return make


def hooked() -> nn.Module:
    made = Model()
    made.fc.register_forward_hook(lambda module, given, y: y * y)
    return made


def used_elsewhere(self, x):
    h = self.fc(x)
    return self.norm(h.relu()) + h


def returned_too(self, x):
    h = self.fc(x)
    return self.norm(h.relu()), h


def squares(self, x):
    h = self.fc(x)
    return self.norm(h * h)


def two_dimensions(self, x):
    return F.layer_norm(self.fc(x), (ROWS, N))


def changes_its_bias(self, x):
    h = self.fc(x)
    self.norm.bias.data.add_(1)
    return self.norm(h)


def without_gradients_between(self, x):
    with torch.no_grad():
        h = self.fc(x)
    return self.norm(h)


def other_dtype(self, x):
    return F.layer_norm(self.fc(x).double(), (N,))


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "used elsewhere": (model(used_elsewhere), "used more than once, by relu, add"),
    "returned too": (model(returned_too), "used more than once, by relu, the output"),
    "square": (model(squares), "mul is not a pointwise"),
    "hook": (hooked, "mul is not a pointwise"),
    "dropout": (
        model(lambda s, x: s.norm(F.alpha_dropout(s.fc(x), 0.1, True))),
        "alpha_dropout drops values in a way of its own; eval mode is fused",
    ),
    "heads turned": (
        model(lambda s, x: F.layer_norm(s.fc(x).view(ROWS, 8, 2).transpose(0, 1), (2,))),
        "its heads are turned to another order, which its result shows in memory",
    ),
    "first rows": (model(lambda s, x: s.norm(s.fc(x)[0])), "getitem is not a pointwise"),
    "transposed": (
        model(lambda s, x: F.layer_norm(s.fc(x).transpose(0, 1), (ROWS,))),
        "transpose makes columns of its rows",
    ),
    "turned and turned back": (
        model(lambda s, x: s.norm(s.fc(x).transpose(0, 1).unflatten(0, (4, -1)).flatten(0, 1).t())),
        "transpose makes columns of its rows and t rows of them again: without these two",
    ),
    "convolved in between": (  # as DaViT's
        model(
            lambda s, x: s.norm(
                (lambda h: h + F.conv1d(h, torch.ones(N, 1, 3), padding=1, groups=N))(
                    s.fc(x[None]).transpose(1, 2)
                ).transpose(1, 2)
            )
        ),
        "columns of its rows, which add reads before transpose makes them rows again",
    ),
    "two dimensions": (model(two_dimensions), "its norm spans 2 dimensions"),
    "batch norm": (model(Model.forward, norm=nn.BatchNorm1d(N)), "its norm is BatchNorm"),
    "group norm of rows": (
        model(lambda s, x: s.norm(s.fc(x.view(1, ROWS, K))), norm=nn.GroupNorm(1, ROWS)),
        "GroupNorm of 3-dimensional input normalises dimension 1",
    ),
    "multiplied": (
        model(lambda s, x: s.norm(s.fc(x) * (x[:, :1] * s.fc.bias.sum()))),
        r"multiplies by a tensor of shape \[5, 1\]",
    ),
    "broadcast": (
        model(lambda s, x: s.norm(s.fc(x) + x[:, :1])), r"adds a tensor of shape \[5, 1\]"
    ),
    "another function": (model(lambda s, x: s.norm(s.fc(x).sin())), "sin is not a pointwise"),
    "gated by half of itself": (
        model(lambda s, x: s.norm(F.glu(s.fc(x))), norm=nn.LayerNorm(N // 2)),
        "glu is not a pointwise",
    ),
    "flipped": (model(lambda s, x: s.norm(s.fc(x).flip(0))), "flip is not a pointwise"),
    "masked": (
        model(lambda s, x: s.norm(torch.where(x[:, :1] > 0, s.fc(x), 0.0))),
        "where is not a pointwise",
    ),
    "batch norm of a stream": (  # as RTDL's ResNet
        model(lambda s, x: (lambda h: h + s.act(s.norm(h)))(s.fc(x)), norm=nn.BatchNorm1d(N)),
        "used more than once, by batch_norm, add",
    ),
    "batch norm of a stream, eval": (
        model(
            lambda s, x: (lambda h: h + s.act(s.norm(h)))(s.fc(x)), norm=nn.BatchNorm1d(N).eval()
        ),
        "used more than once, by add, batch_norm",
    ),
    "ghost batch norm, eval": (  # as TabNet's
        model(
            lambda s, x: torch.cat([s.norm(h) for h in s.fc(x).chunk(1)]),
            norm=nn.BatchNorm1d(N).eval(),
        ),
        "chunk is not a pointwise operation",
    ),
    "changed in place": (model(changes_its_bias), "in between may change tensors"),
    "no_grad between": (model(without_gradients_between), "in between may change tensors or modes"),
    "other dtype": (model(other_dtype), "its result is torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_fused_says_why_and_stays_right(name: str) -> None:
    make, reason = REASONS[name]
    plain = make()
    x = torch.randn(ROWS, K)
    explained = epinorm.explain(plain, x)
    (row,) = explained.rows
    assert not row.fused
    assert row.strategy == "layers"
    assert re.search(reason, row.reason), row.reason
    results = []
    for m in (copy.deepcopy(plain), epinorm.fuse(copy.deepcopy(plain), strategy="reference")):
        torch.manual_seed(2)
        y = m(x)
        results.append(y if isinstance(y, tuple) else (y,))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


class WrittenOutNorm(nn.RMSNorm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def test_norms_of_parts_of_one_linear_are_rows_with_a_way_out() -> None:
    """Of parts that overlap: a row for each norm."""

    class Attention(Model):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(K, 3 * N)
            self.q_norm, self.k_norm = nn.LayerNorm(N), WrittenOutNorm(N, 1e-6)

        def forward(self, x):
            y = self.qkv(x)
            q, k, v = y[:, :N], y[:, 1 : N + 1], y[:, 2 * N :]
            return self.q_norm(q) * self.k_norm(k) + v

    made, x = Attention(), torch.randn(ROWS, K)
    rows = epinorm.explain(made, x).rows
    assert [row.where for row in rows] == ["qkv → q_norm", "qkv → k_norm"]
    for row in rows:
        assert not row.fused
        assert "takes its rows apart" in row.reason
        assert "an nn.Linear for each part" in row.reason
    assert torch.equal(epinorm.fuse(copy.deepcopy(made), strategy="reference")(x), made(x))


def test_looking_leaves_no_trace_and_runs_no_kernel() -> None:
    class Counts(Model):
        def forward(self, x):
            self.calls += 1
            return super().forward(x) * random.random() + torch.rand(N)

    made = nn.Sequential(Counts(), nn.BatchNorm1d(N), nn.Dropout(0.5))
    before, state = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    numbers = random.getstate()
    x = torch.full((ROWS, K), float("nan"))
    assert epinorm.explain(made, x).fused == 1
    assert made[0].calls == 0
    assert torch.equal(state, torch.get_rng_state())
    assert numbers == random.getstate()
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in made.parameters())


def test_a_model_that_needs_values_is_told_as_far_as_it_goes() -> None:
    def branches(self, x):
        h = self.norm(self.fc(x))
        return self.norm(self.fc(h[:, :K])) if h.sum() > 0 else -h

    made = model(branches)()
    explained = epinorm.explain(made, torch.randn(ROWS, K))
    assert [row.where for row in explained.rows] == ["fc → norm"]
    assert any("without values the model stops" in note for note in explained.notes)
    fused = epinorm.fuse(made, strategy="reference")
    fused(torch.randn(ROWS, K))
    explained = epinorm.explain(fused)
    assert explained.fused == 1
    assert any(re.search(r"breaks at .*test_explain.py:\d+", note) for note in explained.notes)


def test_a_call_that_is_refused_is_no_model_without_chains(capfd: Any) -> None:
    made = model(lambda self, x: self.norm(self.fc(x)))()
    said = str(epinorm.explain(made, torch.randn(ROWS, K + 1)))
    assert "not seen: without values the model stops (" in said
    assert "no chain" not in said
    assert "Traceback" not in capfd.readouterr().err  # PyTorch's log of what raises
    assert "no chain" in str(epinorm.explain(nn.Identity(), torch.randn(ROWS, K)))


def test_a_call_that_would_raise_is_not_fused() -> None:
    made = model(lambda self, x: self.norm(self.fc(x)))()
    (row,) = epinorm.explain(made, torch.ones(ROWS, K, dtype=torch.long)).rows
    assert not row.fused
    assert "input is of torch.int64" in row.reason
    fused = epinorm.fuse(made, strategy="cpu")
    with pytest.raises(RuntimeError, match="nothing to compute"):
        fused(torch.ones(0, K))
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    assert "the call raises: strategy 'cpu' cannot serve this chain" in row.reason


class AsksForAStream(Model):
    """As transformers does in front of its masks: without a driver the question raises."""

    def forward(self, x):
        try:
            capturing = torch.cuda.is_current_stream_capturing()
        except Exception:
            capturing = False
        return x if capturing else super().forward(x)


def test_asking_whether_a_cuda_graph_is_captured_breaks_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asking = epinorm.fuse(AsksForAStream())
    asking(torch.randn(ROWS, K))
    assert epinorm.explain(asking).rows[0].where == "fc → norm"
    assert "unfused" not in caplog.text


def test_rows_name_chain_place_and_plan() -> None:
    made = nn.Sequential(Model(), nn.Linear(N, N, bias=False), nn.GroupNorm(4, N), nn.SiLU())
    x = torch.randn(ROWS, K)
    fused = epinorm.fuse(copy.deepcopy(made), strategy="reference")
    assert epinorm.explain(fused).rows == ()
    assert "Nothing was captured" in str(epinorm.explain(fused))
    torch.compile(fused, backend="eager")(torch.randn(ROWS, K))  # which says nothing itself
    assert 'backend="epinorm") fuses' in " ".join(str(epinorm.explain(fused)).split())
    assert "epinorm.fuse" in str(epinorm.explain(made))
    fused(x)
    for explained in (epinorm.explain(made, x), epinorm.explain(fused), epinorm.explain(fused, x)):
        assert [(r.chain, r.where, r.fused, r.shape) for r in explained.rows] == [
            ("layer_norm(1e-05)|relu", "0.fc → 0.norm", True, f"[{ROWS}, {K}] → [{ROWS}, {N}]"),
            ("group_norm(4,1e-05)|silu", "1 → 2", True, f"[{ROWS}, {N}] → [{ROWS}, {N}]"),
        ]
    assert {row.reason for row in epinorm.explain(fused).rows} == {"asked for by name"}
    assert {row.strategy for row in epinorm.explain(fused).rows} == {"reference"}


def test_what_is_left_to_pytorch_is_not_shown_as_fused() -> None:
    wide = (nn.Linear(K, 128), nn.LayerNorm(128), nn.ReLU())  # as fast in PyTorch's own layers
    made = nn.Sequential(*wide, nn.Linear(128, N), nn.GroupNorm(4, N))
    explained = epinorm.explain(made, torch.randn(128, K))
    assert [row.left for row in explained.rows] == [True, False]
    assert [row.cells()[2] for row in explained.rows] == ["PyTorch's", "yes"]
    assert (explained.fused, explained.left) == (2, 1)
    said = "1 of 2 chains by epinorm's kernels, 1 left to PyTorch's own layers"
    assert f"Sequential: {said}" in str(explained)
    assert said in explained._repr_html_().replace("&#x27;", "'")


def test_a_copy_is_told_to_be_not_fused_and_no_more() -> None:
    fused = epinorm.fuse(Model(), strategy="reference")
    fused(torch.randn(ROWS, K))
    said = str(epinorm.explain(copy.deepcopy(fused)))
    assert "It is not fused: call epinorm.fuse" in said
    assert "no chain" not in said


class Agent(nn.Module):
    """Methods alone, as agents of reinforcement learning have them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Model().eval()

    def encode(self, x):
        return self.encoder(x)


def test_a_model_without_forward_is_warned_of_and_its_parts_are_named() -> None:
    told = r"Agent has no forward, and model\(x\) is what is fused: fuse the submodules"
    with pytest.warns(UserWarning, match=told):
        agent = epinorm.fuse(Agent())
    x = torch.randn(ROWS, K)
    agent.encode(x)
    for explained in (epinorm.explain(agent), epinorm.explain(agent, x), epinorm.explain(Agent())):
        assert re.search(told, str(explained))
        assert "no chain" not in str(explained)
    epinorm.fuse(agent.encoder, strategy="reference")
    agent.encode(x)
    assert epinorm.explain(agent).fused == 1


def test_a_model_with_forward_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    class Calls(Agent):
        def forward(self, x):
            return self.encode(x)

    given = nn.Identity()
    given.forward = lambda x: x  # type: ignore[method-assign]
    fused = epinorm.fuse(Calls())
    epinorm.fuse(given)
    epinorm.fuse(torch.jit.script(nn.Linear(2, 2)))
    assert not [w for w in recwarn if "has no forward" in str(w.message)]
    fused.encode(torch.randn(ROWS, K))
    assert "submodules that are called by themselves" in " ".join(
        str(epinorm.explain(fused)).lower().split()
    )


@pytest.mark.slow
def test_a_missing_compiler_is_told() -> None:
    code = (
        "import epinorm, torch; from torch import nn;"
        "m = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8));"
        "(row,) = epinorm.explain(m, torch.ones(2, 8)).rows; print(row.strategy, row.reason)"
    )
    process = Process(code, {"PATH": "/nowhere", "HOME": "/nowhere"})
    said, err = process.communicate(200)
    assert process.returncode == 0, err
    assert said.startswith("reference there is no C++ compiler")


def test_text_html_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = epinorm.explain(model(used_elsewhere)(), torch.randn(ROWS, K))
    monkeypatch.setenv("COLUMNS", "80")
    text = str(explained)
    assert "Probe: 0 of 1 chains fused" in text
    assert "fc → norm" in text
    assert max(map(len, text.splitlines())) <= 80
    page = explained._repr_html_()
    assert "<th>chain</th>" in page
    assert "used more than once" in page
    data = json.loads(explained.to_json())
    assert data["model"] == "Probe"
    assert data["rows"][0]["fused"] is False


def test_the_gain_is_that_of_the_plans_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200; on a CPU nothing is estimated."""

    def on_a_gpu(problem: Any, strategy: Any) -> Any:
        return plan_cuda(
            replace(problem, device=torch.device("cuda"), precision="native"), strategy
        )

    layers = nn.Sequential(nn.Linear(512, 512), nn.GroupNorm(32, 512)).bfloat16()
    x = torch.empty(1024, 512).bfloat16()
    assert epinorm.explain(layers, x).rows[0].gain is None
    monkeypatch.setattr(sys.modules["epinorm.capture.explain"], "plan_for", on_a_gpu)
    with imaginary_h200():
        told = epinorm.explain(layers, x)
    (row,) = told.rows
    times = re.search(r"estimated (\d+) us;.*PyTorch's own layers: (\d+)", row.reason)
    assert times is not None, row.reason
    assert row.gain == pytest.approx(int(times[2]) / int(times[1]), rel=0.05)
    assert f"{row.gain:.1f}×" in str(told)


def test_a_place_is_one_row_at_every_size() -> None:
    fused = epinorm.fuse(model(lambda s, x: s.norm(s.fc(x) + x[:, :1]))())
    for rows in (3, 5, 7):
        fused(torch.randn(rows, K))
    (row,) = epinorm.explain(fused).rows
    assert re.search(r"adds a tensor of shape \[\d, 1\] to one of shape \[\d, 16\]", row.reason)


def test_keyword_arguments() -> None:
    (row,) = epinorm.explain(Model(), x=torch.randn(2, 3, K)).rows
    assert row.shape == f"[2, 3, {K}] → [2, 3, {N}]"
