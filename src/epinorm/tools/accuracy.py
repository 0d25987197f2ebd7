"""How large an error may be: relative to eager's own, against a float64 truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

RATIO_LIMITS: Mapping[torch.dtype, float] = {
    torch.float64: 1.0,
    torch.float32: 1.0,
    torch.bfloat16: 1.1,
    torch.float16: 1.1,
}
"""How many times eager's error ours may be."""

RATIO_RESOLUTION = 0.005
"""Ratios are read to two decimals: 1.00 is at most 1.005. Two results that share a library product
differ in the last bits of what follows it, and their errors then agree to a thousandth, on either
side of one."""

FLOOR_ULPS: Mapping[torch.dtype, float] = {
    torch.float64: 16.0,
    torch.float32: 4.0,
    torch.bfloat16: 0.25,
    torch.float16: 0.25,
}
"""An error of this many ulps (spacings at 1) always passes. On a small problem the product adds few
roundings, eager's error is a matter of luck, and a multiple of it means nothing.

fp32: after the product a value passes about eight more roundings (bias, mean, difference, rstd,
gamma, beta, activation) of half an ulp each. 16 bit: what rounding the exact result costs, 0.2 ulp;
the roundings between are in fp32 there, and whole ulps would be above eager's error on any problem.
fp64: the truth has the same precision, so eager's error against it is often zero, and the distance
between two correct results is all there is to judge."""

NO_TRUTH, TIMES_NOISE = 2.0**24, 2.0
"""An error of eager's so many times the truth says that the truth, in float64, is roundings itself:
of terms that cancel, as in the gradient of a bias in front of a BatchNorm, which is 0. Then eager's
result and ours are roundings of these terms too; which are larger is luck, however many draws are
pooled, and twice eager's error passes."""

DRAWS = 4
"""Where the error of one draw is luck, those of several are pooled, as root mean squares."""
MOST_DRAWS = 32
"""The ratio of two root mean squares of 8192 values each has 1.1 % of noise; over so many draws
0.2 %, less than half of RATIO_RESOLUTION."""
NARROW = 1.05
"""An error of up to so many times the allowed one may be noise: further draws tell."""
NOT_FAR = 16.0
"""The same after a single draw. An error that all elements share is one random number, as of sums
over rows each of which has an error of its own; that it is shows over draws alone."""


def allowed_error(eager_error: float, dtype: torch.dtype) -> float:
    """The largest relative error that passes, given eager's own (dimensionless)."""
    no_truth = eager_error > NO_TRUTH
    limit = TIMES_NOISE if no_truth else RATIO_LIMITS[dtype] + RATIO_RESOLUTION
    return max(limit * eager_error, FLOOR_ULPS[dtype] * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Comparison:
    """One tensor of the candidate against eager's, both against the float64 truth.

    ``what`` is "output", "gradient of fc.weight", ...; errors are ‖out − truth‖ / ‖truth‖.
    ``reason`` says what is wrong beside the error (shape, NaN, missing); None for nothing.
    ``noise``: by which share two results as exact as eager's may differ over these draws.
    """

    what: str
    inputs: str
    ours: float
    eager: float
    allowed: float
    reason: str | None = None
    noise: float = 0.0

    @property
    def ratio(self) -> float:
        """Our error over eager's: 1 where both are zero."""
        if self.eager > 0:
            return self.ours / self.eager
        return 1.0 if self.ours == 0 else math.inf

    @property
    def passed(self) -> bool:
        return self.reason is None and self.ours <= self.allowed

    @property
    def missed(self) -> bool:
        """Whether the error is too large, and nothing else is wrong."""
        return self.reason is None and not self.passed

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite error is None, and ``reason`` says what it is."""
        values = {name: getattr(self, name) for name in ("what", "inputs", "reason", "passed")}
        for name in ("ours", "eager", "ratio", "allowed"):
            number = getattr(self, name)
            values[name] = number if math.isfinite(number) else None
        return values

    @property
    def strain(self) -> float:
        """Our error over the allowed one: how close this comparison is to failing."""
        return math.inf if self.reason else self.ours / self.allowed

    def __str__(self) -> str:
        verdict = self.reason or (
            f"error {self.ours:.2e}, eager {self.eager:.2e} ({self.ratio:.2f}×), "
            f"allowed {self.allowed:.2e}"
        )
        return f"{self.what} on {self.inputs}: {verdict}"


@dataclass(frozen=True)
class Verification:
    """The outcome for one dtype and pass: it passed if there are comparisons and all passed."""

    dtype: torch.dtype
    training: bool
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "pass": "training" if self.training else "forward",
            "dtype": str(self.dtype).removeprefix("torch."),
            "passed": self.passed,
            "comparisons": [c.as_json() for c in self.comparisons],
        }

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)

    @property
    def worst(self) -> Comparison:
        """The comparison closest to its limit, or furthest beyond it."""
        return max(self.comparisons, key=lambda c: c.strain)


@dataclass(frozen=True)
class Outcome:
    """What one run of a model gave: its output tensors and, where asked for, gradients by name."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        for index, output in enumerate(self.outputs):
            yield ("output" if len(self.outputs) == 1 else f"output {index}"), output
        yield from self.gradients.items()


def relative_error(result: Tensor, truth: Tensor) -> float:
    """‖result − truth‖ / ‖truth‖ in float64; inf where result holds NaN or Inf and truth does not.

    Both of the same shape, any floating dtype. A truth of zeros gives ‖result‖; NaN and Inf must
    stand where the truth has them, and the finite elements are compared. Empty tensors: 0.
    """
    result, truth = result.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    if not bool(finite.all()):
        same = torch.equal(result.isnan(), truth.isnan()) and bool(
            (result[truth.isinf()] == truth[truth.isinf()]).all()
        )
        if not same:
            return math.inf
        result, truth = result[finite], truth[finite]
    if not bool(result.isfinite().all()):
        return math.inf
    difference = torch.linalg.vector_norm(result - truth).item()
    norm = torch.linalg.vector_norm(truth).item()
    return difference / norm if norm > 0 else difference


def compare(
    truth: Outcome, eager: Outcome, ours: Outcome, dtype: torch.dtype, inputs: str
) -> tuple[Comparison, ...]:
    """Compare every output and gradient of the truth; what the candidate lacks fails."""
    ours_by_name, eager_by_name = dict(ours.tensors()), dict(eager.tensors())
    comparisons = []
    for what, exact in truth.tensors():
        if exact is None:
            continue
        theirs = eager_by_name[what]
        assert theirs is not None, f"eager has no {what}"
        eager_error = relative_error(theirs, exact)
        allowed = allowed_error(eager_error, dtype)
        result = ours_by_name.get(what)
        reason = _mismatch(result, theirs)
        error = math.inf
        if reason is None and result is not None:
            error = relative_error(result, exact)
            if not math.isfinite(error):
                reason = _not_finite(result, exact)
            elif not math.isfinite(eager_error):
                reason = f"eager's own result is not finite in {dtype}, so there is no yardstick"
        comparisons.append(Comparison(what, inputs, error, eager_error, allowed, reason))
    return tuple(comparisons)


def pooled(
    draws: Sequence[Sequence[Comparison]], allowed: Callable[[str, float], float]
) -> tuple[Comparison, ...]:
    """The same comparisons over several draws: errors as root mean squares.

    ``allowed``: the largest error that passes, of what is compared and eager's error.
    """
    by_what: dict[str, list[Comparison]] = {}
    for each in draws:  # of which one may lack what eager itself could not compute
        for comparison in each:
            by_what.setdefault(comparison.what, []).append(comparison)
    found = []
    for what, comparisons in by_what.items():
        first = comparisons[0]
        reason = next((c.reason for c in comparisons if c.reason), None)
        ours, eager = (_rms([getattr(c, name) for c in comparisons]) for name in ("ours", "eager"))
        inputs = first.inputs if len(draws) == 1 else f"{first.inputs}, {len(draws)} draws"
        noise = _noise([c.eager for c in comparisons])
        # The floor stays as it is.
        limit = allowed(what, eager * (1 + noise * (len(draws) >= MOST_DRAWS)))
        found.append(Comparison(what, inputs, ours, eager, limit, reason, noise))
    return tuple(found)


def _noise(errors: Sequence[float]) -> float:
    """Three standard deviations of the ratio of two root mean squares of as many errors, whose
    squares vary as these do: eager's, so that no candidate widens its own limit."""
    squares = [error * error for error in errors]
    if len(squares) < 2 or not 0 < sum(squares) < math.inf:
        return 0.0
    return 3 * stdev(squares) / mean(squares) / math.sqrt(2 * len(squares))


def _rms(errors: Sequence[float]) -> float:
    return math.hypot(*errors) / len(errors) ** 0.5


def more_draws(comparisons: Sequence[Comparison], draws: int) -> int:
    """How many draws, beside those that were compared, may tell whether this is right.

    None where nothing failed, where something is wrong beside errors or by far, and after
    MOST_DRAWS; else up to the next multiple of DRAWS.
    """
    failed = [c for c in comparisons if not c.passed]
    near = [NOT_FAR if draws < DRAWS else max(NARROW, 1 + 2 * c.noise) for c in failed]
    far = any(c.strain > limit for c, limit in zip(failed, near, strict=True))
    if not failed or draws >= MOST_DRAWS or far:
        return 0
    return DRAWS - draws % DRAWS


def over_draws(
    draw: Callable[[int], Sequence[Comparison]], allowed: Callable[[str, float], float]
) -> tuple[Comparison, ...]:
    """The comparisons of ``draw(0)``; where they miss narrowly, those of further draws with it."""
    draws = [draw(0)]
    found = tuple(draws[0])
    while more := more_draws(found, len(draws)):
        draws += [draw(len(draws) + index) for index in range(more)]
        found = pooled(draws, allowed)
    return found


def _mismatch(result: Tensor | None, theirs: Tensor) -> str | None:
    if result is None:
        return "missing"
    if result.shape != theirs.shape:
        return f"has shape {tuple(result.shape)}, eager's has {tuple(theirs.shape)}"
    if result.dtype != theirs.dtype:
        return f"has dtype {result.dtype}, eager's has {theirs.dtype}"
    if result.device != theirs.device:
        return f"is on {result.device}, eager's is on {theirs.device}"
    return None


def _not_finite(result: Tensor, truth: Tensor) -> str:
    wrong = int((result.isfinite() != truth.isfinite()).sum())
    return (
        f"{wrong} of {result.numel()} elements are NaN or Inf where the truth is finite, or the "
        "other way round (never written, or overflowed)"
    )


def differences(first: Outcome, second: Outcome, inputs: str) -> list[Comparison]:
    """A failed comparison for each tensor that a second run on the same inputs changed."""
    again = dict(second.tensors())
    failed = []
    for what, tensor in first.tensors():
        other = again.get(what)
        if tensor is None or other is None or tensor.shape != other.shape:
            continue  # missing or of another shape: compare() has said so
        if not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            changed = int((tensor != other).sum())
            reason = f"a second run on the same inputs changed {changed} of {tensor.numel()} values"
            failed.append(Comparison(what, inputs, math.inf, 0.0, 0.0, reason))
    return failed
