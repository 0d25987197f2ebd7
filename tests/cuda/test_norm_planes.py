"""dz written once as planes: what the kernels do to numbers, emulated, and that they compile."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from test_norm_kernels_compile import EASY, HEAVY, problem_of

from epinorm.backends.cuda.fp32.norm_planes import (
    faint_rows,
    planes_source,
    rescale_source,
    rows_plan,
)
from epinorm.backends.cuda.norm.backward_text import backward_plan, backward_source
from epinorm.backends.cuda.plan.norm_backward import Outputs
from epinorm.backends.cuda.plan.norm_planes import FEWEST_STAGES, MOST_STRIPS, worthwhile
from epinorm.backends.cuda.plan.norm_tile import vector_width
from epinorm.backends.cuda.runtime.jit import compiled
from epinorm.chain import Chain
from epinorm.problem import Problem, Wanted

pytestmark = pytest.mark.usefixtures("kept_figures")

ARCH = "sm_90a"
KB62_THREADS = 768
"""Of a multiprocessor: its 65536 registers, 85 each."""


def problem(channels: int, n: int, chain: str = EASY, m: int = 1024, k: int = 8192) -> Problem:
    same = problem_of(channels, torch.float32, chain)
    parsed = Chain.parse(chain.format(groups=n // channels))
    return dataclasses.replace(same, m=m, k=k, n=n, chain=parsed, precision="high")


def outputs_of(p: Problem, everything: bool = True) -> Outputs:
    operands = tuple(everything for _ in p.chain.operand_kinds)
    return Outputs.of(p, Wanted(True, True, *(everything,) * 3, operands), True, True)


@pytest.mark.parametrize("planes", [1, 2])
def test_kb62_has_its_registers_and_bytes_in_flight(planes: int) -> None:
    p = problem(16, 8192)
    plan = rows_plan(p, 4, outputs_of(p), planes, ARCH)
    assert plan is not None
    tile = plan.tile
    assert tile.resident * tile.threads == KB62_THREADS
    result = compiled(planes_source(p, plan, outputs_of(p), planes, ARCH))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0)
    assert result.registers <= 80
    assert result.shared_bytes <= 48 * 1024
    # A stage is worked on, the others are on their way: z and dy of each thread's values.
    assert (plan.stages - 1) * KB62_THREADS * 2 * 4 * tile.values >= 32 * 1024


@pytest.mark.parametrize(("planes", "everything"), [(1, False), (2, True)])
@pytest.mark.parametrize(
    ("channels", "n", "chain"),
    [
        (1, 1024, EASY),
        (4, 4096, EASY),
        (6, 1536, EASY),
        (16, 1024, EASY),
        (16, 2048, "group_norm({groups})|add_residual|relu"),
        (24, 3072, EASY),
        (64, 4096, EASY),
        (512, 4096, EASY),
        (2048, 2048, "rms_norm|silu"),
    ],
)
def test_variants_compile_without_spills(
    channels: int, n: int, chain: str, planes: int, everything: bool
) -> None:
    p = problem(channels, n, chain)
    outputs = outputs_of(p, everything)
    plan = rows_plan(p, vector_width(channels, 4, ()), outputs, planes, ARCH)
    assert plan is not None
    assert plan.stages >= FEWEST_STAGES
    assert plan.strips <= MOST_STRIPS
    across = plan.strips * plan.tile.groups_per_block
    assert across >= p.groups > across - plan.strips * plan.tile.groups_per_block
    result = compiled(planes_source(p, plan, outputs, planes, ARCH))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0)


def test_what_no_cluster_holds_has_no_plan() -> None:
    wide = problem(16, 65536)
    assert rows_plan(wide, 4, outputs_of(wide), 1, ARCH) is None
    wide = problem(16384, 16384, "layer_norm|gelu")
    assert rows_plan(wide, 4, outputs_of(wide), 1, ARCH) is None


def test_a_long_chain_has_its_registers() -> None:
    long = problem(16, 8192, HEAVY)
    plan = rows_plan(long, 4, outputs_of(long), 1, ARCH)
    assert plan is not None
    assert plan.tile.resident < KB62_THREADS // plan.tile.threads


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("beside_dx", [False, True])
def test_the_kernel_between_compiles_without_spills(planes: int, beside_dx: bool) -> None:
    assert compiled(rescale_source(planes, 3, beside_dx, ARCH)).spill_bytes == 0


def test_dz_alone_if_it_is_wanted_compiles() -> None:
    p = problem(16, 8192)
    only = Wanted(True, False, False, False, False, ())
    outputs = Outputs.of(p, only, if_wanted=True)
    plan = backward_plan(p, 4, outputs, ARCH)
    assert compiled(backward_source(p, plan, outputs, ARCH)).spill_bytes == 0


def test_where_it_pays() -> None:
    assert worthwhile(problem(16, 8192), 1)
    assert worthwhile(problem(16, 8192), 2)
    assert worthwhile(problem(16, 1024, m=16384, k=1024), 1)
    assert not worthwhile(problem(16, 1024, m=64, k=1024), 1)  # two launches cost more
    assert not worthwhile(problem(16, 8192, k=1024), 1)  # memory
    assert worthwhile(problem(16, 8192, k=1024), 2)


# The numbers, as the kernels compute them.


class Split(NamedTuple):
    """hi and lo as float64, in the scale 2^-shift of each row; where a row counts; and elements of
    rows out of range."""

    hi: Tensor
    lo: Tensor
    shift: Tensor
    out: Tensor


def exponent(value: Tensor) -> Tensor:
    return torch.frexp(value.double()).exponent.double() - 1


def split(value: Tensor, given: Tensor, planes: int, of_x: Tensor | None = None) -> Split:
    """PlaneValue of plane_value.cuh; given: what value was made from, nonzero if it is. of_x: x's
    shifts, for a dz whose rows take over row 0's power where they can."""
    largest = value.abs().amax(1)
    in_range = (exponent(largest).abs() <= 60) & largest.isfinite() & (largest != 0)
    shift = torch.where(in_range, 14 - exponent(largest), 0.0)
    if of_x is None:
        shift = torch.where(in_range, torch.where(shift == 24, 23.0, shift), 24.0)  # row_shift
    elif in_range[0] and of_x[0] != 24:
        wanted = of_x[0] + shift[0] - of_x
        more = (largest * torch.exp2(shift + 1) <= 65504).double()
        shift = torch.where(in_range, wanted.clamp(shift - 1, shift + more), shift)
    v = (value.double() * torch.exp2(shift)[:, None]).float()
    hi = v.half().float()
    rest = v - hi
    lo = (rest * 2048).half().float() if planes == 2 else torch.zeros_like(v)
    out = (given != 0) & ~in_range[:, None]
    if of_x is not None:
        shift = torch.where(in_range & (of_x != 24), shift, math.nan)
    return Split(hi.double(), lo.double(), shift, out)


class Emulated(NamedTuple):
    dw: Tensor
    flags: Tensor
    lost: Tensor
    """Norms of what the rescaled x no longer holds, summed as dW sums it."""
    terms: Tensor
    """Sum over i of the norms of dz[i, n] x[i], and the largest of them."""
    largest: Tensor


def emulated(dz: Tensor, x: Tensor, weight_scale: Tensor, planes: int) -> Emulated:
    """dW and the flags of its rows as norm_backward_planes.cu and rescale_planes.cu have them; a
    row of zeros has no shift."""
    (m, _), k = dz.shape, x.shape[1]
    of_x = split(x, x, planes)
    up = split(dz * weight_scale, dz, planes, of_x.shift)
    power = -up.shift - of_x.shift
    counts = ~power.isnan()
    top = power[counts].max()
    if planes == 2 and counts[0] and top <= power[0] + 1:  # PowerRange::target()
        top = power[0]
    factor = torch.where(counts, torch.exp2(power - top), 1.0)[:, None]
    v = (of_x.hi + of_x.lo / 2048) * factor
    hi = v.float().clamp(-65504, 65504).half().double()
    lo = ((v - hi) * 2048).float().half().double() if planes == 2 else torch.zeros_like(v)
    u_hi, u_lo = up.hi.t(), up.lo.t()
    total = u_hi @ hi + (u_lo @ hi + u_hi @ lo) / 2048
    u = (up.hi + up.lo / 2048).abs()
    dw = total * torch.exp2(top - exponent(weight_scale))[:, None]
    faint_power, faint_largest, tiny = faint_rows(m, k)
    counted = torch.where(counts[:, None], factor, 0.0)
    largest = (u * counted).amax(0)
    least = tiny
    if power[counts].min() < top + faint_power:
        least = max(tiny, faint_largest)
    flags = up.out.any(0) | (largest != 0) & (exponent(largest) < least)
    norms = v.norm(dim=1, keepdim=True)
    unscaled = torch.exp2(top - exponent(weight_scale))
    return Emulated(
        dw,
        flags,
        (u.t() @ (v - hi - lo / 2048).norm(dim=1, keepdim=True)).squeeze(1) * unscaled,
        (u * norms).sum(0) * unscaled,
        (u * norms).amax(0) * unscaled,
    )


def case(name: str, m: int = 96, k: int = 128, n: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dz, x = torch.randn(m, n), torch.rand(m, k) + 0.5
    scale = torch.exp2(torch.randint(-6, 3, (n,)).float() - 13)
    rows = torch.ones(m, 1)
    if name == "spread":
        rows = torch.exp2(-40 * torch.rand(m, 1))
    elif name == "outlier":
        rows[7] = 2.0**12
    elif name == "lonely":  # all others are faint
        rows[7] = 2.0**30
        dz[7] += dz[7].sign()  # nothing near zero by chance
        dz[7, ::2] *= 2.0**-20
    elif name == "one power up":  # and x up to the largest that fp16 has
        dz.clamp_(-2.5, 2.5)
        rows[7:20], rows[30:40] = 1.2, 0.2
        x[7:20] = x[7:20].clamp(0.6, 0.9999) * 4
        x[7, 3], x[8, 3] = 3.9999998, 3.9998
    elif name == "zero rows":
        dz[::3] = 0
    elif name == "tiny channel":
        rows[5] = 2.0**-40
        dz[torch.arange(m) != 5, 9] = 0
    elif name == "small channels":
        dz *= torch.exp2(-torch.arange(n) / 2)
    elif name == "zero row of x, outliers":
        rows[7], rows[13] = 2.0**40, 2.0**30
        dz[7, 9] = 0
        x[13] = 0
    elif name.startswith("zero row of x"):
        x *= 2.0 ** float(name.split()[-1])
        x[13] = 0
    elif name == "x of all sizes":
        x *= torch.exp2(20 * torch.randn(m, k).clamp(-1, 1))
    return dz * rows, x, scale


CASES = [
    *(
        "plain",
        "spread",
        "outlier",
        "one power up",
        "lonely",
        "zero rows",
        "tiny channel",
        "small channels",
    ),
    *("x of all sizes", "zero row of x, outliers"),
    *("zero row of x, others 0", "zero row of x, others -10", "zero row of x, others -30"),
]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_flagged_keeps_the_bound(name: str, planes: int) -> None:
    """internals/precision.md: 2^-13 or, but for lo·lo, 2^-24 of the terms for x's shift, and what
    planes round."""
    dz, x, scale = case(name)
    found = emulated(dz, x, scale, planes)
    truth = dz.double().t() @ x.double()
    held = ~found.flags
    epsilon = 2.0**-13 if planes == 1 else 2.0**-24
    assert (found.lost <= epsilon * (found.terms + found.largest))[held].all()
    rounded = 2.0**-11 if planes == 1 else 2.0**-21
    error = (found.dw - truth).norm(dim=1)
    assert (error <= (rounded + epsilon) * (found.terms + found.largest))[held].all()
    if name in ("plain", "outlier", "zero rows") or "others" in name:
        assert held.all()


@pytest.mark.parametrize("planes", [1, 2])
def test_a_channel_that_only_a_faint_row_carries_is_flagged(planes: int) -> None:
    dz, x, scale = case("tiny channel")
    flags = emulated(dz, x, scale, planes).flags
    assert flags[9]
    assert flags.sum() == 1
    dz, x, scale = case("lonely")
    flags = emulated(dz, x, scale, planes).flags
    assert flags[::2].any()
    assert not flags[1::2].any()


@pytest.mark.parametrize("planes", [1, 2])
def test_channels_far_below_their_rows_are_as_accurate_or_flagged(planes: int) -> None:
    """Each by itself, relative to its own norm: no bits of a channel go to its neighbours."""
    dz, x, scale = case("small channels")
    found = emulated(dz, x, torch.ones_like(scale), planes)
    truth = dz.double().t() @ (x - 1).double()
    shifted = emulated(dz, x - 1, torch.ones_like(scale), planes)  # sums do not cancel less
    error = (shifted.dw - truth).norm(dim=1) / truth.norm(dim=1)
    assert (error <= (2.0**-11 if planes == 1 else 2.0**-22))[~shifted.flags].all()
    assert found.flags[42:].all()
    assert not found.flags[:30].any()


@pytest.mark.parametrize("planes", [1, 2])
def test_rows_of_about_one_size_share_a_power(planes: int) -> None:
    """x's planes then stay as they are, whatever the rows' exponents."""
    dz, x, _ = case("plain")
    dz = dz / dz.abs().amax(1, keepdim=True) * (0.8 + 0.7 * torch.rand(len(dz), 1))
    x = x / x.abs().amax(1, keepdim=True) * (0.9 + 0.2 * torch.rand(len(x), 1))
    dz[0] /= dz[0].abs().max()
    shift_of_x = split(x, x, planes).shift
    powers = [-split(dz, dz, planes, given).shift - shift_of_x for given in (shift_of_x, None)]
    assert [len(set(power.tolist())) for power in powers] == [1, 3]


def test_few_rows_with_a_power_more_are_the_only_ones_that_change() -> None:
    """They go up by one, and none of the others down."""
    dz, x, scale = case("one power up")
    shift_of_x = split(x, x, 2).shift
    power = -split(dz * scale, dz, 2, shift_of_x).shift - shift_of_x
    assert power.max() == power[0] + 1
    assert (power > power[0]).sum() < 20
    far = -split(
        dz * scale * torch.where(torch.arange(96) == 9, 64.0, 1.0)[:, None], dz, 2, shift_of_x
    ).shift
    assert (far - shift_of_x).max() > power[0] + 1


def test_the_bound_is_needed() -> None:
    """Without it the channel's error would be that of nothing at all."""
    dz, x, scale = case("tiny channel")
    found = emulated(dz, x, scale, 1)
    truth = dz.double().t() @ x.double()
    assert (found.dw[9] - truth[9]).norm() > 0.1 * truth[9].norm()


def test_faint_rows() -> None:
    assert faint_rows(1024, 8192) == (7 - 25, 10 + 7 - 9, 5 - 9)
    assert faint_rows(1025, 8193) == (7 - 25, 11 + 7 - 9, 6 - 9)
    assert faint_rows(1, 1) == (-25, -9, -9)
