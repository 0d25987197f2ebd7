"""The backward pass on the host, without a GPU: which kernels, in which order, what is freed when.

Kernels are stand-ins that compute nothing; each launch's arguments must fit its signature.
"""

import dataclasses
import sys
import weakref
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import epinorm.backends.cuda.executable  # noqa: F401  (binds what `launched` replaces, before it does)
from epinorm.backends import memo
from epinorm.backends.cuda import plane_products
from epinorm.backends.cuda.fp32 import gradient_planes, norm_planes, planes, rescue, rescue_gradient
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes, nbytes_kept
from epinorm.backends.cuda.fp32.planes import splitter
from epinorm.backends.cuda.gemm.hopper import linear_norm
from epinorm.backends.cuda.gemm.hopper import product as hopper_product
from epinorm.backends.cuda.norm import backward as norm_backward
from epinorm.backends.cuda.plan import gradients
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.replay import recorded, recording
from epinorm.chain import Chain
from epinorm.operator import calls
from epinorm.problem import Inputs, Plan
from imaginary import believe_in, imaginary_h200

CPU = torch.device("cpu")
SHARED = 232448
M, K, N, GROUPS = 40, 32, 48, 6
FACTS = (f"group_norm({GROUPS})|silu", "single", False, None)
ALL = (True,) * 5


class Stand:
    """In place of a kernel: notes its launches in order."""

    def __init__(self, entry, launched):
        self.entry, self.launched = entry, launched

    def blocks_per_sm(self, threads):
        return 4

    def clusters_at_once(self, cluster, threads):
        return 64

    def prepare(self, signature, *grid_and_block, **options):
        def launch(*values):
            kinds = {"m": bytes, "f": float}
            assert len(values) == len(signature), (self.entry, signature, values)
            for letter, value in zip(signature, values, strict=True):
                assert isinstance(value, kinds.get(letter, int)), (self.entry, signature, values)
            self.launched.append(self.entry)
            for note in self.launched.notes:
                note(self.launched)

        return launch


class Launched(list):
    def __init__(self):
        super().__init__()
        self.notes = []


@pytest.fixture
def launched(monkeypatch):
    found = Launched()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    believe_in(monkeypatch, Gpu((9, 0), 132, SHARED, SHARED + 1024))
    stands = {
        "load": lambda source, device: Stand(source.entry, found),
        "tensor_map": lambda *arguments: b"0" * 128,
    }
    modules = (*(gradient_planes, linear_norm, hopper_product, norm_backward, norm_planes, planes),)
    for module in (*modules, rescue, rescue_gradient):
        for name, stand in stands.items():
            monkeypatch.setattr(module, name, stand, raising=False)
    monkeypatch.setattr(gradients, "planes_taken", lambda p, x, w, *core: planes_of(p, x, w))
    monkeypatch.setattr(calls, "plan_for", lambda *_: Plan("single", "test", "hopper"))
    memo.clear()
    yield found
    memo.clear()


@pytest.fixture
def written(monkeypatch):
    """dz is written as planes, small as it is."""
    monkeypatch.setattr(gradients, "worthwhile", lambda problem, planes: True)


def planes_of(problem, want_x, want_weight):
    fp32 = problem.dtype == torch.float32
    return fp32 and want_x, fp32 and want_weight


def run(dtype, wanted=ALL, left=None, into=None):
    """Yields a weak reference to z, then the gradients."""
    shapes = [(M, K), (N, K), (N,), (N,), (N,)]
    tensors = (*[torch.randn(shape).to(dtype) for shape in shapes], ())
    kept = [torch.randn(M, N).to(dtype), *torch.rand(2, M, GROUPS)]
    alive = weakref.ref(kept[0])
    dy = torch.randn(M, N).to(dtype)
    yield alive
    yield calls.run_backward(tensors, FACTS, kept, dy, wanted, None, None, left, into)


NORM = ["norm_backward", "norm_column_sums"]
PRODUCTS = ["hopper_product", "rescue_gradient"] * 2


def test_fp32_makes_its_planes_once(launched):
    _, found = run(torch.float32)
    assert launched == ["split", "split", *NORM, "split_gradient", *PRODUCTS]
    assert [tuple(g.shape) for g in found] == [(M, K), (N, K), (N,), (N,), (N,)]
    assert {g.dtype for g in found} == {torch.float32}


WRITTEN = ["norm_backward_planes", "rescale_planes", "norm_backward"]


def test_fp32_writes_dz_once_as_planes(launched, written):
    _, found = run(torch.float32)
    assert launched == ["split", "split", *WRITTEN, *PRODUCTS]
    assert [tuple(g.shape) for g in found] == [(M, K), (N, K), (N,), (N,), (N,)]
    del launched[:]
    run_again = run(torch.float32, (True, True, False, False, False))
    assert len(list(run_again)[1]) == 2
    assert launched == ["split", "split", *WRITTEN, *PRODUCTS]


def test_flags_come_beside_dx_where_memory_allows_it(launched, written, monkeypatch):
    monkeypatch.setattr(gradients, "beside_dx", lambda *_: True)
    _, found = run(torch.float32)
    expected = [WRITTEN[0], PRODUCTS[0], *WRITTEN[1:], *PRODUCTS[1:]]
    assert launched == ["split", "split", *expected]
    assert [tuple(g.shape) for g in found] == [(M, K), (N, K), (N,), (N,), (N,)]
    del launched[:]
    into = torch.zeros(N, K)
    assert list(run(torch.float32, into=into))[1][1] is into
    assert launched[2:5] == WRITTEN  # dX, not dW, would be the peak


def test_one_product_takes_planes_of_its_own(launched, written):
    _, _ = run(torch.float32, (False, True, True, False, False))
    assert launched == ["split", *NORM, "split_gradient", *PRODUCTS[:2]]


def test_largest_magnitudes_of_columns_are_joined_once(launched):
    """Without sums over rows too: else each block of split_gradient would read all parts."""
    _, _ = run(torch.float32, (True, True, False, False, False))
    assert launched == ["split", "split", *NORM, "split_gradient", *PRODUCTS]


def test_rows_that_no_cluster_holds_are_split(launched, written, monkeypatch):
    monkeypatch.setattr(norm_planes, "rows_plan", lambda *_: None)
    _, _ = run(torch.float32)
    assert launched == ["split", "split", *NORM, "split_gradient", *PRODUCTS]


def test_planes_add_dw_to_what_is_there(launched, written):
    into = torch.zeros(N, K)
    _, found = run(torch.float32, into=into)
    assert launched[-4:] == [*PRODUCTS[:2], "hopper_product_into", "rescue_gradient"]
    assert found[1] is into


HELD = {
    False: [
        ("rescale_planes", [True, True, True]),
        ("norm_backward", [True, True, True]),
        ("hopper_product", [True, True, False]),
    ],
    True: [
        ("hopper_product", [True, True, True]),
        ("rescale_planes", [True, True, True]),
        ("norm_backward", [True, True, True]),
    ],
}
"""Up to dX and its flags: whether x's planes, W's and z are held, flags before dX or beside it."""


@pytest.mark.parametrize("beside", [False, True])
def test_what_is_done_with_is_gone_before_more_is_allocated(launched, written, beside, monkeypatch):
    """z before the products, or behind dX; W's planes before dW."""
    monkeypatch.setattr(gradients, "beside_dx", lambda *_: beside)
    made, tensors = bound(torch.float32)
    sizes = [splitter(2, K, rows, 0, CPU).nbytes for rows in (M, N)]
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    kept = [torch.randn(M, N), *torch.rand(2, M, GROUPS)]
    alive = [weakref.ref(t) for t in (*buffers, kept[0])]
    left = KeptPlanes(*buffers)
    del buffers
    fate = []
    launched.notes.append(
        lambda so_far: fate.append((so_far[-1], [t() is not None for t in alive]))
    )
    calls.run_backward(tensors, FACTS, kept, torch.randn(M, N), ALL, None, made, left)
    assert fate[1:] == [
        *HELD[beside],
        ("rescue_gradient", [True, True, False]),
        ("hopper_product", [True, False, False]),
        ("rescue_gradient", [True, False, False]),
    ]
    assert nbytes_kept(CPU) == 0


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ((True, False, False, False, False), ["split", "norm_backward", "split_gradient"]),
        ((False, True, True, False, False), ["split", *NORM, "split_gradient"]),
        ((False, False, True, True, True), NORM),
    ],
)
def test_fp32_makes_no_planes_that_nobody_reads(launched, wanted, expected):
    _, found = run(torch.float32, wanted)
    assert launched == expected + PRODUCTS[:2] * any(wanted[:2])
    assert len(found) == sum(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_takes_dz_as_it_is(launched, dtype):
    _, found = run(dtype)
    assert launched[:2] == NORM
    assert set(launched[2:]) <= {"hopper_product", "add_splits"}
    assert {g.dtype for g in found} == {dtype}


def test_fp32_adds_dw_to_what_is_there(launched):
    into = torch.zeros(N, K)
    _, found = run(torch.float32, into=into)
    products = ["hopper_product", "rescue_gradient", "hopper_product_into", "rescue_gradient"]
    assert launched == ["split", "split", *NORM, "split_gradient", *products]
    assert found[1] is into


def test_a_graph_under_capture_adds_only_by_kernels_that_are_there(launched, monkeypatch):
    """They cannot be loaded meanwhile; a micro-batch before the capture has loaded them."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    into = torch.zeros(N, K)
    _, found = run(torch.float32, into=into)
    assert found[1] is not into
    capturing = False
    assert list(run(torch.float32, into=into))[1][1] is into
    capturing = True
    assert list(run(torch.float32, into=into))[1][1] is into


def test_nothing_is_added_where_the_guard_cannot_be_had(launched, monkeypatch):
    real = plane_products.prepare_rescue

    def broken(*given, adds=False):
        if adds:
            raise RuntimeError("no compiler")
        return real(*given)

    monkeypatch.setattr(plane_products, "prepare_rescue", broken)
    with pytest.raises(RuntimeError, match="no compiler"):
        list(run(torch.float32, into=torch.zeros(N, K)))
    assert "hopper_product_into" not in launched


def test_16_bit_adds_dw_by_the_library(launched):
    """dz, which no kernel computes here, is whatever its memory held: only what is new is known."""
    into = torch.ones(N, K, dtype=torch.bfloat16)
    _, found = run(torch.bfloat16, into=into)
    assert "hopper_product_into" not in launched
    assert found[1] is into
    assert into._version == 1


def test_sums_in_parts_go_to_a_tensor_of_their_own(launched, monkeypatch):
    chosen = hopper_product.choose
    in_parts = lambda *given: dataclasses.replace(chosen(*given), parts=2)  # noqa: E731
    monkeypatch.setattr(hopper_product, "choose", in_parts)
    into = torch.zeros(N, K)
    _, found = run(torch.float32, into=into)
    assert found[1] is not into
    assert "hopper_product_into" not in launched


def test_z_is_gone_before_the_products(launched):
    step = run(torch.float32)
    alive = next(step)
    fate = []
    launched.notes.append(lambda so_far: fate.append((so_far[-1], alive() is not None)))
    next(step)
    assert ("norm_backward", True) in fate
    assert ("hopper_product", False) in fate
    assert ("hopper_product", True) not in fate


def bound(dtype, m=M):
    """What computes a step, and its tensors."""

    shapes = [(m, K), (N, K), (N,), (N,), (N,)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    inputs = Inputs(*tensors, (), calls.constants_of(FACTS))
    return calls.executable_of(inputs, FACTS, True, True), (*tensors, ())


def test_planes_that_were_left_are_used_and_dropped_one_by_one(launched):
    made, tensors = bound(torch.float32)
    sizes = [splitter(2, K, rows, 0, CPU).nbytes for rows in (M, N)]
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    x_alive, w_alive = (weakref.ref(buffer) for buffer in buffers)
    left = KeptPlanes(*buffers)
    del buffers
    fate = []
    launched.notes.append(
        lambda so_far: fate.append((so_far[-1], x_alive() is not None, w_alive() is not None))
    )
    kept = [torch.randn(M, N), *torch.rand(2, M, GROUPS)]
    calls.run_backward(tensors, FACTS, kept, torch.randn(M, N), ALL, None, made, left)
    assert launched == [*NORM, "split_gradient", *PRODUCTS]  # no split of x or W
    assert fate[-3:] == [
        ("rescue_gradient", True, True),  # of dX
        ("hopper_product", True, False),  # W's are gone: dW is allocated by now
        ("rescue_gradient", True, False),
    ]
    assert nbytes_kept(CPU) == 0
    assert x_alive() is None
    kept = [torch.randn(M, N), *torch.rand(2, M, GROUPS)]
    calls.run_backward(tensors, FACTS, kept, torch.randn(M, N), ALL, None, made, left)
    assert launched[-9:] == ["split", "split", *NORM, "split_gradient", *PRODUCTS][-9:]


@pytest.mark.parametrize("m", [N // 2, 2 * N])
def test_the_larger_planes_are_gone_before_the_other_product(launched, m):
    """W's before dW where W is larger than x, x's before dX where x is."""
    made, tensors = bound(torch.float32, m)
    sizes = [splitter(2, K, rows, 0, CPU).nbytes for rows in (m, N)]
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    alive = [weakref.ref(buffer) for buffer in buffers]
    left = KeptPlanes(*buffers)
    del buffers
    fate = []
    launched.notes.append(
        lambda so_far: fate.append((so_far[-1], *[buffer() is not None for buffer in alive]))
    )
    kept = [torch.randn(m, N), *torch.rand(2, m, GROUPS)]
    found = calls.run_backward(tensors, FACTS, kept, torch.randn(m, N), ALL, None, made, left)
    assert [tuple(g.shape) for g in found[:2]] == [(m, K), (N, K)]
    products = [there for kernel, *there in fate if kernel == "hopper_product"]
    assert products == [[True, True], [False, True] if m > N else [True, False]]


def test_no_rows_need_no_kernel(launched):
    shapes = [(0, K), (N, K), (N,), (N,), (N,)]
    tensors = (*[torch.randn(shape) for shape in shapes], ())
    kept = [torch.empty(0, N), *torch.empty(2, 0, GROUPS)]
    found = calls.run_backward(tensors, FACTS, kept, torch.empty(0, N), (False, False, *ALL[2:]))
    assert launched == []
    assert all(not g.any() for g in found)


def most_bytes(m, k, n, chain, waits=True):
    """Of z, planes and what a recorded backward pass allocates: where its memory peaks; where y is
    kept of it and of dy too. waits: the planes of the forward pass are still there."""
    facts = (chain, "auto", False, None)
    parsed = Chain.parse(chain)
    vectors = [torch.empty(n) for _ in range(3 if parsed.norm else 1)] + [None] * 2
    operands = tuple(torch.empty(m, n) for _ in parsed.operand_kinds)
    tensors = (torch.empty(m, k), torch.empty(n, k), *vectors[:3])
    with imaginary_h200(), torch.no_grad():
        inputs = Inputs(*tensors, operands, calls.constants_of(facts))
        made = calls.executable_of(inputs, facts, True, True)
        out, dy = made.forward(*inputs), torch.empty(m, n)
        saved, left = (out.saved(parsed), out.mean, out.rstd), out.left
        left.restrict(waits, waits)
        planes = [left.x, left.weight] if waits else []
        own = {t.data_ptr() for t in (*planes, saved[0], *[dy] * parsed.saves_y)}
        given = [dy, *tensors, *operands, *saved, *planes]
        wanted = tuple(t is not None for t in (*tensors, *operands))
        with recording([t for t in given if t is not None and t.numel()]) as noted:
            known = made, left
            found = calls.run_backward(
                (*tensors, operands), facts, list(saved), dy, wanted, None, *known
            )
        facts_of_run = recorded(noted, [t for t in found if t is not None])
    buffers, steps = noted.buffers, facts_of_run.steps
    alive = {i: b.end - b.begin for i, b in enumerate(buffers[: noted.given]) if b.begin in own}
    peak = 0
    for *_, allocated, done in steps:
        for i in allocated:
            over = facts_of_run.made[i - noted.given][2]
            alive[i] = alive.pop(over) if over >= 0 else buffers[i].end - buffers[i].begin
        peak = max(peak, sum(alive.values()))
        for i in done:
            alive.pop(i, None)
    return peak


@pytest.mark.parametrize(
    ("sizes", "chain", "matrices"),
    [
        # z, which dz takes the place of; x's and W's planes; dz's twice; dX and its two parts.
        ((1024, 1024, 1024), "rms_norm|silu", 1 + 2 + 2 + 3),
        # z; x's planes, four times as wide; dz's; the residual's gradient; a quarter of it scratch.
        ((8192, 3072, 768), "add_residual|layer_norm(1e-05)", 1 + 4 + 1 + 1 + 0.25),
    ],
)
def test_the_most_that_a_backward_pass_holds(sizes, chain, matrices):
    """In results of the linear: Dreamer's layer, and the one of BERT's where its step peaks."""
    m, _, n = sizes
    assert most_bytes(*sizes, chain) < (matrices + 0.1) * 4 * m * n


@pytest.mark.parametrize("waits", [True, False])
def test_dz_for_the_guard_is_written_over_the_planes_of_x(waits):
    """dy and y, which stay; x's planes, dz's; dW, half as large, and W's where these waited."""
    m, k, n = 4096, 2048, 2048
    most = most_bytes(m, k, n, "relu", waits) / (4 * m * n)
    assert most < 2 + 1 + 1 + 0.5 + 0.5 * waits + 0.01


@pytest.mark.parametrize("sizes", [(4096, 2048, 2048), (4000, 2056, 2040), (2048, 2056, 2040)])
@pytest.mark.parametrize("chain", ["relu", "add_residual|relu", "silu"])
def test_it_is_where_it_fits_and_nothing_else_could_hold_dz(sizes, chain):
    with imaginary_h200():
        m, k, n = sizes
        inputs = Inputs(
            *(torch.empty(m, k), torch.empty(n, k), torch.empty(n), None, None),
            (torch.empty(m, n),) * ("residual" in chain),
        )
        made = calls.executable_of(inputs, (chain, "auto", False, None), True, True)
        steps = [step.kernel for step in made.plan.backward]
        expected = chain == "relu" and k <= m
        assert (steps[2:5] == ["hopper_product", "norm_backward", "rescue_gradient"]) == expected
        assert any("over x's planes" in step.reason for step in made.plan.backward) == expected
