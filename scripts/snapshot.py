"""Write every launch of every named case, so that a move can be shown to change nothing else.

    python scripts/snapshot.py OUT.json             each launch: kernel, hash of its text, shape
    python scripts/snapshot.py OUT.json --compile   registers and spills of each text as well (slow)
    python scripts/snapshot.py OUT.json --against OLD.json    and say what differs

Everything on the host runs as for an H200; the driver is a stand-in that notes launches, and
tensors are memory of the CPU that nothing reads. Needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epinorm
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.runtime import device, driver, jit, launch, tensor_map
from epinorm.operator import calls

H200 = SimpleNamespace(
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    total_memory=150 * 2**30,
)
PRODUCTS = ("mm", "addmm", "addmm_", "linear")
GroupNorm, LayerNorm, RMSNorm = epinorm.GroupNorm, epinorm.LayerNorm, epinorm.RMSNorm

# name: m, k, n, norm, pre, post
CASES: dict[str, tuple[int, int, int, Any, str, str]] = {
    "kb62": (1024, 8192, 8192, GroupNorm(512), "", "leaky_relu(0.01)|scale(2)"),
    "kb62_v0": (128, 512, 256, GroupNorm(8), "", "leaky_relu(0.01)|scale(2)"),
    "skinny": (65536, 128, 128, GroupNorm(32), "", "leaky_relu(0.01)|scale(2)"),
    "mid": (16384, 1024, 1024, GroupNorm(32), "", "leaky_relu(0.01)|scale(2)"),
    "wide_groups": (8192, 4096, 4096, GroupNorm(32), "", "leaky_relu(0.01)|scale(2)"),
    "decode_16": (16, 8192, 8192, GroupNorm(512), "", "leaky_relu(0.01)|scale(2)"),
    "decode_1": (1, 8192, 8192, GroupNorm(512), "", "leaky_relu(0.01)|scale(2)"),
    "layer_norm_512": (4096, 512, 512, LayerNorm(), "", "leaky_relu(0.01)|scale(2)"),
    "ln256": (65536, 256, 256, LayerNorm(), "", "relu"),
    "rms_1024": (1024, 1024, 1024, RMSNorm(), "", "silu"),
    "residual_768": (4096, 768, 768, LayerNorm(), "add_residual", ""),
    "operands": (512, 256, 384, GroupNorm(48), "mul_channel", "silu|add_residual|mul_channel"),
    "odd": (100, 36, 60, GroupNorm(5), "", "gelu"),
    "groups_12": (16384, 768, 768, GroupNorm(64), "", "silu"),
}
KINDS = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "fp64": (torch.float64, "highest"),
    "high": (torch.float32, "high"),
    "highest": (torch.float32, "highest"),
}


class Driver:
    """Stands in for the CUDA driver: knows each kernel by the source that was loaded."""

    has_parameter_info = False

    def __init__(self) -> None:
        self.sources: list[Any] = []
        self.launches: list[dict[str, Any]] = []
        self.loading: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuLibraryGetKernel(self, handle: Any, _library: Any, _name: bytes) -> int:
        self.sources.append(self.loading)
        handle._obj.value = len(self.sources)
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, *_: Any) -> int:
        blocks._obj.value = 4
        return 0

    def cuOccupancyMaxActiveClusters(self, clusters: Any, *_: Any) -> int:
        clusters._obj.value = 64
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, _arguments: Any, _: None) -> int:
        words = list((ctypes.c_uint32 * 7).from_address(config.value))
        source = self.sources[handle.value - 1]
        self.launches.append(
            {
                "kernel": source.entry,
                "text": hash_of(source),
                "grid": words[:3],
                "block": words[3:6],
                "shared_bytes": words[6],
            }
        )
        return 0


def hash_of(source: Any) -> str:
    """Of what the compiler sees: comments and spaces do not count."""
    code = " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", source.text, flags=re.S).split())
    return hashlib.sha256("\0".join((code, *source.options)).encode()).hexdigest()[:16]


class Products(TorchDispatchMode):
    """Notes PyTorch's own products among the launches, and computes none of them."""

    def __init__(self, into: Driver) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.into.launches.append({"kernel": f"aten::{name}"})
            a, b = [t for t in args if isinstance(t, Tensor)][-2:]
            return args[0] if name == "addmm_" else a.new_empty(a.shape[0], b.shape[1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def imaginary_h200() -> Any:
    """Let tensors of the CPU be computed as if they were on an H200; yields the driver."""
    api = Driver()

    def load_library(source: Any) -> Any:
        api.loading = source
        return real_load_library(source)

    real_load_library = jit._load_library
    nothing = jit.Compiled(b"", "", 0, 0, 0, 0)

    def plan_for(problem: Any, strategy: Any, strict: bool = False) -> Any:
        return cuda_plan.plan_cuda(problem, strategy)

    def precision(dtype: torch.dtype, _: str) -> str:
        return calls_precision(dtype, "cuda")

    calls_precision = calls.product_precision
    patches = [
        *((module, "driver", lambda: api) for module in (driver, jit, launch, tensor_map)),
        (jit, "_load_library", load_library),
        (jit, "compiled", lambda source: nothing),
        (device, "device_index", lambda device=None: 0),
        (jit, "device_index", lambda device=None: 0),
        (device, "_capability", lambda index: (9, 0)),
        (device, "_properties", lambda index: H200),
        (launch, "_current_device", lambda: 0),
        (launch, "_current_stream", lambda index: 5),
        (launch, "make_primary_context_current", lambda index: None),
        (jit, "make_primary_context_current", lambda index: None),
        (torch.cuda, "device", lambda index: contextlib.nullcontext()),
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "get_device_properties", lambda index: H200),
        (cuda_plan, "supported", lambda device: None),
        (tuned, "choice", lambda *_: None),
        (calls, "plan_for", plan_for),
        (calls, "product_precision", precision),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        hopper_plan.choose_tile.cache_clear()
        yield api


def steps() -> tuple[dict[str, Any], list[Any]]:
    """The launches in their order by case, kind and pass; and every source that was loaded."""
    found: dict[str, Any] = {}
    with imaginary_h200() as api:
        for name, (m, k, n, norm, pre, post) in CASES.items():
            for kind, (dtype, precision) in KINDS.items():
                torch.set_float32_matmul_precision(precision)
                for training in (False, True):
                    key = f"{name} {kind} {'training' if training else 'forward'}"
                    found[key] = launches(api, m, k, n, norm, pre, post, dtype, training)
    return found, api.sources


def launches(
    api: Driver, m: int, k: int, n: int, norm: Any, pre: str, post: str, dtype: Any, training: bool
) -> Any:
    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype).requires_grad_(training)

    chain = epinorm.Chain.build(norm, pre, post)
    operands = [new(n) if kind == "channel" else new(m, n) for kind in chain.operand_kinds]
    vectors = [new(n) for _ in range(3)]
    api.launches.clear()
    with Products(api), torch.set_grad_enabled(training):
        facts = (str(chain), "auto", False, None)
        tensors = (new(m, k), new(n, k), *vectors)
        if not training:
            calls.run_inference((*tensors, operands), facts)
        else:
            y, *kept = calls.run_forward([*(t.detach() for t in tensors), operands], facts)
            api.launches.append({"backward": ""})
            wanted = [True] * (5 + len(operands))
            with torch.no_grad():
                calls.run_backward((*tensors, operands), facts, kept, torch.empty_like(y), wanted)
    return list(api.launches)


def figures(sources: list[Any]) -> dict[str, str]:
    """Registers and spills by the hash of a text."""
    found = {}
    for i, source in enumerate(sources):
        if hash_of(source) not in found:
            print(f"{i + 1}/{len(sources)} {source.entry}", file=sys.stderr)
            code = jit.compiled(source)
            found[hash_of(source)] = f"{code.registers} registers, {code.spill_bytes} spilled"
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    differing = [k for k in old["steps"] if old["steps"][k] != new["steps"].get(k)]
    differing += [k for k in new["steps"] if k not in old["steps"]]
    for key in differing:
        print("differs:", key)
        for which, side in (("old", old), ("new", new)):
            for one in side["steps"].get(key, []):
                print(f"  {which} {one}")
    shared = old["figures"].keys() & new["figures"].keys()
    worse = [k for k in shared if old["figures"][k] != new["figures"][k]]
    for key in worse:
        print(f"{key}: {old['figures'][key]}, now {new['figures'][key]}")
    print(f"{len(new['steps'])} cases, {len(differing)} differ")
    return bool(differing or worse)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--against", type=Path)
    chosen = parser.parse_args()
    found, sources = steps()
    found = {"steps": found, "figures": figures(sources) if chosen.compile else {}}
    chosen.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if chosen.against:
        return compare(json.loads(chosen.against.read_text()), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
