"""``torch.compile(model, backend="epinorm")``: our pass over the graph, TorchInductor behind it.

Registered by the entry point ``torch_dynamo_backends``, so nothing needs to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from epinorm.capture.found import Place
from epinorm.capture.fuse import checked_settings
from epinorm.capture.masks import leave_out_masks
from epinorm.capture.rewriting import rewrite
from epinorm.capture.tf32_attention import take_attention
from epinorm.chain.reference import Results
from epinorm.operator.dispatch import call
from epinorm.problem import Strategy

_OPTIONS: dict[str, Any] = {"strategy": "auto", "strict": False, "rounding": "once"}


@dataclass(frozen=True)
class _Operator:
    """One chain as a call of the operator, which Inductor takes as it is."""

    chain: str
    strategy: Strategy
    strict: bool
    __name__ = "linear_norm"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> Results:
        tensors = (x, weight, bias, norm_weight, norm_bias, operands)
        return call(*tensors, self.chain, self.strategy, self.strict)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Fuse the chains of a captured graph and hand the rest to TorchInductor.

    mode and options are torch.compile's, for Inductor; ``strategy``, ``strict`` and ``rounding``
    among the options are those of ``epinorm.linear_norm``. Raises ValueError for an unknown one,
    what Inductor raises for an option that it does not know, and RuntimeError under ``strict``
    where a chain is found and cannot be fused.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= {key.replace("-", "_"): value for key, value in (options or {}).items()}
    settings = checked_settings(
        *(patches.pop(name, default) for name, default in _OPTIONS.items())  # ours, in their order
    )

    def operator(place: Place, chain: str) -> _Operator:
        return _Operator(chain, *settings.of(place.has_norm))

    leave_out_masks(gm.graph)
    found = rewrite(gm, operator, settings, runs_eagerly=False)
    take_attention(gm)
    unfused = [place for place in found.places if place.found is None]
    if settings.strict and unfused:
        raise RuntimeError(f"strict=True, but a chain is not fused: {unfused[0].obstacle}")
    return compile_fx(gm, example_inputs, config_patches=patches)  # type: ignore[return-value]
