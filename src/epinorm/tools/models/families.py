"""Where a model's GPU time goes: its kernels by family, from torch.profiler."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from epinorm.tools.timing import Runner

FAMILIES = (
    ("epinorm product", r"^(linear_norm|hopper_product|portable_)\w*$"),
    ("epinorm norm", r"^(norm_(forward|backward|column)\w*|add_splits)$"),
    ("epinorm planes and guards", r"^(split|rescue|rescale)\w*$"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("library product", r"gemm|nvjet|cutlass|xmma|splitK|gemv"),
    ("Triton", r"^triton"),
    ("norm", r"layer_?norm|rms_?norm|group_?norm|batch_?norm|GammaBeta"),
    ("reduction, softmax", r"reduce|softmax"),
    ("pointwise, copies", r"elementwise|copy|Memcpy|Memset|fill|catArray|index|embedding"),
)
"""Name and pattern; the first that fits a kernel's name counts. Ours are plain words of C."""


def family(kernel: str) -> str:
    """The family of a kernel by its name."""
    for name, pattern in FAMILIES:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def families_of(
    runners: Mapping[str, Runner], device: torch.device, calls: int = 3
) -> dict[str, dict[str, float]] | None:
    """GPU ms that one run of each spends in each family; None on a CPU."""
    if device.type != "cuda":
        return None
    found = {}
    for name, runner in runners.items():
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(calls):
                runner.prepare()
                runner.run()
            torch.cuda.synchronize(device)
        times: Counter[str] = Counter()
        for event in profiled.events() or ():
            if str(event.device_type).endswith("CUDA"):
                times[family(event.name)] += event.time_range.elapsed_us()
        found[name] = {key: us / 1000 / calls for key, us in times.most_common()}
    return found
