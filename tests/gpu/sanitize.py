"""Every kind of norm kernel and of the portable kernel once, small, for compute-sanitizer.

`make sanitize-gpu` runs this file; ARGS=norm or ARGS=portable leaves out the others.

PyTorch's caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): it hands out parts of
large blocks, in which an access beyond a tensor's end is still inside an allocation.
"""

import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import make_product

from conftest import CHAIN, make_case
from epinorm.cuda.hopper_product import ProductShape
from epinorm.cuda.portable_product import prepare_product

HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"

# Channels in a group, groups, rows, dtype, chain, padding of the rows.
CASES = (
    (16, 8, 33, torch.float32, CHAIN, 0),
    (16, 8, 33, torch.bfloat16, CHAIN, 0),
    (33, 3, 5, torch.float16, CHAIN, 0),
    (24, 5, 37, torch.float32, HEAVY, 3),
    (16, 4, 17, torch.float64, HEAVY, 0),
    (1000, 1, 7, torch.bfloat16, "layer_norm|gelu", 8),
    (4096, 2, 3, torch.float32, CHAIN, 0),
    (20000, 1, 3, torch.float32, "rms_norm|relu", 0),
    (65544, 1, 2, torch.bfloat16, CHAIN, 0),
)


# Rows, K, channels in a group, groups, kind, training. Rows of x on 16, 4 and 2 bytes; groups in a
# warp, shared by warps, and wider than a warp's registers; rows of y that do not fill 16 bytes.
PORTABLE = (
    (130, 136, 16, 17, "bfloat16", True),
    (37, 66, 16, 5, "bfloat16", False),
    (37, 33, 2, 5, "float16", True),
    (20, 40, 256, 2, "bfloat16", False),
    (20, 40, 136, 2, "highest", True),
    (130, 70, 16, 17, "highest", True),
    (65, 33, 40, 3, "high", False),
)


def norm_kernels() -> None:
    for channels, groups, m, dtype, chain, extra in CASES:
        case = make_case(channels, groups, m, dtype, chain, extra=extra)
        kept = case.forward()
        gradients = case.backward(kept)
        torch.cuda.synchronize()
        results = [kept.y, *gradients.values()]
        assert all(bool(t.isfinite().all()) for t in results), (channels, dtype, chain)
        print(f"{channels} channels, {groups} groups, {m} rows, {dtype}: done", flush=True)


def portable_kernels() -> None:
    for m, k, channels, groups, kind, training in PORTABLE:
        case = make_product(m, k, channels, groups, kind, training=training)
        found = dataclasses.replace(case, core="portable").run()
        torch.cuda.synchronize()
        assert all(bool(t.isfinite().all()) for t in found), (m, k, channels, kind)
        print(f"{m} x {k}, {channels} channels, {kind}: done", flush=True)
    dz, weight, x = (torch.randn(s, device="cuda") for s in ((65, 136), (136, 72), (65, 72)))
    for major_k_a, b in ((True, weight), (False, x)):
        a, b = dz.half(), b.half()
        rows, length = a.shape if major_k_a else a.shape[::-1]
        shape = ProductShape(rows, 72, length, 1, 4)
        multiply = prepare_product(shape, a.dtype, torch.float32, False, major_k_a, a.device)
        assert bool(multiply(0, lambda a=a, b=b: (a, a, b, b), 0).isfinite().all())
        print(f"product, a {tuple(a.shape)}: done", flush=True)


KERNELS = {"norm": norm_kernels, "portable": portable_kernels}

if __name__ == "__main__":
    for name in sys.argv[1:] or KERNELS:
        KERNELS[name]()
