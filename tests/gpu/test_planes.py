"""The splitting kernel: fp32 rows as planes of fp16, exact to the bits that it promises.

internals/precision.md derives the bounds: two planes hold an element to 2^-22 of itself, but never
finer than 2^-36 of a row scaled into [2^14, 2^15); with one plane to 2^-11 and 2^-25. Rows with an
element that is not held to the tolerance are flagged by 1, with a list of these elements' columns;
where the list is too short, and where the scale leaves 2^±60, by 2.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import split

from epinorm.backends.cuda.fp32.planes import LISTED, splitter
from epinorm.backends.cuda.plan.plane_layout import PlaneLayout
from epinorm.tools.verify import poisoned_memory

STEP = {1: 2.0**-11, 2: 2.0**-22}  # of the element
FINEST = {1: 2.0**-25, 2: 2.0**-36}  # of a scaled row
TOLERANCE = {1: 2.0**-8, 2: 2.0**-20}

BOTH = pytest.mark.parametrize("planes", [1, 2])


def ordinary(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda")


def rebuilt(found, columns: int, planes: int) -> torch.Tensor:
    value = found.hi.double()
    if planes == 2:
        value = value + found.lo.double() / 2048
    return (value * found.scale.double()[:, None])[:, :columns]


def splitted(values: torch.Tensor, planes: int):
    """Into memory that held NaN, twice, with the same bits."""
    rows, columns = values.shape
    padded = PlaneLayout(planes, columns, rows, 0).padded
    like = [torch.empty(planes, rows, padded, dtype=torch.float16, device="cuda")]
    like += [torch.empty(rows, device="cuda"), torch.empty(rows, dtype=torch.uint8, device="cuda")]
    with poisoned_memory(like):
        first = split(values, planes)
    with poisoned_memory(like):
        second = split(values, planes)
    for name in ("hi", "lo", "scale", "flags"):
        one, two = (getattr(s, name).contiguous().view(torch.uint8) for s in (first, second))
        assert torch.equal(one, two), name
    return first


def not_held(values: torch.Tensor, found, planes: int) -> torch.Tensor:
    """Which elements of rows in range are not held to the tolerance: internals/precision.md,
    element by element."""
    scaled = values / found.scale[:, None]
    hi = scaled.half().float()
    rest = scaled - hi
    if planes == 2:
        rest = rest - (rest * 2048).half().float() / 2048
    held = (rest.abs() <= scaled.abs() * TOLERANCE[planes]) & ((scaled != 0) | (values == 0))
    return ~held


def check_lists(values: torch.Tensor, found, planes: int) -> None:
    """The flags are right, and rows flagged by 1 list just the columns that are not held."""
    largest = values.abs().amax(1)
    in_range = ((largest >= 2.0**-60) & (largest < 2.0**61)) | (largest == 0)
    lost = not_held(values, found, planes)
    count = lost.sum(1)
    expected = torch.where(count > 0, torch.where(count <= LISTED, 1, 2), 0)
    expected = torch.where(in_range, expected, 2).to(torch.uint8)
    assert torch.equal(found.flags, expected)
    rows = found.flags == 1
    for row, listed in zip(lost[rows].tolist(), found.spoilt[rows].tolist(), strict=True):
        columns = sorted(column for column in listed if column >= 0)
        assert columns == [i for i, is_lost in enumerate(row) if is_lost]
        assert listed.count(-1) == LISTED - len(columns)


def check(values: torch.Tensor, planes: int) -> torch.Tensor:
    """Every row is held to the bound or flagged; returns the flags."""
    rows, columns = values.shape
    found = splitted(values, planes)
    assert found.hi.shape == (rows, PlaneLayout(planes, columns, rows, 0).padded)
    check_lists(values, found, planes)
    kept = found.flags == 0
    exact = values.double()[kept]
    scale = found.scale.double()[kept, None]
    error = (rebuilt(found, columns, planes)[kept] - exact).abs()
    assert (error <= (exact.abs() * STEP[planes]).clamp(min=FINEST[planes] * scale)).all()
    assert (error <= exact.abs() * TOLERANCE[planes]).all()  # else it had to be flagged
    assert not found.hi[kept, columns:].any()
    assert not found.lo[kept, columns:].any()
    largest = found.hi[kept].float().abs().amax(1)
    zero = (exact == 0).all(1)
    assert ((largest >= 2.0**14) & (largest <= 2.0**15) | zero).all()
    assert (torch.frexp(found.scale).mantissa == 0.5).all()  # powers of two
    return found.flags.bool()


COLUMNS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 127, 128, 129, 255, 1000, 1023, 1024, 1025)
COLUMNS += (2048, 4099, 8191, 8192, 8193, 8200, 40000)


@BOTH
@pytest.mark.parametrize("columns", COLUMNS)
def test_row_lengths(columns, planes):
    """From a part of a vector to rows that are read twice; rows that do not fill a block."""
    for rows in (1, 7, 65):
        assert not check(ordinary(rows, columns).clamp(min=-8) + 0.01, planes).all()
        assert not check(torch.rand(rows, columns, device="cuda"), planes).any()


@BOTH
def test_no_rows(planes):
    found = split(torch.empty(0, 24, device="cuda"), planes)
    assert found.hi.shape == (0, 24)


@BOTH
@pytest.mark.parametrize("columns", [8, 100, 1024, 8192])
def test_odd_addresses_and_strides(columns, planes):
    values = ordinary(9, columns)
    expected = split(values, planes)
    shifted = values.new_full((9 * columns + 1,), float("nan"))[1:].view(9, columns)
    shifted.copy_(values)
    padded = [values.new_full((9, columns + extra), float("nan")) for extra in (1, 2, 4)]
    for wide in padded:
        wide[:, :columns] = values
    for odd in (shifted, *(wide[:, :columns] for wide in padded)):
        found = splitted(odd, planes)
        for name in ("hi", "lo", "scale", "flags"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


@BOTH
@pytest.mark.parametrize("exponent", [-60, -59, -14, -1, 0, 1, 14, 59, 60])
def test_scales_that_are_taken(exponent, planes):
    values = (torch.rand(33, 100, device="cuda") + 0.25) * 2.0**exponent
    values[:, 3] = 1.5 * 2.0**exponent
    assert not check(values, planes).any()


@BOTH
@pytest.mark.parametrize("largest", [2.0**61, 1e30, 3e38, 2.0**-61, 1e-30, 1e-38, 1e-40, 1e-45])
def test_scales_that_are_flagged(largest, planes):
    """A product of two such scales could leave fp32; below 2^-126 the numbers are denormal."""
    values = ordinary(5, 100)
    values[2] = torch.linspace(-largest, largest, 100, device="cuda", dtype=torch.float64)
    flags = check(values, planes)
    assert flags.tolist() == [False, False, True, False, False]


@BOTH
def test_zeros_are_exact_and_not_flagged(planes):
    values = ordinary(6, 520)
    values[1] = 0
    values[2] = -0.0
    values[3, ::2] = 0
    found = splitted(values, planes)
    assert not check(values, planes).any()
    assert not found.hi[1:3].any()
    assert not found.lo[1:3].any()
    assert torch.equal(
        rebuilt(found, 520, planes)[3, ::2], torch.zeros(260, device="cuda").double()
    )


@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", [0, 99, 1027, 8199])
def test_nan_and_inf_are_flagged(value, column, planes):
    values = torch.rand(3, 8200, device="cuda") + 0.5
    values[1, column] = value
    assert splitted(values, planes).flags.tolist() == [0, 2, 0]


@BOTH
@pytest.mark.parametrize("columns", [6, 64, 100, 1023, 8192, 8199, 40000])
@pytest.mark.parametrize("count", [1, 2, LISTED, LISTED + 1])
def test_columns_that_are_not_held_are_listed(count, columns, planes):
    """By teams of every size, in registers and beyond; more than a list holds flag the row."""
    values = torch.rand(70, columns, device="cuda") + 0.5
    for row in (0, 33, 34, 69):
        values[row, torch.randperm(columns, device="cuda")[:count]] = 1e-16
    values[35, -1] = -1e-16
    values[36, 0] = 1e-16
    flags = splitted(values, planes).flags
    check_lists(values, split(values, planes), planes)
    assert flags[[0, 33, 34, 69]].tolist() == [1 if count <= LISTED else 2] * 4
    assert flags[[35, 36]].tolist() == [1, 1]
    assert flags.count_nonzero() == 6


@BOTH
@pytest.mark.parametrize("columns", [100, 1024, 8200])
def test_without_lists_all_else_is_as_with_them(columns, planes):
    """For an inference: not a byte is written beyond scales and flags."""
    x, w = (torch.rand(rows, columns, device="cuda") + 0.5 for rows in (70, 33))
    x[34, :2] = w[5, 7] = 1e-16
    found = []
    for lists in (True, False):
        split_both = splitter(planes, columns, 70, 33, x.device, False, lists)
        buffer = torch.full((split_both.nbytes + 64,), 0xAB, dtype=torch.uint8, device="cuda")
        split_both(buffer.data_ptr(), x, w)
        assert (buffer[split_both.nbytes :] == 0xAB).all()
        parts = (split_both.scale, split_both.flags), (split_both.flags, split_both.nbytes)
        found.append([buffer[: split_both.spoilt], *(buffer[a:b] for a, b in parts)])
    assert found[0][2].tolist().count(1) == 2
    for with_lists, without in zip(*found, strict=True):
        assert torch.equal(with_lists, without)


@BOTH
def test_two_matrices_list_their_own_columns(planes):
    first, second = (torch.rand(rows, 264, device="cuda") + 0.5 for rows in (5, 9))
    first[4, 7] = second[0, 11] = second[8, 263] = 1e-16
    both = splitter(planes, 264, 5, 9, first.device)
    buffer = torch.empty(both.nbytes, dtype=torch.uint8, device="cuda")
    both(buffer.data_ptr(), first, second)
    for values, found in (
        (first, both.planes_in(buffer)),
        (second, both.planes_in(buffer, second=True)),
    ):
        assert found.flags.any()
        check_lists(values, found, planes)


@BOTH
@pytest.mark.parametrize("outlier", [1e4, 1e6, 1e8, 1e12])
def test_outliers(outlier, planes):
    """What the others lose beside it decides, not the outlier itself."""
    values = torch.rand(4, 1000, device="cuda") + 0.5
    values[1, 17] = outlier
    flags = check(values, planes)
    assert flags.tolist() == [False, outlier > 2.0**31, False, False]


def test_values_that_vanish_beside_an_outlier_are_flagged():
    """Scaled, they are below the smallest fp32: nothing of them is left to compare."""
    values = torch.zeros(5, 200, device="cuda")
    values[:, 0] = 2.0**60
    values[1, 1] = 2.0**-110
    values[2, 1] = 2.0**-149
    values[3, 1] = 2.0**-90
    for planes in (1, 2):
        assert check(values, planes).tolist() == [False, True, True, True, False]


@BOTH
def test_random_exponents(planes):
    """Rows of every spread, from none to all of fp32: held or flagged, and both happen."""
    torch.manual_seed(1)
    spread = torch.linspace(0, 60, 400, device="cuda")[:, None]
    exponents = (torch.rand(400, 300, device="cuda") - 0.5) * 2 * spread
    values = torch.randn(400, 300, device="cuda") * torch.exp2(exponents)
    flags = check(values, planes)
    assert not flags[:20].any()
    assert flags[-100:].all()


def test_exact_where_the_bits_suffice():
    """22 bits beside each other, and every integer of 12 bits and sign in one plane's 11."""
    values = torch.randint(-(2**21), 2**21, (64, 512), device="cuda").float()
    found = split(values, 2)
    assert torch.equal(rebuilt(found, 512, 2), values.double())
    small = torch.randint(-(2**11), 2**11 + 1, (64, 512), device="cuda").float()
    found = split(small, 1)
    assert torch.equal(rebuilt(found, 512, 1), small.double())


def test_one_plane_is_the_first_of_two():
    values = ordinary(20, 1000)
    one, two = split(values, 1), split(values, 2)
    assert torch.equal(one.hi, two.hi)
    assert torch.equal(one.scale, two.scale)
    assert one.lo.data_ptr() == one.hi.data_ptr()
