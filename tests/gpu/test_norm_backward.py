"""The backward norm kernel on a GPU: what test_norm_forward.py's shared checks leave out."""

import itertools

import pytest
import torch
from torch import Tensor

from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.norm.backward import Factors, Largest, NormBackward
from epinorm.chain import Chain
from epinorm.problem import Forward, Inputs, Layout, Plan, Problem, Wanted
from epinorm.tools.accuracy import relative_error

PLAN = Plan("epilogue", "test")
CHAINS = (
    "group_norm(3)|leaky_relu(0.1)|scale(2)",
    "gelu|mul_channel|group_norm(3)|add_residual|silu|add_channel",
    "add_residual|tanh|layer_norm|mul_channel|softplus",
    "rms_norm|mish",
)


class LinearNorm(torch.autograd.Function):
    """forward() and backward() of the CUDA backend as autograd sees them."""

    @staticmethod
    def forward(ctx, chain: str, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        inputs = Inputs(x, weight, *rest[:3], tuple(rest[3:]))
        n, dtype = weight.shape[0], x.dtype
        precision = "native" if dtype != torch.float32 else "highest"
        ctx.problem = Problem(
            Chain.parse(chain), *x.shape, n, dtype, dtype, dtype, True, True, True, True, x.device,
            precision,
        )  # fmt: skip
        layout = Layout(inputs.x.stride(0), inputs.weight.stride(0), (ctx.problem.m, ctx.problem.n))
        ctx.executable = CudaExecutable(ctx.problem, PLAN, layout)
        kept = ctx.executable.forward(*inputs)
        ctx.save_for_backward(*inputs[:5], *inputs.operands, *kept.outputs)
        return kept.y

    @staticmethod
    def backward(ctx, dy: Tensor):
        saved = ctx.saved_tensors
        inputs = Inputs(*saved[:5], tuple(saved[5:-4]))
        need = ctx.needs_input_grad
        want = Wanted(*need[1:6], tuple(need[6:]))
        found = ctx.executable.backward(inputs, [Forward(*saved[-4:])], dy, want)
        return None, *found[:5], *found.operands


def tensors(chain: str, m: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(m, k), (n, k), (n,), (n,), (n,)]
    shapes += [(n,) if kind == "channel" else (m, n) for kind in Chain.parse(chain).operand_kinds]
    return [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("chain", CHAINS)
def test_gradcheck_in_float64(chain):
    leaves = tensors(chain, 5, 4, 12, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *t: LinearNorm.apply(chain, *t), leaves, eps=1e-6, atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("index", range(7))
def test_each_wanted_gradient_alone_is_that_of_all(index):
    chain = CHAINS[1]
    leaves = tensors(chain, 33, 8, 48, torch.float32)
    y = LinearNorm.apply(chain, *leaves)
    dy = torch.randn_like(y)
    every = torch.autograd.grad(y, leaves, dy)
    alone = [t.detach().requires_grad_(i == index) for i, t in enumerate(leaves)]
    (found,) = torch.autograd.grad(LinearNorm.apply(chain, *alone), [alone[index]], dy)
    assert relative_error(found, every[index]) < 1e-6


def test_broadcast_gradient_of_a_sum():
    leaves = tensors(CHAINS[0], 17, 8, 48, torch.float32)
    found = torch.autograd.grad(LinearNorm.apply(CHAINS[0], *leaves).sum(), leaves)
    y = LinearNorm.apply(CHAINS[0], *leaves)
    dense = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))


def test_nan_in_dy_stays_in_its_row_and_group(norm_case):
    case = norm_case(16, 3, 9)
    kept = case.forward()
    clean = case.backward(kept)
    case.dy[4, 20] = float("nan")
    found = case.backward(kept)
    hit = torch.zeros_like(case.z, dtype=torch.bool)
    hit[4, 16:32] = True
    assert torch.equal(found["dz"].isnan(), hit)
    assert torch.equal(found["dz"][~hit], clean["dz"][~hit])
    assert found["norm_weight"].isnan().nonzero().flatten().tolist() == [20]
    assert found["bias"].isnan().nonzero().flatten().tolist() == list(range(16, 32))


@pytest.mark.parametrize("m", [1, 1024])
def test_sums_over_rows_are_as_accurate_as_eagers(norm_case, m):
    """One sign throughout: sums that grow, where the order of addition matters."""
    case = norm_case(32, 4, m, uniform=True)
    case.dy = case.dy.abs()
    case.check()


def test_no_rows_give_zero_sums(norm_case):
    case = norm_case(16, 2, 0)
    found = case.backward(case.forward())
    assert all(not t.any() for t in found.values())
    assert found["norm_weight"].shape == (32,)


def test_streams_do_not_share_memory(norm_case):
    """Two problems of the same sizes on two streams at once: each has its own partial sums."""
    cases = [norm_case(16, 64, 2048) for _ in range(2)]
    for case in cases:
        case.problem = cases[0].problem
    kept = [case.forward() for case in cases]
    expected = [case.backward(k) for case, k in zip(cases, kept, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = []
    for _, (case, k, stream) in itertools.product(range(5), zip(cases, kept, streams, strict=True)):
        with torch.cuda.stream(stream):
            found.append(NormBackward(case.problem)(case.inputs, k, case.dy, case.want))
    torch.cuda.synchronize()
    for i, result in enumerate(found):
        assert torch.equal(result.norm_weight, expected[i % 2]["norm_weight"])
        assert torch.equal(result.dz, expected[i % 2]["dz"])


def part(storage: Tensor, address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(rows, columns) of ``dtype`` at an address inside ``storage``."""
    begin = address - storage.data_ptr()
    return storage[begin : begin + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("wanted", ["rows", "columns", "both"])
@pytest.mark.parametrize(
    ("channels", "groups", "m"),
    [(16, 24, 70), (4, 6, 33), (256, 3, 40), (100, 2, 9), (1024, 2, 12), (6000, 3, 5)],
)
def test_largest_magnitudes_of_rows_and_columns(norm_case, channels, groups, m, wanted):
    """Exactly those of the dz that is written, times powers of two: teams of every kind."""
    case = norm_case(channels, groups, m)
    n = channels * groups
    by_columns, by_rows = (
        torch.exp2(torch.randint(-9, 9, (size,), device="cuda").float()) for size in (n, m)
    )
    case.dy[m // 2] = 0
    kept = case.forward()
    factors = Factors(
        by_columns.data_ptr() if wanted != "columns" else 0,
        by_rows.data_ptr() if wanted != "rows" else 0,
    )
    plain = NormBackward(case.problem)(case.inputs, kept, case.dy, case.want)
    found = NormBackward(case.problem)(case.inputs, kept, case.dy, case.want, factors)
    # The kernel is another one, whose registers may have led to another tile.
    assert relative_error(found.dz, plain.dz) < 1e-6
    assert relative_error(found.norm_weight, plain.norm_weight) < 1e-6
    largest: Largest = found.largest
    at, storage = largest, largest.scratch[0]
    if wanted != "columns":
        rows = part(storage, at.rows, (m, at.row_parts), torch.float32)
        assert torch.equal(rows.amax(1), (found.dz * by_columns).abs().amax(1))
        assert not part(at.flags, at.row_flags, (1, m), torch.uint8).any()
    if wanted != "rows":
        columns = part(storage, at.columns, (1, n), torch.float32)
        assert torch.equal(columns[0], (found.dz * by_rows[:, None]).abs().amax(0))
        assert not part(at.flags, at.column_flags, (1, n), torch.uint8).any()


def test_largest_of_a_nan_is_a_nan(norm_case):
    case = norm_case(16, 8, 40)
    case.dy[3, 20] = float("nan")
    ones = torch.ones(128, device="cuda")
    factors = Factors(ones.data_ptr(), ones.data_ptr())
    kept = case.forward()
    found = NormBackward(case.problem)(case.inputs, kept, case.dy, case.want, factors)
    largest = found.largest
    rows = part(largest.scratch[0], largest.rows, (40, largest.row_parts), torch.float32)
    assert rows.isnan().any(1).nonzero().flatten().tolist() == [3]
    columns = part(largest.scratch[0], largest.columns, (1, 128), torch.float32)
    assert columns[0].isnan().nonzero().flatten().tolist() == list(range(16, 32))
