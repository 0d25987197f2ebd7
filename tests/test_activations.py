"""The registry of operations: what a definition says is so, and one definition is all it takes."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import pytest
import torch
from torch import nn

import epinorm
from epinorm.chain.activations import ACTIVATIONS, Definition
from epinorm.chain.pointwise import (
    DEFINITIONS,
    Pointwise,
    define,
    of_call,
    of_module,
)
from processes import Process

K, N = 12, 16
DEFINED = [d for d in ACTIVATIONS if d.operand != "seed"]  # dropout: test_dropout.py
MODULES = sorted({cls for d in DEFINED for cls in d.modules}, key=lambda cls: cls.__name__)
NAMED = [(cls, [*names, *d.where]) for d in DEFINED for cls, names in d.modules.items()]
CONSTANTS = [*dict.fromkeys((cls, name) for cls, names in NAMED for name in names)]
VALUES: dict[str, list[Any]] = {}
for _definition in DEFINED:
    for _name, _value in _definition.where.items():
        VALUES.setdefault(_name, []).append(_value)


def other_value(name: str, value: Any) -> Any:
    return next(v for v in VALUES[name] if v != value) if name in VALUES else value * 0.02 + 0.3


def operations(definition: Definition) -> list[Pointwise]:
    constants = [
        [default if default is not None and math.isfinite(default) else v for default, v in pairs]
        for pairs in (
            zip(definition.parameters.values(), (-0.5, 1.5), strict=False),
            zip([None] * len(definition.parameters), (-0.5, 1.5), strict=False),
            zip([None] * len(definition.parameters), (0.7, 2.5), strict=False),
        )
    ]
    return [Pointwise(definition.name, tuple(c)) for c in constants]


@pytest.mark.filterwarnings("ignore:epinorm")
@pytest.mark.parametrize("before", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("cls,name", CONSTANTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_constant_changed_after_fusing_takes_effect(cls: Any, name: str, before: bool) -> None:
    layers = [nn.Linear(K, N), nn.GroupNorm(4, N)]
    layers.insert(1 if before else 2, cls())
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 10)
    # Kernels are given all constants alike, on either side (test_changing_constants.py): compiled
    # for one of them.
    compiled = not before and name == "negative_slope"
    fused = epinorm.fuse(copy.deepcopy(model), strategy="auto" if compiled else "reference")
    x = torch.randn(9, K, dtype=torch.float64)
    found = []
    default = getattr(next(m for m in model if type(m) is cls), name)
    for value in (other_value(name, default), default):
        for one in (model, fused):
            setattr(next(m for m in one if type(m) is cls), name, value)
        found.append(fused(x))
        torch.testing.assert_close(found[-1], model(x), rtol=1e-10, atol=1e-10)
    assert epinorm.explain(fused).rows[0].fused
    assert not torch.allclose(*found)


def test_every_constant_of_every_module_is_among_them() -> None:
    named = set(CONSTANTS)
    for cls in MODULES:
        declared = set(getattr(cls, "__constants__", ())) - {"inplace"}
        assert {(cls, name) for name in declared} <= named


EACH = [op for d in DEFINED for op in operations(d) if op.operand is None]


@pytest.mark.parametrize("operation", EACH, ids=str)
def test_derivative_jumps_at_the_kinks_alone(operation: Pointwise) -> None:
    step = 2**-12
    x = torch.arange(-8, 24, step, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(operation(x).sum(), x)
    jumps = x.detach()[1:][(slope[1:] - slope[:-1]).abs() > 50 * step]
    near = [(jumps - kink).abs() <= 2 * step for kink in operation.kinks]
    assert torch.stack(near).any(0).all() if near else not jumps.numel()


@pytest.mark.parametrize("operation", EACH, ids=str)
def test_homogeneous_is_what_scales_with_its_input(operation: Pointwise) -> None:
    x = torch.randn(1000, dtype=torch.float64) * 4
    scales = all(torch.equal(operation(x * c), operation(x) * c) for c in (0.25, 8.0))
    assert scales or not operation.definition.homogeneous


@pytest.mark.parametrize("definition", DEFINED, ids=lambda d: d.name)
def test_every_spelling_of_a_function_is_read(definition: Definition) -> None:
    x = torch.randn(200, dtype=torch.float64) * 4
    for target in definition.functions:
        for operation in operations(definition):
            constants = dict(zip(definition.parameters, operation.constants, strict=True))
            call = getattr(torch.Tensor, target) if isinstance(target, str) else target
            for named in (constants, {}):
                given = () if named else operation.constants
                read = of_call(target, (None, *given), named | definition.where)
                assert read == operation
                expected = call(x.clone(), *given, **named, **definition.where)
                assert torch.equal(read(x), expected)


@pytest.mark.parametrize(
    "target,arguments,named,text",
    [
        (torch.clamp, (None, -1), {}, "clamp(-1,inf)"),
        (torch.clamp, (None, None, 2), {}, "clamp(-inf,2)"),
        ("clamp_", (None,), {"max": 2}, "clamp(-inf,2)"),
        ("clamp_min", (None, 0), {}, "clamp(0,inf)"),
        (torch.ops.aten.clamp_max_.default, (None, 0), {}, "clamp(-inf,0)"),
        (torch.ops.aten.gelu.default, (None,), {"approximate": "tanh"}, "gelu_tanh"),
        (torch.ops.aten.relu_.default, (None,), {}, "relu"),
        (torch.ops.aten.elu.default, (None, 0.5, 2.0), {}, None),
        (torch.nn.functional.elu, (None, 0.5, True), {}, "elu(0.5)"),
        (torch.nn.functional.relu, (), {"input": None, "inplace": True}, "relu"),
        (torch.nn.functional.leaky_relu, (None, math.nan), {}, None),
        (torch.nn.functional.leaky_relu, (None, "0.1"), {}, None),
        (torch.relu, (None,), {"out": None}, None),
        (torch.mul, (None, 2), {}, None),
        ("view", (None, 2), {}, None),
    ],
)
def test_calls_are_read_as_pytorch_reads_them(target, arguments, named, text) -> None:
    found = of_call(target, arguments, named)
    assert (None if found is None else str(found)) == text


def test_a_constant_that_is_no_number_is_nothing_of_ours() -> None:
    assert of_module(nn.LeakyReLU(torch.tensor(0.1))) is None  # type: ignore[arg-type]
    assert of_module(nn.LeakyReLU(math.nan)) is None


def celu(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "celu",
        "apply": torch.celu,
        "forward": "return x > T(0) ? x : alpha * expm1(x / alpha);",
        "backward": "return x > T(0) ? g : g * exp(x / alpha);",
        "parameters": {"alpha": 1.0},
        "modules": {nn.CELU: ("alpha",)},
        "functions": (torch.celu, torch.ops.aten.celu),
        "kinks": lambda alpha: (0.0,),
        "homogeneous": False,
    }
    return {key: value for key, value in (entry | changes).items() if value is not ...}


@pytest.mark.parametrize("forgotten", ["modules", "functions", "kinks", "homogeneous"])
def test_what_a_definition_lacks_is_named(forgotten: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{forgotten}'"):
        Definition(**celu(**{forgotten: ...}))


@pytest.mark.parametrize("changes", [{"parameters": {}}, {"modules": {nn.CELU: ()}}])
def test_a_module_whose_constants_are_forgotten_is_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match=r"an attribute of CELU for each of.*constants \(alpha\)"):
        Definition(**celu(**changes))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"name": "relu"}, "'relu' is defined already"),
        ({"modules": {nn.ELU: ("alpha",)}}, "'celu' is spelled as 'elu' is"),
        ({"functions": (torch.relu,)}, "'celu' is spelled as 'relu' is"),
    ],
)
def test_two_operations_are_told_apart(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        define(Definition(**celu(**changes)))
    assert "celu" not in DEFINITIONS


NEW_ACTIVATION = """
    import copy, torch, epinorm
    import torch.nn.functional as F
    from torch import nn
    from epinorm.tools.kinks import away_from_kinks
    from epinorm.chain.pointwise import define
    from epinorm.chain.activations import Definition

    define(
        Definition(
            "celu",
            F.celu,
            "return x > T(0) ? x : alpha * expm1(x / alpha);",
            "return x > T(0) ? g : g * exp(x / alpha);",
            {"alpha": 1.0},
            modules={nn.CELU: ("alpha",)},
            functions=(F.celu, torch.celu, torch.ops.aten.celu),
            kinks=lambda alpha: (0.0,),
            homogeneous=False,
        )
    )

    class ByFunction(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(12, 16), nn.LayerNorm(16)

        def forward(self, x):
            return F.celu(self.norm(torch.celu(self.fc(x), 2.0)), alpha=0.5)

    # Powers of two: PyTorch's own derivative takes alpha's reciprocal in single precision.
    def compare(model, text, change=None):
        fused = epinorm.fuse(copy.deepcopy(model), strategy="cpu")
        x = torch.randn(40, 12, dtype=torch.float64)
        (row,) = epinorm.explain(fused, x).rows
        assert row.fused and row.chain.endswith(text), row
        for step in range(2 if change else 1):
            results = []
            for one in (model, fused):
                if step:
                    change(one)
                y = one(x)
                parameters = list(one.parameters())
                dy = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y)
                results.append([y, *torch.autograd.grad(y, parameters, dy)])
            torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)

    compare(
        nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.CELU(0.25)).double(),
        "celu(0.25)",
        lambda one: setattr(one[2], "alpha", 4.0),
    )
    compare(ByFunction().double(), "celu(0.5)")
    x, w = torch.randn(9, 12), torch.randn(16, 12)
    for post in ("celu(0.5)", nn.CELU(0.5)):
        y = epinorm.linear_norm(x, w, norm=epinorm.LayerNorm(), post=post)
        torch.testing.assert_close(y, F.celu(F.layer_norm(x @ w.T, (16,)), 0.5))
    near = torch.tensor([[-1.0, 1e-9, 1.0]], dtype=torch.float64)
    (kept,) = away_from_kinks(nn.CELU(), (near,), [near.shape], 1e-6)
    assert kept.tolist() == [[True, False, True]]
"""


@pytest.mark.slow
def test_a_new_activation_is_one_definition() -> None:
    process = Process(NEW_ACTIVATION, os.environ)
    _, err = process.communicate(200)
    assert process.returncode == 0, err
