"""x's planes over x (fp32/split_over.cu): the same y as with planes beside it, and nothing else
changes.

Bits are the same but where something is flagged. There a flagged row of x is read as it was, and
another beside a flagged row of W from its planes; rows and columns are compared with float64 by
internals/precision.md's promise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from product_case import ProductCase, bits, make_product, split, to_tf32

from epinorm.backends.cuda import executable
from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.fp32.planes import splitter
from epinorm.backends.cuda.plan import hopper
from epinorm.backends.cuda.runtime.native import native
from epinorm.backends.memo import clear
from epinorm.backends.prepack import prepacked
from epinorm.chain.reference import epilogue
from epinorm.problem import Inputs, Layout, Plan, Strategy
from epinorm.tools.verify import poisoned_memory

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="Hopper's core alone writes planes over x",
)

FLOOR = {"highest": 1e-6, "high": 1e-3}
TINY = 1e-16  # beside values around 1


@pytest.fixture(autouse=True)
def by_planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At `high` too: neither TF32 nor what is converted on the way."""
    every = hopper.candidates
    monkeypatch.setattr(
        hopper, "candidates", lambda p: (t for t in every(p) if not (t.tf32 or t.converts))
    )
    clear()
    torch.manual_seed(0)
    yield
    clear()


@dataclass(frozen=True)
class Shape:
    strategy: Strategy
    chain: str
    m: int
    k: int
    channels: int
    groups: int = 1
    bias: bool = True

    def case(self, kind: str) -> ProductCase:
        case = make_product(
            *(self.m, self.k, self.channels, self.groups, kind, self.chain),
            bias=self.bias, norm_weight="norm" in self.chain, norm_bias="norm" in self.chain,
        )  # fmt: skip
        # Nothing is flagged by chance: magnitudes from a half to one and a half.
        for t in case.inputs[:2]:
            t.copy_((torch.rand_like(t) + 0.5) * torch.randn_like(t).sign())
        case.inputs.weight.div_(self.k**0.5)
        return case


BARE = Shape("single", "identity", 70, 64, 256, bias=False)
SHAPES = [
    BARE,
    Shape("single", "relu", 200, 192, 320),
    Shape("single", "mul_channel|gelu|add_residual", 1030, 2048, 2048),
    Shape("single", "group_norm({groups})|silu", 130, 1024, 256, 4),
    Shape("planes", "layer_norm|silu", 256, 1024, 1024, bias=False),
    Shape("planes", "layer_norm|gelu", 70, 8192, 512),
    Shape("planes", "add_residual|layer_norm", 33, 2048, 4096),
]
CLUSTER = Shape("single", "layer_norm|silu", 9000, 768, 768)
EVERY = [(shape, kind) for kind in FLOOR for shape in SHAPES] + [(CLUSTER, "high")]

every_shape = pytest.mark.parametrize(
    ("shape", "kind"), EVERY, ids=lambda v: v if isinstance(v, str) else f"{v.chain}-{v.k}"
)


def run(case: ProductCase, shape: Shape, inputs: Inputs, spends: bool) -> Tensor:
    """y, into memory that held NaN."""
    problem = replace(case.problem, spends_x=spends)
    plan = Plan(shape.strategy, "", "hopper")
    forward, _ = executable._forward(
        problem, plan, Layout(*_strides(inputs), (problem.m, problem.n))
    )
    like = [torch.empty(problem.m, problem.n, device="cuda")] * 2
    with poisoned_memory(like):
        return forward(inputs).y


def _strides(inputs: Inputs) -> tuple[int, int]:
    return inputs.x.stride(0), inputs.weight.stride(0)


def spend(case: ProductCase, shape: Shape) -> tuple[Tensor, Tensor]:
    """y and what became of x; the same bits twice, and nothing else written."""
    found = []
    for _ in range(2):
        before = [None if t is None else t.clone() for t in case.inputs[:5]]
        operands = [t.clone() for t in case.inputs.operands]
        mine = case.inputs._replace(x=case.inputs.x.clone())
        found.append((run(case, shape, mine, True), mine.x))
        after = *case.inputs[:5], *case.inputs.operands
        for t, kept in zip(after, (*before, *operands), strict=True):
            assert t is None or torch.equal(bits(t), bits(kept))
    for first, second in zip(*found, strict=True):
        assert torch.equal(bits(first), bits(second))
    return found[0]


def flags_of(case: ProductCase) -> tuple[Tensor, Tensor]:
    planes = case.problem.planes
    return split(case.inputs.x, planes).flags, split(case.inputs.weight, planes).flags


def y_of(case: ProductCase, dtype: torch.dtype | None, rounded: bool = False) -> Tensor:
    x, weight, _, gamma, beta = case.inputs[:5]
    exact = case.inputs
    if rounded:
        case.inputs = exact._replace(x=to_tf32(x), weight=to_tf32(weight))
    z = case.linear(dtype)
    case.inputs = exact
    affine = (None if t is None else t.to(z.dtype) for t in (gamma, beta))
    operands = tuple(t.to(z.dtype) for t in case.inputs.operands)
    return epilogue(z, case.problem.chain, *affine, operands)


def errors(difference: Tensor, size: Tensor, rows: bool, alike: bool) -> Tensor:
    """Of each row, or column; alike: those across it count as much as each other."""
    across = size.abs().quantile(0.9, 0 if rows else 1, keepdim=True)
    across = across.where(across > 0, 1.0)
    difference, size = (t / across if alike else t for t in (difference, size))
    dim = 1 if rows else 0
    return difference.norm(dim=dim) / size.norm(dim=dim).clamp(min=1e-300)


def check(case: ProductCase, shape: Shape) -> None:
    """Ordinary bits where nothing is flagged, the promise where something is."""
    exact = case.inputs.x.clone()
    ordinary = run(case, shape, case.inputs, False)
    y, left = spend(case, shape)
    flags, columns = flags_of(case)
    groups = columns.bool()
    if case.problem.chain.norm is not None:
        groups = groups.view(case.problem.groups, -1).any(1)
    touched = (flags != 0)[:, None] | groups.repeat_interleave(case.problem.n // len(groups))[None]
    assert torch.equal(bits(y[~touched]), bits(ordinary[~touched]))
    flagged = flags != 0
    assert torch.equal(bits(left[flagged]), bits(exact[flagged]))
    # Of a product by itself the ordinary guard leaves listed elements that cannot count.
    again = flagged if shape.bias else flags == 2
    assert torch.equal(bits(y[again]), bits(ordinary[again]))
    spent = ~flagged & (exact != 0).any(1)
    assert (left[spent].view(torch.int32) != exact[spent].view(torch.int32)).any(1).all()
    precision = case.problem.precision
    truth, yardsticks = y_of(case, torch.float64), [y_of(case, None)]
    assert torch.equal(y.isnan(), ordinary.isnan())
    assert torch.equal(y.isinf(), ordinary.isinf())
    if precision == "high":
        yardsticks.append(y_of(case, torch.float64, rounded=True))
    results = truth.float().double(), y.double(), *(t.double() for t in (*yardsticks, ordinary))
    finite = torch.stack(results).isfinite().all(0)
    assert finite.any(1).float().mean() > 0.9
    truth, y, *others = (t.double().where(finite, 0.0) for t in (truth, *results[1:]))
    bare = case.problem.chain.norm is None
    size = truth  # the promise is of rows of the linear's output, most of which ReLU may hide
    if str(case.problem.chain) == "relu":
        size = case.linear(torch.float64).where(finite, 0.0)
    for rows in (True, False)[: 1 + bare]:
        theirs = torch.stack([errors(t - truth, size, rows, bare) for t in others]).amax(0)
        worst = errors(y - truth, size, rows, bare) / (2 * theirs).clamp(min=FLOOR[precision])
        assert worst.max() <= 1, f"{'rows' if rows else 'columns'}: {worst.max():.2f} of the limit"


def flag_rows(case: ProductCase) -> None:
    x, k = case.inputs.x, case.problem.k
    for count, row in ((1, 0), (1, 3), (4, 7), (5, 9), (k, 10), (2, len(x) - 1)):
        x[row, torch.randperm(k, device="cuda")[:count]] = TINY
    x[11].mul_(2.0**-70)
    x[12] = 0
    x[13] = 0
    x[14].mul_(1e-40)
    x[15, ::2] = 0
    if case.problem.chain.norm is None:
        x[16].mul_(2.0**70)
        x[17, 5] = float("inf")
        x[18, k - 1] = float("nan")
        x[19, 0], x[19, 1] = float("inf"), float("-inf")
    x[20:23, 1] = -TINY


def flag_columns(case: ProductCase) -> None:
    weight, k = case.inputs.weight, case.problem.k
    n = len(weight)
    for count, row in ((1, 1), (4, 5), (5, n - 2)):
        weight[row, torch.randperm(k, device="cuda")[:count]] = TINY
    weight[8].mul_(2.0**-70)
    weight[9] = 0
    if case.problem.chain.norm is None:
        weight[40].mul_(2.0**70)
        weight[41, 3] = float("inf")
        weight[42, 3] = float("nan")


def flag_both(case: ProductCase) -> None:
    flag_rows(case)
    flag_columns(case)


def every_row(case: ProductCase) -> None:
    """By one element each, beside a row of W that is flagged as well."""
    x = case.inputs.x
    x[torch.arange(len(x)), torch.randint(x.shape[1], (len(x),))] = TINY
    case.inputs.weight[7, 0] = TINY


def nothing(case: ProductCase) -> None: ...


FLAGS: list[Callable[[ProductCase], None]] = [
    *(nothing, flag_rows, flag_columns, flag_both, every_row),
]


@pytest.mark.parametrize("kind", FLOOR)
@pytest.mark.parametrize("k", [8, 64, 72, 192, 1024, 2048, 8192])
@pytest.mark.parametrize("m", [70, 9000])
def test_planes_over_x_are_those_beside_it(m: int, k: int, kind: str) -> None:
    """And so are scales and W's flags; a flagged row of x stays."""
    case = replace(BARE, m=m, k=k).case(kind)
    flag_both(case)
    exact, weight, _ = case.inputs[:3]
    n, planes = len(weight), case.problem.planes
    x, of_x, of_w = exact.clone(), split(exact, planes), split(weight, planes)
    over = splitter(planes, k, m, n, x.device, True)
    buffer = torch.empty(over.nbytes, dtype=torch.uint8, device="cuda")
    at = buffer.data_ptr()
    more = at, at + over.lo, at + over.scale, at + over.flags, *over.numbers
    over.launch(True)(x.data_ptr(), k, weight.data_ptr(), k, *more)
    scales = buffer[over.scale : over.flags].view(torch.float32)
    flags = buffer[over.flags :]
    assert torch.equal(scales[:m], of_x.scale)
    assert torch.equal(scales[over.second :], of_w.scale)
    assert torch.equal(flags[:m], 2 * of_x.flags.sign())
    assert torch.equal(flags[over.second :], of_w.flags)
    whole = of_x.flags != 0
    assert torch.equal(bits(x[whole]), bits(exact[whole]))
    found = *over.planes_over(x), *over.halves_in(buffer, second=True)
    for ours, theirs in zip(found[:2], (of_x.hi, of_x.lo), strict=True):
        assert torch.equal(bits(ours[~whole]), bits(theirs[~whole]))
    for ours, theirs in zip(found[2:], (of_w.hi, of_w.lo), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@every_shape
def test_y_is_right_whatever_is_flagged(shape: Shape, kind: str) -> None:
    for flag in FLAGS:
        case = shape.case(kind)
        flag(case)
        found = flags_of(case)
        assert [f.any().item() for f in found] == [
            flag in (flag_rows, flag_both, every_row),
            flag in (flag_columns, flag_both, every_row),
        ]
        check(case, shape)


@pytest.mark.parametrize("kind", FLOOR)
@pytest.mark.parametrize("k", [8, 64, 72, 128, 512, 4096, 8192])
def test_a_lost_element_alone_beside_zeros(k: int, kind: str) -> None:
    """Its product is itself, which planes have lost."""
    shape = replace(BARE, k=k)
    case = shape.case(kind)
    x, weight = case.inputs.x, case.inputs.weight
    columns = torch.randint(k, (len(x),), device="cuda")
    lost = TINY * (1 + torch.rand(len(x), device="cuda"))
    x[torch.arange(len(x)), columns] = lost
    n = len(weight)
    weight.zero_()
    weight[torch.arange(n), torch.arange(n) % k] = 1
    y, _ = spend(case, shape)
    for row, column in enumerate(columns.tolist()):
        if column < n:
            assert y[row, column] == lost[row]


@pytest.mark.parametrize("kind", FLOOR)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=["relu", "layer_norm"])
def test_with_a_prepacked_weight(shape: Shape, kind: str) -> None:
    for flag in FLAGS:
        case = shape.case(kind)
        flag(case)
        with prepacked(case.inputs.weight):
            check(case, shape)


@pytest.mark.parametrize("kind", FLOOR)
def test_an_x_that_cannot_hold_its_planes_stays(kind: str) -> None:
    shape = replace(BARE, k=192)
    case = shape.case(kind)
    flag_both(case)
    odd = torch.empty(70 * 192 + 1, device="cuda")[1:].view(70, 192)
    apart = torch.empty(70, 200, device="cuda")[:, :192]
    for x in (odd, apart):
        x.copy_(case.inputs.x)
        inputs = case.inputs._replace(x=x)
        y = run(case, shape, inputs, True)
        assert torch.equal(bits(y), bits(run(case, shape, inputs, False)))
        assert torch.equal(bits(x), bits(case.inputs.x))
    for k in (100, 8256):
        shape = replace(BARE, k=k)
        case = shape.case(kind)
        before = case.inputs.x.clone()
        run(case, shape, case.inputs, True)
        assert torch.equal(case.inputs.x, before)


@pytest.mark.parametrize("kind", FLOOR)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=["relu", "layer_norm"])
def test_recorded_passes_and_their_graphs(shape: Shape, kind: str) -> None:
    """At the same addresses and at others, with other values in the same place."""
    native(wait=True)
    cases = []
    for flag in FLAGS:
        case = shape.case(kind)
        flag(case)
        expected, _ = spend(case, shape)
        cases.append((case, expected))
    first = cases[0][0]
    problem = replace(first.problem, spends_x=True)
    made = CudaExecutable(
        problem,
        Plan(shape.strategy, "", "hopper"),
        Layout(problem.k, problem.k, (problem.m, problem.n)),
    )
    places = [tuple(torch.empty_like(t) for t in first.inputs[:2]) for _ in range(2)]
    for _ in range(4):
        for case, expected in cases:
            for x, weight in places:
                x.copy_(case.inputs.x)
                weight.copy_(case.inputs.weight)
                y = made.forward(x, weight, *case.inputs[2:]).y
                assert torch.equal(bits(y), bits(expected))
                del y


def test_a_users_cuda_graph() -> None:
    shape = SHAPES[4]
    cases = [shape.case("highest") for _ in FLAGS]
    x, inputs = torch.empty_like(cases[0].inputs.x), cases[0].inputs
    for case, flag in zip(cases, FLAGS, strict=True):
        flag(case)
        case.inputs = inputs._replace(x=case.inputs.x)
    problem = replace(cases[0].problem, spends_x=True)
    forward, _ = executable._forward(
        problem, Plan("planes", "", "hopper"), Layout(problem.k, problem.k, (problem.m, problem.n))
    )
    x.copy_(inputs.x)
    forward(inputs._replace(x=x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(inputs._replace(x=x)).y
    for case in cases:
        expected, _ = spend(case, shape)
        x.copy_(case.inputs.x)
        graph.replay()
        assert torch.equal(bits(y), bits(expected))
