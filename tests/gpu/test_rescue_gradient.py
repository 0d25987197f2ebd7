"""The backward products' range guard, its flags set by hand: the rest is kept.

Values are compared with float64 row by row, relative to the error of PyTorch's own fp32 product on
that row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.fp32.planes import LISTED
from epinorm.backends.cuda.fp32.rescue import SURELY
from epinorm.backends.cuda.fp32.rescue_gradient import prepare_rescue
from epinorm.tools.accuracy import allowed_error, relative_error

ULP = torch.finfo(torch.float32).eps
NAN = float("nan")
ORDERS = pytest.mark.parametrize("transposed", [False, True], ids=["dx", "dw"])


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int32)


def strided(t: Tensor, extra: int, shift: int) -> Tensor:
    """The same matrix in rows ``extra`` values further apart, ``shift`` values into NaNs."""
    rows, columns = t.shape
    memory = torch.full((rows * (columns + extra) + shift,), NAN, device="cuda")
    view = memory[shift:].view(rows, columns + extra)[:, :columns]
    view.copy_(t)
    return view


@dataclass
class Case:
    """One product and its flags; the result begins as NaN."""

    a: Tensor
    b: Tensor
    transposed: bool
    row_flags: Tensor
    summed_flags: Tensor
    spoilt: Tensor
    """(L, 4): read where summed_flags is 1."""

    @property
    def flagged(self) -> Tensor:
        """(R,): the rows of which all must be computed again."""
        return self.row_flags.bool() | (self.summed_flags > 1).any()

    def product(self, dtype: torch.dtype) -> Tensor:
        a = self.a.to(dtype)
        return (a.t() if self.transposed else a) @ self.b.to(dtype)

    def empty(self) -> Tensor:
        return torch.full((self.row_flags.numel(), self.b.shape[1]), NAN, device="cuda")

    def guard(self, result: Tensor) -> None:
        prepare_rescue(result, self.a, self.b, self.transposed, *self.flags())()

    @cached_property
    def scale(self) -> Tensor:
        """Of planes that nothing was multiplied by."""
        return torch.ones(self.row_flags.numel(), device="cuda")

    def flags(self) -> tuple[int, int, int, int]:
        given = self.row_flags, self.summed_flags, self.spoilt, self.scale
        return tuple(t.data_ptr() for t in given)  # type: ignore[return-value]

    def spoil(self, index: int, *columns: int) -> None:
        """Flag an index of the sum by the columns that it spoils."""
        self.summed_flags[index] = 1
        self.spoilt[index] = -1
        self.spoilt[index, : len(columns)] = torch.tensor(columns, device="cuda")

    def whole(self) -> Case:
        """The same with everything spoilt."""
        return replace(self, summed_flags=torch.full_like(self.summed_flags, 2))

    def check_columns(self, *columns: int) -> None:
        """These columns, and flagged rows, have the bits that they have where all is computed; the
        rest is still NaN."""
        expected = self.whole().compute()
        assert expected.isfinite().all()
        spoilt = self.row_flags.bool()[:, None].repeat(1, self.b.shape[1])
        spoilt[:, list(columns)] = True
        ours = self.compute()
        assert torch.equal(ours.isnan(), ~spoilt)
        assert torch.equal(bits(ours)[spoilt], bits(expected)[spoilt])

    def compute(self) -> Tensor:
        result = self.empty()
        self.guard(result)
        return result

    def check(self) -> Tensor:
        """Flagged rows as accurate as PyTorch's, the others still NaN, the same bits twice."""
        ours, rows = self.compute(), self.flagged
        assert torch.equal(bits(ours), bits(self.compute())), "two launches differ"
        assert ours[~rows].isnan().all(), "a row without a flag was written"
        assert not ours[rows].isnan().any(), "a row with a flag was left out"
        if not rows.any():
            return ours
        truth, eager = self.product(torch.float64)[rows], self.product(torch.float32)[rows]
        found = ours[rows]
        error, theirs = (relative_error(t, truth) for t in (found, eager))
        assert error <= allowed_error(theirs, torch.float32), f"{error:.3e}, eager {theirs:.3e}"
        each, eager_each = (row_errors(t, truth) for t in (found, eager))
        assert (each <= torch.clamp(eager_each, min=4 * ULP)).all(), (
            f"a row has {(each / eager_each).max():.2f} x eager's error"
        )
        return ours


def row_errors(found: Tensor, truth: Tensor) -> Tensor:
    return (found.double() - truth).norm(dim=1) / truth.norm(dim=1)


def make_case(
    rows: int,
    columns: int,
    length: int,
    transposed: bool,
    *,
    flagged: float = 0.0,
    summed: float = 0.0,
    uniform: bool = False,
    extra: int = 0,
    shift: int = 0,
) -> Case:
    """Random tensors; rows and summed indices are flagged with these probabilities."""
    draw = torch.rand if uniform else torch.randn
    a = draw((length, rows) if transposed else (rows, length), device="cuda")
    b = draw(length, columns, device="cuda")
    if extra or shift:
        a, b = strided(a, extra, shift), strided(b, extra, shift)
    row_flags, summed_flags = (
        (torch.rand(n, device="cuda") < p).to(torch.uint8) * value
        for n, p, value in ((rows, flagged, 1), (length, summed, 2))
    )
    # What is not written where no flag is 1 must not be read.
    spoilt = torch.full((length, LISTED), 1, dtype=torch.int32, device="cuda")
    return Case(a, b, transposed, row_flags, summed_flags, spoilt)


@pytest.fixture(autouse=True)
def _full_precision():
    was = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = was


@ORDERS
def test_nothing_flagged_writes_nothing(transposed):
    for shape in ((1, 1, 1), (1024, 256, 300), (3001, 130, 70), (70000, 8, 8), (8, 8, 70001)):
        assert make_case(*shape, transposed).compute().isnan().all()


@ORDERS
@pytest.mark.parametrize("row", [0, 127, 128, 1023, 1024, 1099])
def test_one_row(transposed, row):
    case = make_case(1100, 272, 1000, transposed)
    case.row_flags[row] = 255  # any value but zero
    assert case.check().isfinite().sum() == 272


@ORDERS
@pytest.mark.parametrize("index", [0, 3, 4, 15, 16, 500, 990, 991, 992, 1000, 1001, 1002])
def test_one_index_of_the_sum_spoils_everything(transposed, index):
    case = make_case(140, 272, 1003, transposed)
    case.summed_flags[index] = 2
    assert case.check().isfinite().all()


@ORDERS
def test_flags_at_addresses_that_are_multiples_of_four_only(transposed):
    case = make_case(1100, 130, 1003, transposed)
    for at in (0, 1, 1002):
        memory = torch.zeros(1007, dtype=torch.uint8, device="cuda")
        memory[:4] = 1  # of somebody else
        flags = memory[4:]
        assert replace(case, summed_flags=flags).compute().isnan().all()
        flags[at] = 2
        assert replace(case, summed_flags=flags).check().isfinite().all()
    memory = torch.ones(1108, dtype=torch.uint8, device="cuda")
    memory[4:-4] = 0
    flags = memory[4:-4]
    flags[1099] = 1
    assert replace(case, row_flags=flags).check().isfinite().sum() == 130


@ORDERS
@pytest.mark.parametrize("flagged", [0.005, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("summed", [0.0, 0.01, 1.0])
def test_random_flags(transposed, flagged, summed):
    make_case(1300, 650, 1500, transposed, flagged=flagged, summed=summed).check()


@ORDERS
@pytest.mark.parametrize("flagged, summed", [(0.0, 0.0), (0.03, 0.0), (0.3, 0.0), (0.03, 0.01)])
@pytest.mark.parametrize("sizes", [(1300, 650, 1500), (1024, 512, 8192)], ids=str)
def test_added_to_what_is_there(transposed, flagged, summed, sizes):
    """The second size's sums are shared by several blocks."""
    case = make_case(*sizes, transposed, flagged=flagged, summed=summed)
    before = torch.randn(*sizes[:2], device="cuda")
    result = before.clone()
    prepare_rescue(result, case.a, case.b, transposed, *case.flags(), adds=True)()
    expected = torch.where(case.flagged[:, None], before + case.compute(), before)
    assert torch.equal(result, expected)
    case.spoil(5, 7)  # the kernel before has then added nothing
    result = before.clone()
    prepare_rescue(result, case.a, case.b, transposed, *case.flags(), adds=True)()
    assert torch.equal(result, before + case.whole().compute())


@ORDERS
@pytest.mark.parametrize("column", [0, 1, 127, 128, 255, 271])
@pytest.mark.parametrize("index", [0, 3, 15, 990, 1002])
def test_an_index_spoils_one_column(transposed, index, column):
    case = make_case(1100, 272, 1003, transposed)
    case.spoil(index, column)
    case.check_columns(column)


@ORDERS
@pytest.mark.parametrize("sizes", [(1300, 650, 1500), (130, 132, 40), (1024, 512, 8192)], ids=str)
@pytest.mark.parametrize("flagged", [0.0, 0.03, 1.0])
def test_indices_spoil_several_columns_beside_flagged_rows(transposed, flagged, sizes):
    """The last size's sums are shared by several blocks."""
    case = make_case(*sizes, transposed, flagged=flagged)
    last = sizes[1] - 1
    case.spoil(3, 5, 131)
    case.spoil(sizes[2] - 1, last)
    case.spoil(17, 0, 1, 2, last)
    case.spoil(18, 5)
    case.check_columns(0, 1, 2, 5, 131, last)


@ORDERS
@pytest.mark.parametrize("sizes", [(1300, 650, 1500), (1024, 512, 8192)], ids=str)
@pytest.mark.parametrize("flagged", [0.0, 0.03])
def test_listed_columns_are_kept_where_they_are_large(transposed, flagged, sizes):
    """SURELY times the row's scale, whatever the sign; numbers, one by one."""
    case = make_case(*sizes, transposed, flagged=flagged)
    rows = sizes[0]
    case.scale = 2.0 ** torch.randint(-9, 9, (rows,), device="cuda").float()
    case.spoil(3, 5, 131)
    case.spoil(sizes[2] - 1, 5)
    expected = case.whole().compute()
    surely = SURELY * case.scale[:, None].expand_as(expected)
    surely = torch.where(torch.rand_like(expected) < 0.5, -surely, surely)

    def check(before: Tensor, written: Tensor) -> None:
        result = before.clone()
        case.guard(result)
        written = written | case.row_flags.bool()[:, None]
        assert torch.equal(bits(result), bits(torch.where(written, expected, before)))

    none = torch.zeros_like(expected, dtype=torch.bool)
    check(surely, none)
    for value in (0.999 * surely, torch.zeros_like(surely), surely * NAN, surely / 0.0):
        before, written = surely.clone(), none.clone()
        for row, column in ((0, 5), (127, 131), (128, 5), (rows - 1, 131)):
            before[row, column] = value[row, column]
            written[row, column] = True
        before[77, 6] = 0  # of no list
        check(before, written)
    case.summed_flags[7] = 2
    check(surely, ~none)


@ORDERS
@pytest.mark.parametrize("count", [63, 64, 65, 200])
def test_more_columns_than_are_remembered_spoil_everything(transposed, count):
    case = make_case(150, 300, 1003, transposed)
    for i in range(count):
        case.spoil(3 * i, i)
    case.check_columns(*(range(count) if count <= 64 else range(300)))


@ORDERS
def test_a_row_that_is_not_held_at_all_spoils_everything(transposed):
    case = make_case(150, 300, 1003, transposed)
    case.spoil(5, 17)
    case.summed_flags[900] = 2
    case.check_columns(*range(300))


@ORDERS
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31, 32, 33, 129, 1027])
def test_the_last_rows_of_any_number(transposed, rows):
    case = make_case(rows, 40, 300, transposed)
    case.row_flags[-1] = 1
    case.check()
    case.row_flags.fill_(1)
    case.check()


@ORDERS
@pytest.mark.parametrize("columns", [1, 3, 8, 127, 129, 257])
def test_any_number_of_columns(transposed, columns):
    make_case(300, columns, 500, transposed, flagged=0.3, uniform=True).check()


@ORDERS
@pytest.mark.parametrize("length", [0, 1, 7, 31, 32, 33, 255, 256, 1023, 1024, 4099, 20001])
def test_lengths(transposed, length):
    """Sums of one block, and shared by two, four and eight."""
    case = make_case(150, 140, length, transposed, flagged=0.6)
    if length:
        case.check()
        case.row_flags.zero_()
        case.row_flags[77] = 1
        case.check()
    else:
        case.row_flags[0] = 1
        assert (case.compute()[case.flagged] == 0).all()


@ORDERS
@pytest.mark.parametrize("extra, shift", [(1, 0), (2, 1), (4, 0), (4, 4), (7, 3)])
def test_rows_at_any_address_with_any_stride(transposed, extra, shift):
    case = make_case(300, 230, 777, transposed, flagged=0.5, extra=extra, shift=shift)
    case.check()


@ORDERS
def test_more_rows_than_a_block_looks_at(transposed):
    for flagged in (0.0001, 1.0):
        make_case(70001, 72, 64, transposed, flagged=flagged).check()
    case = make_case(70001, 72, 64, transposed)
    case.row_flags[70000] = 1
    assert case.check().isfinite().sum() == 72


@ORDERS
@pytest.mark.parametrize("shape", [(600, 500, 300), (200, 200, 5000)])
def test_values_are_the_same_wherever_a_row_is_computed(transposed, shape):
    """Alone, among a few and among all: the order of the sums is fixed."""
    alone = make_case(*shape, transposed)
    alone.row_flags[77] = 1
    few = replace(alone, row_flags=alone.row_flags.clone())
    few.row_flags[50:110] = 1
    expected = alone.compute()[77]
    for case in (few, alone.whole()):
        assert torch.equal(bits(case.compute()[77]), bits(expected))


@ORDERS
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), NAN])
def test_inf_and_nan_propagate_as_in_eager(transposed, value):
    case = make_case(50, 60, 3000, transposed, flagged=0.5)
    case.a[3, 17] = value
    case.b[40, 5] = value
    case.row_flags[3] = case.row_flags[17] = 1
    case.summed_flags[40] = 2
    ours, eager = case.compute(), case.product(torch.float32)
    assert not eager.isfinite().all()
    torch.testing.assert_close(ours, eager, equal_nan=True, rtol=2e-5, atol=1e-3)


@ORDERS
@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-42])
def test_rows_far_from_one(transposed, scale):
    case = make_case(100, 130, 1000, transposed, flagged=0.3)
    case.row_flags[0] = 1
    rows = case.row_flags.bool()
    if transposed:
        case.a[:, rows] *= scale
    else:
        case.a[rows] *= scale
    truth = case.product(torch.float64)[rows]
    error, eager = (
        relative_error(t[rows], truth) for t in (case.compute(), case.product(torch.float32))
    )
    # Denormal sums round to the same spacing in any order: eager's error up to chance.
    assert error <= 1.05 * eager


@ORDERS
def test_an_outlier_against_zeros(transposed):
    """What one scale a row cannot hold: 1e12 that multiplies zeros, beside values of one."""
    case = make_case(100, 130, 1000, transposed, flagged=0.3)
    (case.a.t() if transposed else case.a)[:, 11] = 1e12
    case.b[11] = 0
    case.check()


@ORDERS
def test_a_graph_replays_with_other_flags(transposed):
    case = make_case(600, 300, 1100, transposed)
    result = case.compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.fill_(NAN)
        case.guard(result)
    case.spoilt[3] = torch.tensor([33, -1, -1, -1])
    for row, index in ((None, None), (5, None), (599, 17), (None, 1099), (5, 3), (None, None)):
        case.row_flags.zero_()
        case.summed_flags.zero_()
        if row is not None:
            case.row_flags[row] = 1
        if index is not None:
            case.summed_flags[index] = 1 if index == 3 else 2
        graph.replay()
        assert torch.equal(bits(result), bits(case.compute()))
        spoilt = case.flagged[:, None].repeat(1, 300)
        spoilt[:, 33] |= index == 3
        assert torch.equal(result.isnan(), ~spoilt)


@ORDERS
def test_the_kernel_before_is_waited_for(transposed):
    """The guard starts early; what that kernel writes last must not overwrite a flagged row."""
    case = make_case(1024, 1024, 512, transposed, flagged=0.1)
    expected = case.compute()
    other = torch.full((2**26,), NAN, device="cuda")
    result = other[-expected.numel() :].view(expected.shape)
    for _ in range(20):
        other.fill_(NAN)
        case.guard(result)
        assert torch.equal(bits(result), bits(expected))


def test_no_rows_and_no_columns():
    assert make_case(0, 64, 32, False).compute().shape == (0, 64)
    assert make_case(64, 0, 32, True).compute().shape == (64, 0)


def test_what_does_not_fit_is_refused():
    case = make_case(64, 32, 48, False)
    with pytest.raises(ValueError, match=r"\(64, 48\)"):
        replace(case, transposed=True).compute()
    flags = torch.zeros(65, dtype=torch.uint8, device="cuda")[1:]
    with pytest.raises(ValueError, match="multiples of 4"):
        replace(case, row_flags=flags).compute()


def microseconds(work: Callable[[], object], repeats: int, replays: int = 15) -> float:
    """Median time of one ``work()`` inside a graph of ``repeats`` of them."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return sorted(times[3:])[replays // 2]


SHAPES = [
    ("kb62", 1024, 8192, 8192, 2.0),
    ("skinny", 65536, 128, 128, 40.0),
    ("mid", 16384, 1024, 1024, 3.0),
]
"""m, k, n of the forward product; what the guard may cost in times of cuBLAS where all is flagged
(skinny: dW is one tile, which no more than a cluster of blocks shares)."""


def of_shape(m: int, k: int, n: int, transposed: bool) -> Case:
    return make_case(*((n, k, m) if transposed else (m, k, n)), transposed)


@pytest.mark.alone
@ORDERS
@pytest.mark.parametrize("name, m, k, n, _", SHAPES)
def test_costs_next_to_nothing_where_nothing_is_flagged(name, m, k, n, _, transposed):
    case = of_shape(m, k, n, transposed)
    result, other = case.empty(), torch.zeros(2**20, device="cuda")

    def guarded() -> None:
        other.add_(1)
        case.guard(result)

    alone = microseconds(lambda: other.add_(1), 100)
    cost = microseconds(guarded, 100) - alone
    print(f"{name} {'dw' if transposed else 'dx'}: nothing flagged costs {cost:.2f} us")
    assert cost < 5


@pytest.mark.alone
@ORDERS
@pytest.mark.parametrize("name, m, k, n, most", SHAPES)
def test_costs_about_what_cublas_does_where_all_is_flagged(name, m, k, n, most, transposed):
    case = of_shape(m, k, n, transposed)
    result = case.empty()
    eager = microseconds(lambda: case.product(torch.float32), 1, 5)
    for rows in (1, 128, case.row_flags.numel()):
        case.row_flags.zero_()
        case.row_flags[torch.randperm(case.row_flags.numel(), device="cuda")[:rows]] = 1
        ours = microseconds(lambda: case.guard(result), 1, 5)
        print(f"{name} {'dw' if transposed else 'dx'}, {rows} rows: {ours:.0f}, eager {eager:.0f}")
    assert ours < most * eager


@pytest.mark.alone
@ORDERS
def test_spoilt_columns_cost_no_strips(transposed):
    """One in each strip of 128."""
    case = of_shape(1024, 8192, 8192, transposed)
    result = case.empty()
    for i in range(32):
        case.spoil(i, i * 256)
    eager = microseconds(lambda: case.product(torch.float32), 1, 5)
    ours = microseconds(lambda: case.guard(result), 1, 5)
    print(f"{'dw' if transposed else 'dx'}, 32 columns: {ours:.0f}, eager {eager:.0f}")
    assert ours < 0.1 * eager
