"""split_gradient.cu's planes, emulated: nothing but a line's largest magnitude flags it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from test_norm_planes import exponent, split

EMPTY = 24  # kEmptyRowShift


def product(
    dz: Tensor, other: Tensor, planes: int, zeros_count: bool = False
) -> tuple[Tensor, Tensor]:
    """dz @ other with a scale of each row of dz, as the planes have it; and which rows are flagged.
    zeros_count: rows of zeros in ``other`` take part in the scales."""
    of_other = split(other, other, planes)
    counts = ((of_other.shift != EMPTY) | zeros_count).float()
    u = dz * torch.exp2(-of_other.shift).float() * counts
    largest = u.abs().amax(1)
    in_range = (exponent(largest).abs() <= 60) & largest.isfinite()
    flags = torch.where(largest == 0, ((dz != 0) & (counts != 0)).any(1), ~in_range)
    shift = torch.where(in_range & (largest != 0), 14 - exponent(largest), 0.0)[:, None]
    v = (u.double() * torch.exp2(shift)).float()
    hi = v.half().float()
    lo = ((v - hi) * 2048).half().double() if planes == 2 else torch.zeros_like(v).double()
    hi, other_hi, other_lo = hi.double(), of_other.hi, of_other.lo
    total = hi @ other_hi + (lo @ other_hi + hi @ other_lo) / 2048
    return total * torch.exp2(-shift), flags


def case(name: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    dz, other = torch.randn(64, 200), torch.rand(200, 48) + 0.5
    if name == "faint elements":  # where nothing comes through what follows, or next to nothing
        dz[:, ::3] *= torch.exp2(-60 * torch.rand(64, 67))
    elif name == "one alone":
        dz[:, 1:] *= 2.0**-30
    elif name == "largest beside zeros":
        other[7] = 0
        dz[:, 7] = 2.0**50
    elif name == "of all sizes":
        dz *= torch.exp2(torch.randint(-20, 20, (64, 1)))
        other *= torch.exp2(torch.randint(-20, 20, (200, 1)))
    return dz, other


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(
    "name", ["plain", "faint elements", "one alone", "largest beside zeros", "of all sizes"]
)
def test_what_planes_do_not_hold_is_less_than_they_round(name: str, planes: int) -> None:
    dz, other = case(name)
    found, flags = product(dz, other, planes)
    assert not flags.any()
    error = (found - dz.double() @ other.double()).norm(dim=1)
    terms = dz.double().abs() @ other.double().norm(dim=1)
    assert (error <= terms * (2.0**-11 if planes == 1 else 2.0**-22)).all()


def test_zeros_must_take_no_part_in_scales() -> None:
    dz, other = case("largest beside zeros")
    truth = dz.double() @ other.double()
    for zeros_count in (False, True):
        found, _ = product(dz, other, 1, zeros_count)
        lost = ((found - truth).norm(dim=1) > 0.1 * truth.norm(dim=1)).all()
        assert lost == zeros_count


def test_a_row_that_is_all_lost_is_flagged() -> None:
    dz, other = case("plain")
    dz[3] *= 2.0**-148
    dz[5] = 0
    dz[9, 2] = torch.inf
    dz[11, 2] = torch.nan
    _, flags = product(dz, other, 2)
    assert flags.nonzero().squeeze(1).tolist() == [3, 9, 11]
