"""The same bits from any number of threads and from every run."""

from __future__ import annotations

import itertools

import pytest
import torch

pytestmark = pytest.mark.usefixtures("needs_kernels")

CHAIN = "mul_channel|group_norm(8)|silu|add_residual"
SHAPES = {
    "blocks of whole rows": (5003, 40, 64),
    "one block": (9, 40, 64),
    "a packed weight": (300, 520, 256),
    "tiles of the product": (130, 512, 256),
    "tiles of both gradients": (1027, 700, 640),
    "two rows and a long product": (2, 3000, 1024),
}


def bits(results):
    return [None if t is None else t.view(torch.uint8).clone() for t in results]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_number_of_threads(shape, dtype, make_case):
    case = make_case(CHAIN, *SHAPES[shape], dtype)
    runs = []
    for threads in (1, 3, 7):
        torch.set_num_threads(threads)
        runs.append(bits(case.run()))
    for first, other in itertools.pairwise(runs):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_second_run_in_dirty_memory(make_case):
    """Every element is written: what freed memory held does not show."""
    case = make_case(CHAIN, 4500, 48, 64)
    first = bits(case.run())
    for result in first:
        torch.full((result.numel() // 4,), float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(first, bits(case.run()), strict=True))


@pytest.mark.slow
def test_kernels_do_not_share_constants(make_case):
    """Each chain's library has the same names in it; one must not read another's."""
    channel = make_case("mul_channel|group_norm(4)|mul_channel", 40, 16, 32)
    element = make_case("add_residual|group_norm(4)|add_residual", 40, 16, 32)
    before = bits(element.run())
    channel.run()
    assert all(torch.equal(a, b) for a, b in zip(before, bits(element.run()), strict=True))
    for case in (channel, element):
        for ours, theirs in zip(case.run(), case.eager(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
