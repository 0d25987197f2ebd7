"""explain() names every chain, and for each that is not fused the reason."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm
from torch.utils import _pytree as pytree

import epinorm

K, N, ROWS = 12, 16, 5
COUNTER: list[int] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.LayerNorm(N)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.config = {"slope": 0.1}

    def forward(self, x):
        return self.act(self.norm(self.fc(x)))


class UsedElsewhere(Model):
    def forward(self, x):
        h = self.fc(x)
        return self.norm(h).relu() + h


class ReturnedToo(Model):
    def forward(self, x):
        h = self.fc(x)
        return self.norm(h), h


class Reshapes(Model):
    def forward(self, x):
        return self.norm(self.fc(x).reshape(-1, N))


class DropsBetween(Model):
    def forward(self, x):
        return self.norm(self.drop(self.fc(x)))


class Squares(Model):
    def forward(self, x):
        h = self.fc(x)
        return self.norm(h * h)


class ComputedShape(Model):
    def forward(self, x):
        h = self.fc(x)
        return F.layer_norm(h, [x.shape[-1] + 4], self.norm.weight, self.norm.bias)


class TwoDimensions(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((ROWS, N))


class BranchesOnData(Model):
    def forward(self, x):
        h = self.norm(self.fc(x))
        return h if h.sum() > 0 else -h


class BranchesOnShape(Model):
    def forward(self, x):
        return self.norm(self.fc(x)) if x.dim() == 2 else self.fc(x)


class NoGrad(Model):
    def forward(self, x):
        with torch.no_grad():
            h = self.norm(self.fc(x))
        return h


class Autocasts(Model):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.norm(self.fc(x))


class Prints(Model):
    def forward(self, x):
        print(end="")
        return self.norm(self.fc(x))


class Rolls(Model):
    def forward(self, x):
        return self.norm(self.fc(x)) * random.random()


class Counts(Model):
    def forward(self, x):
        self.calls += 1
        return self.norm(self.fc(x))


class SetsOnChild(Model):
    def forward(self, x):
        h = self.norm(self.fc(x))
        self.act.last = h
        return h


class DefaultList(Model):
    def forward(self, x, extra=[]):  # noqa: B006
        return self.norm(self.fc(x)) * len(extra)


class ReadsDictionary(Model):
    def forward(self, x):
        return F.leaky_relu(self.norm(self.fc(x)), self.config["slope"])


class AppendsToGlobal(Model):
    def forward(self, x):
        COUNTER.append(1)
        return self.norm(self.fc(x))


class Variadic(Model):
    def forward(self, *args):
        return self.norm(self.fc(args[0]))


class ChecksType(Model):
    def forward(self, x):
        return self.norm(self.fc(x)) if isinstance(x, torch.Tensor) else None


class SwallowsErrors(Model):
    def forward(self, x):
        try:
            if x.sum() > 0:
                return self.norm(self.fc(x))
        except Exception:
            return x
        return -x


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class OwnNorm(nn.LayerNorm):
    pass


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Model()
        change(model)
        return model

    return make


REASONS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "forward hook": (
        changed(lambda m: m.fc.register_forward_hook(lambda *a: None)), "fc has hooks"
    ),
    "forward pre-hook": (
        changed(lambda m: m.norm.register_forward_pre_hook(lambda *a: None)), "norm has hooks"
    ),
    "backward hook": (
        changed(lambda m: m.norm.register_full_backward_hook(lambda *a: None)), "norm has hooks"
    ),
    "old weight_norm": (changed(lambda m: weight_norm(m.fc)), "fc has hooks"),
    "forward replaced": (
        changed(lambda m: setattr(m.norm, "forward", F.relu)), "the forward of norm was replaced"
    ),
    "used elsewhere": (UsedElsewhere, "the result of fc is also used by add"),
    "returned too": (ReturnedToo, "the result of fc is also used by the output"),
    "reshape": (Reshapes, "reshape is not a pointwise operation"),
    "square": (Squares, "mul is not a pointwise operation"),
    "dropout in training": (DropsBetween, "drop drops values in training; fused in eval mode"),
    "computed normalized_shape": (ComputedShape, "normalized_shape is computed"),
    "two dimensions": (TwoDimensions, "its norm spans 2 dimensions"),
    "subclass of Linear": (
        changed(lambda m: setattr(m, "fc", OwnLinear(K, N))), "OwnLinear is not nn.Linear"
    ),
    "subclass of a norm": (
        changed(lambda m: setattr(m, "norm", OwnNorm(N))), "OwnNorm is a subclass"
    ),
    "lazy": (changed(lambda m: setattr(m, "fc", nn.LazyLinear(N))), "LazyLinear has no shape"),
    "branch on data": (BranchesOnData, "decides by a tensor's value or shape"),
    "branch on shape": (BranchesOnShape, "decides by a tensor's value or shape"),
    "no_grad": (NoGrad, "cannot be traced"),
    "autocast": (Autocasts, "cannot be traced"),
    "print": (Prints, "calls print"),
    "random": (Rolls, "calls Random.random"),
    "sets attributes": (Counts, "sets attributes of its own"),
    "sets on a child": (SetsOnChild, "sets attributes of a module"),
    "mutable default": (DefaultList, "the default of extra is a list"),
    "dictionary": (ReadsDictionary, "reads self.config, a dict"),
    "global list": (AppendsToGlobal, "reads the global COUNTER, a list"),
    "variadic": (Variadic, r"its forward takes \*args"),
    "isinstance": (ChecksType, "calls isinstance"),
    "swallowed error": (SwallowsErrors, "decides by a tensor's value"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make, reason", REASONS.values(), ids=REASONS)
def test_what_is_not_fused_says_why_and_stays_right(
    make: Callable[[], nn.Module], reason: str
) -> None:
    model = make()
    (row,) = epinorm.explain(model).rows
    assert not row.fused
    assert row.strategy == "layers"
    assert re.search(reason, row.reason), row.reason
    x = torch.randn(ROWS, K)
    model(x)  # a lazy module takes its shape
    for p in model.parameters():
        nn.init.normal_(p)
    results = []
    for prepare in (lambda m: m, epinorm.fuse):
        model.calls = 0
        torch.manual_seed(2)
        prepare(model)
        random.seed(2)
        results.append(model(x))
        assert model.calls == isinstance(model, Counts)
    for got, expected in zip(*map(pytree.tree_leaves, reversed(results)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_tracing_leaves_no_trace_in_the_module() -> None:
    model = Counts()
    before = copy.deepcopy(vars(model))
    epinorm.explain(model)
    assert vars(model).keys() == before.keys()
    assert model.calls == 0


def test_quantised_layers_are_named() -> None:
    model = Model()
    model.fc = torch.ao.nn.quantized.dynamic.Linear(K, N)
    (row,) = epinorm.explain(model).rows
    assert not row.fused
    assert "quantized.dynamic" in row.reason
    assert "is not nn.Linear" in row.reason


def test_rows_name_chain_place_and_plan() -> None:
    model = nn.Sequential(Model(), nn.Linear(N, N, bias=False), nn.GroupNorm(4, N), nn.SiLU())
    for explanation in (
        epinorm.explain(model),
        epinorm.explain(epinorm.fuse(copy.deepcopy(model))),
    ):
        assert {(r.chain, r.where, r.fused) for r in explanation.rows} == {
            ("layer_norm(1e-05)|relu", "0.fc → 0.norm", True),
            ("group_norm(4,1e-05)|silu", "1 → 2", True),
        }
        assert all(r.reason == "decided at the first call" for r in explanation.rows)


def test_example_inputs_give_shapes_and_the_plans_reason() -> None:
    model = Model()
    x = torch.randn(2, 3, K)
    (row,) = epinorm.explain(model, x).rows
    assert row.fused
    assert row.shape == f"[2, 3, {K}] → [2, 3, {N}]"
    assert row.strategy in ("cpu", "reference")
    assert row.reason != "decided at the first call"
    (forced,) = epinorm.explain(epinorm.fuse(model, strategy="reference"), x).rows
    assert forced.strategy == "reference"


def test_example_inputs_tell_a_group_norm_that_is_another_function() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.GroupNorm(4, N))
    (row,) = epinorm.explain(model, torch.randn(2, N, K)[..., :K]).rows
    assert not row.fused
    assert "normalises dimension 1" in row.reason


def test_example_inputs_tell_mixed_dtypes() -> None:
    model = nn.Sequential(nn.Linear(K, N).bfloat16(), nn.LayerNorm(N))
    (row,) = epinorm.explain(model, torch.randn(2, K).bfloat16()).rows
    assert not row.fused
    assert "several dtypes" in row.reason


def test_the_example_run_leaves_buffers_random_state_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.BatchNorm1d(N), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0))
    epinorm.explain(epinorm.fuse(model), x)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())


def test_text_table_and_json() -> None:
    explanation = epinorm.explain(UsedElsewhere())
    text = str(explanation)
    assert "UsedElsewhere: 0 of 1 chains fused" in text
    assert "fc → norm" in text
    data = json.loads(explanation.to_json())
    assert data["model"] == "UsedElsewhere"
    assert data["rows"][0]["fused"] is False
    assert "also used by" in data["rows"][0]["reason"]


def test_a_chain_in_an_inlined_container_is_listed_once() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N))

        def forward(self, x):
            return self.net(x).relu()

    (row,) = epinorm.explain(Outer()).rows
    assert (row.chain, row.where) == ("layer_norm(1e-05)|relu", "net.0 → net.1")
