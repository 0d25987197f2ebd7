"""Liger-Kernel beside eager and epinorm on the same work, in one process, verified alike.

    python benchmarks/liger.py    # results/liger/<gpu>.json, and from it docs/comparison.md's table

Its norms stand in the place of PyTorch's, behind PyTorch's Linear; in a Llama its rotary embedding,
RMSNorm and SwiGLU, as its own patch puts them there. Epinorm is held to the verification's bounds;
Liger-Kernel, whose roundings are its own, to WRONG times these, and its output's error is shown.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import epinorm
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.models import NAMED, SETTINGS
from epinorm.tools.models.subject import Setting, Subject
from epinorm.tools.models.verify import DRAWS, compare_candidate, judge, truth_of
from epinorm.tools.results import commit, device_name, device_slug, put_values, today
from epinorm.tools.timing import Settings, sample_interleaved
from epinorm.tools.verdict import spreads
from shapes import SHAPES

RESULTS = Path(__file__).resolve().parent / "results" / "liger"
CASES = ("llama_4", "bert_out", "wide_ln", "dreamer", "ln256", "kb62", "mid")
KEY = ("case", "setting", "pass", "gpu")
WRONG = 4.0
TIMING = Settings(runs=20, warmup=3)


def ligers(model: nn.Module) -> nn.Module:
    """The model with Liger's modules, on the same parameters."""
    from liger_kernel import transformers as liger
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    if hasattr(model, "model"):
        _patch_llama(model, liger)
    for name, norm in list(model.named_children()):
        made = None
        if isinstance(norm, nn.GroupNorm):
            made = LigerGroupNorm(norm.num_channels, norm.num_groups, norm.eps)
            # It wants a dimension behind the channels.
            made.register_forward_pre_hook(lambda _, given: given[0].unsqueeze(-1))
            made.register_forward_hook(lambda _, given, y: y.squeeze(-1))
        elif isinstance(norm, nn.LayerNorm):
            made = liger.LigerLayerNorm(norm.normalized_shape[0], norm.eps)
        elif isinstance(norm, nn.RMSNorm):
            # As PyTorch computes it in 16 bit: all of it in fp32, and so with fp32's eps.
            eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
            made = liger.LigerRMSNorm(norm.normalized_shape[0], eps, casting_mode="gemma")
        if made is not None:
            made.weight = norm.weight
            if getattr(norm, "bias", None) is not None:
                made.bias = norm.bias
            setattr(model, name, made)
    for module in model.modules():
        if isinstance(module, liger.LigerRMSNorm) or "RMSNorm" in type(module).__name__:
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


def measure(case: str, setting: Setting, training: bool, device: torch.device) -> dict[str, Any]:
    """One row; the ways share one set of parameters, but for epinorm's copy."""
    make = partial(NAMED[case], False) if case in NAMED else partial(_made, case, device)
    model, inputs = Subject(case, make).make(setting, device)
    model.train(training)
    plain = copy.deepcopy(model)
    other, fused = ligers(copy.deepcopy(model)), epinorm.fuse(copy.deepcopy(model))
    ways: dict[str, nn.Module] = {"eager": plain, "liger": other, "fused": fused}
    draws: dict[str, list[Any]] = {"liger": [], "fused": []}
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
        "case": case, "setting": setting.name, "pass": "training" if training else "forward",
        "gpu": device_name(device), "torch": torch.__version__, "commit": commit(),
        "date": today(), "liger": importlib.metadata.version("liger-kernel"), "reasons": {},
    }  # fmt: skip
    for name, found in draws.items():
        judged = judge(found, setting)
        error = judged.output.ours
        row[f"{name}_error"] = float(f"{error:.3g}") if math.isfinite(error) else None
        row["eager_error"] = float(f"{judged.output.eager:.3g}")
        if max(c.strain for c in judged.comparisons) > (WRONG if name == "liger" else 1.0):
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
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--settings", default="highest,high,bf16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    device, failed = torch.device("cuda"), 0
    path = chosen.out / f"{device_slug(device_name(device))}.json"
    for case in chosen.cases.split(","):
        for setting in map(SETTINGS.__getitem__, chosen.settings.split(",")):
            for training in (False, True):
                torch._dynamo.reset()
                try:
                    with fp32_precision_set(setting.precision):
                        row = measure(case, setting, training, device)
                except Exception as error:  # the other rows are still wanted
                    print(f"{case}, {setting.name}, {training=}: {error!r}"[:400], flush=True)
                    failed += 1
                    continue
                put_values(path, row, KEY)
                print(json.dumps(row), flush=True)
                torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
