"""Values and gradients of every operation, norm, dtype, group size and shape against float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends import reference as reference_backend
from epinorm.backends.cpu.blocks import choose_blocks
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.problem import Wanted
from epinorm.tools.accuracy import relative_error

sys.path.insert(0, str(Path(__file__).parent))
import kernels as backend

pytestmark = pytest.mark.usefixtures("needs_kernels")

KB62 = "group_norm(8)|leaky_relu(0.01)|scale(2)"
OPERATIONS = {
    "scale": "scale(1.7)",
    "add": "add(0.3)",
    "clamp": "clamp(-0.8,0.9)",
    "hardtanh": "hardtanh(-0.7,0.6)",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


SEVERAL = "add_residual|silu|mul_channel|{}|add_channel|gelu|add_residual|tanh"
SMOOTH = "group_norm(8,0.1)|silu"
"""Without a kink: where a value lies within rounding of one, float32 and float64 may take different
sides, and the gradient of that element is then another, ours or eager's. And with an eps that keeps
a group of two nearly equal channels from making up all of the error by itself."""


def both_draws(make_case, *facts, times=1, **more):
    """Mean zero and mean not zero."""
    draws = (torch.randn, torch.rand) * times
    return [make_case(*facts, draw=draw, **more) for draw in draws]


NAMES = [OPERATIONS.get(n, n) for n in sorted(set(DEFINITIONS) - {"dropout", "mul_row"})]
PAIRS = ["|".join((*NAMES, NAMES[0])[i : i + 2]) for i in range(0, len(NAMES), 2)]
EVERY = [
    # Alone on both sides, by the kernels of test_hard_inputs.py; in float64 two on each, in bf16
    # crosswise.
    *((torch.float32, name, name) for name in NAMES),
    *((torch.float64, *sides) for sides in zip(PAIRS[::2], PAIRS[1::2], strict=True)),
    *((torch.bfloat16, *sides) for sides in zip(PAIRS[1::2], PAIRS[::2], strict=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("dtype, pre, post", EVERY, ids=str)
def test_every_operation(dtype, pre, post, make_case, check_as_accurate_as_eager):
    times = 18 if dtype == torch.bfloat16 else 1  # which side of a kink a value takes is chance
    cases = both_draws(make_case, f"{pre}|group_norm(4)|{post}", 320, 48, 64, dtype, times=times)
    check_as_accurate_as_eager(cases)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group_norm(4)", "layer_norm", "rms_norm", "rms_norm(0.001)"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_with_several_operations(norm, dtype, make_case, check_as_accurate_as_eager):
    chain = SEVERAL.format(norm)
    check_as_accurate_as_eager(both_draws(make_case, chain, 512, 64, 96, dtype, times=4))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12, 24, 120])
def test_group_sizes(groups, make_case, check_as_accurate_as_eager):
    chain = f"group_norm({groups},0.1)|silu"  # eps: see SMOOTH
    check_as_accurate_as_eager(both_draws(make_case, chain, 700, 40, 240))


def test_groups_of_one_channel(make_case):
    """The variance is zero: y is the bias alone, and no gradient reaches x."""
    case = make_case("identity|group_norm(24)|identity", 37, 20, 24)
    y, dx, dweight, *_ = case.run()
    assert torch.equal(y, case.inputs.norm_bias.expand(37, 24))
    assert dx.abs().max() == 0
    assert dweight.abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "m,k,n",
    [
        *((1, 16, 32), (15, 7, 8), (17, 33, 40), (255, 5, 72), (513, 100, 24), (4097, 9, 136)),
        *((5000, 24, 1000), (300, 700, 520), (1100, 300, 640)),
    ],
)
def test_ragged_shapes(m, k, n, make_case, check_as_accurate_as_eager):
    check_as_accurate_as_eager(both_draws(make_case, SMOOTH, m, k, n, times=2 if n < 64 else 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("m,k,n", [(300, 520, 256), (301, 257, 513), (1030, 500, 264)])
def test_packed_weight(m, k, n, bias, make_case, check_as_accurate_as_eager):
    """Whole blocks by a weight arranged beforehand, the last rows by a plain product."""
    chain = SMOOTH if n % 8 == 0 else "layer_norm|silu"
    cases = both_draws(make_case, chain, m, k, n, bias=bias)
    blocks = choose_blocks(cases[0].problem, can_pack=True)
    assert blocks.packed
    assert m % blocks.rows
    check_as_accurate_as_eager(cases)


def test_short_products_round_less_than_eager(make_case):
    """K = 128 in one chain of additions is eager's; in two halves, a quarter of the error goes."""
    case = make_case(KB62, 4096, 128, 128)
    exact = case.inputs.x.double() @ case.inputs.weight.double().T + case.inputs.bias.double()
    ours, eager = (
        relative_error(module.forward(case.problem, case.inputs).z, exact)
        for module in (backend, reference_backend)
    )
    assert ours < 0.85 * eager


@pytest.mark.slow
@pytest.mark.parametrize("m,k,n", [(257, 40, 56), (4500, 24, 40), (600, 520, 512)])
def test_bf16_shapes(m, k, n, make_case, check_as_accurate_as_eager):
    cases = [
        case
        for _ in range(6 if m * n < 10_000 else 2)
        for case in both_draws(make_case, KB62, m, k, n, torch.bfloat16)
    ]
    check_as_accurate_as_eager(cases)


@pytest.mark.slow
@pytest.mark.parametrize("m", [300, 4500])
def test_16_bit_product_with_fp32_norm(m, make_case, check_as_accurate_as_eager):
    chain = "add_residual|group_norm(8)|mul_channel|silu"
    cases = both_draws(make_case, chain, m, 48, 64, torch.bfloat16, torch.float32)
    check_as_accurate_as_eager(cases)
    assert cases[0].run()[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias,affine", [(False, True), (True, False), (False, False)])
def test_without_parameters(bias, affine, dtype, make_case, check_as_accurate_as_eager):
    check_as_accurate_as_eager(
        both_draws(make_case, KB62, 400, 40, 64, dtype, bias=bias, affine=affine)
    )


@pytest.mark.parametrize("m", [130, 4200])
def test_rows_with_a_stride(m, make_case):
    """Parts of wider tensors give the bits that their copies give."""
    case = make_case("add_residual|group_norm(4)|add_residual", m, 40, 64)

    def widened(tensor):
        wide = torch.full((tensor.shape[0], tensor.shape[1] + 9), float("nan"))
        wide[:, 3 : 3 + tensor.shape[1]] = tensor
        return wide[:, 3 : 3 + tensor.shape[1]]

    inputs = case.inputs
    strided = inputs._replace(
        x=widened(inputs.x),
        weight=widened(inputs.weight),
        operands=tuple(widened(t) for t in inputs.operands),
    )
    other = type(case)(case.problem, strided, widened(case.dy))
    for name, a, b in zip(
        "y dx dw db dg dbeta d0 d1".split(), case.run(), other.run(), strict=True
    ):
        # The product may sum in another order where rows start elsewhere in a cache line.
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=name)


def test_expanded_gradient(make_case):
    """What y.sum().backward() sends: one value, with no stride in either direction."""
    case = make_case(KB62, 100, 24, 32)
    expanded = type(case)(case.problem, case.inputs, torch.tensor(0.5).expand(100, 32))
    dense = type(case)(case.problem, case.inputs, torch.full((100, 32), 0.5))
    for a, b in zip(expanded.run(), dense.run(), strict=True):
        assert torch.equal(a, b)


def test_only_what_is_wanted(make_case):
    case = make_case("mul_channel|group_norm(4)|silu|add_residual", 200, 24, 32)
    kept = backend.forward(case.problem, case.inputs)
    everything = case.run()[1:]
    for index in range(7):
        flags = [i == index for i in range(7)]
        want = Wanted(*flags[:5], tuple(flags[5:]))
        some = backend.backward(case.problem, case.inputs, kept, case.dy, want)
        for i, gradient in enumerate((*some[:5], *some.operands)):
            assert (gradient is None) == (i != index)
        found = (*some[:5], *some.operands)[index]
        assert torch.equal(found, everything[index])


def test_what_is_kept(make_case):
    case = make_case(KB62, 100, 24, 32)
    kept = backend.forward(case.problem, case.inputs)
    theirs = reference_backend.forward(case.problem, case.inputs)
    assert [t.shape for t in kept.outputs] == [t.shape for t in theirs.outputs]
    torch.testing.assert_close(kept.z, theirs.z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kept.mean, theirs.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kept.rstd, theirs.rstd, rtol=1e-5, atol=1e-6)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, case, *tensors):
        inputs = case.inputs._replace(
            x=tensors[0].detach(),
            weight=tensors[1].detach(),
            bias=tensors[2].detach(),
            norm_weight=tensors[3].detach(),
            norm_bias=tensors[4].detach(),
            operands=tuple(t.detach() for t in tensors[5:]),
        )
        kept = backend.forward(case.problem, inputs)
        ctx.saved = (case, inputs, kept)
        return kept.y

    @staticmethod
    def backward(ctx, dy):
        case, inputs, kept = ctx.saved
        gradients = backend.backward(case.problem, inputs, kept, dy, case.wanted())
        return (None, *gradients[:5], *gradients.operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain",
    [
        *(SEVERAL.format(norm) for norm in ("group_norm(3)", "layer_norm", "rms_norm")),
        *(f"{pre}|group_norm(2)|{post}" for dtype, pre, post in EVERY if dtype == torch.float64),
    ],
)
def test_gradcheck(chain, make_case):
    case = make_case(chain, 5, 4, 6, torch.float64)
    tensors = [t.clone().requires_grad_() for t in (*case.inputs[:5], *case.inputs.operands)]
    assert torch.autograd.gradcheck(lambda *given: _Fused.apply(case, *given), tensors)
