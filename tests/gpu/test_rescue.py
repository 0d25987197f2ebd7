"""The range guard on a GPU, its flags set by hand: what is flagged is right, the rest untouched.

z, whose condition is good, is compared with float64 row by row, relative to eager's own error on
that row; y, mean and rstd as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.fp32 import rescue as guard
from epinorm.backends.cuda.fp32.rescue import SURELY, rescue_launch, rescue_tile, splits_of
from epinorm.backends.cuda.norm.text import matrix_arguments, parameters_at
from epinorm.backends.cuda.runtime.device import sm_count
from epinorm.backends.cuda.runtime.prepared import starts_early
from epinorm.backends.cuda.text.chain_text import ChainArguments
from epinorm.chain import Chain
from epinorm.chain.reference import apply_pointwise, epilogue, linear_norm
from epinorm.problem import Forward, Inputs, Problem
from epinorm.tools.accuracy import allowed_error, relative_error

EASY = "group_norm({groups})|leaky_relu(0.01)|scale(2)"
HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"
ULP = torch.finfo(torch.float32).eps
NAN = float("nan")


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int32)


def strided(t: Tensor, extra: int, shift: int = 0) -> Tensor:
    """The same matrix in rows ``extra`` values further apart, ``shift`` values into its memory."""
    rows, columns = t.shape
    memory = torch.full((rows * (columns + extra) + shift,), NAN, device="cuda")
    view = memory[shift:].view(rows, columns + extra)[:, :columns]
    view.copy_(t)
    return view


@dataclass
class Case:
    """One problem, its tensors and flags; every output begins as NaN."""

    problem: Problem
    inputs: Inputs
    row_flags: Tensor
    column_flags: Tensor

    @property
    def flagged(self) -> Tensor:
        """(M, groups): what must be computed again."""
        groups = self.problem.groups
        columns = self.column_flags.bool().view(groups, -1).any(1)
        return self.row_flags.bool()[:, None] | columns[None, :]

    def empty(self) -> Forward:
        p = self.problem

        def nans(*shape: int) -> Tensor:
            return torch.full(shape, NAN, device="cuda")

        if not p.training:
            return Forward(nans(p.m, p.n), nans(0), nans(0), nans(0))
        mean = nans(0) if "rms_norm" in str(p.chain) else nans(p.m, p.groups)
        return Forward(nans(p.m, p.n), nans(p.m, p.n), mean, nans(p.m, p.groups))

    @cached_property
    def scales(self) -> list[Tensor]:
        """Of planes that nothing was multiplied by."""
        return [torch.ones(count, device="cuda") for count in (self.problem.m, self.problem.n)]

    def guard(self, forward: Forward) -> None:
        problem, inputs = self.problem, self.inputs
        if problem.m == 0:
            return
        x, weight = inputs.x, inputs.weight
        at = (x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0))
        aligned = (at[0] | at[2] | (at[1] | at[3]) * 4) % 16 == 0
        rescue_launch(problem, aligned)(
            *at,
            *parameters_at(*inputs[2:5]),
            *(self.row_flags.data_ptr(), self.column_flags.data_ptr()),
            *(scale.data_ptr() for scale in self.scales),
            *forward.addresses,
            *(problem.m, problem.n, problem.k, *matrix_arguments(inputs.operands)[0]),
            *ChainArguments(problem.chain, torch.float32)(inputs.constants),
        )

    def compute(self) -> Forward:
        forward = self.empty()
        self.guard(forward)
        return forward

    def product(self, dtype: torch.dtype) -> Tensor:
        return self.inputs.x.to(dtype) @ self.inputs.weight.to(dtype).t()

    def epilogue(self, z: Tensor) -> Forward:
        """Everything after the product by PyTorch, in z's dtype."""
        p, dtype = self.problem, z.dtype
        bias, gamma, beta = (None if t is None else t.to(dtype) for t in self.inputs[2:5])
        operands = tuple(t.to(dtype) for t in self.inputs.operands)
        biased = z if bias is None else z + bias
        y = epilogue(biased, p.chain, gamma, beta, operands)
        grouped = apply_pointwise(biased, p.chain.pre, iter(operands)).view(p.m, p.groups, -1)
        eps = ULP if p.chain.norm.eps is None else p.chain.norm.eps
        centred = "rms_norm" not in str(p.chain)
        mean = grouped.mean(2) if centred else z.new_zeros(p.m, p.groups)
        variance = (grouped - mean[..., None]).square().mean(2)
        return Forward(y, z, mean if centred else z.new_zeros(0), (variance + eps).rsqrt())

    def check(self) -> Forward:
        """Flagged cells as accurate as eager's, the others still NaN, the same bits twice."""
        ours, again = self.compute(), self.compute()
        cells = self.flagged
        wide = cells.repeat_interleave(self.problem.n // self.problem.groups, 1)
        for name, found in zip(ours._fields, ours.outputs, strict=False):
            assert torch.equal(bits(found), bits(getattr(again, name))), f"{name} differs"
            mask = wide if name in ("y", "z") else cells
            if found.numel():
                assert found[~mask].isnan().all(), f"{name}: a cell without a flag was written"
                assert not found[mask].isnan().any(), f"{name}: a cell with a flag was left out"
        truth, eager = self.product(torch.float64), self.product(torch.float32)
        if not self.problem.training:
            y, exact = (self.epilogue(z).y[wide] for z in (eager, truth))
            self.compare("y", ours.y[wide], y, exact)
            return ours
        self.compare("z", ours.z[wide], eager[wide], truth[wide])
        rows = self.row_flags.bool()
        found, theirs = (row_errors(z[rows], truth[rows]) for z in (ours.z, eager))
        assert (found <= torch.clamp(theirs, min=4 * ULP)).all(), (
            f"rows of z: {(found / theirs).max():.2f} x eager's error"
        )
        # The rest on our own z: a group of two amplifies z's errors without bound.
        z = torch.where(wide, ours.z, eager)
        exact, theirs = self.epilogue(z.double()), self.epilogue(z)
        self.compare("y", ours.y[wide], theirs.y[wide], exact.y[wide])
        for name in ("mean", "rstd") if ours.mean.numel() else ("rstd",):
            three = (getattr(t, name)[cells] for t in (ours, theirs, exact))
            self.compare(name, *three)
        return ours

    @staticmethod
    def compare(name: str, found: Tensor, theirs: Tensor, exact: Tensor) -> None:
        error, eager = (relative_error(t, exact) for t in (found, theirs))
        allowed = allowed_error(eager, torch.float32)
        assert error <= allowed, f"{name}: error {error:.3e}, eager {eager:.3e}"


def row_errors(found: Tensor, truth: Tensor) -> Tensor:
    return (found.double() - truth).norm(dim=1) / truth.norm(dim=1)


def make_case(
    group: int,
    groups: int,
    m: int,
    k: int = 1000,
    chain: str = EASY,
    *,
    rows: float = 0.0,
    columns: float = 0.0,
    uniform: bool = False,
    training: bool = True,
    absent: tuple[str, ...] = (),
    extra: int = 0,
) -> Case:
    """Random tensors; ``rows`` and ``columns`` are flagged with this probability."""
    parsed = Chain.parse(chain.format(groups=groups))
    n = group * groups
    draw = torch.rand if uniform else torch.randn

    def matrix(height: int, width: int) -> Tensor:
        t = draw(height, width, device="cuda")
        return strided(t, extra, shift=1) if extra else t

    def vector(name: str) -> Tensor | None:
        return None if name in absent else torch.randn(n, device="cuda")

    operands = tuple(
        torch.randn(n, device="cuda") if kind == "channel" else matrix(m, n)
        for kind in parsed.operand_kinds
    )
    x, w = matrix(m, k), matrix(n, k)
    inputs = Inputs(x, w, vector("bias"), vector("norm_weight"), vector("norm_bias"), operands)
    problem = Problem(
        chain=parsed,
        m=m,
        k=k,
        n=n,
        dtype=torch.float32,
        norm_dtype=torch.float32,
        out_dtype=torch.float32,
        has_bias="bias" not in absent,
        has_norm_weight="norm_weight" not in absent,
        has_norm_bias="norm_bias" not in absent,
        training=training,
        device=torch.device("cuda", torch.cuda.current_device()),
        precision="highest",
    )
    row_flags = (torch.rand(m, device="cuda") < rows).to(torch.uint8)
    column_flags = (torch.rand(n, device="cuda") < columns).to(torch.uint8)
    return Case(problem, inputs, row_flags, column_flags)


@pytest.fixture(autouse=True)
def _full_precision():
    was = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = was


@pytest.fixture(params=[1, 2, 4, 8])
def splits(request, monkeypatch):
    """As many blocks share each sum, whatever the problem."""
    if request.param > 1 and not starts_early(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("no clusters")
    monkeypatch.setattr(guard, "splits_of", lambda *_: request.param)
    guard.rescue_launch.cache_clear()
    yield request.param
    guard.rescue_launch.cache_clear()


def test_nothing_flagged_writes_nothing():
    for m, groups in ((1, 1), (1024, 16), (3001, 5)):
        for found in make_case(16, groups, m).compute().outputs:
            assert found.isnan().all()


@pytest.mark.parametrize("row", [0, 127, 128, 1023, 1024, 1099])
def test_one_row(row):
    case = make_case(16, 17, 1100)
    case.row_flags[row] = 1
    assert case.check().y.isfinite().sum() == case.problem.n


@pytest.mark.parametrize("column", [0, 15, 16, 127, 128, 271])
def test_one_column(column):
    case = make_case(16, 17, 1100)
    case.column_flags[column] = 255  # any value but zero
    assert case.check().y.isfinite().sum() == case.problem.m * 16


def test_the_last_rows_of_flags_that_end_off_a_word():
    for m in (1, 2, 3, 5, 129, 1027, 8193, 9219):
        case = make_case(16, 3, m)
        case.row_flags[-1] = 1
        case.check()


@pytest.mark.parametrize("group", [2, 4, 8, 12, 16, 24, 40, 64, 72, 100, 128, 136, 248, 256])
def test_group_sizes(group):
    groups = 700 // group + 1
    make_case(group, groups, 300, rows=0.02, columns=0.002).check()
    training = group < 16  # y alone is no yardstick there: small groups amplify z's errors
    make_case(group, groups, 200, 2000, rows=0.5, uniform=True, training=training).check()


FLAGS = pytest.mark.parametrize(
    "rows, columns", [(0.02, 0.0), (0.0, 0.002), (0.3, 0.01), (1.0, 0.0), (0.0, 1.0)]
)
"""Rows of x, of W, both; all of either."""


@FLAGS
@pytest.mark.parametrize("group", [320, 768, 2048])
def test_groups_that_the_blocks_of_a_cluster_share(group, rows, columns):
    if not starts_early(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("no clusters")
    case = make_case(group, 3, 1100, 333, rows=rows, columns=columns / 20)
    if columns:
        case.column_flags[-1] = 1
    case.check()


def test_chains_of_groups_that_blocks_share():
    for chain, extra, training in (
        (HEAVY, 7, True),
        ("silu|rms_norm|gelu", 0, True),
        (HEAVY, 4, False),
    ):
        absent = ("norm_bias",) if "rms" in chain else ()
        groups = 1 if "rms" in chain else 2
        make_case(
            512, groups, 300, 177, chain, rows=0.1, columns=0.001, extra=extra, training=training,
            absent=absent,
        ).check()  # fmt: skip


@pytest.mark.parametrize("rows", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("columns", [0.0, 0.01, 1.0])
def test_random_flags(rows, columns):
    make_case(16, 40, 1300, 1500, rows=rows, columns=columns).check()


@pytest.mark.parametrize("k", [0, 1, 7, 16, 17, 255, 256, 257, 4099])
def test_lengths(k):
    case = make_case(16, 20, 70, k, rows=0.6, columns=0.01)
    if k:
        case.check()
    else:  # eager's error is zero, and that of everything else in its last digits
        y, truth = case.compute().y, case.epilogue(case.product(torch.float64)).y
        mask = case.flagged.repeat_interleave(16, 1)
        assert y[~mask].isnan().all()
        assert relative_error(y[mask], truth[mask]) < 4 * ULP


@FLAGS
@pytest.mark.parametrize("group", [2, 16, 24, 128, 256])
def test_sums_shared_by_blocks(group, rows, columns, splits):
    """Thin tiles and full ones, several chunks of rows, strips that end before the tile does."""
    case = make_case(group, 700 // group + 1, 1100, 1500, rows=rows, columns=columns)
    if columns:
        case.column_flags[-1] = 1
    case.check()


@pytest.mark.parametrize("m", [1, 5, 31, 33, 127])
def test_fewer_rows_than_blocks_share_or_not_as_many_each(m, splits):
    for case in (make_case(16, 9, m, 1100, rows=1.0), make_case(72, 4, m, 1100, columns=1.0)):
        case.check()


@pytest.mark.parametrize("k", [1, 3, 31, 32, 33, 100, 255, 257, 513, 4099])
def test_lengths_that_leave_blocks_with_little_or_nothing(k, splits):
    for group, groups in ((16, 20), (72, 5)):
        make_case(group, groups, 70, k, rows=0.6, columns=0.01).check()


def test_an_empty_sum_is_zero_in_all_blocks(splits):
    case = make_case(16, 20, 70, 0, rows=0.6)
    assert (case.compute().z[case.row_flags.bool()] == 0).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("extra", [0, 4, 7])
def test_shared_sums_of_every_kind_of_kernel(extra, training, splits):
    """Aligned rows and others, with and without what backward needs."""
    case = make_case(
        24, 9, 300, 1777, HEAVY, rows=0.1, columns=0.01, extra=extra, training=training
    )
    case.check()


def test_flags_that_the_kernel_before_writes(splits):
    """Each time that kernel is the one that sets them, just before the guard."""
    case = make_case(16, 40, 600, 1100, rows=0.1, columns=0.01)
    expected, forward = case.compute(), case.empty()
    flags = [t.clone() for t in (case.row_flags, case.column_flags)]
    x, w, bias, gamma, beta = case.inputs[:5]
    addresses = [t.data_ptr() for t in (bias, gamma, beta, case.row_flags, case.column_flags)]
    scales = [t.data_ptr() for t in case.scales]
    launch = rescue_launch(case.problem, (x.stride(0) | w.stride(0)) % 4 == 0, flags_late=True)
    for _ in range(20):
        for t in (*forward.outputs, case.row_flags):
            t.fill_(NAN if t.is_floating_point() else 0)
        torch.mul(flags[1], 1, out=case.column_flags)
        torch.mul(flags[0], 1, out=case.row_flags)
        launch(
            *(x.data_ptr(), x.stride(0), w.data_ptr(), w.stride(0)),
            *addresses,
            *scales,
            *forward.addresses,
            *(600, 640, 1100, *case.problem.chain.arguments),
        )
        for found, one in zip(forward.outputs, expected.outputs, strict=True):
            assert torch.equal(bits(found), bits(one))


def test_bits_do_not_depend_on_other_flags_however_sums_are_shared(splits):
    """A row's, and a group's: alone, among a few and among all."""
    for group, groups, k in ((16, 40, 1500), (72, 9, 333), (256, 3, 1100)):
        everything = make_case(group, groups, 1100, k, rows=1.0)
        expected = everything.compute()
        problem, inputs = everything.problem, everything.inputs
        for rows, columns in (([1030], []), ([], [group]), (range(50, 90), [0]), ([7, 1099], [3])):
            flags = (
                torch.zeros_like(everything.row_flags),
                torch.zeros_like(everything.column_flags),
            )
            for of, indices in zip(flags, (rows, columns), strict=True):
                of[list(indices)] = 1
            case = Case(problem, inputs, *flags)
            cells = case.flagged
            wide = cells.repeat_interleave(group, 1)
            result = case.compute()
            for name, found in zip(result._fields, result.outputs, strict=False):
                mask = wide if name in ("y", "z") else cells
                assert torch.equal(bits(found[mask]), bits(getattr(expected, name)[mask])), name
                assert found[~mask].isnan().all(), name


def test_more_items_than_clusters_run_at_once(splits):
    """Each cluster takes several, and blocks of it must not run ahead into the next one's tile."""
    case = make_case(16, 260, 2100, 300, rows=1.0)
    case.check()
    case.row_flags[torch.rand(2100, device="cuda") < 0.9] = 0
    case.column_flags[5::1000] = 1
    case.check()


@pytest.mark.parametrize("extra", [1, 2, 4, 7])
def test_rows_at_any_address_with_any_stride(extra):
    make_case(24, 9, 150, 777, HEAVY, rows=0.5, columns=0.01, extra=extra).check()


@pytest.mark.parametrize(
    "group, chain",
    [
        (256, "layer_norm|gelu"),
        (64, "layer_norm"),
        (256, "rms_norm|silu"),
        (200, "silu|rms_norm(1e-06)|scale(2)"),
    ],
)
def test_layer_and_rms_norm(group, chain):
    absent = ("norm_bias",) if "rms" in chain else ()
    for rows in (0.02, 1.0):
        make_case(group, 1, 333, 1200, chain, rows=rows, absent=absent).check()


@pytest.mark.parametrize("group", [4, 16, 48, 256])
def test_operands(group):
    case = make_case(group, 512 // group + 1, 200, 1100, HEAVY, rows=0.4, columns=0.003)
    case.check()


@pytest.mark.parametrize(
    "absent", [("bias",), ("norm_weight",), ("norm_bias",), ("bias", "norm_weight", "norm_bias")]
)
def test_absent_parameters(absent):
    make_case(16, 9, 150, rows=0.5, absent=absent).check()


def test_values_are_the_same_wherever_a_row_is_computed():
    """Alone, among a few and among all: the order of the sums is fixed."""
    alone = make_case(16, 40, 600, 1500)
    alone.row_flags[77] = 1
    few = Case(alone.problem, alone.inputs, alone.row_flags.clone(), alone.column_flags)
    few.row_flags[50:90] = 1
    everything = Case(
        alone.problem, alone.inputs, torch.ones_like(alone.row_flags), few.column_flags
    )
    expected = alone.compute()
    for case in (few, everything):
        for found, one in zip(case.compute().outputs, expected.outputs, strict=True):
            assert torch.equal(bits(found[77]), bits(one[77]))


@pytest.mark.parametrize("chain", [EASY, "rms_norm"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), NAN])
def test_inf_and_nan_propagate_as_in_eager(chain, value, splits):
    groups = 8 if chain is EASY else 1
    case = make_case(16 if chain is EASY else 128, groups, 50, chain=chain)
    case.inputs.x[3, 17] = value
    case.inputs.weight[40, 5] = value
    case.row_flags[3] = case.column_flags[40] = 1
    ours, eager = case.compute().y, case.epilogue(case.product(torch.float32)).y
    mask = case.flagged.repeat_interleave(case.problem.n // groups, 1)
    assert not eager[mask].isfinite().all()
    assert ours[~mask].isnan().all()
    torch.testing.assert_close(ours[mask], eager[mask], equal_nan=True, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-42])
def test_rows_far_from_one(scale):
    case = make_case(16, 16, 100, rows=0.3, absent=("bias",))
    case.inputs.x[case.row_flags.bool()] *= scale
    ours, truth, eager = case.compute(), case.product(torch.float64), case.product(torch.float32)
    rows = case.row_flags.bool()
    error, eager_error = (relative_error(z[rows], truth[rows]) for z in (ours.z, eager))
    # Denormal sums round to the same spacing in any order: eager's error up to chance.
    assert error <= 1.05 * eager_error
    y = case.epilogue(eager).y
    torch.testing.assert_close(ours.y[rows], y[rows], rtol=3e-5, atol=1e-6)


def test_an_outlier_against_zero_weights():
    """What one scale a row cannot hold: 1e12 that multiplies zeros, beside values of one."""
    case = make_case(16, 16, 100, rows=0.3)
    case.inputs.x[:, 11] = 1e12
    case.inputs.weight[:, 11] = 0
    case.check()


def powers_of_two(count: int) -> Tensor:
    return 2.0 ** torch.randint(-9, 9, (count,), device="cuda").float()


@pytest.mark.parametrize("group", [16, 72])
def test_single_elements_count_only_where_the_product_is_small(group, splits):
    """Flags of 1; products of SURELY times both scales are right as they are, whatever the sign."""
    case = make_case(group, 9, 1100, 700, rows=0.1, columns=0.02)
    case.scales = [powers_of_two(1100), powers_of_two(9 * group)]
    surely = SURELY * case.scales[0][:, None] * case.scales[1]
    surely *= torch.where(torch.rand_like(surely) < 0.5, -1.0, 1.0)
    everything = case.compute()

    def check(z: Tensor, cells: Tensor) -> None:
        forward = case.empty()
        forward.z.copy_(z)
        case.guard(forward)
        wide = cells.repeat_interleave(group, 1)
        assert torch.equal(forward.y.isnan(), ~wide)
        assert torch.equal(bits(forward.z), bits(torch.where(wide, everything.z, z)))
        assert torch.equal(bits(forward.y)[wide], bits(everything.y)[wide])

    none = torch.zeros_like(case.flagged)
    check(surely, none)
    row, column = (int(flags.nonzero()[-1]) for flags in (case.row_flags, case.column_flags))
    case.column_flags.zero_()
    case.column_flags[column] = 1
    tile = rescue_tile(group).columns // group
    rows_alone = int((case.row_flags == 0).nonzero()[-1])
    for value in (0.999 * surely, torch.zeros_like(surely), surely * NAN, surely / 0.0):
        z, cells = surely.clone(), none.clone()
        z[row, -1] = value[row, -1]  # its groups as far as a tile holds them
        cells[row, 9 - (9 % tile or tile) :] = True
        z[rows_alone, column] = value[rows_alone, column]
        cells[rows_alone, column // group] = True
        z[rows_alone, column - 1 if column else 1] = 0  # of no flag
        check(z, cells)
    case.row_flags[row] = 2
    cells = none.clone()
    cells[row] = True
    check(surely, cells)
    case.column_flags[column] = 3
    cells[:, column // group] = True
    cells[case.row_flags.bool()] |= (
        torch.arange(9, device="cuda") // tile == column // group // tile
    )
    check(surely, cells)


def test_a_graph_replays_with_other_flags():
    case = make_case(16, 40, 600)
    forward = case.empty()
    case.guard(forward)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for found in forward.outputs:
            found.fill_(NAN)
        case.guard(forward)
    for row, column in ((None, None), (5, None), (599, 17), (None, None)):
        case.row_flags.zero_()
        case.column_flags.zero_()
        if row is not None:
            case.row_flags[row] = 1
        if column is not None:
            case.column_flags[column] = 1
        graph.replay()
        for found, expected in zip(forward.outputs, case.compute().outputs, strict=True):
            assert torch.equal(bits(found), bits(expected))


def test_no_rows():
    case = make_case(16, 4, 0)
    assert case.compute().y.shape == (0, 64)


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


@pytest.mark.alone
@pytest.mark.parametrize("m, k, groups", [(1024, 8192, 512), (65536, 128, 8), (8192, 4096, 256)])
def test_costs_next_to_nothing_where_nothing_is_flagged(m, k, groups):
    case = make_case(16, groups, m, k, training=False)
    forward, other = case.empty(), torch.zeros(2**20, device="cuda")

    def guarded() -> None:
        other.add_(1)
        case.guard(forward)

    alone = microseconds(lambda: other.add_(1), 100)
    cost = microseconds(guarded, 100) - alone
    print(f"({m}, {k}) -> {groups * 16}: nothing flagged costs {cost:.2f} us")
    assert cost < 5


@pytest.mark.alone
@pytest.mark.parametrize("m, k, groups", [(1024, 8192, 512), (16384, 1024, 64), (8192, 4096, 256)])
def test_one_flag_keeps_much_of_the_gpu_at_work(m, k, groups):
    """One row of W, and one of x: a small part of what all of them cost."""
    case = make_case(16, groups, m, k, training=False)
    forward, n = case.empty(), groups * 16
    splits = splits_of(rescue_tile(16), m, n, k, sm_count())

    def cost() -> float:
        return microseconds(
            lambda: case.guard(forward),
            1,
            5,
        )

    case.column_flags[n // 2] = 1
    column = cost()
    case.column_flags.zero_()
    case.row_flags[m // 2] = 1
    row = cost()
    case.row_flags.fill_(1)
    everything = cost()
    print(
        f"({m}, {k}) -> {n}, {splits} splits: one row of W {column:.0f} us, of x {row:.0f}, "
        f"all {everything:.0f}"
    )
    assert max(column, row) < everything / 4


@pytest.mark.alone
def test_costs_about_what_eager_does_where_all_is_flagged():
    case = make_case(16, 512, 1024, 8192, training=False)
    forward = case.empty()
    x, w, bias, gamma, beta = case.inputs[:5]
    eager = microseconds(lambda: linear_norm(x, w, bias, case.problem.chain, gamma, beta), 1, 5)
    for rows in (1, 32, 33, 128, 1024):
        case.row_flags.zero_()
        case.row_flags[torch.randperm(1024, device="cuda")[:rows]] = 1
        ours = microseconds(
            lambda: case.guard(forward),
            1,
            5,
        )
        rate = 2e-6 * rows * 8192 * 8192 / ours
        print(f"kb62, {rows} rows flagged: {ours:.0f} us, {rate:.1f} TFLOP/s, eager {eager:.0f}")
    assert ours < 1.5 * eager
