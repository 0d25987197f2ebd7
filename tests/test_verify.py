"""verify accepts what is right and catches what is wrong: planted wrong implementations."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from epinorm.tools import console
from epinorm.tools.accuracy import (
    FLOOR_ULPS,
    Comparison,
    Outcome,
    Verification,
    allowed_error,
    compare,
    over_draws,
    relative_error,
)
from epinorm.tools.kinks import away_from_kinks
from epinorm.tools.tf32 import round_to_tf32
from epinorm.tools.verify import (
    Truth,
    by_the_larger_yardstick,
    draw_inputs,
    poisoned_memory,
    randomize_parameters,
    run_model,
    verify,
)

M, K, N, GROUPS = 24, 48, 64, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.gn = nn.GroupNorm(GROUPS, N)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.gn(self.fc(x)), 0.01)
        return y + y


class OtherOrder(Model):
    """Right, but rounded elsewhere: two passes over the values by hand."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x).view(-1, GROUPS, N // GROUPS)
        centred = z - z.mean(-1, keepdim=True)
        normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.gn.eps)
        y = normal.flatten(1) * self.gn.weight + self.gn.bias
        return 2 * F.leaky_relu(y, 0.01)


class OverTheBatch(Model):
    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x).view(-1, GROUPS, N // GROUPS)
        variance, mean = torch.var_mean(z, (0, 2), correction=0, keepdim=True)
        normal = ((z - mean) * torch.rsqrt(variance + self.gn.eps)).flatten(1)
        return 2 * F.leaky_relu(normal * self.gn.weight + self.gn.bias, 0.01)


class GammaIgnored(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(self.fc(x), GROUPS, None, self.gn.bias)
        return 2 * F.leaky_relu(y, 0.01)


class GammaPerGroup(Model):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.gn.weight.view(GROUPS, -1)[:, :1].expand(GROUPS, N // GROUPS).flatten()
        return 2 * F.leaky_relu(F.group_norm(self.fc(x), GROUPS, weight, self.gn.bias), 0.01)


class UnbiasedVariance(Model):
    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x).view(-1, GROUPS, N // GROUPS)
        variance, mean = torch.var_mean(z, 2, correction=1, keepdim=True)
        normal = ((z - mean) * torch.rsqrt(variance + self.gn.eps)).flatten(1)
        return 2 * F.leaky_relu(normal * self.gn.weight + self.gn.bias, 0.01)


class LastRowUnwritten(Model):
    """Writes all rows but the last into fresh memory, which may hold an earlier, right result."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if torch.is_grad_enabled():
            return y
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 0.5


class WrongGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(self.fc(x), GROUPS, _HalfGradient.apply(self.gn.weight), self.gn.bias)
        return 2 * F.leaky_relu(y, 0.01)


class NoGradient(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = F.group_norm(self.fc(x), GROUPS, self.gn.weight.detach(), self.gn.bias)
        return 2 * F.leaky_relu(y, 0.01)


class SixteenBitInside(Model):
    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(x.bfloat16(), self.fc.weight.bfloat16(), self.fc.bias.bfloat16()).to(x.dtype)
        return 2 * F.leaky_relu(self.gn(z), 0.01)


class WrongShape(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : N // 2]


class WrongDtype(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class AnswersOnce(Model):
    """Returns its first answer forever."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "answer"):
            self.answer = super().forward(x)
        return self.answer


class ChangesFromRunToRun(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (
            y + y * 1e-9 * torch.rand(())
            if y.dtype == torch.float64
            else y.mul(1 + 2e-7 * torch.rand(()))
        )


class AddsNaN(Model):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[0, 0] = math.nan
        return y


def make(kind: type[Model], dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    return kind().to(dtype), (torch.rand(M, K, dtype=dtype),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_itself_passes(dtype: torch.dtype, training: bool) -> None:
    model, inputs = make(Model, dtype)
    result = verify(model, copy.deepcopy(model), inputs, training=training)
    assert result.passed, result.failures
    names = [c.what for c in result.comparisons]
    if training:
        assert names[:6] == [
            "output",
            "gradient of input 0",
            "gradient of fc.weight",
            "gradient of fc.bias",
            "gradient of gn.weight",
            "gradient of gn.bias",
        ]
    assert len(names) == (12 if training else 2)
    assert all(c.ratio == 1 for c in result.comparisons)


def test_a_right_model_that_rounds_elsewhere_passes() -> None:
    model, inputs = make(Model, torch.float64)
    result = verify(model, make(OtherOrder, torch.float64)[0], inputs)
    assert result.passed, result.failures


@pytest.mark.parametrize(
    "wrong",
    [
        OverTheBatch,
        GammaIgnored,
        GammaPerGroup,
        UnbiasedVariance,
        SixteenBitInside,
        WrongShape,
        WrongDtype,
        AnswersOnce,
        AddsNaN,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_values_are_caught(wrong: type[Model], dtype: torch.dtype) -> None:
    model, inputs = make(Model, dtype)
    result = verify(model, make(wrong, dtype)[0], inputs, training=False)
    assert not result.passed
    assert any(c.what == "output" for c in result.failures)


@pytest.mark.parametrize("wrong", [OverTheBatch, GammaIgnored, UnbiasedVariance])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wrong_values_are_caught_in_16_bit(wrong: type[Model], dtype: torch.dtype) -> None:
    model, inputs = make(Model, dtype)
    assert not verify(model, make(wrong, dtype)[0], inputs, training=False).passed


def test_an_unwritten_row_is_caught_although_memory_held_the_answer() -> None:
    model, inputs = make(Model)
    result = verify(model, make(LastRowUnwritten)[0], inputs, training=False)
    assert not result.passed
    assert not result.worst.passed


@pytest.mark.parametrize("wrong", [WrongGradient, NoGradient])
def test_a_wrong_gradient_is_caught_and_named(wrong: type[Model]) -> None:
    model, inputs = make(Model)
    result = verify(model, make(wrong)[0], inputs)
    assert {c.what for c in result.failures} == {"gradient of gn.weight"}


def test_a_missing_gradient_is_said() -> None:
    model, inputs = make(Model)
    result = verify(model, make(NoGradient)[0], inputs)
    assert result.failures[0].reason == "missing"


def test_a_second_run_must_give_the_same_bits() -> None:
    model, inputs = make(Model)
    result = verify(model, make(ChangesFromRunToRun)[0], inputs, training=False)
    assert any("second run" in (c.reason or "") for c in result.failures)


def test_a_model_that_draws_is_said_to_at_once() -> None:
    class Draws(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.randn(1)

    model, inputs = make(Draws)
    with pytest.raises(ValueError, match="another result at each call"):
        verify(model, make(Draws)[0], inputs)


def test_parameters_are_given_back() -> None:
    model, inputs = make(Model)
    before = copy.deepcopy(model.state_dict())
    candidate = copy.deepcopy(model)
    verify(model, candidate, inputs)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        assert torch.equal(candidate.state_dict()[name], value)
    assert all(p.grad is None for p in model.parameters())


def test_a_candidate_without_the_parameters_is_refused() -> None:
    model, inputs = make(Model)
    with pytest.raises(RuntimeError, match="Missing key"):
        verify(model, nn.Linear(K, N), inputs, training=False)


def test_norm_parameters_and_biases_are_random() -> None:
    model, _ = make(Model)
    randomize_parameters(model)
    assert model.gn.weight.std() > 0.1
    assert abs(model.gn.weight.mean() - 1) < 0.2
    assert model.gn.bias.std() > 0.2
    assert model.fc.bias.std() > 0.2


def test_inputs_are_fresh_and_of_both_kinds() -> None:
    given = (torch.zeros(100, 100), 3, torch.arange(4))
    rand, randn = (draw_inputs(given, kind, seed=5) for kind in ("rand", "randn"))
    assert rand[0].min() >= 0
    assert abs(rand[0].mean() - 0.5) < 0.02
    assert abs(randn[0].mean()) < 0.05
    assert abs(randn[0].std() - 1) < 0.05
    assert rand[1] == 3
    assert torch.equal(rand[2], given[2])
    assert not torch.equal(rand[0], draw_inputs(given, "rand", seed=6)[0])


def test_relative_error() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), truth) == math.inf
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0
    assert relative_error(torch.tensor([0.25]), torch.zeros(1)) == 0.25
    holes = torch.tensor([math.nan, 2.0, math.inf])
    assert relative_error(holes.clone(), holes) == 0
    assert relative_error(torch.tensor([math.nan, 2.0, -math.inf]), holes) == math.inf
    assert relative_error(torch.tensor([1.0, 2.0, math.inf]), holes) == math.inf


def test_the_limits() -> None:
    assert allowed_error(1e-5, torch.float32) == pytest.approx(1e-5, rel=0.006)
    assert allowed_error(0.0, torch.float32) == 4 * 2**-23
    assert allowed_error(1e6, torch.float32) == pytest.approx(1e6, rel=0.006)
    assert allowed_error(1e9, torch.float32) == 2e9
    assert allowed_error(4e-3, torch.bfloat16) == pytest.approx(4.4e-3, rel=0.006)
    # The floor in 16 bit lies under the error that rounding and one product leave in eager.
    model, inputs = make(Model, torch.bfloat16)
    output = verify(model, copy.deepcopy(model), inputs, training=False).worst
    assert FLOOR_ULPS[torch.bfloat16] * torch.finfo(torch.bfloat16).eps < output.eager


def test_no_comparison_is_no_pass() -> None:
    assert not Verification(torch.float32, False, ()).passed


def test_the_ratio_where_eager_is_exact() -> None:
    assert Comparison("output", "rand", 0.0, 0.0, 1e-7).ratio == 1
    assert Comparison("output", "rand", 1e-8, 0.0, 1e-7).ratio == math.inf


@pytest.mark.parametrize("size", [3, 1000, 100_000, 10_000_000])
def test_poisoned_memory_is_handed_out_next(size: int) -> None:
    right = torch.ones(size)
    del right
    with poisoned_memory([torch.ones(size)]):
        assert bool(torch.empty(size).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_empty_batches_pass() -> None:
    model, _ = make(Model)
    result = verify(model, copy.deepcopy(model), (torch.rand(0, K),))
    assert result.passed


def test_dy_is_the_same_for_every_dtype() -> None:
    model, inputs = make(Model)
    single = run_model(model, inputs, training=True, dy_seed=3)
    exact = run_model(copy.deepcopy(model).double(), (inputs[0].double(),), True, dy_seed=3)
    for (name, a), (_, b) in zip(single.tensors(), exact.tensors(), strict=True):
        assert relative_error(a, b) < 1e-6, name


@pytest.mark.parametrize("kinked", [F.relu, F.hardtanh, F.relu6, F.hardswish, F.leaky_relu])
def test_dy_is_zero_next_to_a_kink_alone(kinked) -> None:
    points = torch.linspace(-8, 8, 1601, dtype=torch.float64)

    class Activation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kinked(x)

    (kept,) = away_from_kinks(Activation(), (points,), [points.shape], 1e-3)
    x = points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(kinked(x).sum(), x)
    jumps = (slope[1:] - slope[:-1]).abs() > 0.3
    assert jumps.any()
    assert not kept[1:][jumps].any()
    assert kept.sum() > 1480
    assert away_from_kinks(nn.Tanh(), (points,), [points.shape], 1e-3) == [None]


def test_one_element_on_the_other_side_of_a_kink_decides_nothing() -> None:
    # One of two million elements lies so near to 0 that fp32 and fp64 disagree about its sign.
    slope = {torch.float32: 1.0, torch.float64: 0.01}

    class Flipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(128))

        def forward(self, x: Tensor) -> Tensor:
            y = F.leaky_relu(x + 0 * self.bias, 0.01)
            near = (x[0, 0] * slope[x.dtype]).reshape(1, 1)
            return torch.cat([torch.cat([near, y[:1, 1:]], 1), y[1:]]) + self.bias * 0

    x = torch.randn(16384, 128)
    x[0, 0] = 1e-9
    model = Flipped()
    outcomes = {}
    for masked in (False, True):
        exact = copy.deepcopy(model).double()
        kept = away_from_kinks(exact, (x.double(),), [x.shape], 1e-7) if masked else []
        truth = run_model(exact, (x.double(),), True, 0, kept)
        eager = run_model(model, (x,), True, 0, kept)
        name = "gradient of input 0"
        outcomes[masked] = relative_error(eager.gradients[name], truth.gradients[name])
    assert outcomes[False] > 1e-5
    assert outcomes[True] < 1e-7


def test_a_wrong_slope_of_the_activation_is_caught() -> None:
    class Slope(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.gn(self.fc(x))
            right = F.leaky_relu(y, 0.01)
            return 2 * (right.detach() + F.leaky_relu(y, 0.02) - F.leaky_relu(y, 0.02).detach())

    model, inputs = make(Model)
    result = verify(model, make(Slope)[0], inputs)
    assert not any(c.what == "output" for c in result.failures)
    assert any(c.what == "gradient of fc.weight" for c in result.failures)


class _RoundedProduct(torch.autograd.Function):
    """x Wᵀ of rounded operands, as its gradients are."""

    @staticmethod
    def forward(ctx, x, weight, rounded):
        ctx.save_for_backward(x, weight)
        ctx.rounded = rounded
        return rounded(x) @ rounded(weight).t()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = ctx.rounded(dy)
        return dy @ ctx.rounded(weight), dy.t() @ ctx.rounded(x), None


class InTf32(Model):
    rounded = staticmethod(round_to_tf32)

    def forward(self, x: Tensor) -> Tensor:
        z = _RoundedProduct.apply(x, self.fc.weight, self.rounded) + self.fc.bias
        return 2 * F.leaky_relu(self.gn(z), 0.01)


class InBf16(InTf32):
    rounded = staticmethod(lambda t: t.bfloat16().float())


@pytest.fixture
def tf32_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU too, whose products are in fp32 all the same."""
    monkeypatch.setattr("epinorm.tools.verify.allows_tf32", lambda dtype, _: dtype == torch.float32)


@pytest.mark.usefixtures("tf32_is_allowed")
@pytest.mark.parametrize("training", [False, True])
def test_tf32_passes_where_it_is_allowed_and_eager_takes_fp32(training: bool) -> None:
    model, inputs = make(Model)
    result = verify(model, make(InTf32)[0], inputs, training=training)
    assert result.passed, result.failures
    by_tf32 = [c for c in result.comparisons if c.inputs.endswith("n, eager in TF32")]
    assert {c.what for c in by_tf32} >= {"output"}
    assert all(c.eager > 1e-5 for c in by_tf32 if c.ours > 1e-6)
    of_16_bit = verify(model, make(InBf16)[0], inputs, training=training)
    with_products = {c.what for c in result.comparisons} - {"gradient of gn.bias"}
    assert {c.what for c in of_16_bit.failures} >= with_products


@pytest.mark.parametrize("training", [False, True])
def test_tf32_fails_where_it_is_not_allowed(training: bool) -> None:
    torch.set_float32_matmul_precision("high")  # which says nothing of a CPU
    model, inputs = make(Model)
    assert not verify(model, make(InTf32)[0], inputs, training=training).passed


@pytest.mark.usefixtures("tf32_is_allowed")
def test_tf32_is_emulated_only_after_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epinorm.tools.verify.RoundedOperands", None)  # so calling it raises
    model, inputs = make(Model)
    assert verify(model, copy.deepcopy(model), inputs).passed


def one(ours: float, eager: float, reason: str | None = None) -> Comparison:
    return Comparison("output 0", "randn", ours, eager, eager, reason)


FP32, TF32 = 1e-7, 3e-4


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (one(1e-2, FP32), one(2e-4, TF32)),
        (one(math.inf, FP32, "has NaNs"), one(2e-4, TF32)),
        (one(FP32, FP32), one(math.inf, TF32, "has NaNs")),
    ],
)
def test_of_two_runs_neither_excuses_the_other(first: Comparison, again: Comparison) -> None:
    """As where a race shows now and then; another output misses, so that there is a second run."""
    nothing = Outcome((), {})
    tf32 = Truth(nothing, nothing)
    other = "output 1"
    runs = [
        [first, replace(one(2e-4, FP32), what=other)],
        [again, replace(one(2e-4, TF32), what=other)],
    ]
    found = by_the_larger_yardstick(
        replace(tf32, in_tf32=lambda: tf32), lambda truth: runs[truth is tf32]
    )
    assert [c.passed for c in found] == [False, True]


class Noisy(nn.Module):
    """x with noise of some size in fp32, drawn from the bits of x; in float64 x itself."""

    def __init__(self, noise: float, seed: int) -> None:
        super().__init__()
        self.noise, self.seed, self.calls = noise, seed, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return x.clone()
        self.calls += 1
        seed = self.seed + int(x.view(torch.int32).sum())
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        return x + self.noise * noise


def test_a_narrow_miss_is_judged_over_further_draws() -> None:
    eager, shares = Noisy(1e-3, 0), []
    x = (torch.empty(64, 128),)
    found = {}
    for seed in range(8):
        ours = Noisy(1e-3, 1)
        result = verify(
            eager, ours, x, training=False, kinds=("randn",), seed=seed, progress=shares.append
        )
        assert result.passed, result.failures
        (found[seed],) = result.comparisons
        draws = found[seed].inputs.removeprefix("randn")
        assert ours.calls == 2 + (int(draws.split()[1]) - 1 if draws else 0)
        assert shares == sorted(shares)
        assert 0 <= shares[0] <= shares.pop() < 1
        shares.clear()
        with console.out.capture() as shown:
            console.out.print(console.verification_table(result))
        assert found[seed].inputs in shown.get()
    assert {c.inputs for c in found.values()} > {"randn", "randn, 4 draws"}
    for worse in (1.02, 1.2):
        ours = Noisy(1e-3 * worse, 1)
        (failed,) = verify(eager, ours, x, training=False, kinds=("randn",)).failures
        assert failed.ratio == pytest.approx(worse, rel=0.005 if worse == 1.02 else 0.05)
        draws = 32 if worse == 1.02 else 4
        assert failed.inputs == f"randn, {draws} draws"
        assert ours.calls == draws + 1


@pytest.mark.parametrize(("worse", "verifications"), [(1.0, 200), (1.02, 40)])
def test_luck_decides_hardly_any_verification(worse: float, verifications: int) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = Outcome((torch.zeros(8192, dtype=torch.float64),), {})
    firsts: list[bool] = []

    def draw(number: int) -> tuple[Comparison, ...]:
        noise = torch.randn(2, 8192, generator=generator)
        eager, ours = (Outcome((part,), {}) for part in (noise[0], worse * noise[1]))
        found = compare(exact, eager, ours, torch.float32, "")
        firsts.extend(c.passed for c in found if number == 0)
        return found

    def passes() -> bool:
        drawn = over_draws(draw, lambda _, eager: allowed_error(eager, torch.float32))
        return all(c.passed for c in drawn)

    passed = [passes() & passes() for _ in range(verifications)]  # on both kinds of inputs
    if worse == 1.0:
        assert sum(firsts) < 0.75 * len(firsts)
        assert sum(passed) >= 0.99 * verifications
    else:
        assert sum(passed) <= 0.05 * verifications


@pytest.mark.parametrize(("worse", "passes"), [(1.0, 0.9), (4.0, 0.25)])
def test_luck_decides_hardly_any_error_that_is_one_number(worse: float, passes: float) -> None:
    """As of a sum over rows whose errors all columns share."""
    generator = torch.Generator().manual_seed(0)
    exact = Outcome((torch.zeros(1024, dtype=torch.float64),), {})

    def draw(number: int) -> tuple[Comparison, ...]:
        noise = torch.randn(2, generator=generator)
        eager, ours = (Outcome((n.expand(1024),), {}) for n in (noise[0], worse * noise[1]))
        return compare(exact, eager, ours, torch.float32, "")

    limit = partial(allowed_error, dtype=torch.float32)
    drawn = [over_draws(draw, lambda _, eager: limit(eager)) for _ in range(300)]
    share = sum(c.passed for (c,) in drawn) / len(drawn)
    assert share > passes if worse == 1.0 else share < passes


def test_the_floor_is_not_widened_by_what_eagers_errors_vary() -> None:
    floor = allowed_error(0.0, torch.float32)
    drawn = over_draws(
        lambda number: [Comparison("output", "", 1.2 * floor, 1e-12 * (number == 0), floor)],
        lambda _, eager: allowed_error(eager, torch.float32),
    )
    assert not any(c.passed for c in drawn)


def test_draws_are_pooled_by_what_they_compare() -> None:
    """One of which eager cannot compute in some draw is judged by the others."""

    def draw(number: int) -> list[Comparison]:
        first = Comparison("output 0", "", 1.02 if number < 4 else 0.5, 1.0, 1.005)
        return [first, Comparison("output 1", "", 3.0, 4.0, 4.0)][number == 1 :]

    found = over_draws(draw, lambda _, eager: 1.005 * eager)
    assert [c.what for c in found] == ["output 0", "output 1"]
    assert all(c.passed for c in found)
    assert found[1].ours == pytest.approx(3.0)


def test_what_is_wrong_beside_its_error_is_drawn_once() -> None:
    class WrongAtOnce(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 1:]

    ours = WrongAtOnce(1e-3, 1)
    result = verify(Noisy(1e-3, 0), ours, (torch.empty(64, 128),), training=False)
    assert all("has shape" in c.reason for c in result.failures)
    assert ours.calls == 4  # two runs on inputs of both kinds


def test_what_a_further_draw_shows_wrong_counts() -> None:
    right, wrong = (Comparison("output", "randn", 1.01, 1.0, 1.005, r) for r in (None, "missing"))
    found = over_draws(lambda number: [wrong if number == 2 else right], lambda _, eager: eager)
    assert [c.reason for c in found] == ["missing"]
