"""``torch.compile(model, backend="epinorm")``: our pass over the graph, TorchInductor behind it.

Registered by the entry point ``torch_dynamo_backends``, so nothing needs to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from epinorm.capture.aliasing import AsCaptured
from epinorm.capture.found import Place
from epinorm.capture.fuse import checked_settings
from epinorm.capture.masks import leave_out_masks
from epinorm.capture.rewriting import rewrite
from epinorm.capture.tf32_attention import take_attention
from epinorm.chain.reference import Results
from epinorm.operator.dispatch import call
from epinorm.operator.undisturbed import is_distributed

_OPTIONS: dict[str, Any] = {"strategy": "auto", "strict": False, "rounding": "once"}


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
    from torch._functorch import config as tracing
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from epinorm.capture.after_autograd import AfterAutograd, KeepsSeeds  # loads Inductor

    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= {key.replace("-", "_"): value for key, value in (options or {}).items()}
    settings = checked_settings(
        *(patches.pop(name, default) for name, default in _OPTIONS.items())  # ours, in their order
    )

    def operator(place: Place, chain: str) -> Callable[..., Results]:
        def linear_norm(*tensors: Any) -> Results:  # which Inductor takes as it is
            return call(*(*tensors, chain, *settings.of(place.has_norm)))

        return linear_norm

    as_captured = AsCaptured(gm)
    leave_out_masks(gm.graph)
    found = rewrite(gm, operator, settings, runs_eagerly=False)
    take_attention(gm)
    unfused = [place for place in found.places if place.found is None]
    if settings.strict and unfused:
        raise RuntimeError(f"strict=True, but a chain is not fused: {unfused[0].obstacle}")
    if not config.post_grad_custom_post_pass:  # else it is the user's own
        patches.setdefault("post_grad_custom_post_pass", AfterAutograd())
    if not config.joint_custom_pre_pass:
        patches.setdefault("joint_custom_pre_pass", KeepsSeeds())
    # AOTAutograd's cache may take what it traced of DTensors for another graph's, in a next process
    # or after a reset; of PyTorch's own layers too.
    traced_anew = {"enable_autograd_cache": False} if is_distributed(example_inputs) else {}
    with tracing.patch(traced_anew):
        run: Any = compile_fx(gm, example_inputs, config_patches=patches)
    return as_captured.guarded(run)
