"""The operators as compiled graphs call them: like a recorded call, native code computes them.

The GPU is conftest.py's; fp64, whose products are PyTorch's own, but where a dtype is named.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epinorm.backends import memo, unpromised
from epinorm.backends.prepack import prepacked
from epinorm.capture.backend import compile_graph
from epinorm.operator import native_operators, schema, shortcuts
from watching import SeesOperators

CHAIN = "add_residual|layer_norm(1e-05)|silu|mul_channel"
SUM = "add_residual|layer_norm(1e-05)|silu|returns(sum)"
M, K, N = 12, 16, 32
FEW = 7
"""Functions of Python's from an operator's call to its first launch: PyTorch's, ours, what is kept,
and two each, of which one is the tests' GPU's, that ask for the device and for the stream."""


def tensors(chain: str = CHAIN, m: int = M, dtype: torch.dtype = torch.float64) -> list[Any]:
    x, weight, *vectors = (torch.randn(s).to(dtype) for s in ((m, K), (N, K), (N,), (N,), (N,)))
    operands = [torch.randn(m, N).to(dtype), torch.randn(N).to(dtype)]
    return [x, weight, *vectors, operands[: 1 if chain == SUM else 2]]


def layers(given: list[Any], chain: str = CHAIN) -> tuple[Tensor, ...]:
    """y and, where it is a result, the sum; in fp64."""
    x, weight, bias, gamma, beta, operands = given
    bias = None if bias is None else bias.double()
    z = nn.functional.linear(x.double(), weight.double(), bias) + operands[0].double()
    y = nn.functional.layer_norm(z, (N,), gamma.double(), beta.double(), 1e-5)
    y = nn.functional.silu(y)
    return (y, z) if chain == SUM else (y * operands[1].double(),)


def facts(chain: str = CHAIN, strategy: str = "epilogue") -> tuple[Any, ...]:
    return chain, strategy, False, None


def compare(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def infer(given: list[Any], chain: str = CHAIN, strategy: str = "epilogue") -> tuple[Tensor, ...]:
    operator = schema.linear_norm_sum if chain == SUM else schema.linear_norm
    found = operator(*given, *facts(chain, strategy))
    return found if chain == SUM else (found,)


def step(
    given: list[Any], chain: str = CHAIN, wanted: list[bool] | None = None, uses_sum: bool = True
) -> tuple[Any, Any]:
    """The results and the wanted gradients; and eager's."""
    operator = schema.linear_norm_sum_forward if chain == SUM else schema.linear_norm_forward
    y, z, mean, rstd, *total = operator(*given, *facts(chain))
    flat = [*given[:5], *given[5]]
    wanted = [t is not None for t in flat] if wanted is None else wanted
    dy = torch.randn_like(y)
    dsum = [torch.randn_like(total[0])] if total and uses_sum else []
    kept = (total[0] if total else z, mean, rstd)
    before = [None if t is None else t.clone() for t in (*flat, *kept, dy)]
    found = schema.linear_norm_backward(dy, *given, *kept, *facts(chain), wanted, *dsum)
    assert type(found) is list
    for t, was in zip((*flat, *kept, dy), before, strict=True):
        assert t is None or torch.equal(t, was), "an operator writes over nothing that it is given"
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in flat]
    dys = [dy.double(), *dsum]
    asked = [t for t, want in zip(leaves, wanted, strict=True) if want]
    with torch.enable_grad():
        results = layers([*leaves[:5], leaves[5:]], chain)
        expected = torch.autograd.grad(results[: len(dys)], asked, dys)
    return (y, *total, *found), (*(r.detach() for r in results), *expected)


@pytest.fixture
def native(gpu: Any) -> Callable[..., bool]:
    """Whether native code computes all of a call; its kinds are warm from the start."""

    def is_native(run: Callable[[], Any]) -> bool:
        entered: list[str] = []

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                entered.append(frame.f_code.co_qualname)

        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
        calls = [i - 1 for i, name in enumerate(entered) if name.startswith("shorten_")]
        return bool(calls) and all(
            next(j for j, name in enumerate(entered[i:]) if name.endswith("launch_kernel")) <= FEW
            for i in calls
        )

    for chain in (CHAIN, SUM):
        for _ in range(4):
            infer(tensors(chain), chain)
            for uses_sum in (False, True):
                step(tensors(chain), chain, uses_sum=uses_sum)
    return is_native


@pytest.mark.parametrize("chain", [CHAIN, SUM])
def test_few_functions_stand_between_an_operator_and_its_kernel(gpu, native, chain):
    for uses_sum in (False, True):
        given, before = tensors(chain), gpu.replayed
        assert native(lambda given=given: compare(infer(given, chain), layers(given, chain)))
        assert gpu.replayed == before + 1
        # The norm, forward and backward, and its sums over rows.
        assert native(lambda uses=uses_sum: compare(*step(tensors(chain), chain, uses_sum=uses)))
        assert gpu.replayed == before + 4


def test_results_are_new_tensors(native):
    given = tensors()
    first, again = (schema.linear_norm_forward(*given, *facts()) for _ in "ab")
    assert type(first) is tuple
    addresses = [t.data_ptr() for t in (*first, *again) if t.numel()]
    assert len(set(addresses)) == len(addresses) == 8
    gamma = tensors(SUM)
    results = [schema.linear_norm_sum_forward(*gamma, *facts(SUM)) for _ in "ab"]
    assert [t.shape for t in results[0]] == [(M, N), (0,), (M, 1), (M, 1), (M, N)]
    assert results[0][1] is not results[1][1]
    chain = "rms_norm(1e-06)|silu"
    for _ in range(5):
        empty = schema.linear_norm_forward(*given[:4], None, [], *facts(chain))[2]
        assert empty.shape == (0,)
        assert empty.dtype == torch.float64


def unaligned(given: list[Any]) -> None:
    given[0] = torch.randn(M * K + 1, dtype=torch.float64)[1:].view(M, K)


def strided(given: list[Any]) -> None:
    given[0] = torch.randn(M, 2 * K, dtype=torch.float64)[:, :K]


def transposed(given: list[Any]) -> None:
    given[1] = torch.randn(K, N, dtype=torch.float64).t()


def longer(given: list[Any]) -> None:
    given[:] = tensors(m=M + 5)


def without_bias(given: list[Any]) -> None:
    given[2] = None


def residual_of_another(given: list[Any]) -> None:
    given[5][0] = given[5][0].clone().t().contiguous().t()


def negative(given: list[Any]) -> None:
    given[0] = torch._neg_view(given[0])


def replaced(given: list[Any]) -> None:
    given[1] = nn.Parameter(given[1])


@pytest.mark.parametrize(
    "change",
    [unaligned, strided, transposed, longer, without_bias, residual_of_another, negative, replaced],
    ids=lambda f: f.__name__,
)
def test_what_changes_between_calls(gpu, native, change):
    with torch.no_grad():
        for i in range(8):
            given = tensors()
            if i % 2:
                change(given)
            compare(infer(given), layers(given))
            compare(*step(given))


def test_other_gradients_are_wanted(native):
    wishes = [[i == j for j in range(7)] for i in range(7)]
    for _ in range(4):
        for wanted in (*wishes, [True] * 7, [False, True, False, True, True, False, False]):
            compare(*step(tensors(), wanted=wanted))


def test_a_gradient_of_the_sum_by_name(native):
    given = tensors(SUM)
    y, _, mean, rstd, total = schema.linear_norm_sum_forward(*given, *facts(SUM))
    read = (torch.randn_like(y), *given, total, mean, rstd, *facts(SUM), [True] * 6)
    dsum = torch.randn_like(total)
    expected = schema.linear_norm_backward(*read, dsum)
    for _ in range(3):
        compare(schema.linear_norm_backward(*read, dsum=dsum), expected)


@pytest.mark.parametrize("strides", ["broadcast", "transposed", "odd"])
def test_gradients_as_they_come(native, strides):
    given = tensors()
    _, *kept = schema.linear_norm_forward(*given, *facts())
    dy = {
        "broadcast": torch.ones((), dtype=torch.float64).expand(M, N),
        "transposed": torch.randn(N, M, dtype=torch.float64).t(),
        "odd": torch.randn(M * N + 1, dtype=torch.float64)[1:].view(M, N),
    }[strides]
    leaves = [t.clone().requires_grad_() for t in (*given[:5], *given[5])]
    expected = torch.autograd.grad(layers([*leaves[:5], leaves[5:]]), leaves, dy)
    for _ in range(3):
        found = schema.linear_norm_backward(dy, *given, *kept, *facts(), [True] * 7)
        compare(found, expected)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [torch._neg_view, torch.zeros_like], ids=["negative", "zeros"])
def test_gradients_whose_memory_is_not_what_they_are(native, kind, place):
    given = tensors(SUM)
    _, _, *kept, total = schema.linear_norm_sum_forward(*given, *facts(SUM))
    leaves = [t.clone().requires_grad_() for t in (*given[:5], *given[5])]
    dys = list(torch.randn(2, M, N, dtype=torch.float64))
    dys[place] = kind(dys[place])
    expected = torch.autograd.grad(layers([*leaves[:5], leaves[5:]], SUM), leaves, dys)
    if kind is torch.zeros_like:
        dys[place] = torch._efficientzerotensor((M, N), dtype=torch.float64)
    for _ in range(4):
        read = dys[0], *given, total, *kept, *facts(SUM), [True] * 6, dys[1]
        compare(schema.linear_norm_backward(*read), expected)


@pytest.mark.parametrize("used", [True, False])
def test_a_sum_of_another_dtype_than_the_norms(gpu, used):
    """As under autocast, where nothing widens it: its gradient is converted on the way."""
    chain, bf16 = "silu|layer_norm(1e-05)|returns(sum)", torch.bfloat16
    asked = (chain, "epilogue", False, torch.float32)
    for _ in range(5):
        x, weight, bias = (torch.randn(s).to(bf16) for s in ((M, K), (N, K), (N,)))
        gamma, beta = torch.randn(2, N)
        given = (x, weight, bias, gamma, beta, [])
        y, z, mean, rstd, total = schema.linear_norm_sum_forward(*given, *asked)
        assert (y.dtype, total.dtype) == (torch.float32, bf16)
        dys = [torch.randn_like(t) for t in (y, total)[: 1 + used]]
        wanted = [False, False, True, True, True]
        read = (*given, z, mean, rstd, *asked, wanted)
        found = schema.linear_norm_backward(dys[0], *read, *dys[1:])
        leaves = [t.double().requires_grad_() for t in (bias, gamma, beta)]
        s = nn.functional.silu(nn.functional.linear(x.double(), weight.double(), leaves[0]))
        results = (nn.functional.layer_norm(s, (N,), *leaves[1:], 1e-5), s)[: len(dys)]
        expected = torch.autograd.grad(results, leaves, [dy.double() for dy in dys])
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_the_stream_and_the_device_are_asked_for_at_each_call(gpu, native, monkeypatch):
    for stream in (5, 11, 2**40, 5):
        gpu.stream = stream
        gpu.launches.clear()
        compare(*step(tensors()))
        assert {launch.stream for launch in gpu.launches} == {stream}
    monkeypatch.setattr(unpromised, "current_device", lambda: 1)
    before = gpu.replayed
    compare(*step(tensors()))
    assert gpu.replayed == before


def test_modes_autograd_and_transforms_see_the_operator(native):
    given = tensors()
    with SeesOperators() as mode:
        y = schema.linear_norm(*given, *facts())
    assert mode.seen[0] is schema.linear_norm
    by_sample = torch.vmap(
        lambda row, r: schema.linear_norm(row[None], *given[1:5], [r[None], given[5][1]], *facts())
    )
    compare((by_sample(given[0], given[5][0])[:, 0],), (y,))
    with torch.inference_mode():
        assert infer(given)[0].is_inference()
        compare(infer(given), (y,))
    assert not infer(given)[0].is_inference()
    given[1].requires_grad_()
    for _ in range(4):
        found = infer(given)[0]
        assert found.requires_grad
        with torch.no_grad():
            assert not infer(given)[0].requires_grad
    (gradient,) = torch.autograd.grad(found.sum(), given[1])
    (expected,) = torch.autograd.grad(layers(given)[0].sum(), given[1])
    compare((gradient,), (expected,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        made = schema.linear_norm(dual, *given[1:], *facts())
        assert torch.autograd.forward_ad.unpack_dual(made).tangent is not None


def test_a_profile_shows_the_operators_that_ran_as_they_run(gpu, native):
    before = gpu.replayed
    with torch.profiler.profile(record_shapes=True) as profile:
        assert native(lambda: compare(*step(tensors())))
    assert gpu.replayed == before + 3
    events = {event.name: event for event in profile.events() if "epinorm" in event.name}
    assert set(events) == {"epinorm::linear_norm_forward", "epinorm::linear_norm_backward"}
    shapes = events["epinorm::linear_norm_forward"].input_shapes
    assert shapes == [[M, K], [N, K], [N], [N], [N], [M, N], [N]]


def test_hooks_on_saved_tensors_are_no_matter_of_an_operator(native):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert native(lambda: compare(*step(tensors())))


def test_the_precision_setting_is_read_at_each_call(gpu):
    kernels = {"highest": ["split", "linear_norm", "rescue"], "high": ["linear_norm"]}
    chain = "layer_norm(1e-05)|silu|mul_channel"
    for setting in ("highest",) * 4 + ("high",) * 4 + ("highest", "high") * 2:
        torch.set_float32_matmul_precision(setting)
        x, weight, vectors = torch.randn(24, 256), torch.randn(N, 256), list(torch.randn(4, N))
        gpu.launches.clear()
        y = schema.linear_norm(x, weight, *vectors[:3], vectors[3:], *facts(chain, "single"))
        assert gpu.kinds() == kernels[setting]
        z = nn.functional.linear(x.double(), weight.double(), vectors[0].double())
        y64 = nn.functional.layer_norm(z, (N,), *(v.double() for v in vectors[1:3]), 1e-5)
        compare((y,), (nn.functional.silu(y64) * vectors[3].double(),), 1e-4)


def test_a_setting_that_another_thread_changes_meanwhile(gpu, monkeypatch):
    chain, found = "layer_norm(1e-05)|silu", native_operators.passes_of

    def meanwhile(*given: Any) -> Any:
        torch.set_float32_matmul_precision("high")
        return found(*given)

    def kernels(setting: str) -> list[str]:
        torch.set_float32_matmul_precision(setting)
        x, weight, vectors = torch.randn(24, 256), torch.randn(N, 256), list(torch.randn(3, N))
        gpu.launches.clear()
        schema.linear_norm(x, weight, *vectors, [], *facts(chain, "single"))
        return gpu.kinds()

    with monkeypatch.context() as patch:
        patch.setattr(native_operators, "passes_of", meanwhile)
        for _ in range(4):
            assert kernels("highest") == ["split", "linear_norm", "rescue"]
    for _ in range(4):
        assert kernels("high") == ["linear_norm"]


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_a_prepacked_weight_is_read_where_it_is_kept(gpu, streams):
    gpu.refuses_graphs = True  # which repeat what was launched, where x comes to the same address
    weight, vectors = torch.randn(N, 256), list(torch.randn(3, N))
    chain = "layer_norm(1e-05)|silu"

    def splits() -> int:
        x = torch.randn(24, 256)
        y = schema.linear_norm(x, weight, *vectors, [], *facts(chain, "single"))
        z = nn.functional.linear(x.double(), weight.double(), vectors[0].double())
        y64 = nn.functional.layer_norm(z, (N,), *(v.double() for v in vectors[1:]), 1e-5)
        compare((y,), (nn.functional.silu(y64),), 1e-4)
        return gpu.kinds().count("split")

    def calls() -> list[int]:
        return [splits() for _ in range(5)]

    assert calls() == [1] * 5
    with prepacked(weight):
        assert calls() == [2, 1, 1, 1, 1]  # the weight's, and x's at each call
        weight.mul_(2)
        assert calls() == [2, 1, 1, 1, 1]
    weight.mul_(2)
    for _ in range(5):
        before = gpu.replayed
        assert splits() == 1
        assert gpu.replayed >= before + 3


def test_a_chains_own_numbers_are_its_own(native):
    given = tensors()
    y = layers(given)[0]
    for factor in (2.0, 5.0, 2.0, -3.0) * 4:
        compare(infer(given, f"{CHAIN}|scale({factor})"), (factor * y,))


def test_a_mistake_is_the_same_error_at_every_call(native):
    for _ in range(2):
        given = tensors()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            schema.linear_norm(given[0][:, 1:], *given[1:], *facts())
        kept = schema.linear_norm_forward(*given, *facts())[1:]
        with pytest.raises(RuntimeError, match="must be of shape"):
            schema.linear_norm_backward(given[0], *given, *kept, *facts(), [True] * 7)
        compare(*step(given))


@pytest.mark.parametrize("kind", ["norm_forward", "norm_backward", "norm_column_sums"])
def test_a_launch_that_fails_raises_and_the_next_call_is_right(gpu, native, kind):
    gpu.refused = kind
    with pytest.raises(RuntimeError, match=r"launch [12] of [12] failed with"):
        step(tensors())
    gpu.refused = ""
    compare(*step(tensors()))


def test_what_is_planned_anew_is_computed_anew(gpu, native):
    memo.clear()
    before = gpu.replayed
    compare(*step(tensors()))
    assert gpu.replayed == before


def test_nothing_is_kept_alive(native):
    given = tensors()
    y = weakref.ref(infer(given)[0])
    step(given)
    alive = [weakref.ref(t) for t in given[:5]]
    del given
    gc.collect()
    assert y() is None
    assert all(each() is None for each in alive)


def test_threads(native):
    def work() -> None:
        for _ in range(20):
            compare(*step(tensors()))

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work) for _ in range(4)]:
            each.result()


def test_a_compiled_training_step_is_native(gpu, native, monkeypatch):
    """Its operators: what TorchInductor makes of the rest is its own."""

    def without_code(gm: Any, inputs: Any, **_: Any) -> Any:
        from torch._functorch.aot_autograd import aot_module_simplified
        from torch._inductor.decomposition import select_decomp_table

        keep = lambda gm, _: gm  # noqa: E731
        return aot_module_simplified(gm, inputs, keep, keep, decompositions=select_decomp_table())

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", without_code)
    layer = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.SiLU(), nn.Linear(N, K))
    model = layer.double()
    options = {"strategy": "epilogue"}
    compiled = torch.compile(model, backend=compile_graph, options=options)
    for i in range(8):
        x = torch.randn(M, K, dtype=torch.float64, requires_grad=True)
        leaves = [x, *model.parameters()]
        right = model(x)
        dy = torch.randn_like(right)
        before = gpu.replayed
        found: list[Tensor] = []

        def run(x=x, leaves=leaves, dy=dy, found=found) -> None:
            y = compiled(x)
            found.extend((y, *torch.autograd.grad(y, leaves, dy)))

        if i < 7:
            run()
        else:
            assert native(run)
            assert gpu.replayed == before + 3
        compare(found, (right, *torch.autograd.grad(right, leaves, dy)))
    torch._dynamo.reset()


def test_where_pytorch_keeps_its_call_elsewhere_operators_are_dispatched(gpu):
    class Operator:
        name = staticmethod(lambda: "epinorm::other")
        _schema = schema.linear_norm._schema

    shortcuts.shorten_forward(Operator(), training=False)
    shortcuts.shorten_backward(Operator())
