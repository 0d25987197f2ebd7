"""Find every chain of a model and replace it by the fused operation: ``fuse`` and ``explain``.

From a module's own ``forward`` to a rewritten one: ``trace`` and ``watch`` make a graph and note
what it took for granted, ``match`` finds the chains, ``site`` is one fused chain, ``program`` the
rewritten code, ``replace`` puts it into the model, ``explain`` tells about it.
"""

from __future__ import annotations

from torch import nn

from epinorm.chain import Rounding
from epinorm.chain.chain import check_rounding
from epinorm.problem import Strategy, check_strategy
from epinorm.rewrite.explain import Explanation, Row, explain
from epinorm.rewrite.program import Settings
from epinorm.rewrite.replace import fuse_module, unfuse_module

__all__ = ["Explanation", "Row", "explain", "fuse", "unfuse"]


def fuse(
    model: nn.Module,
    *,
    rounding: Rounding = "once",
    strategy: Strategy = "auto",
    strict: bool = False,
) -> nn.Module:
    """Replace every Linear → pointwise* → norm → pointwise* of the model by one operation.

    Works on the model itself and returns it: copy it before (``copy.deepcopy``) to keep one that
    is not fused. To find the chains each module's ``forward`` is run on stand-ins for tensors, here
    and later at the first call of another form. Parameters, state_dict, hooks, children and
    attributes stay as they are, and parameters are read at each call. What does not fit the chain
    at a call runs as the model wrote it, with a warning, or a RuntimeError under ``strict``.
    ``explain`` says what is fused and what is not.

    ``rounding``, ``strategy`` and ``strict`` are those of ``linear_norm``. Raises TypeError for
    anything but an nn.Module, ValueError for an unknown rounding or strategy.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_strategy(strategy)
    settings = Settings(strategy, strict, check_rounding(rounding))
    for module in reversed(list(model.modules())):
        fuse_module(module, settings)
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undo ``fuse`` on the model and return it."""
    for module in model.modules():
        unfuse_module(module)
    return model
