"""Every kind of norm kernel, of the portable kernel and of Hopper's once, small, for
compute-sanitizer.

`make sanitize-gpu` runs this file; ARGS names kinds of kernels: calls, repeated, over_dy, norm,
batch, portable, hopper, split, clusters, halves, attention.

PyTorch's caching allocator must be off (PYTORCH_NO_CUDA_MEMORY_CACHING=1): it hands out parts of
large blocks, in which an access beyond a tensor's end is still inside an allocation.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from product_case import ProductCase, fitted, forced_tile, make_product, plane_products

import epinorm
from conftest import CHAIN, make_case
from epinorm.backends.cuda.fp32.norm_planes import DzPlanes
from epinorm.backends.cuda.fp32.rescue_gradient import prepare_rescue
from epinorm.backends.cuda.gemm.forward import launch_with
from epinorm.backends.cuda.gemm.hopper.fp32_weight import Converting
from epinorm.backends.cuda.gemm.hopper.product import prepare_adding
from epinorm.backends.cuda.gemm.product import prepare_product
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.backends.cuda.plan.hopper_product import ProductShape, choose
from epinorm.backends.cuda.plan.hopper_tile import Tile, fp32_input_tiles, fp32_weight_tiles
from epinorm.backends.cuda.plan.portable import choose_product_tile
from epinorm.backends.cuda.runtime.device import gpu_of, sm_count
from epinorm.backends.cuda.runtime.native import settle
from epinorm.chain import Rounding
from epinorm.operator.attention import attention
from epinorm.operator.dispatch import Caller
from epinorm.operator.schema import linear_norm_backward, linear_norm_forward, spending_dy
from epinorm.problem import Strategy, Wanted

EVERY = Wanted(True, True, True, True, True, ())
HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"

ROWS = "dropout(0.3)|mul_row|add_residual"

# Channels in a group, groups, rows, dtype, chain, padding of the rows.
CASES = (
    (16, 8, 33, torch.float32, CHAIN, 0),
    (16, 8, 33, torch.bfloat16, CHAIN, 0),
    (33, 3, 5, torch.float16, CHAIN, 0),
    (24, 5, 37, torch.float32, HEAVY, 3),
    (16, 4, 17, torch.float64, HEAVY, 0),
    (1000, 1, 7, torch.bfloat16, "layer_norm|gelu", 8),
    (4096, 2, 3, torch.float32, CHAIN, 0),
    (20000, 1, 3, torch.float32, "rms_norm|relu", 0),
    (65544, 1, 2, torch.bfloat16, CHAIN, 0),
)


# Rows, K, channels in a group, groups, kind, training. Rows of x on 16, 4 and 2 bytes; groups in a
# warp, shared by warps, and wider than a warp's registers; rows of y that do not fill 16 bytes.
PORTABLE = (
    (130, 136, 16, 17, "bfloat16", True),
    (37, 66, 16, 5, "bfloat16", False),
    (37, 33, 2, 5, "float16", True),
    (20, 40, 256, 2, "bfloat16", False),
    (20, 40, 136, 2, "highest", True),
    (130, 70, 16, 17, "highest", True),
    (65, 33, 40, 3, "high", False),
)

# As above, for Hopper's kernel: tiles in turn and together, W resident, ragged rows and columns,
# planes and TF32.
HOPPER = (
    (130, 136, 16, 17, "bfloat16", True),
    (300, 1024, 16, 32, "bfloat16", False),
    (200, 64, 4, 32, "float16", True),
    (5, 520, 8, 9, "bfloat16", False),
    (130, 70, 16, 17, "highest", True),
    (130, 72, 16, 17, "high", True),
    (300, 100, 128, 8, "high", True),  # TF32 from registers
)
# Groups shared by the blocks of a cluster. Racecheck takes half a minute for these, where the other
# tools take seconds: what came to no end within 25 s was that, and cut off (H200, compute-sanitizer
# of CUDA 13.0). No wait can miss its phase: a buffer's barrier completes phase e + 2 when every
# warp of every block has sent to it, each after having read phase e; blocks write into each other
# behind barrier.cluster, and end when they received all that is ever sent to them.
CLUSTERS = (
    (70, 200, 512, 1, "bfloat16", True),
    (70, 200, 1024, 1, "bfloat16", False),
    (70, 200, 2048, 1, "float16", True),
    (70, 200, 768, 1, "high", True),  # TF32 from registers
    (70, 202, 768, 1, "high", True),  # by a plane, and its range guard's
    (70, 200, 256, 33, "highest", True),  # enough tiles for clusters
)
IN_HALVES = (
    (Tile(128, 384, 0, ping_pong=False, cluster_n=2), "bfloat16"),
    (Tile(128, 384, 0, ping_pong=False, cluster_n=2), "high"),
    (Tile(128, 384, 4, ping_pong=False, cluster_n=2, fp32_input=True), "high"),
)
# Of a training step whose backward pass writes dz as planes: rows, K, groups of 16 channels. Held
# by a block; by two of a cluster, the last one with lanes to spare. At `high` the kernel between
# runs beside dX.
WRITTEN = (33, 72, 32)
WRITTEN_BY_CLUSTERS = (33, 72, 120)
# Of one that writes dz and splits it: the largest of columns are joined between. Rows, K,
# channels, groups, precision; the last's groups are summed by a kernel of their own.
SPLIT = ((33, 72, 16, 32, "highest"), (37, 68, 12, 6, "high"), (9, 40, 2048, 1, "high"))
# As a user calls it: rows, K, N, norm, pre, dtype, strategy, rounding. Planes with rows of any
# width, and without a norm; statistics rounded as eager's by each kernel of the forward pass. The
# eighth has rows of odd width: else cuBLAS writes them by TMA, which initcheck does not see. Then
# numbers of whole rows and norms of their parts, beside a dropout, by each kernel of a chain.
CALLS: tuple[tuple[int, int, int, Any, str, torch.dtype, Strategy, Rounding], ...] = (
    (70, 200, 768, epinorm.LayerNorm(), "add_residual", torch.float32, "planes", "once"),
    (33, 72, 1000, epinorm.RMSNorm(), "", torch.float32, "planes", "once"),
    (70, 200, 96, None, "gelu", torch.float32, "single", "once"),
    (130, 136, 272, epinorm.GroupNorm(17), "mish", torch.bfloat16, "single", "eager"),
    (37, 66, 80, epinorm.GroupNorm(5), "", torch.float16, "single", "eager"),
    (70, 200, 1024, epinorm.GroupNorm(4), "", torch.bfloat16, "single", "eager"),
    (33, 72, 99, epinorm.GroupNorm(3), "tanh", torch.float16, "epilogue", "eager"),
    (3, 72, 19999, epinorm.GroupNorm(1), "", torch.bfloat16, "epilogue", "eager"),
    (70, 200, 768, epinorm.LayerNorm(), "mul_row|add_residual", torch.bfloat16, "single", "once"),
    (37, 66, 80, epinorm.RMSNorm(num_groups=5), "mul_row", torch.float16, "single", "eager"),
    (70, 200, 1024, epinorm.LayerNorm(num_groups=8), "mul_row", torch.float32, "single", "once"),
    (33, 72, 1000, epinorm.RMSNorm(num_groups=5), ROWS, torch.float32, "planes", "once"),
    (33, 72, 99, epinorm.LayerNorm(num_groups=3), ROWS, torch.float32, "epilogue", "once"),
)
# As these, repeated by native code: fp32 behind the library's products and by planes; 16 bits.
REPEATED: tuple[tuple[int, int, int, Any, str, torch.dtype, Strategy, Rounding], ...] = (
    (130, 136, 272, epinorm.GroupNorm(17), "mish", torch.float32, "single", "once"),
    (1024, 512, 768, epinorm.LayerNorm(), "mul_row|add_residual", torch.float32, "planes", "once"),
    (70, 200, 1024, epinorm.LayerNorm(num_groups=8), "", torch.bfloat16, "single", "once"),
)
# Rows, K, N, chain.
OVER_DY = (
    (130, 72, 256, "group_norm(32)|silu"),
    (70, 72, 1000, "layer_norm(1e-05)|silu"),
    (9, 40, 40000, "rms_norm(1e-05)|silu"),
    (1030, 512, 384, "gelu"),
)
# Of attention: queries, keys, width of a head, in blocks that are not full and in full ones.
ATTENTION = ((100, 70, 64), (128, 128, 64), (65, 130, 128))
# Of a product of the backward pass: rows, columns, length, whether a runs along the sum; its rows
# in memory are whole 16-byte units. The sums of the last two are split over blocks.
PRODUCTS = ((65, 72, 136, True), (136, 72, 65, False))
SPLIT_PRODUCTS = ((64, 64, 4096, True), (64, 64, 4096, False))


def norm_kernels() -> None:
    for channels, groups, m, dtype, chain, extra in CASES:
        case = make_case(channels, groups, m, dtype, chain, extra=extra)
        kept = case.forward()
        gradients = case.backward(kept)
        torch.cuda.synchronize()
        results = [kept.y, *gradients.values()]
        assert all(bool(t.isfinite().all()) for t in results), (channels, dtype, chain)
        print(f"{channels} channels, {groups} groups, {m} rows, {dtype}: done", flush=True)


def portable_kernels() -> None:
    for m, k, channels, groups, kind, training in PORTABLE:
        case = make_product(m, k, channels, groups, kind, training=training)
        run_flagged(dataclasses.replace(case, core="portable"))
    products(portable_product_of, PRODUCTS)


def linear_norm_kernels(cases: Iterable[tuple[int, int, int, int, str, bool]]) -> None:
    for m, k, channels, groups, kind, training in cases:
        run_flagged(make_product(m, k, channels, groups, kind, training=training))


def run_flagged(case: ProductCase) -> None:
    """fp32: with a row of x that planes do not hold, then with one of W too: all rows of its column
    are computed again."""
    problem = case.problem
    matrices = (case.inputs.x, case.inputs.weight) if problem.dtype == torch.float32 else (None,)
    for matrix in matrices:
        if matrix is not None:
            matrix[2] *= 2.0**-70
        found = case.run()
        torch.cuda.synchronize()
        assert all(bool(t.isfinite().all()) for t in found.outputs), problem
    size = f"{problem.m} x {problem.k} -> {problem.n}"
    print(f"{size}, {problem.chain}, {problem.dtype}, {problem.precision}: done", flush=True)


def hopper_kernels() -> None:
    linear_norm_kernels(HOPPER)
    weights_converted()
    x_written_over()
    dz_written(*WRITTEN)
    products(hopper_product_of, PRODUCTS + SPLIT_PRODUCTS)
    adding_products()


def hopper_product_of(shape: ProductShape, *rest: Any) -> Any:
    choice = choose(shape, sm_count(torch.device("cuda")))
    return prepare_product(shape, choice, *rest)


def portable_product_of(shape: ProductShape, *rest: Any) -> Any:
    tile = choose_product_tile(shape.planes, gpu_of(torch.device("cuda")))
    return prepare_product(shape, tile, *rest)


def weights_converted() -> None:
    """On the way into the product, and left as planes; a scale is corrected, an element noted."""
    cases = [("high", tile) for tile in (*fp32_weight_tiles(1), *fp32_input_tiles(8, 256)[:1])]
    for kind, tile in [*cases, *(("highest", tile) for tile in fp32_weight_tiles(2))]:
        # Two tiles for most blocks.
        rows = 2 * tile.block_m + 40 if tile.fp32_weight else 1000
        case = make_product(rows, 136, 16, 528, kind, "mul_row|" + CHAIN, training=True)
        matrix = case.inputs.weight if tile.fp32_weight else case.inputs.x
        matrix[5, 7], matrix[9, 3] = 1e6, 1e-14
        leaves = kind == "high"  # two planes are left by no such kernel
        launch = Converting(case.problem, tile, leaves)
        found = launch.bind(*case.layout(case.inputs))(case.inputs)
        torch.cuda.synchronize()
        assert all(bool(t.isfinite().all()) for t in found.outputs), tile
        print(f"converted on the way by {tile}: done", flush=True)


def x_written_over() -> None:
    """By its planes, from which the guard puts together what it computes again."""
    for kind in ("high", "highest"):
        case = make_product(70, 256, 16, 17, kind)
        problem = dataclasses.replace(case.problem, spends_x=True)
        tile = fitted(problem, Tile(64, 64, 0))
        case.inputs.x[5, 7], case.inputs.weight[9, 3] = 1e-14, 1e-14
        case.inputs.x[40] *= 2.0**-70
        found = launch_with(problem, tile, case.layout(case.inputs))(case.inputs)
        torch.cuda.synchronize()
        assert bool(found.y.isfinite().all()), kind
        print(f"planes over x, {kind}: done", flush=True)


def split_kernels() -> None:
    """dz split into planes, with nothing flagged, with a row and with columns flagged."""
    for m, k, channels, groups, precision in SPLIT:
        case = make_product(m, k, channels, groups, precision, training=True)
        kept = NormForward(case.problem)(case.linear(None, False), case.inputs)
        products = plane_products(case.problem, writes_planes=False)
        dy = torch.randn_like(kept.y)
        for flagged in (None, (2,), (..., slice(8, 8 + channels))):
            if flagged is not None:
                dy[flagged] *= 1e-30
            _, dx, dw = products(case.inputs, [kept], dy, EVERY, None, None)
            torch.cuda.synchronize()
            assert dx is not None and dw is not None  # noqa: PT018
            assert bool(dx.isfinite().all() & dw.isfinite().all()), (m, channels, precision)
        print(f"dz split, {m} x {channels * groups}, {precision}: done", flush=True)


def cluster_kernels() -> None:
    linear_norm_kernels(CLUSTERS)
    dz_written(*WRITTEN_BY_CLUSTERS)


def kernels_in_halves() -> None:
    """The last finds scales on the way, and later that they do not suffice."""
    for tile, kind in IN_HALVES:
        with forced_tile(tile):
            chain = "add_residual|layer_norm"
            case = make_product(200, 200, 768, 1, kind, chain, training=True)
            case.inputs.x[[7, 150], [100, 199]] = 1e4
            run_flagged(case)


def dz_written(m: int, k: int, groups: int) -> None:
    """As planes, with nothing flagged, with rows that x's planes follow, and with a row flagged."""
    for precision in ("high", "highest"):
        case = make_product(m, k, 16, groups, precision, training=True)
        kept = case.run()
        products = plane_products(case.problem)
        products.dz_planes = DzPlanes(case.problem, products.split_x, products.split_weight)
        dy = torch.randn_like(kept.y)
        for change in (1.0, 2.0**-9, 1e-30):
            dy[5] *= change
            _, dx, dw = products(case.inputs, [kept], dy, EVERY, None, None)
            torch.cuda.synchronize()
            assert dx is not None and dw is not None  # noqa: PT018
            assert bool(dx.isfinite().all() & dw.isfinite().all()), (m, groups, precision)
        assert None not in products.dz_planes.launches.values()
        print(f"dz written once, {m} x {16 * groups}, {precision}: done", flush=True)


def products(prepare: Callable[..., Any], cases: Iterable[tuple[int, int, int, bool]]) -> None:
    """c = a · b in fp16 with fp32 results."""
    for rows, columns, length, major_k_a in cases:
        size = (rows, length) if major_k_a else (length, rows)
        a, b = (torch.randn(s, device="cuda").half() for s in (size, (length, columns)))
        shape = ProductShape(rows, columns, length, 1)
        scale = torch.ones(rows, device="cuda")
        multiply = prepare(shape, major_k_a, a.device)
        result = multiply(a.data_ptr(), lambda a=a, b=b: (a, a, b, b), scale.data_ptr())
        assert bool(result.isfinite().all()), shape
        print(f"product {size} x {tuple(b.shape)}: done", flush=True)


def adding_products() -> None:
    """Into what is there, with a row and an index of the sum flagged and without; and the guard."""
    for rows, columns, length, major_k_a in PRODUCTS:
        size = (rows, length) if major_k_a else (length, rows)
        a, b = (torch.randn(s, device="cuda") for s in (size, (length, columns)))
        planes = (a.half(), a.half(), b.half(), b.half())
        row_flags, sum_flags = (
            torch.zeros(count, dtype=torch.uint8, device="cuda") for count in (rows, length)
        )
        row_flags[rows // 2] = 1
        scale, result = torch.ones(rows, device="cuda"), torch.zeros(rows, columns, device="cuda")
        add = prepare_adding(ProductShape(rows, columns, length, 1), major_k_a, a.device)
        assert add is not None
        flags = row_flags.data_ptr(), sum_flags.data_ptr()
        for flagged in (0, 1):
            sum_flags[3] = flagged
            add(0, functools.partial(tuple, planes), scale.data_ptr(), result, *flags)
            prepare_rescue(result, a, b, not major_k_a, *flags, 0, scale.data_ptr(), adds=True)()
        assert bool(result.isfinite().all())
        print(f"added product {size} x {tuple(b.shape)}: done", flush=True)


def calls() -> None:
    """Both passes of ``CALLS``."""
    for call in CALLS:
        step(*call)


def repeated_calls() -> None:
    """By native code, dz written over z."""
    settle()
    for call in REPEATED:
        nodes = [step(*call) for _ in range(6)]
        assert nodes[-1] == "LinearNormBackward", nodes


def step(
    m: int,
    k: int,
    n: int,
    norm: Any,
    pre: str,
    dtype: torch.dtype,
    strategy: Strategy,
    rounding: Rounding,
) -> str:
    """Both passes of one of ``CALLS``; the name of its node in autograd's graph."""
    kinds = () if norm is None else epinorm.Chain.build(norm, pre, "").operand_kinds
    of_kind = {"row": (m, 1), "element": (m, n)}
    sizes = [(m, k), (n, k), (n,), *(of_kind[kind] for kind in kinds if kind in of_kind)]
    tensors = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
    trained = [t.requires_grad_() for t in tensors if t.shape != (m, 1)]
    x, weight, bias, *operands = tensors
    if norm is None:
        y = epinorm.linear(x, weight, bias, post=pre, strategy=strategy)
    else:
        y = epinorm.linear_norm(
            *(x, weight, bias), norm=norm, pre=pre, post="silu", operands=operands,
            strategy=strategy, rounding=rounding,
        )  # fmt: skip
    assert y.grad_fn is not None
    node = y.grad_fn.name()
    y.backward(torch.randn_like(y))
    torch.cuda.synchronize()
    results = [y, *(t.grad for t in trained)]
    assert all(t is not None and bool(t.isfinite().all()) for t in results), (norm, strategy)
    print(f"{m} x {k} -> {n}, {norm}, {pre}, {strategy}, {rounding}: done", flush=True)
    return node


def written_over_dy() -> None:
    """dz, in a lane's rows, a block's, and blocks' that share a row; as planes before, or not."""
    for m, k, n, chain in OVER_DY:
        sizes = [(m, k), (n, k), *[(n,)] * (3 if "norm" in chain else 1)]
        tensors = [torch.randn(size, device="cuda") for size in sizes]
        tensors[0][3] *= 1e-30
        given: list[Any] = [*tensors, *[None] * (5 - len(tensors)), []]
        facts = (chain, "auto", False, None)
        y, *kept = linear_norm_forward(*given, *facts)
        wanted = [t is not None for t in given[:5]]
        spending = spending_dy()[linear_norm_backward, sum(wanted)]
        found = spending(torch.randn_like(y), *given, *kept, *facts, wanted)
        torch.cuda.synchronize()
        assert all(bool(t.isfinite().all()) for t in found), (n, chain)
        print(f"dz over dy, {m} x {n}, {chain}: done", flush=True)


def batch_kernels() -> None:
    """BatchNorm's, of strips that are not full and of one row less than a pass, by planes too."""
    chain = "mul_channel|add_residual|batch_norm(1e-05)|silu|dropout(0.1)|mul_channel"
    for m, k, n, dtype, strategy in BATCH:
        run = Caller(chain, strategy)
        shapes = (m, k), (n, k), (n,), (n,), (n,), (n,), (m, n), (n,)
        for training in (True, False):
            given = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
            leaves = [t.requires_grad_(training) for t in given]
            x, weight, bias, gamma, beta, *operands = leaves
            y, statistics = run(x, weight, bias, gamma, beta, tuple(operands))
            gradients = torch.autograd.grad(y, leaves, torch.randn_like(y)) if training else ()
            torch.cuda.synchronize()
            assert all(bool(t.isfinite().all()) for t in (y, statistics, *gradients)), (m, n)
        print(f"BatchNorm of {m} x {n}, {dtype}, {strategy}: done", flush=True)
    cases: Any = importlib.import_module("test_batch_norm")
    for text in cases.TEXTS:
        for m, n, dtype in (
            (33, 60, torch.float32),
            (300, 272, torch.bfloat16),
            (5, 33, torch.float16),
        ):
            found = cases.Kernels(text, m, n, dtype).ours()
            torch.cuda.synchronize()
            assert all(bool(t.isfinite().all()) for t in found.values()), (text, m, n)
            print(f"{m} rows of {n}, {text}, {dtype}: done", flush=True)


def attention_kernels() -> None:
    for queries, keys, width in ATTENTION:
        sizes = [(2, 3, rows, width) for rows in (queries, keys, keys)]
        given = [torch.randn(size, device="cuda", requires_grad=True) for size in sizes]
        mixed, _ = attention(*given, 0.1)
        gradients = torch.autograd.grad(mixed, given, torch.randn_like(mixed))
        torch.cuda.synchronize()
        assert all(bool(t.isfinite().all()) for t in (mixed, *gradients)), (queries, keys, width)
        print(f"attention of {queries} and {keys} rows of {width}: done", flush=True)


BATCH: list[tuple[int, int, int, torch.dtype, Strategy]] = [
    (63, 24, 130, torch.float32, "epilogue"),
    (200, 64, 264, torch.float32, "planes"),
    (65, 24, 300, torch.bfloat16, "epilogue"),
    (2, 24, 33, torch.float64, "epilogue"),
]
"""Rows, K, N: strips of columns that are not full, narrow vectors, passes of fewer rows."""
KERNELS = {
    "calls": calls,
    "repeated": repeated_calls,
    "over_dy": written_over_dy,
    "norm": norm_kernels,
    "portable": portable_kernels,
    "hopper": hopper_kernels,
    "split": split_kernels,
    "clusters": cluster_kernels,
    "halves": kernels_in_halves,
    "attention": attention_kernels,
    "batch": batch_kernels,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or KERNELS:
        KERNELS[name]()
