"""Every operation's C++ text against PyTorch, compiled once for the CPU, values and gradients."""

import ctypes
import math
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from epinorm.chain.activations import CPP_FUNCTIONS
from epinorm.chain.pointwise import (
    DEFINITIONS,
    Pointwise,
    as_pointwise,
    as_pointwise_list,
    cpp_function,
    format_number,
    parse_pointwise,
)

# Each definition at its defaults, and with other constants where it takes some.
OPERATIONS = [
    *(Pointwise(name) for name, d in DEFINITIONS.items() if None not in d.parameters.values()),
    Pointwise("leaky_relu", (0.3,)),
    Pointwise("leaky_relu", (-0.5,)),
    Pointwise("elu", (0.7,)),
    Pointwise("hardtanh", (-0.25, 2.0)),
    Pointwise("clamp", (-1.0, 1.5)),
    Pointwise("clamp", (0.0,)),
    Pointwise("clamp", (1.0, -1.0)),
    Pointwise("softplus", (2.5, 3.0)),
    Pointwise("scale", (2.0,)),
    Pointwise("scale", (-0.1,)),
    Pointwise("add", (1.5,)),
]

HEADER = """
#include <cmath>
#define EPINORM_FUNCTION static inline
using std::exp; using std::expm1; using std::log1p; using std::tanh; using std::erf;
template <typename T> static T quotient(T a, T b) { return a / b; }
template <typename T> static T at_least(T x, T low) { return x < low ? low : x; }
template <typename T> static T at_most(T x, T high) { return x > high ? high : x; }
"""

KINKS = [0.0, -0.0, 3.0, -3.0, 6.0, 1.0, -1.0, 1.5, -0.25, 2.0, 1.2, 20.0, 8.0]
LARGE = [1e2, -1e2, 1e4, -1e4, 1e30, -1e30, 1e160, -1e160, 700.0, -700.0, 800.0, -800.0]
SPECIAL = [math.nan, math.inf, -math.inf]


def _identifier(operation: Pointwise) -> str:
    return f"f{OPERATIONS.index(operation)}"


def _loop(operation: Pointwise, body: str) -> str:
    """One function and a loop over an array that calls it in double."""
    name = f"{_identifier(operation)}_{body}"
    arguments = "x[i]" if body == "forward" else "g[i], x[i]"
    if operation.operand is not None:
        arguments += ", t[i]"
    for value in operation.arguments:
        arguments += f", {value!r}".replace("inf", "INFINITY")
    return (
        cpp_function(name, operation, body)  # type: ignore[arg-type]
        + f'\nextern "C" void loop_{name}(long n, const double* x, const double* g, '
        + "const double* t, double* out) "
        + f"{{ for (long i = 0; i < n; ++i) out[i] = {name}<double>({arguments}); }}\n"
    )


def _bodies(operation: Pointwise) -> list[str]:
    bodies = ["forward", "backward"]
    return [*bodies, "operand_backward"] if operation.definition.operand_backward else bodies


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("pointwise")
    loops = [_loop(op, body) for op in OPERATIONS for body in _bodies(op)]
    (folder / "all.cpp").write_text(HEADER + CPP_FUNCTIONS + "".join(loops))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "all.cpp", "-o", "all.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def _call(compiled: ctypes.CDLL, operation: Pointwise, body: str, *arrays: torch.Tensor):
    out = torch.full_like(arrays[0], math.nan)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*arrays, out)]
    getattr(compiled, f"loop_{_identifier(operation)}_{body}")(
        ctypes.c_long(out.numel()), *pointers
    )
    return out


def _samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.cat(
        [
            torch.randn(400, dtype=torch.float64) * 3,
            torch.linspace(-30, 30, 601, dtype=torch.float64),
            torch.tensor(KINKS + LARGE + SPECIAL, dtype=torch.float64),
        ]
    )
    return x, torch.randn_like(x), torch.randn_like(x)


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor, x: torch.Tensor, rtol: float) -> None:
    """Equal NaNs and infinities; values within rtol, or 1e-13 where the tails cancel to nothing."""
    slack = rtol * theirs.abs() + 1e-13 * (theirs.abs() < 1e-3)
    bad = ours.isnan() != theirs.isnan()
    bad |= (ours.isinf() | theirs.isinf()) & (ours != theirs)
    bad |= ours.isfinite() & theirs.isfinite() & ((ours - theirs).abs() > slack)
    wrong = torch.stack([x, ours, theirs], dim=1)[bad].tolist()
    assert not wrong, f"(x, ours, PyTorch's): {wrong[:8]}"


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_cpp_text_computes_what_pytorch_computes(compiled, operation):
    x, g, t = _samples()
    leaves = [x.requires_grad_(), t.requires_grad_()]
    if operation.operand == "seed":  # kernels get what it makes of each value
        seed = torch.tensor([1])
        y, t = operation(x[None], seed)[0], operation(torch.ones_like(x)[None], seed)[0]
    else:
        y = operation(*leaves) if operation.operand is not None else operation(x)
    dx, dt = torch.autograd.grad(y, leaves, g, allow_unused=True)
    arrays = [v.detach() for v in (x, g, t)]
    _assert_same(_call(compiled, operation, "forward", *arrays), y.detach(), arrays[0], 1e-12)
    _assert_same(_call(compiled, operation, "backward", *arrays), dx, arrays[0], 1e-12)
    if operation.definition.operand_backward is not None:
        found = _call(compiled, operation, "operand_backward", *arrays)
        _assert_same(found, dt, arrays[0], 1e-12)


def test_every_definition_is_compiled_here():
    assert {op.name for op in OPERATIONS} == set(DEFINITIONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_text_round_trip(operation):
    assert parse_pointwise(str(operation)) == operation


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.LeakyReLU(0.2),
        nn.ReLU(inplace=True),
        nn.ReLU6(),
        nn.ELU(0.5),
        nn.SiLU(),
        nn.GELU(),
        nn.GELU(approximate="tanh"),
        nn.Mish(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Hardtanh(-2, 0.5),
        nn.Hardswish(),
        nn.Softplus(2, 5),
    ],
    ids=repr,
)
def test_module_means_the_same_operation(module):
    x = torch.randn(500, dtype=torch.float64) * 4
    assert torch.equal(as_pointwise(module)(x), module(x.clone()))


def test_operations_may_come_in_any_form():
    expected = (Pointwise("leaky_relu", (0.01,)), Pointwise("scale", (2.0,)))
    assert as_pointwise_list("leaky_relu(0.01)|scale(2)") == expected
    assert as_pointwise_list([nn.LeakyReLU(), "scale(2)"]) == expected
    assert as_pointwise_list(nn.Sequential(nn.LeakyReLU())) == expected[:1]
    assert as_pointwise_list(nn.LeakyReLU()) == expected[:1]
    assert as_pointwise_list(expected[1]) == expected[1:]
    assert as_pointwise_list("") == as_pointwise_list(()) == ()


@pytest.mark.parametrize(
    "value,text",
    [
        (2.0, "2"),
        (0.01, "0.01"),
        (-0.0, "-0.0"),
        (1e-5, "1e-05"),
        (math.inf, "inf"),
        (1e22, "1e+22"),
    ],
)
def test_numbers_print_short_and_read_back(value, text):
    assert format_number(value) == text
    assert math.copysign(1, float(text)) == math.copysign(1, value)
    assert float(text) == value


@pytest.mark.parametrize(
    "text,message",
    [
        ("leaky_rely(0.1)", "unknown pointwise operation 'leaky_rely'; did you mean 'leaky_relu'?"),
        ("zzz", "unknown pointwise operation 'zzz'; known are identity"),
        ("scale", r"scale needs a value for factor, e.g. scale\(2\)"),
        ("relu(1)", "relu takes at most 0 constants, got 1"),
        ("hardtanh(1,2,3)", "hardtanh takes at most 2 constants, got 3"),
        ("scale(two)", r"cannot read 'two' in 'scale\(two\)' as a number"),
        ("scale(2", r"cannot read 'scale\(2': expected name\(number, ...\)"),
        ("scale(nan)", "scale takes finite or infinite constants, got nan"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse_pointwise(text)


@pytest.mark.parametrize("operation", [torch.relu, F.silu, F.leaky_relu, F.gelu, torch.clamp])
def test_function_means_the_same_operation(operation):
    x = torch.randn(500, dtype=torch.float64) * 4
    bounds = (-math.inf,) if operation is torch.clamp else ()
    assert torch.equal(as_pointwise(operation)(x), operation(x, *bounds))


@pytest.mark.parametrize(
    "wrong,name", [(3, "int"), (torch.mul, "mul"), (nn.ReLU, "ReLU"), (None, "NoneType")]
)
def test_anything_else_is_told(wrong, name):
    with pytest.raises(TypeError, match=f"^{name} is not a pointwise operation; pass a text such"):
        as_pointwise_list(wrong)
    with pytest.raises(TypeError, match=f"^{name} is not a pointwise operation; pass a text such"):
        as_pointwise_list([wrong])


def test_unknown_module_is_a_type_error():
    with pytest.raises(TypeError, match="Linear is not a pointwise operation; pass a text such as"):
        as_pointwise(nn.Linear(1, 1))


def test_subclass_of_an_activation_is_not_that_activation():
    class Louder(nn.ReLU):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="Louder is not a pointwise operation"):
        as_pointwise(Louder())


def test_no_operand_has_no_operand_backward():
    with pytest.raises(ValueError, match="relu has no operand_backward"):
        cpp_function("f", Pointwise("relu"), "operand_backward")
