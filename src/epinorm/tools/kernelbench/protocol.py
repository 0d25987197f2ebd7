"""From a model and its inputs to what is verified and timed: a fused copy and the row's facts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from epinorm.capture import Explanation, explain, fuse
from epinorm.chain import Chain, GroupNorm, LayerNorm
from epinorm.problem import Strategy
from epinorm.tools.bench import Case, fp32_precision_set, linear_calls

Precision = Literal["highest", "high", "native"]


class NoChainError(Exception):
    """The model has no chain that can be fused; the message says so and why."""


def fused_copy(
    name: str, model: nn.Module, inputs: Sequence[Any], strategy: Strategy = "auto"
) -> tuple[nn.Module, Explanation]:
    """A fused copy of the model, with parameters of its own, and what was fused in it.

    Raises NoChainError if nothing can be fused, with the reasons.
    """
    candidate = fuse(copy.deepcopy(model), strategy=strategy)
    explanation = explain(candidate, *inputs)
    if not explanation.fused:
        if strategy != "auto":
            candidate(*inputs)  # one that cannot serve raises, and says why
        found = "; ".join(f"{row.chain} ({row.where}): {row.reason}" for row in explanation.rows)
        found = found or "no Linear → pointwise* → norm → pointwise* was found"
        whole = "; epinorm bench FILE.py:Model takes it as a whole" if explanation.linears else ""
        raise NoChainError(f"{name}: Model holds no chain that can be fused: {found}{whole}")
    return candidate, explanation


def make_case(
    name: str,
    model: nn.Module,
    inputs: Sequence[Any],
    dtype: torch.dtype,
    precision: Precision,
    device: torch.device,
    training: bool,
    strategy: Strategy = "auto",
) -> Case:
    """What one row measures: the model and its fused copy; raises NoChainError."""
    with fp32_precision_set(precision), torch.set_grad_enabled(training):
        candidate, explanation = fused_copy(name, model, inputs, strategy)
    return Case(
        name=name,
        model=model,
        candidate=candidate,
        inputs=tuple(inputs),
        dtype=dtype,
        precision=precision,
        device=device,
        training=training,
        strategy="+".join(sorted({row.strategy for row in explanation.rows if row.fused})),
        asked=strategy,
        facts=_facts(model, inputs, explanation),
    )


def _facts(model: nn.Module, inputs: Sequence[Any], explanation: Explanation) -> dict[str, Any]:
    """The row's chain; its sizes too where the model is one chain and one linear layer."""
    texts = [row.chain for row in explanation.rows if row.fused]
    facts: dict[str, Any] = {"chain": "; ".join(texts)}
    calls = linear_calls(model, inputs)
    if len(texts) == 1 and len(calls) == 1:
        layer, x = calls[0]
        chain = Chain.parse(texts[0])
        facts |= {
            "m": x.shape[:-1].numel(),
            "k": layer.in_features,
            "n": layer.out_features,
            "groups": chain.groups(layer.out_features),
            "norm": _norm_name(chain),
        }
    return facts


def _norm_name(chain: Chain) -> str:
    if isinstance(chain.norm, GroupNorm):
        return "group_norm"
    return "layer_norm" if isinstance(chain.norm, LayerNorm) else "rms_norm"
