"""Is a whole model as exact as eager's? Truth is the same model in float64.

A model's error is the sum of those of all its operations, most of them PyTorch's own, so single
gradients' errors vary by luck. The outputs are judged as those of a chain are; the gradients all
together, as one long vector; and each by itself more loosely, so that a wrong one shows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.accuracy import FLOOR_ULPS, Comparison, Outcome, allowed_error, compare
from epinorm.tools.kinks import rows_away_from_kinks
from epinorm.tools.models.subject import Setting
from epinorm.tools.verify import poisoned_memory, randomize_parameters, run_model

__all__ = ["Judged", "Truth", "judge_candidate", "truth_of"]

SINGLE_LIMIT = 2.0
"""How many times eager's error that of a single gradient may be."""
NO_DIGIT = 0.5
"""A gradient of which eager has a larger error is zero but for roundings, as that of the bias of an
attention's keys: it counts among all gradients together alone."""
POOLED_LIMIT = 1.1
"""How many times eager's error that of all gradients together may be."""


@dataclass(frozen=True)
class Truth:
    """What float64 and eager give, and for each output where dy is not zero (None: everywhere)."""

    exact: Outcome
    eager: Outcome
    kept: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Judged:
    """A candidate's comparisons; ``pooled``: ours and eager's error of all gradients together."""

    comparisons: tuple[Comparison, ...]
    pooled: tuple[float, float] | None

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


def truth_of(model: nn.Module, inputs: tuple[Any, ...], setting: Setting, training: bool) -> Truth:
    """Run the model in float64 and as it is; norms' and biases' parameters become random."""
    randomize_parameters(model)
    twin = copy.deepcopy(model).double()
    wide = tuple(
        v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in inputs
    )

    eager = partial(setting.call, model)
    exact = run_model(twin, wide, False)
    plain = run_model(model, inputs, False, call=eager)
    if not training:
        return Truth(exact, plain, ())
    error = max(c.eager for c in compare(exact, plain, plain, setting.products, "as given"))
    kept = rows_away_from_kinks(twin, wide, [t.shape for t in exact.outputs], error)
    exact = run_model(twin, wide, True, 0, kept)
    return Truth(exact, run_model(model, inputs, True, 0, kept, eager), tuple(kept))


def judge_candidate(
    truth: Truth,
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    setting: Setting,
    training: bool,
) -> Judged:
    """Compare ``call`` on ``model``, which has the parameters that the truth was made with."""
    with poisoned_memory([tensor for _, tensor in truth.eager.tensors()], copies=1):
        ours = run_model(model, inputs, training, 0, truth.kept, call)
    compared = compare(truth.exact, truth.eager, ours, setting.products, "as given")
    outputs = [c for c in compared if c.what.startswith("output")]
    gradients = [_single(c, setting.products) for c in compared if c not in outputs]
    if not training:
        return Judged(tuple(outputs), None)
    norms = {name: _norm(tensor) for name, tensor in truth.exact.tensors() if tensor is not None}
    weights = [norms[c.what] for c in gradients]
    errors = (
        _together([c.ours for c in gradients], weights),
        _together([c.eager for c in gradients], weights),
    )
    limit = max(POOLED_LIMIT * errors[1], _floor(setting.products))
    together = Comparison("all gradients together", "as given", *errors, limit)
    return Judged((*outputs, *gradients, together), errors)


def _single(c: Comparison, dtype: torch.dtype) -> Comparison:
    limit = SINGLE_LIMIT * c.eager if c.eager < NO_DIGIT else math.inf
    return replace(c, allowed=max(limit, allowed_error(c.eager, dtype)))


def _floor(dtype: torch.dtype) -> float:
    return FLOOR_ULPS[dtype] * torch.finfo(dtype).eps


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def _together(errors: Sequence[float], norms: Sequence[float]) -> float:
    """The relative error of vectors as one, from that and the norm of each."""
    differences = [error * (norm or 1.0) for error, norm in zip(errors, norms, strict=True)]
    return math.hypot(*differences) / (math.hypot(*norms) or 1.0)
