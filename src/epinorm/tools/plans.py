"""The plans of a model's fused chains, as a training step or a forward pass makes them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from epinorm.backends.engine import plan_for
from epinorm.capture import fuse
from epinorm.problem import Plan, Problem
from epinorm.tools.tune import recorded


def plans_of(model: nn.Module, inputs: Sequence[Any]) -> list[tuple[Problem, Plan]]:
    """Each different problem of a training step with ``model``, and its plan.

    Runs a fused copy of the model once; raises what running it raises.
    """
    with recorded() as found, torch.enable_grad():
        fuse(copy.deepcopy(model))(*inputs)
    problems = [dataclasses.replace(p, whole_step=p.training) for p, _ in found]
    return [(problem, plan_for(problem)) for problem in dict.fromkeys(problems)]
