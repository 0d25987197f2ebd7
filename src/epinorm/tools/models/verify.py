"""Is a whole model as exact as eager's? Truth is the same model in float64.

The outputs are judged as those of a chain are; the gradients all together, as one long vector; and
each by itself more loosely, so that a wrong one shows. A gradient whose terms cancel, as those of
an attention's queries and keys do, has an error of a few random numbers, so it is judged over
several draws (docs/measuring.md has the derivation, and how far two orders of summation differ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.accuracy import (
    FLOOR_ULPS,
    Comparison,
    allowed_error,
    compare,
    pooled,
)
from epinorm.tools.kinks import rows_away_from_kinks
from epinorm.tools.models.subject import Setting
from epinorm.tools.verify import (
    Truth,
    by_the_larger_yardstick,
    expected,
    must_repeat,
    poisoned_memory,
    randomize_parameters,
    run_model,
)

SINGLE_LIMIT = 2.0
"""How many times eager's error that of a single gradient may be."""
NO_DIGIT = 0.5
"""A gradient of which eager has a larger error is zero but for roundings, as that of the bias of an
attention's keys: it counts among all gradients together alone."""
POOLED_LIMIT = 1.1
"""How many times eager's error that of all gradients together may be."""
POOLED = "all gradients together"


@dataclass(frozen=True)
class Judged:
    """A candidate's comparisons over all draws, its errors and eager's their root mean squares."""

    comparisons: tuple[Comparison, ...]

    @property
    def reason(self) -> str | None:
        """What is wrong, in one line; None if nothing is."""
        wrong = [c for c in self.comparisons if not c.passed]
        return str(max(wrong, key=lambda c: c.strain)) if wrong else None

    @property
    def output(self) -> Comparison:
        """The output whose error is closest to its limit."""
        outputs = [c for c in self.comparisons if c.what.startswith("output")]
        return max(outputs, key=lambda c: c.strain)

    @property
    def pooled(self) -> Comparison | None:
        """All gradients together; None where there was no backward pass."""
        return next((c for c in self.comparisons if c.what == POOLED), None)


def truth_of(
    model: nn.Module, inputs: tuple[Any, ...], setting: Setting, training: bool, seed: int = 0
) -> Truth:
    """Run the model in float64 and as it is; norms' and biases' parameters become random.

    Raises ValueError where the model as it is does not repeat its own result.
    """
    randomize_parameters(model, seed)
    eager = partial(setting.call, model)
    must_repeat(*(run_model(model, inputs, False, call=eager) for _ in range(2)))
    of = (inputs, setting.products, training, seed)
    return expected(model, *of, rows_away_from_kinks, eager)


def compare_candidate(
    truth: Truth,
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    setting: Setting,
    training: bool,
) -> tuple[Comparison, ...]:
    """Compare ``call`` on ``model``, which has the parameters that the truth was made with: each
    output, and in training each gradient and all of them together."""

    def judged(truth: Truth) -> tuple[Comparison, ...]:
        with poisoned_memory([tensor for _, tensor in truth.eager.tensors()], copies=1):
            ours = run_model(model, inputs, training, truth.seed, truth.kept, call)
        compared = compare(truth.exact, truth.eager, ours, setting.products, "as given")
        if training:
            compared = (*compared, _all_gradients(truth, compared))
        return judge([compared], setting).comparisons

    return tuple(by_the_larger_yardstick(truth, judged))


def _all_gradients(truth: Truth, compared: Sequence[Comparison]) -> Comparison:
    """Of one vector, made of every gradient among what was compared."""
    norms = {name: _norm(tensor) for name, tensor in truth.exact.tensors() if tensor is not None}
    gradients = [c for c in compared if not c.what.startswith("output")]
    weights = [norms[c.what] for c in gradients]
    errors = (
        _together([c.ours for c in gradients], weights),
        _together([c.eager for c in gradients], weights),
    )
    return Comparison(POOLED, "as given", *errors, math.inf)


def judge(draws: Sequence[Sequence[Comparison]], setting: Setting) -> Judged:
    """The verdict over one or several draws, each as ``compare_candidate`` gives it."""
    return Judged(pooled(draws, lambda what, eager: _allowed(what, eager, setting.products)))


def _allowed(what: str, eager: float, dtype: torch.dtype) -> float:
    if what == POOLED:
        return max(POOLED_LIMIT * eager, FLOOR_ULPS[dtype] * torch.finfo(dtype).eps)
    least = allowed_error(eager, dtype)
    if what.startswith("output"):
        return least
    return max(least, SINGLE_LIMIT * eager) if eager < NO_DIGIT else math.inf


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def _together(errors: Sequence[float], norms: Sequence[float]) -> float:
    """The relative error of vectors as one, from that and the norm of each."""
    differences = [error * (norm or 1.0) for error, norm in zip(errors, norms, strict=True)]
    return math.hypot(*differences) / (math.hypot(*norms) or 1.0)
