"""Kernels loaded and launched on a GPU: arguments, streams, graphs, threads, clusters, TMA."""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epinorm.backends.cuda.runtime import device
from epinorm.backends.cuda.runtime.driver import driver
from epinorm.backends.cuda.runtime.jit import KernelSource, load
from epinorm.backends.cuda.runtime.launch import Kernel
from epinorm.backends.cuda.runtime.tensor_map import tensor_map

pytestmark = pytest.mark.gpu

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor;
}
"""


def kernel_of(entry: str, text: str, index: int = 0) -> Kernel:
    return load(KernelSource(entry, text, device.arch_of(index)), index)


def launch(
    kernel: Kernel, signature: str, grid: int, block: int, *values: object, **options: Any
) -> None:
    """Once, with tensors and tensor maps as what they are addressed by."""
    bare = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]
    stream = options.pop("stream", None)
    kernel.prepare(signature, grid, block, **options)(*bare, stream=stream)


def scale(x: torch.Tensor, y: torch.Tensor, factor: float, **options: object) -> None:
    """y = factor x by the kernel above."""
    n = x.numel()
    kernel = kernel_of("scale", SCALE, x.device.index)
    launch(kernel, "ppif", -(-n // 128), 128, x, y, n, factor, **options)


def blank_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


@pytest.fixture
def hopper() -> None:
    if device.capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def test_facts_about_the_gpu() -> None:
    properties = torch.cuda.get_device_properties(0)
    assert device.supported("cuda") is None
    assert device.supported(0) is None
    assert device.arch_of().startswith(f"sm_{properties.major}{properties.minor}")
    assert device.sm_count("cuda:0") == properties.multi_processor_count
    assert 48 * 1024 < device.max_shared_bytes() <= 256 * 1024


def test_arguments_of_every_type_arrive() -> None:
    text = """
    extern "C" __global__ void all(const float* x, const void* null, int i, long long l,
                                   char* bytes, unsigned u, unsigned long long v, float f,
                                   double d, double* y) {
        y[0] = x[1]; y[1] = null == nullptr; y[2] = i; y[3] = l; y[4] = u; y[5] = v; y[6] = f;
        y[7] = d; bytes[0] = 7;
    }"""
    x = torch.tensor([1.0, 2.5], device="cuda")
    data = torch.zeros(1, dtype=torch.int8, device="cuda")
    y = torch.full((8,), float("nan"), dtype=torch.float64, device="cuda")
    expected = [2.5, 1, -5, -(2**40), 2**32 - 1, 2**60, 0.15625, 1 / 3]
    numbers = (-5, -(2**40), 2**32 - 1, 2**60, 0.15625, 1 / 3)
    prepared = kernel_of("all", text).prepare("ppilpuvfdp", (1, 1, 1), (1, 1))
    prepared(x.data_ptr(), 0, *numbers[:2], data.data_ptr(), *numbers[2:], y.data_ptr())
    assert y.tolist() == expected
    assert data.item() == 7


def test_wrong_arguments_are_refused_before_the_launch() -> None:
    x = torch.ones(4, device="cuda")
    kernel = kernel_of("scale", SCALE)
    with pytest.raises(ValueError, match="scale: arguments do not fit their types"):
        launch(kernel, "ppif", 1, 1, x, x, 2**31, 1)
    with pytest.raises(ValueError, match="letters out of"):
        kernel.prepare("pp?f", 1, 1)(0, 0, 0, 0)
    if driver().has_parameter_info:
        with pytest.raises(TypeError, match=r"scale takes arguments of \[8, 8, 4, 4\] bytes"):
            launch(kernel, "pplf", 1, 1, x, x, 4, 1)
        with pytest.raises(TypeError, match=r"scale takes arguments of \[8, 8, 4, 4\] bytes"):
            launch(kernel, "ppi", 1, 1, x, x, 4)
    too_much = device.max_shared_bytes() + 1
    with pytest.raises(RuntimeError, match=f"allowing scale {too_much} bytes of shared memory"):
        launch(kernel, "ppif", 1, 1, x, x, 4, 1, shared_bytes=too_much)
    with pytest.raises(RuntimeError, match=r"launching scale on cuda:0 failed.*block \(2048, 1, 1"):
        launch(kernel, "ppif", 1, 2048, x, x, 4, 1)
    y = blank_like(x)
    scale(x, y, 3.0)  # and the GPU is none the worse
    assert y.tolist() == [3.0] * 4


def test_launches_follow_the_current_stream() -> None:
    """On the wrong stream the kernel would read x long before it is filled."""
    x, y, z = (torch.full((1000,), float("nan"), device="cuda") for _ in range(3))
    scale(x, y, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        scale(x, y, 2.0)
    scale(x, z, 4.0, stream=stream)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 6.0))
    assert torch.equal(z, torch.full_like(z, 12.0))
    scale(x, z, 5.0, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(z, torch.full_like(z, 15.0))


def test_a_launch_is_captured_in_a_graph() -> None:
    x = torch.randn(1000, device="cuda")
    y, z = blank_like(x), blank_like(x)
    scale(x, y, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(x, y, 2.0)
        scale(y, z, 8.0)
    for _ in range(2):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(z, x * 16)


def test_a_kernel_that_is_not_loaded_is_not_loaded_inside_a_capture() -> None:
    x = torch.randn(1000, device="cuda")
    y = blank_like(x)
    torch.mul(x, 3, out=y)
    y.fill_(float("nan"))
    text = SCALE.replace("scale", "cold") + f"// {time.time_ns()}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(x, 3, out=y)
        with pytest.raises(RuntimeError, match=r"cold is not loaded yet .* make one call"):
            kernel_of("cold", text)
    graph.replay()  # the capture went on undisturbed
    assert torch.equal(y, x * 3)
    # Loaded but never launched: nothing is left for the driver to do inside the capture.
    kernel = kernel_of("cold", text)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(kernel, "ppif", 8, 128, x, y, 1000, 5.0)
    graph.replay()
    assert torch.equal(y, x * 5)


def test_torch_compile_runs_it() -> None:
    @torch.library.custom_op("epinorm_test_machinery::scale", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        y = blank_like(x)
        scale(x, y, factor)
        return y

    @scaled.register_fake
    def fake(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.empty_like(x)

    def chain(x: torch.Tensor) -> torch.Tensor:
        return scaled(scaled(x + 1, 2.0) * 3, 0.5)

    x = torch.randn(500, device="cuda")
    expected = chain(x)
    for backend in ("aot_eager", "cudagraphs"):
        compiled = torch.compile(chain, fullgraph=True, backend=backend)
        for _ in range(3):
            assert torch.equal(compiled(x), expected)


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_launch_the_same_kernel() -> None:
    """Eight threads, each on a stream of its own, none of which used CUDA before."""
    n, rounds = 256, 300
    inputs = [torch.full((n,), float(i + 1), device="cuda") for i in range(8)]
    outputs = [torch.full((rounds, n), float("nan"), device="cuda") for _ in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    prepared = kernel_of("scale", SCALE).prepare("ppif", 2, 128)
    torch.cuda.synchronize()
    errors: list[Exception] = []
    start = threading.Barrier(len(inputs))

    def work(i: int) -> None:
        try:
            start.wait()
            for r in range(rounds):
                addresses = inputs[i].data_ptr(), outputs[i][r].data_ptr()
                prepared(*addresses, n, r, stream=streams[i].cuda_stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    run(threads)
    torch.cuda.synchronize()
    assert errors == []
    factors = torch.arange(rounds, device="cuda", dtype=torch.float32)[:, None]
    for i, output in enumerate(outputs):
        assert torch.equal(output, (factors * (i + 1)).expand(rounds, n))


def test_threads_load_the_same_kernel() -> None:
    text = SCALE.replace("scale", "together") + f"// {time.time_ns()}"
    kernels: list[Kernel] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        kernels.append(kernel_of("together", text))

    threads = [threading.Thread(target=work) for _ in range(8)]
    run(threads)
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == 1


def test_a_new_thread_launches_on_the_default_stream() -> None:
    x = torch.randn(1000, device="cuda")
    y = blank_like(x)
    scale(x, y, 1.0)
    thread = threading.Thread(target=scale, args=(x, y, 7.0))
    thread.start()
    thread.join()
    assert torch.equal(y, x * 7)


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_its_own_kernel() -> None:
    for index in (1, 0, 1):
        x = torch.randn(1000, device=f"cuda:{index}")
        y = blank_like(x)
        scale(x, y, 2.0)
        assert torch.equal(y, x * 2)
        assert torch.cuda.current_device() == 0


SHARED = """
extern "C" __global__ void reversed(const int* x, int* y, int n) {
    extern __shared__ int values[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = values[n - 1 - i];
}
"""


def test_all_of_the_shared_memory_can_be_had() -> None:
    kernel = kernel_of("reversed", SHARED)
    for size in (40_000, device.max_shared_bytes(), 60_000):
        n = size // 4
        x = torch.arange(n, dtype=torch.int32, device="cuda")
        y = torch.full_like(x, -1)
        launch(kernel, "ppi", 1, 256, x, y, n, shared_bytes=size)
        assert torch.equal(y, x.flip(0))
    assert kernel.blocks_per_sm(256, device.max_shared_bytes()) == 1
    assert kernel.blocks_per_sm(256) >= 4


CLUSTER = """
extern "C" __global__ void ranks(int* y) {
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    y[2 * blockIdx.x] = rank;
    y[2 * blockIdx.x + 1] = size;
}
"""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_blocks_come_in_clusters(size: int) -> None:
    y = torch.full((16, 2), -1, dtype=torch.int32, device="cuda")
    kernel = kernel_of("ranks", CLUSTER)
    launch(kernel, "p", 16, 32, y, cluster=size)
    assert y.tolist() == [[block % size, size] for block in range(16)]
    # Of blocks that fill a multiprocessor.
    at_once = kernel.clusters_at_once(size, 32, device.max_shared_bytes())
    assert 1 <= at_once <= device.sm_count() // size
    assert size > 1 or at_once == device.sm_count()


DEPENDENT = """
__device__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void first(long long* times, int* value) {
    asm volatile("griddepcontrol.launch_dependents;");
    unsigned long long end = now() + 300000;
    while (now() < end) {}
    *value = 42;
    times[0] = now();
}
extern "C" __global__ void second(long long* times, const int* value, int* result) {
    times[1] = now();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    *result = *(volatile const int*)value;
}
"""


@pytest.mark.alone
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dependent", [False, True])
def test_a_dependent_launch_starts_before_the_one_ahead_has_ended(dependent: bool) -> None:
    first, second = (kernel_of(entry, DEPENDENT) for entry in ("first", "second"))
    for _ in range(3):
        times = torch.zeros(2, dtype=torch.int64, device="cuda")
        value, result = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        launch(first, "pp", 1, 1, times, value)
        launch(second, "ppp", 1, 1, times, value, result, dependent=dependent)
        end_of_first, start_of_second = times.tolist()
        assert result.item() == 42
        assert (start_of_second < end_of_first) == dependent


CHILD = f"""
import time, torch
x = torch.ones(1000, device="cuda"); y = torch.full_like(x, float("nan")); torch.cuda.synchronize()
from epinorm.backends import cache
from epinorm.backends.cuda.runtime import device, jit
started = time.perf_counter()
compiled, real = [], jit.compile_cubin
jit.compile_cubin = lambda source: compiled.append(source) or real(source)
kernel = jit.load(jit.KernelSource("scale", {SCALE!r}, device.arch_of(0)), 0)
kernel.prepare("ppif", 8, 128)(x.data_ptr(), y.data_ptr(), 1000, 2.0)
seconds = time.perf_counter() - started
assert y.eq(2).all().item()
print("compiled" if compiled else "cached", seconds)
"""


@pytest.mark.alone
def test_processes_race_on_an_empty_cache_and_the_next_one_starts_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {
        **os.environ,
        "EPINORM_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "error:epinorm", "-c", CHILD],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    racing = [start() for _ in range(3)]
    first = [child.communicate(timeout=100)[0].split() for child in racing]
    assert [child.returncode for child in racing] == [0, 0, 0]
    assert ["compiled"] in [words[:1] for words in first]
    assert len(list((tmp_path / "cache" / "cubins").iterdir())) == 1
    later = [start().communicate(timeout=100)[0].split() for _ in range(5)]
    with capsys.disabled():
        print(f"\nfirst processes: {first}; the next: {later}")
    assert {how for how, _ in later} == {"cached"}
    # The quickest: a busy machine makes every one of them wait for others.
    assert min(float(seconds) for _, seconds in later) < 0.05


def microseconds_a_call(call: Callable[[], object]) -> float:
    """Median time that a call takes the host; few enough in a row that the queue never fills."""
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(100):
            call()
        times.append((time.perf_counter() - started) * 1e4)
    return statistics.median(times)


TEN = """
struct __align__(64) CUtensorMap { unsigned long long words[16]; };
extern "C" __global__ void ten(float* a, float* b, float* c, float* d, float* e, float* f, float* g,
                               int i, int j, float k) {}
extern "C" __global__ void mapped(const __grid_constant__ CUtensorMap p,
    const __grid_constant__ CUtensorMap q, const __grid_constant__ CUtensorMap r,
    const __grid_constant__ CUtensorMap s, float* e, float* f, float* g, int i, int j, float k) {}
"""


@pytest.mark.alone
def test_a_launch_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(1024, 1024, device="cuda")
    kernel, mapped = kernel_of("ten", TEN), kernel_of("mapped", TEN)
    prepared = kernel.prepare("pppppppiif", 4, 128)

    def addresses() -> None:
        p = x.data_ptr()
        prepared(p, p, p, p, p, p, p, 5, 7, 1.0)

    found: dict[str, Callable[[], object]] = {
        "ten arguments, prepared": addresses,
        "torch.add(x, x, out=x)": lambda: torch.add(x, x, out=x),
    }
    if device.capability() >= (9, 0):
        maps, p = [tensor_map(x, 32, 32)] * 4, x.data_ptr()
        of_maps = mapped.prepare("mmmmpppiif", 4, 128)
        found["four maps, prepared"] = lambda: of_maps(*maps, p, p, p, 5, 7, 1.0)
        found["tensor_map, kept"] = lambda: tensor_map(x, 32, 32)
    measured = {name: microseconds_a_call(call) for name, call in found.items()}
    with capsys.disabled():
        print()
        for name, cost in measured.items():
            print(f"{name}: {cost:.2f} us")
    # About what PyTorch's own launch of a kernel costs, on whatever machine this is.
    assert measured["ten arguments, prepared"] < 1.25 * measured["torch.add(x, x, out=x)"]


# One thread copies one box in by TMA, as the kernels do; all write it to `seen` as it lies. These
# tests are the last: a fault of TMA ends the process' context, and every test after it would fail.
COPY = """
struct __align__(64) CUtensorMap { unsigned long long words[16]; };
extern "C" __global__ void copy(const __grid_constant__ CUtensorMap from, unsigned char* seen,
                                int column, int row, int bytes) {
    extern __shared__ __align__(1024) unsigned char box[];
    __shared__ __align__(8) unsigned long long barrier;
    unsigned at = __cvta_generic_to_shared(box), bar = __cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(bar), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                     :: "r"(at), "l"(&from), "r"(bar), "r"(column), "r"(row) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
                     " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar) : "memory");
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) seen[i] = box[i];
}
"""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensor_maps_address_a_matrix(dtype: torch.dtype, swizzle: int) -> None:
    """A box that hangs over the edge: zeros in shared memory.

    Shared memory is in the order that PTX ISA gives for the swizzle: of a byte's offset, the bits
    above 4 are xor-ed with as many bits above 7. (Copies back to global memory, which no kernel
    here makes, write whole 16 bytes at a row's end.)
    """
    size = dtype.itemsize
    box_rows, box_cols = 64, (swizzle or 128) // size
    rows, cols, stride = 100, 200 // size * 4 + 2, 1024 // size
    kernel = kernel_of("copy", COPY)
    x = torch.randn(rows, stride, device="cuda").to(dtype)[:, :cols]
    step = 16 // size  # TMA needs the box to start on 16 bytes; the matrix may end anywhere
    column, row = (cols - box_cols // 2) // step * step, rows - 40
    seen = torch.full((box_rows, box_cols), float("nan"), device="cuda").to(dtype)
    from_map = tensor_map(x, box_rows, box_cols, swizzle)
    assert tensor_map(x, box_rows, box_cols, swizzle) is from_map
    bytes_ = box_rows * box_cols * size
    launch(kernel, "mpiii", 1, 128, from_map, seen, column, row, bytes_, shared_bytes=bytes_)
    copied = x[row:, column:]
    expected = torch.zeros_like(seen)
    expected[: copied.shape[0], : copied.shape[1]] = copied
    offset = torch.arange(bytes_, device="cuda")
    swizzled = offset ^ (offset >> 3 & swizzle - 16) if swizzle else offset
    in_order = seen.view(torch.uint8).flatten()[swizzled]
    assert torch.equal(in_order, expected.view(torch.uint8).flatten())


@pytest.mark.usefixtures("hopper")
def test_what_tma_cannot_address_is_refused() -> None:
    x = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    with pytest.raises(TypeError, match=r"but got torch\.int64"):
        tensor_map(x.long(), 64, 16)
    with pytest.raises(ValueError, match=r"a matrix with elements, but got shape \(0, 64\)"):
        tensor_map(x[:0], 64, 64)
    with pytest.raises(ValueError, match="contiguous columns, but got strides"):
        tensor_map(x.t(), 64, 64)
    with pytest.raises(ValueError, match="they are 14 bytes apart"):
        tensor_map(x.flatten()[:70].view(10, 7), 8, 8)
    with pytest.raises(ValueError, match="16-byte boundary"):
        tensor_map(x[:, 1:], 64, 64)
    with pytest.raises(ValueError, match="1 to 256 rows and columns, but got 257 x 64"):
        tensor_map(x, 257, 64)
    with pytest.raises(ValueError, match="row of 256 bytes does not fit swizzle 128"):
        tensor_map(x, 64, 128)
    with pytest.raises(ValueError, match="swizzle must be one of"):
        tensor_map(x, 64, 64, swizzle=16)
