"""An experiment (docs/hopper.md): fp32 at `high` without a pass that makes a plane of W.

    PYTHONPATH=src python3 benchmarks/experiments/w_from_registers.py

On a Hopper GPU: the kernel beside this file, with and without what a range guard would have to look
at, checked against float64 and timed beside the library's split of W followed by its product, and
PyTorch's TF32. Prints a line each and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from epinorm.cuda.device import sm_count
from epinorm.cuda.hopper import ARCH, Tile, product_shared_bytes, product_source
from epinorm.cuda.hopper_plan import persistent_blocks
from epinorm.cuda.hopper_product import SIGNATURE as PRODUCT_SIGNATURE
from epinorm.cuda.hopper_product import THREADS
from epinorm.cuda.jit import KernelSource, load
from epinorm.cuda.launch import tensor_map
from epinorm.cuda.planes import splitter
from epinorm.cuda.source import KERNEL_FOLDER, kernel_text
from epinorm.timing import Runner, Settings, time_interleaved

M, N, K = 1024, 8192, 8192
SIGNATURE = "mm" + "pp" + "iii" + "f"
BLOCK_N, BLOCK_M = 128, 256
SHARED_BYTES = 3 * BLOCK_N * 256 + 4 * BLOCK_M * 128 + 16 * 7
FACTOR = 2.0**-30
ALLOWED = 1e-4
BOUNDED = "#define EPINORM_BOUNDED_WAITS 20000000\n"


def main() -> int:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    w = torch.empty(N, K, device=device).uniform_(-(K**-0.5), K**-0.5)
    x = torch.rand(M, K, device=device)
    scale, x_scale = scale_of(w), scale_of(x)
    w_plane, x_plane = (w * scale[:, None]).half(), (x * x_scale[:, None]).half()
    right = w_plane.double() @ x_plane.double().t() * FACTOR
    for bounded in (True, False):  # a first run that ends, whatever is wrong
        ours = {
            f"W from registers{', looked at' * checked}": mixed(w, x_plane, scale, checked, bounded)
            for checked in (False, True)
        }
        for name, run in ours.items():
            error = ((run().double() - right).norm() / right.norm()).item()
            print(f"{name}: error {error:.1e}", flush=True)
            if not error < ALLOWED:
                return 1
    split = splitter(1, K, N, 0, device)
    buffer = torch.empty(split.nbytes, dtype=torch.uint8, device=device)
    multiply = product(x_plane, split.planes_in(buffer).hi)

    def split_and_multiply() -> None:
        split(buffer.data_ptr(), w)
        multiply()

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    runs: dict[str, Callable[[], object]] = {
        **ours,
        "product of planes": multiply,
        "split of W, product": split_and_multiply,
        "PyTorch, TF32": lambda: torch.mm(x, w.t()),
    }
    times = time_interleaved({n: Runner(run) for n, run in runs.items()}, device, Settings())
    for name, us in times.items():
        print(f"{name:32} {us:6.1f} us")
    return 0


def scale_of(matrix: Tensor) -> Tensor:
    """The power of two that brings each row's largest magnitude into [2^14, 2^15)."""
    _, exponent = torch.frexp(matrix.abs().amax(1))
    return torch.ldexp(torch.ones_like(matrix[:, 0]), 15 - exponent)


def order_along_k() -> list[int]:
    """Which of 32 columns stands at each place: w_from_registers.cu says why."""
    order = [0] * 32
    for j in range(2):
        for q in range(4):
            for half in range(2):
                for i in range(2):
                    order[j * 16 + half * 8 + 2 * q + i] = (2 * q + j) * 4 + half * 2 + i
    return order


def wgmma_text() -> str:
    """wgmma m64n256k16 of fp16 with A from registers."""
    count = BLOCK_M // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void wgmma_a(float (&d)[{count}], const unsigned (&a)[4], "
        "unsigned long long b, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{BLOCK_M}k16.f32.f16.f16 "
        f'{{{d}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0; }}"\n'
        f'    : {outputs} : {inputs}, "l"(b), "r"(accumulate));\n}}\n'
    )


def mixed_source(checked: bool, bounded: bool = False) -> KernelSource:
    """The kernel's text; compiles without a GPU."""
    own = os.path.relpath(Path(__file__).with_suffix(".cu"), KERNEL_FOLDER)
    prelude = BOUNDED * bounded + f"constexpr bool kChecked = {str(checked).lower()};\n"
    return KernelSource("w_from_registers", kernel_text(own, prelude + wgmma_text()), ARCH)


def prepare(
    source: KernelSource, signature: str, tiles: int, dynamic: int, device: torch.device
) -> Callable[..., None]:
    """The launch of a kernel of persistent blocks."""
    blocks = persistent_blocks(tiles, sm_count(device))
    kernel = load(source, device, dynamic)
    return kernel.prepare(signature, blocks, THREADS, shared_bytes=dynamic, dependent=True)


def mixed(
    w: Tensor, x_plane: Tensor, scale: Tensor, checked: bool, bounded: bool
) -> Callable[[], Tensor]:
    device = w.device
    (n, k), m = w.shape, x_plane.shape[0]
    order = torch.tensor(order_along_k(), device=device)
    x = x_plane.view(m, k // 32, 32)[:, :, order].reshape(m, k).contiguous()
    tiles = n // BLOCK_N * -(-m // BLOCK_M)
    launch = prepare(mixed_source(checked, bounded), SIGNATURE, tiles, SHARED_BYTES, device)
    out = torch.empty(n, m, device=device)
    maps = tensor_map(w, BLOCK_N, 32).data, tensor_map(x, BLOCK_M, 64).data

    def run(_kept: object = (w, x)) -> Tensor:  # the maps hold their addresses
        launch(*maps, scale.data_ptr(), out.data_ptr(), n, m, k, FACTOR)
        return out

    return run


def product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """The library's plain product of one plane, a (m, k) times b (n, k)."""
    device, tile = a.device, Tile(128, 256, 4, ping_pong=False)
    (m, k), n = a.shape, b.shape[0]
    source = product_source(tile, 1, a.dtype, torch.float32, True, True, True)
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    launch = prepare(source, PRODUCT_SIGNATURE, tiles, product_shared_bytes(tile, 1), device)
    out, factors = torch.empty(m, n, device=device), torch.full((m,), FACTOR, device=device)
    a_map, b_map = (tensor_map(t, rows, 64).data for t, rows in ((a, 128), (b, 256)))

    def run() -> Tensor:
        launch(a_map, a_map, b_map, b_map, out.data_ptr(), factors.data_ptr(), m, n, k, 1)
        return out

    return run


if __name__ == "__main__":
    raise SystemExit(main())
