"""A backward pass as a compiled graph holds it, begun and ended, has the bits of the whole one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.runtime.native import native
from epinorm.chain import Chain
from epinorm.operator import schema

pytestmark = pytest.mark.gpu

M, K, N = 2048, 1024, 512
FACTS = ("auto", False, None)


def step(chain: str, values: Any, turned: bool) -> tuple[Any, ...]:
    """What a backward pass is given."""
    has_norm = Chain.parse(chain).norm is not None
    sizes = ((M, K), (N, K), (N,), *([(N,)] * 2 if has_norm else []))
    x, weight, *vectors = (values(*size) for size in sizes)
    weight = weight.t().contiguous().t() if turned else weight
    tensors = (x, weight, *vectors, *[None] * (3 - len(vectors)), [])
    y, *kept = schema.linear_norm_forward(*tensors, chain, *FACTS)
    kept[0] = y if Chain.parse(chain).saves_y else kept[0]
    wanted = [t is not None for t in tensors[:5]]
    return values(M, N), *tensors, *kept, chain, *FACTS, wanted


def ordinary(*size: int) -> Tensor:
    return torch.randn(size, device="cuda")


def with_outliers(*size: int) -> Tensor:
    """Values that planes do not hold, which the range guard computes again."""
    made = torch.randn(size, device="cuda")
    made.flatten()[:: 7 * size[-1] + 1] *= 1e-30
    return made


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("values", [ordinary, with_outliers])
@pytest.mark.parametrize("chain", ["relu", "gelu", "layer_norm(1e-05)|relu"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_bits(precision: str, chain: str, values: Any, turned: bool) -> None:
    native(wait=True)
    torch.set_float32_matmul_precision(precision)
    waiting = []
    for i in range(8):  # run, recorded, repeated; some wait for others to be begun
        given = step(chain, values, turned)
        *found, token = schema.linear_norm_backward_begin(*given)
        waiting.append((given, token, found, schema.linear_norm_backward(*given)))
        if i % 3 == 2 or i == 7:
            for given, token, found, expected in reversed(waiting):
                dx = schema.linear_norm_backward_end(token, given[2], M, K)
                assert all(map(torch.equal, (dx, *found), expected))
            waiting.clear()
