"""A GPU of the imagination: everything on the host runs as for an H200, tensors stay on the CPU.

A launch is decoded from the very bytes that the driver would read, and computed from the addresses
and numbers in them, by PyTorch. So a launch that is given an old address, size, stride or stream
shows as a wrong result.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

from epinorm import precision
from epinorm.backends import memo, unpromised
from epinorm.backends.cuda.fp32 import planes, rescue
from epinorm.backends.cuda.gemm.hopper import linear_norm
from epinorm.backends.cuda.norm import backward as norm_backward
from epinorm.backends.cuda.norm import forward as norm_forward
from epinorm.backends.cuda.norm.text import chain_signature
from epinorm.backends.cuda.plan import strategy as cuda_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.hopper_tile import operand_slots
from epinorm.backends.cuda.plan.norm_backward import backward_plans
from epinorm.backends.cuda.runtime import device, driver, launch, replay, tensor_map
from epinorm.backends.cuda.runtime.native import native
from epinorm.capture.after_autograd import AfterAutograd
from epinorm.chain import Chain, RMSNorm
from epinorm.chain.reference import epilogue
from epinorm.operator import calls, kinds
from epinorm.precision import product_precision

sys.path.insert(0, str(Path(__file__).parent))

import figures
from batch_kernels import SOURCES, STAND_INS, BatchKernels, matrix_at

_WORDS = ctypes.POINTER(ctypes.c_uint64)
SMS = 132
SHARED_BYTES = 232448
CAPTURE_STREAM = 77
_GRAPHS = dict(zip(driver.GRAPHS, (2, 1, 1, 2, 2, 2, 3, 2, 1, 1), strict=True))  # their arguments

_DTYPES = {6: torch.float16, 7: torch.float32, 9: torch.bfloat16}  # CUtensorMapDataType
_CTYPES = {
    "p": ctypes.c_uint64, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float,
    "d": ctypes.c_double,
}  # fmt: skip


def vector_at(address: int, size: int, dtype: torch.dtype) -> Tensor | None:
    return matrix_at(address, 1, size, size, dtype)[0] if address else None


def constants(chain: Chain, dtype: torch.dtype) -> str:
    """The signature of a chain's constants."""
    return ("d" if dtype == torch.float64 else "f") * len(chain.arguments)


@dataclass
class Launch:
    """One launch as the driver saw it."""

    kind: str
    source: Any
    stream: int
    arguments: list[Any]


@dataclass
class ImaginaryGPU(BatchKernels):
    """What it was asked to launch; ``stream`` is what PyTorch's current stream is; ``interrupt``
    runs once, when a launch is about to be read; launches of the kind ``refused`` fail."""

    stream: int = 5
    interrupt: Callable[[], object] | None = None
    refused: str = ""
    launches: list[Launch] = field(default_factory=list)
    sources: list[tuple[str, Any]] = field(default_factory=list)
    split: dict[int, Tensor] = field(default_factory=dict)
    """By the address of their hi plane: matrices that were split into planes."""

    sums: dict[int, list[Tensor]] = field(default_factory=dict)
    """By the address of the scratch: what norm_column_sums will add up."""

    replayed: int = 0
    """Launches by native code, of those that there were."""

    captured: list[Callable[[int], int]] | None = None
    """What the stream that is captured was given so far."""

    capturing: bool = False
    """Whether streams are captured by somebody else."""

    refuses_graphs: bool = False

    refuses_maps: bool = False
    """Whether tensor maps cannot be encoded while a stream is captured here."""

    maps_refused: int = 0

    streams: int = 0
    """Created and not destroyed."""

    capture_mode: int = 0

    graphs: dict[int, list[Callable[[int], int]]] = field(default_factory=dict)
    graph_launches: int = 0

    def kinds(self) -> list[str]:
        """The kernels launched since this was last asked."""
        found = [launch.kind for launch in self.launches]
        self.launches.clear()
        return found

    def load(self, source: tuple[str, Any], *_: Any) -> launch.Kernel:
        self.sources.append(source)
        return launch.Kernel(len(self.sources), source[0], 0, None)

    # ---- the driver ----

    has_parameter_info = False

    def cuTensorMapEncodeTiled(
        self, into: int, dtype: int, _rank: int, address: int, sizes: Any, strides: Any, *_: Any
    ) -> int:
        words = (ctypes.c_uint64 * 5).from_address(into)
        words[:] = (dtype, address, sizes[1], sizes[0], strides[0])
        refused = self.refuses_maps and self.captured is not None
        self.maps_refused += refused
        return int(refused)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, *_: Any) -> int:
        blocks._obj.value = 4
        return 0

    def cuDeviceGet(self, *_: Any) -> int:
        return 0

    def cuKernelSetAttribute(self, *_: Any) -> int:
        return 0

    def cuGetErrorName(self, *_: Any) -> int:
        return 1

    cuGetErrorString = cuGetErrorName

    def cuLaunchKernelEx(self, config: Any, handle: Any, parameters: Any, _: None) -> int:
        if self.interrupt is not None:
            run, self.interrupt = self.interrupt, None
            run()
        kind, source = self.sources[handle.value - 1]
        if kind == self.refused:
            return 700  # CUDA_ERROR_ILLEGAL_ADDRESS
        stream = ctypes.c_uint64.from_address(config.value + 32).value
        pointers = parameters.value
        arguments = []
        for place, letter in enumerate(getattr(self, f"signature_of_{kind}")(source)):
            at = ctypes.c_uint64.from_address(pointers + 8 * place).value
            if letter == "m":
                dtype, *words = (ctypes.c_uint64 * 5).from_address(at)
                arguments.append((_DTYPES[dtype], *words))
            else:
                arguments.append(_CTYPES[letter].from_address(at).value)

        def compute(stream: int) -> int:
            self.launches.append(Launch(kind, source, stream, arguments))
            with _disable_current_modes():  # what is computed here is no part of the caller's run
                getattr(self, f"compute_{kind}")(source, *arguments)
            return 0

        if stream == CAPTURE_STREAM and self.captured is not None:
            self.captured.append(compute)
            return 0
        return compute(stream)

    # ---- CUDA graphs ----

    def cuStreamCreate(self, stream: int, _flags: int) -> int:
        ctypes.c_uint64.from_address(stream).value = CAPTURE_STREAM
        self.streams += 1
        return 0

    def cuStreamDestroy_v2(self, _stream: int) -> int:
        self.streams -= 1
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        there = ctypes.c_int.from_address(mode) if isinstance(mode, int) else mode._obj
        there.value, self.capture_mode = self.capture_mode, there.value
        return 0

    def cuStreamBeginCapture_v2(self, stream: int, _mode: int) -> int:
        assert stream == CAPTURE_STREAM
        self.captured = []
        return 0

    def cuStreamEndCapture(self, _stream: int, graph: int) -> int:
        assert self.captured is not None
        ctypes.c_uint64.from_address(graph).value = made = len(self.graphs) + 1
        self.graphs[made], self.captured = self.captured, None
        return 0

    def cuStreamIsCapturing(self, _stream: int, status: int) -> int:
        ctypes.c_int.from_address(status).value = int(self.capturing)
        return 0

    def cuGraphInstantiateWithFlags(self, made: int, graph: int, _flags: int) -> int:
        ctypes.c_uint64.from_address(made).value = graph
        return int(self.refuses_graphs)

    def cuGraphLaunch(self, graph: int, stream: int) -> int:
        self.graph_launches += 1
        return max(compute(stream) for compute in self.graphs[graph])

    def cuGraphDestroy(self, _graph: int) -> int:
        return 0

    cuGraphExecDestroy = cuGraphDestroy

    def native(self) -> SimpleNamespace:
        """The driver's functions as native code calls them."""

        def launch_kernel(config: int, kernel: int, arguments: int, _: Any) -> int:
            self.replayed += 1
            found = [ctypes.c_void_p(each) for each in (config, kernel, arguments)]
            return self.cuLaunchKernelEx(*found, None)

        def encode(into: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
            sizes, strides = [ctypes.cast(at, _WORDS) for at in rest[:2]]
            return self.cuTensorMapEncodeTiled(into, dtype, rank, address, sizes, strides)

        pointer, number = ctypes.c_void_p, ctypes.c_int
        maps = (pointer, number, number, *[pointer] * 5, *[number] * 4)
        graphs = {
            name: ctypes.CFUNCTYPE(number, *[pointer] * _GRAPHS[name])(getattr(self, name))
            for name in driver.GRAPHS
        }
        return SimpleNamespace(
            **graphs,
            cuLaunchKernelEx=ctypes.CFUNCTYPE(number, *[pointer] * 4)(launch_kernel),
            cuTensorMapEncodeTiled=ctypes.CFUNCTYPE(number, *maps)(encode),
        )

    # ---- the kernels ----

    def signature_of_linear_norm(self, instance: Any) -> str:
        problem = instance.problem
        return (
            "m" * (operand_slots(instance) > 0)
            + linear_norm.SIGNATURE
            + "p" * len(problem.chain.operand_kinds)
            + constants(problem.chain, torch.float32)
        )

    def compute_linear_norm(self, instance: Any, *arguments: Any) -> None:
        if operand_slots(instance):
            arguments = arguments[1:]
        (x_map, _, w_map, _, y, z, bias, gamma, beta, *scales, mean, rstd, m, n, k), more = (
            arguments[:16],
            arguments[16:],
        )
        problem = instance.problem
        count = len(problem.chain.operand_kinds)
        operands, numbers = more[:count], more[count:]
        if instance.scaled:
            x, w = self.split[x_map[1]], self.split[w_map[1]]
            assert all(scales)
        else:
            x, w = (
                matrix_at(address, rows, columns, row_bytes // dtype.itemsize, dtype)
                for dtype, address, rows, columns, row_bytes in (x_map, w_map)
            )
        assert (x.shape, w.shape) == ((m, k), (n, k))
        product = x.double() @ w.double().t()
        facts = SimpleNamespace(
            chain=problem.chain.filled(numbers), m=m, n=n, groups=problem.chain.groups(n),
            norm_dtype=problem.norm_dtype, out_dtype=problem.out_dtype,
            dtype=problem.dtype, stats_dtype=torch.float32,
            has_bias=problem.has_bias, training=problem.matrix_dtype is not None,
        )  # fmt: skip
        pairs = [(address, n) for address in operands]
        self._normalise(facts, product, (bias, gamma, beta), pairs, (y, mean, rstd))
        if problem.matrix_dtype is not None:
            matrix_at(z, m, n, n, problem.matrix_dtype).copy_(product)
        else:
            assert (z, mean, rstd) == (0, 0, 0)

    def signature_of_norm_forward(self, source: Any) -> str:
        problem = source[0]
        return norm_forward.SIGNATURE + chain_signature(problem) + "p" * problem.chain.returns_sum

    def compute_norm_forward(self, source: Any, *arguments: Any) -> None:
        problem = source[0]
        z, z_stride, bias, gamma, beta, y, mean, rstd, m, groups, *more = arguments
        count = 2 * len(problem.chain.operand_kinds)
        total = more.pop() if problem.chain.returns_sum else 0
        operands, numbers = more[:count], more[count:]
        problem = dataclasses.replace(problem, chain=problem.chain.filled(numbers))
        assert (m, groups) == (problem.m, problem.groups)
        values = matrix_at(z, m, problem.n, z_stride, problem.dtype).double()
        pairs = list(zip(operands[::2], operands[1::2], strict=True))
        self._normalise(problem, values, (bias, gamma, beta), pairs, (y, mean, rstd, total))

    def _normalise(
        self,
        problem: Any,
        product: Tensor,
        parameters: tuple[int, int, int],
        operands: list[tuple[int, int]],
        outputs: tuple[int, ...],
    ) -> None:
        m, n, dtype = problem.m, problem.n, problem.norm_dtype
        bias = vector_at(parameters[0], n, problem.dtype)
        gamma, beta = (vector_at(p, n, dtype) for p in parameters[1:])
        assert (bias is not None) == problem.has_bias
        given = [
            vector_at(address, n, dtype)
            if kind == "channel"
            else matrix_at(address, m, n, stride, dtype)
            for (address, stride), kind in zip(operands, problem.chain.operand_kinds, strict=True)
        ]
        in_z = bias is None or getattr(problem, "bias_in_z", False)
        biased = product if in_z else product + bias.double()
        doubles = [None if t is None else t.double() for t in (gamma, beta, *given)]
        y = epilogue(biased, problem.chain, doubles[0], doubles[1], doubles[2:])
        if isinstance(y, tuple):
            y, total = y
            matrix_at(outputs[3], m, n, n, problem.sum_dtype).copy_(total)
        matrix_at(outputs[0], m, n, n, problem.out_dtype).copy_(y)
        if not problem.training or problem.chain.norm is None:
            return
        # No operation before the norm: these are what the tests' chains have.
        grouped = biased.view(m, problem.groups, -1)
        if not isinstance(problem.chain.norm, RMSNorm):
            mean = matrix_at(outputs[1], m, problem.groups, problem.groups, problem.stats_dtype)
            mean.copy_(grouped.mean(2))
            grouped = grouped - grouped.mean(2, keepdim=True)
        rstd = matrix_at(outputs[2], m, problem.groups, problem.groups, problem.stats_dtype)
        rstd.copy_((grouped.square().mean(2) + problem.chain.norm.eps).rsqrt())

    def signature_of_norm_backward(self, source: Any) -> str:
        problem, _, outputs, _ = source
        elements = "p" * sum(outputs.elements)
        return norm_backward.SIGNATURE + chain_signature(problem) + elements

    def compute_norm_backward(self, source: Any, *arguments: Any) -> None:
        problem, _, outputs, _ = source
        dy, dy_stride, z, z_stride, _, _, _, bias, gamma, beta, dz, at, m, _, *more = arguments
        n, kinds = problem.n, problem.chain.operand_kinds
        addresses, more = more[: 2 * len(kinds)], more[2 * len(kinds) :]
        count = len(constants(problem.chain, problem.stats_dtype))
        chain = problem.chain.filled(more[:count])
        given = [vector_at(bias, n, problem.dtype)]
        given += [vector_at(p, n, problem.norm_dtype) for p in (gamma, beta)]
        given += [
            vector_at(address, n, problem.norm_dtype)
            if kind == "channel"
            else matrix_at(address, m, n, stride, problem.norm_dtype)
            for address, stride, kind in zip(addresses[::2], addresses[1::2], kinds, strict=True)
        ]
        product = matrix_at(z, m, n, z_stride, problem.dtype).double()
        doubles = [None if t is None else t.double() for t in given]
        dys = [matrix_at(dy, m, n, dy_stride, problem.out_dtype)]
        if getattr(chain, "adds_gradient", False):
            dys.append(doubles.pop())
        leaves = [t for t in (product, *doubles) if t is not None]

        def differentiate() -> tuple[Tensor, ...]:
            for leaf in leaves:
                leaf.requires_grad_()
            bias, gamma, beta, *operands = doubles
            if not getattr(chain, "begins_at_result", False):
                biased = product
                if bias is not None:
                    biased = product + (bias - bias.detach() if problem.bias_in_z else bias)
                results = epilogue(biased, chain, gamma, beta, operands)
                if isinstance(results, tuple):
                    results = results[: len(dys)]
                return torch.autograd.grad(results, leaves, dys)
            total = product  # which sums alone lead to, in these tests' chains
            for added in (bias, *operands):
                total = total if added is None else total + (added - added.detach())
            if chain.norm is None:
                gradient = chain.pre[-1].definition.result_gradient
                return torch.autograd.grad(total, leaves, gradient(dys[0], product.detach()))
            y = epilogue(total, Chain(chain.norm, (), chain.post), gamma, beta, ())
            return torch.autograd.grad([y, total][: len(dys)], leaves, dys)

        with ThreadPoolExecutor(1) as fresh:  # this thread may be below autograd
            found = fresh.submit(differentiate).result()
        gradients = dict(zip(map(id, leaves), found, strict=True))
        if dz:
            matrix_at(dz, m, n, n, problem.dtype).copy_(gradients[id(product)])
        by_name = [gradients.get(id(t)) for t in (doubles[1], doubles[2], doubles[0], *doubles[3:])]
        dtypes = [problem.dtype if i == 2 else problem.norm_dtype for i in range(len(by_name))]
        pairs = zip(by_name, dtypes, outputs.sums, strict=False)
        self.sums[at] = [gradient.to(dtype) for gradient, dtype, wanted in pairs if wanted]
        asked = zip(by_name[3:], outputs.elements, strict=False)
        elements = [gradient for gradient, wanted in asked if wanted]
        for address, gradient in zip(more[count:], elements, strict=False):
            matrix_at(address, m, n, n, problem.norm_dtype).copy_(gradient)

    def signature_of_norm_column_sums(self, source: Any) -> str:
        return "ppil" + "p" * sum(source[1].sums)

    def compute_norm_column_sums(self, source: Any, at: int, *arguments: Any) -> None:
        largest, _, n, *into = arguments
        assert bool(largest) == source[1].column_largest  # else it may point behind the scratch
        for address, values in zip(into, self.sums.pop(at), strict=True):
            matrix_at(address, 1, n, n, values.dtype)[0].copy_(values)

    def signature_of_split(self, _source: Any) -> str:
        return planes.SIGNATURE

    def compute_split(self, _source: Any, *arguments: Any) -> None:
        x, x_stride, w, w_stride, hi, _lo, _scale, _flags, _spoilt, *numbers = arguments
        rows, second, all_rows, columns, padded = numbers
        self.split[hi] = matrix_at(x, rows, columns, x_stride, torch.float32).clone()
        if all_rows > second:
            more = matrix_at(w, all_rows - second, columns, w_stride, torch.float32)
            self.split[hi + second * padded * 2] = more.clone()

    def signature_of_split_over(self, _source: Any) -> str:
        return planes.OVER_SIGNATURE

    def compute_split_over(self, _source: Any, *arguments: Any) -> None:
        """Leaves NaN in x."""
        x, x_stride, w, w_stride, hi, _lo, _scale, _flags, *numbers = arguments
        rows, second, all_rows, columns, padded = numbers
        assert x_stride == columns == padded
        over = matrix_at(x, rows, columns, x_stride, torch.float32)
        self.split[x] = over.clone()
        over.fill_(float("nan"))
        if all_rows > second:
            more = matrix_at(w, all_rows - second, columns, w_stride, torch.float32)
            self.split[hi] = more.clone()

    def signature_of_rescue(self, source: Any) -> str:
        return rescue.SIGNATURE + chain_signature(source[0])

    def compute_rescue(self, source: Any, *_: Any) -> None:
        """Nothing is flagged."""


def _plan_for(problem: Any, strategy: Any, strict: bool = False) -> Any:
    plan = cuda_plan.plan_cuda(problem, strategy)
    assert plan.strategy != "reference", plan.reason
    return plan


NAMED_CACHE = os.environ.get("EPINORM_CACHE_DIR")


@pytest.fixture(scope="session")
def cache_of_figures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the figures of each kernel that is kept, without its machine code."""
    folder = tmp_path_factory.mktemp("figures") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPINORM_CACHE_DIR", str(folder))
        figures.fill_cache()
    return folder


@pytest.fixture(scope="module")
def kept_figures(private_cache: Path, cache_of_figures: Path) -> Iterator[None]:
    """Compile only what has changed since its figures were kept (figures.py), for tests that read
    no machine code. A cache that EPINORM_CACHE_DIR names is used instead."""
    with pytest.MonkeyPatch.context() as patch:
        if NAMED_CACHE is None:
            patch.setenv("EPINORM_CACHE_DIR", str(cache_of_figures))
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ImaginaryGPU]:
    """Let tensors of the CPU be computed as if they were on an H200, to the end of the test."""
    gpu = ImaginaryGPU()
    set_ = monkeypatch.setattr
    for module in (driver, launch, tensor_map):
        set_(module, "driver", lambda: gpu)
    host = gpu.native()
    set_(replay, "driver", lambda: host)
    native(wait=True).ask(
        lambda: unpromised.current_device(),
        lambda index: unpromised.current_stream(index),
        precision.matmul_setting,
    )
    for module in (linear_norm, norm_forward, norm_backward, planes, rescue):
        set_(module, "load", gpu.load)
    for module, made in STAND_INS.items():
        set_(module, "load", gpu.load)
        for kind in made:
            set_(module, SOURCES[kind], lambda *source, kind=kind: (kind, source))
    set_(norm_backward, "backward_plan", lambda *given: backward_plans(*given[:-1])[0])
    set_(norm_backward, "backward_source", lambda *source: ("norm_backward", source))
    set_(norm_backward, "column_sums_source", lambda *source: ("norm_column_sums", source))
    set_(linear_norm, "linear_norm_source", lambda instance: ("linear_norm", instance))
    set_(norm_forward, "forward_source", lambda *source: ("norm_forward", source))
    set_(planes, "split_source", lambda *source: ("split", source))
    set_(planes, "split_over_source", lambda *source: ("split_over", source))
    set_(rescue, "rescue_source", lambda *source: ("rescue", source))
    set_(norm_forward, "compiled", lambda _: SimpleNamespace(spill_bytes=0))
    set_(device, "device_index", lambda device=None: 0)
    set_(device, "gpu_at", lambda index: device.Gpu((9, 0), SMS, SHARED_BYTES, SHARED_BYTES + 1024))
    set_(unpromised, "current_device", lambda: 0)
    set_(unpromised, "current_stream", lambda index: gpu.stream)
    set_(launch, "make_primary_context_current", lambda index: None)
    set_(torch.cuda, "device", lambda index: contextlib.nullcontext())
    set_(cuda_plan, "supported", lambda device: None)
    set_(tuned, "choice", lambda *_: None)
    set_(calls, "plan_for", _plan_for)
    set_(kinds, "follows_setting", lambda dtype, _: dtype == torch.float32)
    set_(
        calls, "product_precision", lambda dtype, _, *size: product_precision(dtype, "cuda", *size)
    )
    memo.clear()
    yield gpu
    memo.clear()


@pytest.fixture
def streams(gpu: ImaginaryGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prepacking asks PyTorch for."""
    done = lambda *_: None  # noqa: E731
    event = SimpleNamespace(record=done, wait=done, synchronize=done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """What our pass makes of AOTAutograd's graphs, which run as they are: Inductor's own kernels
    take seconds each to compile."""
    made: list[fx.Graph] = []

    def inner(gm: fx.GraphModule, *_: Any, **__: Any) -> fx.GraphModule:
        AfterAutograd()(gm.graph)
        gm.graph.lint()
        gm.recompile()
        made.append(gm.graph)
        return gm

    whole = partial(compile_fx.compile_fx, inner_compile=inner)
    monkeypatch.setattr(compile_fx, "compile_fx", whole)
    return made
