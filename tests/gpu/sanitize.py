"""Every kind of norm kernel once, small, for compute-sanitizer: `make sanitize-gpu` runs this file.

PyTorch's caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): it hands out parts of
large blocks, in which an access beyond a tensor's end is still inside an allocation.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from conftest import CHAIN, make_case

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


def main() -> None:
    for channels, groups, m, dtype, chain, extra in CASES:
        case = make_case(channels, groups, m, dtype, chain, extra=extra)
        kept = case.forward()
        gradients = case.backward(kept)
        torch.cuda.synchronize()
        results = [kept.y, *gradients.values()]
        assert all(bool(t.isfinite().all()) for t in results), (channels, dtype, chain)
        print(f"{channels} channels, {groups} groups, {m} rows, {dtype}: done", flush=True)


if __name__ == "__main__":
    main()
