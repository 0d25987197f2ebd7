"""Other libraries beside eager and epinorm on the same work, in one process, verified alike.

    python benchmarks/others.py quack apex    # or Liger-Kernel, "Transformer Engine"

Rows are in results/others/<gpu>.json.
Their norms stand in the place of PyTorch's, behind PyTorch's Linear; in a Llama Liger-Kernel's
rotary embedding and SwiGLU too, as its own patch puts them there. Epinorm is held to the
verification's bounds; another library, whose roundings are its own, to WRONG times these, and its
output's error is shown.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epinorm
from epinorm.tools.accuracy import DRAWS
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.models import NAMED, SETTINGS
from epinorm.tools.models.subject import Setting, Subject
from epinorm.tools.models.verify import compare_candidate, judge, truth_of
from epinorm.tools.results import commit, device_name, device_slug, put_values, today
from epinorm.tools.timing import Settings, sample_interleaved
from epinorm.tools.verdict import spreads
from shapes import SHAPES

RESULTS = Path(__file__).resolve().parent / "results" / "others"
CASES = ("llama_4", "bert_out", "wide_ln", "dreamer", "ln256", "kb62", "mid")
KEY = ("library", "case", "setting", "pass", "gpu")
WRONG = 4.0
TIMING = Settings(runs=20, warmup=3)


def with_norms(model: nn.Module, made: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The model with what ``made`` puts in the place of a norm, on the same parameters.

    Raises LookupError where it has a place for none of them.
    """
    found = False
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            other = made(norm)
            if other is not None:
                other.weight = norm.weight
                if getattr(norm, "bias", None) is not None:
                    other.bias = norm.bias
                setattr(module, name, other)
                found = True
    if not found:
        raise LookupError("this library has none of the model's norms")
    return model


def rms_of(norm: nn.Module) -> tuple[int, float] | None:
    """Channels and eps of an RMSNorm of PyTorch's or transformers'; None of anything else."""
    if "RMSNorm" not in type(norm).__name__:
        return None
    # PyTorch computes it in fp32 in 16 bit too, and so with fp32's eps.
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return norm.weight.numel(), torch.finfo(torch.float32).eps if eps is None else eps


def ligers(model: nn.Module) -> nn.Module:
    from liger_kernel import transformers as liger
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    def made(norm: nn.Module) -> nn.Module | None:
        if isinstance(norm, nn.GroupNorm):
            other = LigerGroupNorm(norm.num_channels, norm.num_groups, norm.eps)
            # It wants a dimension behind the channels.
            other.register_forward_pre_hook(lambda _, given: given[0].unsqueeze(-1))
            other.register_forward_hook(lambda _, given, y: y.squeeze(-1))
            return other
        if isinstance(norm, nn.LayerNorm):
            return liger.LigerLayerNorm(norm.normalized_shape[0], norm.eps)
        if isinstance(norm, nn.RMSNorm):
            return liger.LigerRMSNorm(*rms_of(norm), casting_mode="gemma")
        return None

    if hasattr(model, "model"):
        _patch_llama(model, liger)
    else:
        with_norms(model, made)
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.in_place = False  # it would write into dy, which the other ways read too
    return model


def _patch_llama(model: nn.Module, liger: Any) -> None:
    """Liger's own patch is of the process too, where eager runs: here it holds for this model."""
    from transformers.models.llama import modeling_llama

    plain = {name: getattr(modeling_llama, name) for name in ("LlamaRMSNorm", "LlamaMLP")}
    liger.apply_liger_kernel_to_llama(
        rope=False, swiglu=True, rms_norm=True, cross_entropy=False,
        fused_linear_cross_entropy=False, model=model.model,
    )  # fmt: skip
    for name, value in plain.items():
        setattr(modeling_llama, name, value)
    rotation = modeling_llama.apply_rotary_pos_emb

    def rotate_by(function: Any) -> None:
        modeling_llama.apply_rotary_pos_emb = function

    model.register_forward_pre_hook(lambda *_: rotate_by(liger.liger_rotary_pos_emb))
    model.register_forward_hook(lambda *_: rotate_by(rotation), always_call=True)


def quacks(model: nn.Module) -> nn.Module:
    from quack.rmsnorm import QuackRMSNorm, layernorm_bwd, layernorm_fwd

    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            return *layernorm_bwd(x, weight, dy.contiguous(), rstd, mean), None

    class LayerNorm(nn.LayerNorm):
        """Quack has LayerNorm's kernels, of fp32 parameters, but no module around them."""

        def forward(self, x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            y = Normalised.apply(rows, self.weight.float(), self.bias.float(), self.eps)
            return y.view_as(x)

    def made(norm: nn.Module) -> nn.Module | None:
        if isinstance(norm, nn.LayerNorm):
            return LayerNorm(norm.normalized_shape, norm.eps)
        return None if (rms := rms_of(norm)) is None else QuackRMSNorm(*rms)

    return with_norms(model, made)


def apexes(model: nn.Module) -> nn.Module:
    from apex.normalization import FusedLayerNorm, FusedRMSNorm

    def made(norm: nn.Module) -> nn.Module | None:
        if isinstance(norm, nn.LayerNorm):
            return FusedLayerNorm(norm.normalized_shape, norm.eps)
        return None if (rms := rms_of(norm)) is None else FusedRMSNorm(*rms)

    return with_norms(model, made)


def engines(model: nn.Module) -> nn.Module:
    """Its norms alone: its LayerNormLinear is for one Linear behind a norm, which no case has."""
    from transformer_engine.pytorch import LayerNorm, RMSNorm

    def made(norm: nn.Module) -> nn.Module | None:
        if isinstance(norm, nn.LayerNorm):
            return LayerNorm(norm.normalized_shape, norm.eps)
        return None if (rms := rms_of(norm)) is None else RMSNorm(*rms)

    return with_norms(model, made)


LIBRARIES = {
    "Liger-Kernel": (ligers, "liger-kernel"),
    "quack": (quacks, "quack-kernels"),
    "apex": (apexes, "apex"),
    "Transformer Engine": (engines, "transformer-engine"),
}
"""What puts a library's modules into a model, and the package that has its version."""


def measure(
    library: str, case: str, setting: Setting, training: bool, device: torch.device
) -> dict[str, Any]:
    """One row; the ways share one set of parameters, but for epinorm's copy."""
    make = partial(NAMED[case], False) if case in NAMED else partial(_made, case, device)
    model, inputs = Subject(case, make).make(setting, device)
    model.train(training)
    plain = copy.deepcopy(model)
    put, package = LIBRARIES[library]
    other, fused = put(copy.deepcopy(model)), epinorm.fuse(copy.deepcopy(model))
    ways: dict[str, nn.Module] = {"eager": plain, "other": other, "fused": fused}
    draws: dict[str, list[Any]] = {"other": [], "fused": []}
    for seed in range(DRAWS if training else 1):
        truth = truth_of(plain, inputs, setting, training, seed)
        for name, found in draws.items():
            values = zip(ways[name].parameters(), plain.parameters(), strict=True)
            with torch.no_grad():
                for ours, eagers in values:
                    ours.copy_(eagers)
            call = partial(setting.call, ways[name])
            found.append(compare_candidate(truth, ways[name], call, inputs, setting, training))
    row: dict[str, Any] = {
        "library": library, "version": importlib.metadata.version(package),
        "case": case, "setting": setting.name, "pass": "training" if training else "forward",
        "gpu": device_name(device), "torch": torch.__version__, "commit": commit(),
        "date": today(), "reasons": {},
    }  # fmt: skip
    for name, found in draws.items():
        judged = judge(found, setting)
        error = judged.output.ours
        row[f"{name}_error"] = float(f"{error:.3g}") if math.isfinite(error) else None
        row["eager_error"] = float(f"{judged.output.eager:.3g}")
        if max(c.strain for c in judged.comparisons) > (WRONG if name == "other" else 1.0):
            row["reasons"][name] = judged.reason
            del ways[name]
    runners: dict[str, Any] = {
        name: model_runner(way, inputs, training, call=partial(setting.call, way))
        for name, way in ways.items()
    }
    samples = sample_interleaved(runners, device, TIMING)
    for name, times in samples.items():
        row[f"{name}_us"] = float(f"{statistics.median(times):.4g}")
    return row | {"runs": len(samples["eager"]), "spreads": spreads(samples, "eager")}


def _made(case: str, device: torch.device) -> tuple[nn.Module, tuple[Any, ...]]:
    return SHAPES[case].make(torch.float32, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("libraries", nargs="+", choices=LIBRARIES)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--settings", default="highest,high,bf16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    device, failed = torch.device("cuda"), 0
    path = chosen.out / f"{device_slug(device_name(device))}.json"
    rows = itertools.product(
        chosen.cases.split(","), chosen.settings.split(","), (False, True), chosen.libraries
    )
    for case, name, training, library in rows:
        setting = SETTINGS[name]
        torch._dynamo.reset()
        try:
            with fp32_precision_set(setting.precision):
                row = measure(library, case, setting, training, device)
        except Exception as error:  # the other rows are still wanted
            print(f"{library}, {case}, {name}, {training=}: {error!r}"[:400], flush=True)
            failed += not isinstance(error, LookupError)
            continue
        put_values(path, row, KEY)
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
