"""Launches without a GPU: everything on the host runs as for an H200, the driver notes launches.

Tensors are memory of the CPU that nothing reads. Shared by tests and scripts/snapshot.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epinorm
from epinorm.backends import memo, unpromised
from epinorm.backends.cuda.fp32 import norm_planes
from epinorm.backends.cuda.norm import backward_text, forward
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.runtime import device, driver, jit, launch, replay, tensor_map
from epinorm.chain import BatchNorm
from epinorm.operator import calls
from epinorm.problem import Inputs

H200 = device.Gpu((9, 0), 132, 232448, 233472)
PRODUCTS = ("mm", "addmm", "addmm_", "linear")
TRYING = (norm_planes, backward_text, forward)
"""The modules that look for a kernel that does not spill."""
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
    "residual_sum": (4096, 768, 768, LayerNorm(), "add_residual", "returns(sum)"),
    "wide_sum": (16384, 3072, 768, RMSNorm(), "add_residual", "returns(sum)"),
    "relu_sum": (1024, 512, 256, GroupNorm(8), "relu", "returns(sum)"),
    "layer_scale_sum": (4096, 768, 768, LayerNorm(), "mul_channel|add_residual", "returns(sum)"),
    "operands": (512, 256, 384, GroupNorm(48), "mul_channel", "silu|add_residual|mul_channel"),
    "odd": (100, 36, 60, GroupNorm(5), "", "gelu"),
    "groups_12": (16384, 768, 768, GroupNorm(64), "", "silu"),
    "wide_ln": (8192, 4096, 4096, LayerNorm(), "", "gelu"),
    "dropout_768": (4096, 768, 768, LayerNorm(), "dropout(0.1)|add_residual", "dropout(0.1)"),
    "heads": (4096, 2048, 2048, RMSNorm(num_groups=16), "", ""),
    "stochastic_depth": (4096, 768, 768, LayerNorm(), "mul_row|add_residual", "returns(sum)"),
    "batch_norm": (16384, 1024, 1024, BatchNorm(), "", "gelu"),
    "batch_norm_odd": (100, 36, 60, BatchNorm(), "relu|add_residual", "mul_channel|dropout(0.1)"),
    "linear": (4096, 2048, 2048, None, "", ""),
    "linear_gelu": (4096, 768, 3072, None, "gelu", ""),
    "linear_relu": (4096, 2048, 2048, None, "relu", ""),
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
        self.texts: dict[bytes, Any] = {}
        self.loading: Any = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuLibraryLoadData(self, _library: Any, cubin: bytes, *_: Any) -> int:
        self.loading = self.texts[cubin]
        return 0

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
    return hashlib.sha256(code.encode()).hexdigest()[:16]


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


def believe_in(monkeypatch: Any, gpu: device.Gpu) -> None:
    """Let plans be made as for this GPU, to the end of the test."""
    monkeypatch.setattr(device, "device_index", lambda device=None: 0)
    monkeypatch.setattr(device, "gpu_at", lambda index: gpu)
    monkeypatch.setattr(cuda_plan, "supported", lambda device: None)
    memo.clear()


@contextlib.contextmanager
def imaginary_h200(gpu: device.Gpu = H200, compiles: bool = False) -> Any:
    """Let tensors of the CPU be computed as if on an H200, or another GPU; yields the driver.

    compiles: whether plans try which kernels spill; else none does."""
    api = Driver()

    def text_of(source: Any) -> jit.Compiled:
        cubin = f"{source.entry} {source.arch} {source.text}".encode()
        api.texts[cubin] = source
        return jit.Compiled(cubin, "", 0, 0, 0, 0)

    def plan_for(problem: Any, strategy: Any, strict: bool = False) -> Any:
        return cuda_plan.plan_cuda(problem, strategy)

    def precision(dtype: torch.dtype, _: str, *sizes: tuple[int, ...]) -> str:
        return calls_precision(dtype, "cuda", *sizes)

    calls_precision = calls.product_precision
    patches = [
        *((module, "driver", lambda: api) for module in (driver, jit, launch, replay, tensor_map)),
        (jit, "_loaded", jit.Loaded()),
        *((module, "compiled", text_of) for module in (jit, *(() if compiles else TRYING))),
        (device, "device_index", lambda device=None: 0),
        (jit, "device_index", lambda device=None: 0),
        (device, "gpu_at", lambda index: gpu),
        (unpromised, "current_device", lambda: 0),
        (unpromised, "current_stream", lambda index: 5),
        (launch, "make_primary_context_current", lambda index: None),
        (jit, "make_primary_context_current", lambda index: None),
        (torch.cuda, "device", lambda index: contextlib.nullcontext()),
        (torch.cuda, "init", lambda: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (cuda_plan, "supported", lambda device: None),
        (tuned, "choice", lambda *_: None),
        (calls, "plan_for", plan_for),
        (calls, "product_precision", precision),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        memo.clear()
        yield api
    memo.clear()


def launches(
    api: Driver,
    m: int,
    k: int,
    n: int,
    norm: Any,
    pre: str,
    post: str,
    dtype: Any,
    training: bool,
    whole_step: bool = False,
) -> Any:
    """What a call launches, and its backward pass where ``training``, by way of the operators or,
    as a ``whole_step``, as calls of models are made."""

    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype).requires_grad_(training)

    parts = (pre, "" if norm is None else str(norm), post)
    chain = epinorm.Chain.parse("|".join(filter(None, parts)) or "identity")
    seed = torch.zeros(1, dtype=torch.int64)
    of_kind = {
        "seed": lambda: seed,
        "channel": lambda: new(n),
        "row": lambda: new(m, 1).detach(),
    }
    operands = [of_kind[kind]() if kind in of_kind else new(m, n) for kind in chain.operand_kinds]
    vectors = [new(n), None, None] if norm is None else [new(n) for _ in range(3)]
    api.launches.clear()
    with Products(api), torch.set_grad_enabled(training):
        facts = (str(chain), "auto", False, None)
        tensors = (new(m, k), new(n, k), *vectors)
        if not training:
            calls.run_inference((*tensors, operands), facts)
            return list(api.launches)
        detached = (None if t is None else t.detach() for t in tensors)
        inputs = Inputs(*detached, tuple(operands), calls.constants_of(facts))
        executable = calls.executable_of(inputs, facts, True, whole_step)
        if whole_step and calls.eager_for(executable) is not None:  # its backward is autograd's
            return list(api.launches)
        forward = executable.forward(*inputs)
        left = getattr(forward, "left", None)
        api.launches.append({"backward": ""})
        wanted = [t is not None and t.requires_grad for t in (*tensors, *operands)]
        dy = torch.empty_like(forward.y)
        with torch.no_grad():
            saved = [forward.saved(chain), forward.mean, forward.rstd]
            dsum = torch.empty_like(forward.second) if chain.returns_sum else None
            known = executable, left
            calls.run_backward((*tensors, operands), facts, saved, dy, wanted, dsum, *known)
    return list(api.launches)
