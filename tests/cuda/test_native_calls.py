"""A training step by native code alone, autograd's node included, does what PyTorch does.

The GPU is conftest.py's; fp64, whose products are PyTorch's own.
"""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.backends.cuda.replayed import ReplayedForward
from epinorm.backends.native_passes import Waits
from epinorm.operator.autograd import differentiable
from epinorm.operator.calls import executable_for_call
from epinorm.operator.dispatch import Caller
from epinorm.operator.native_calls import NativeCalls
from epinorm.operator.transforms import cast

CHAIN = "add_residual|layer_norm(1e-05)|silu|mul_channel"
M, K, N = 12, 16, 32
NATIVE = "LinearNormBackward"
RESIDUAL = 5


def tensors(leading=(M,)):
    sizes = [(*leading, K), (N, K), (N,), (N,), (N,), (*leading, N), (N,)]
    return [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]


def call(caller, given):
    return caller(*given[:5], tuple(given[5:]))


def eager(given):
    x, weight, bias, gamma, beta, residual, channel = given
    z = nn.functional.linear(x, weight, bias) + residual
    return nn.functional.silu(nn.functional.layer_norm(z, (N,), gamma, beta, 1e-5)) * channel


def compare(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def check(caller, given, wanted=None, native=True):
    """y and the gradients are eager's."""
    wanted = [t for t in given if t.requires_grad] if wanted is None else wanted
    expected = eager(given)
    dy = torch.randn_like(expected)
    y = call(caller, given)
    assert y.grad_fn.name() == NATIVE or not native
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    compare(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))


@pytest.fixture
def caller(gpu):
    """One whose step is native from now on."""
    made = Caller(CHAIN, "epilogue")
    for _ in range(4):
        call(made, (given := tensors())).sum().backward()
        call(made, given).backward(torch.randn(M, N, dtype=torch.float64))
    assert call(made, tensors()).grad_fn.name() == NATIVE
    return made


def test_a_step_runs_no_python(gpu, caller, monkeypatch):
    def fail(*_):
        raise AssertionError("Python was asked")

    monkeypatch.setattr("epinorm.operator.autograd.run_backward", fail)
    before = gpu.replayed
    check(caller, tensors())
    assert gpu.replayed == before + 3  # the norm, forward and backward, and its sums over rows


@pytest.mark.parametrize(("m", "k"), [(0, K), (M, 0)])
def test_no_rows_and_no_terms_again_and_again(gpu, m, k):
    """Their gradients are empty, or sums of nothing."""
    caller = Caller(CHAIN, "epilogue")
    for _ in range(6):
        given = [
            t.detach()[:, :k].requires_grad_() if i < 2 else t for i, t in enumerate(tensors((m,)))
        ]
        check(caller, given, native=False)


def test_a_residual_that_is_x(gpu, monkeypatch):
    """As in norm(x + linear(x)), from the first call on."""
    caller = Caller("add_residual|layer_norm(1e-05)", "epilogue")
    for runs in range(6):
        x, weight, bias, gamma, beta = given = [
            torch.randn(size, dtype=torch.float64).requires_grad_()
            for size in ((M, N), (N, N), (N,), (N,), (N,))
        ]
        if runs > 3:
            monkeypatch.setattr("epinorm.operator.autograd.run_backward", None)
        expected = nn.functional.layer_norm(
            nn.functional.linear(x, weight, bias) + x, (N,), gamma, beta
        )
        y, dy = caller(*given, (x,)), torch.randn(M, N, dtype=torch.float64)
        compare((y,), (expected,))
        compare(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy))
    assert y.grad_fn.name() == NATIVE


def test_other_sizes_leading_dimensions_and_what_wants_a_gradient(caller):
    for _ in range(4):
        check(caller, tensors((3, 4)), native=_ > 2)
    check(caller, tensors())
    for place in range(7):
        given = tensors()
        given[place].requires_grad_(False)
        for _ in range(4):
            check(caller, given, native=_ > 2)


def test_only_some_gradients_are_asked_for(caller):
    for _ in range(4):
        given = tensors()
        check(caller, given, wanted=given[1:3])
        check(caller, given, wanted=given[:1])


def test_a_retained_graph_and_one_that_is_gone(caller):
    given, dy = tensors(), torch.randn(M, N, dtype=torch.float64)
    y, expected = call(caller, given), eager(given)
    compare(
        torch.autograd.grad(y, given, dy, retain_graph=True),
        torch.autograd.grad(expected, given, dy, retain_graph=True),
    )
    compare(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, given, dy)


def test_dz_is_written_over_z_where_no_graph_is_retained(gpu, caller):
    """The kernel that writes it is the last to read z."""
    for retain in (True, False):
        y = call(caller, tensors())
        gpu.launches.clear()
        y.backward(torch.randn(M, N, dtype=torch.float64), retain_graph=retain)
        (norm,) = [each for each in gpu.launches if each.kind == "norm_backward"]
        z, dz = norm.arguments[2], norm.arguments[10]
        assert (z != dz) == retain


@pytest.mark.parametrize("last", ["relu", "tanh", "sigmoid"])
def test_an_activations_result_is_kept_in_zs_place(gpu, last):
    """As PyTorch keeps it: one matrix. dz is not written over it, which another stream may read
    although no tensor holds it any more (``record_stream``)."""
    caller, activation = Caller(f"add_residual|{last}", "single"), getattr(torch, last)
    for step in range(5):
        given = [tensors((2, 8))[i].detach().float().requires_grad_() for i in (0, 1, 5)]
        x, weight, residual = given
        y = caller(x, weight, None, None, None, (residual,))
        expected = activation(nn.functional.linear(x, weight) + residual)
        torch.testing.assert_close(y, expected)
        assert (y.grad_fn.name() == NATIVE) == (step > 2), step
        (total, exact), dy = (2 * y, 2 * expected), torch.randn_like(expected)
        at = y.data_ptr()
        del y
        gpu.launches.clear()
        found = torch.autograd.grad(total, given, dy)
        torch.testing.assert_close(found, torch.autograd.grad(exact, given, dy))
        (norm,) = [each for each in gpu.launches if each.kind == "norm_backward"]
        assert norm.arguments[2] == at != norm.arguments[10]
    for change in (lambda t: t.add_(1), lambda t: t[0].zero_()):
        y = caller(x, weight, None, None, None, (residual,))
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gradients_of_gradients(caller):
    given, dy = tensors(), torch.randn(M, N, dtype=torch.float64).requires_grad_()
    twice = []
    for way in (lambda given: call(caller, given), eager):
        first = torch.autograd.grad(way(given), given, dy, create_graph=True)
        total = sum(g.square().sum() for g in first)
        twice.append(torch.autograd.grad(total, [*given, dy]))
    compare(*twice)


def test_what_was_changed_in_place_is_noticed(caller):
    given = tensors()
    y = call(caller, given)
    with torch.no_grad():
        given[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_data_that_was_exchanged_is_read(caller):
    """As FSDP does: sizes are the same, the memory another; or the rows have moved apart."""
    for new in (torch.randn(N, K), torch.randn(N, 2 * K)[:, :K]):
        given = tensors()
        y, expected = call(caller, given), eager(given)
        dy = torch.randn_like(expected)
        given[1].data = new.double()
        gradients = list(torch.autograd.grad(expected, given, dy))
        gradients[0] = gradients[RESIDUAL] @ new.double()  # which eager reads through an older view
        compare(torch.autograd.grad(y, given, dy), gradients)


def test_what_is_left_hears_of_an_exchanged_weight(gpu, monkeypatch):
    """Planes, which fp64 has none of."""

    class Left:
        def restrict(self, *_):
            pass

        def weight_moved(self):
            told.append(self)

    told, passes = [], ReplayedForward.native
    waits = Waits(Left, {}, torch.device("cpu"), None, -1, -1, False)
    monkeypatch.setattr(
        ReplayedForward,
        "native",
        lambda *given: (found := passes(*given)) and found._replace(waits=waits),
    )
    caller = Caller(CHAIN, "epilogue")
    for exchanged in (False,) * 6 + (True,):
        given = tensors()
        y = call(caller, given)
        assert y.grad_fn.name() == NATIVE or not exchanged
        if exchanged:
            given[1].data = given[1].data.clone()
        y.sum().backward()
        assert len(told) == exchanged


@pytest.mark.parametrize("strides", ["broadcast", "transposed", "odd"])
def test_gradients_as_they_come(caller, strides):
    given = tensors()
    dy = {
        "broadcast": torch.ones((), dtype=torch.float64).expand(M, N),
        "transposed": torch.randn(N, M, dtype=torch.float64).t(),
        "odd": torch.randn(M * N + 1, dtype=torch.float64)[1:].view(M, N),
    }[strides]
    found = torch.autograd.grad(call(caller, given), given, dy)
    compare(found, torch.autograd.grad(eager(given), given, dy))


@pytest.mark.parametrize("kind", ["norm_forward", "norm_backward", "norm_column_sums"])
def test_a_launch_that_fails_raises_and_the_next_step_is_right(gpu, caller, kind):
    given = tensors()
    alive = weakref.ref(given[0])
    gpu.refused = kind
    with pytest.raises(RuntimeError, match=r"launch [12] of [12] failed with"):
        call(caller, given).backward(torch.randn(M, N, dtype=torch.float64))
    gpu.refused = ""
    assert given[1].grad is None
    check(caller, tensors())
    del given
    gc.collect()
    assert alive() is None


def test_hooks(caller):
    given, seen = tensors(), []
    y = call(caller, given)
    y.grad_fn.register_hook(lambda into, out: seen.append((len(into), len(out))))
    y.grad_fn.register_prehook(lambda out: (2 * out[0],))
    given[0].register_hook(lambda g: 3 * g)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, given, dy)
    expected = list(torch.autograd.grad(eager(given), given, 2 * dy))
    compare(found, expected)  # eager's x has the hook too
    assert seen == [(7, 1)]
    with torch.autograd.detect_anomaly(check_nan=False):
        y = call(caller, tensors())
    assert "test_hooks" in "".join(y.grad_fn.metadata["traceback_"])


def test_saved_tensor_hooks_see_what_is_saved(caller):
    given, packed = tensors(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = call(caller, given)
    assert packed
    assert y.grad_fn.name() != NATIVE
    dy = torch.randn_like(y)
    compare(torch.autograd.grad(y, given, dy), torch.autograd.grad(eager(given), given, dy))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(caller, reentrant):
    given = tensors()
    dy = torch.randn(M, N, dtype=torch.float64)
    checkpoint(lambda *g: call(caller, g), *given, use_reentrant=reentrant).backward(dy)
    compare([t.grad for t in given], torch.autograd.grad(eager(given), given, dy))


def test_modes_transforms_and_accumulation_are_pythons(caller):
    given = tensors()
    x, rest = given[0], given[1:]
    dy = torch.randn(M, N, dtype=torch.float64)
    found = torch.func.grad(lambda x: (call(caller, [x, *rest]) * dy).sum())(x)
    torch.testing.assert_close(found, torch.autograd.grad(eager(given), x, dy)[0])
    with torch.profiler.profile() as profile:
        y = call(caller, given)
    assert any("epinorm::" in event.key for event in profile.key_averages())
    torch.testing.assert_close(y, eager(given))
    with torch.inference_mode():
        assert call(caller, given).is_inference()
    with torch.no_grad():
        assert call(caller, given).grad_fn is None
    for _ in range(2):
        with epinorm.accumulate_in_place():
            call(caller, given).backward(dy)
    compare([t.grad for t in given], [2 * g for g in torch.autograd.grad(eager(given), given, dy)])
    y = call(caller, given)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(call(caller, [dual, *rest])).tangent
        assert tangent is not None


def test_y_may_change_in_place(caller):
    given = tensors()
    dy = torch.randn(M, N, dtype=torch.float64)
    found = torch.autograd.grad(call(caller, given).mul_(3).relu_(), given, dy)
    compare(found, torch.autograd.grad((eager(given) * 3).relu(), given, dy))


def test_nothing_is_kept_alive(caller):
    """Neither what was saved, nor the graph, nor, after one clear(), what was recorded."""
    from epinorm.backends import memo

    given = tensors()
    y = call(caller, given)
    alive = weakref.ref(y)
    y.sum().backward()
    saved = weakref.ref(given[0])
    del y, given
    gc.collect()
    assert alive() is None
    assert saved() is None
    memo.clear()
    assert call(caller, tensors()).grad_fn.name() != NATIVE


def test_threads(caller):
    def work():
        for _ in range(20):
            check(caller, tensors())

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work) for _ in range(4)]:
            each.result()


def test_other_threads_run_while_one_computes(gpu):
    """As while PyTorch's operations do: a launch may wait for the GPU."""
    caller, size, ticks, done = Caller(CHAIN, "epilogue"), 1024, [], threading.Event()
    given = [torch.randn(size, size, dtype=torch.float64) for _ in range(3)]
    vectors = list(torch.randn(4, size, dtype=torch.float64))
    given = [*given[:2], *vectors[:3], given[2], vectors[3]]
    for _ in range(5):
        call(caller, given)

    def tick():
        while not done.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    before, at_launch = len(ticks), []
    gpu.interrupt = lambda: at_launch.append(len(ticks))  # behind the product
    call(caller, given)
    done.set()
    thread.join()
    assert at_launch[0] - before > 5


def test_a_subclass_is_pythons(caller):
    class Sub(torch.Tensor):
        pass

    given = tensors()
    x = given[0].detach().as_subclass(Sub).requires_grad_()
    assert isinstance(call(caller, [x, *given[1:]]), Sub)


def test_a_fused_model_trains_as_the_model(gpu):
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.SiLU(), nn.Linear(N, N)).double()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="epilogue")
    ways = [(each, torch.optim.SGD(each.parameters(), 0.1)) for each in (model, fused)]
    for _ in range(6):
        x, losses = torch.randn(M, K, dtype=torch.float64), []
        for way, optimizer in ways:
            optimizer.zero_grad()
            loss = way(x).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_a_chain_that_returns_its_sum(gpu):
    """Each of its results may be all that is used; the sum is what backward reads."""
    caller = Caller("add_residual|layer_norm(1e-05)|silu|returns(sum)", "epilogue")

    def layers(given):
        x, weight, bias, gamma, beta, residual = given
        z = nn.functional.linear(x, weight, bias) + residual
        return nn.functional.silu(nn.functional.layer_norm(z, (N,), gamma, beta, 1e-5)), z

    for _ in range(6):
        for used in ((0, 1), (0,), (1,)):
            given = tensors((2, 6))[:6]
            made, expected = call(caller, given), layers(given)
            compare(made, expected)
            dys = [torch.randn_like(expected[i]) for i in used]
            wanted = given if 0 in used else [*given[:3], given[5]]
            found = torch.autograd.grad([made[i] for i in used], wanted, dys)
            compare(found, torch.autograd.grad([expected[i] for i in used], wanted, dys))
    assert {t.grad_fn.name() for t in made} == {NATIVE}
    given = tensors((2, 6))[:6]
    _, total = call(caller, given)
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.sum().backward()


def test_one_of_two_residuals_wants_a_gradient(gpu):
    """As where noise is added before a norm and a stream behind it, or the other way round."""
    for wants in ((True, False), (False, True)):
        caller = Caller("add_residual|layer_norm(1e-05)|mul_element", "epilogue")
        for _ in range(6):
            given = tensors()
            before, behind = (torch.randn(M, N, dtype=torch.float64) for _ in range(2))
            for t, wanted in zip((before, behind), wants, strict=True):
                t.requires_grad_(wanted)
            x, weight, bias, gamma, beta = given[:RESIDUAL]
            z = nn.functional.linear(x, weight, bias) + before
            expected = nn.functional.layer_norm(z, (N,), gamma, beta, 1e-5) * behind
            y = call(caller, [*given[:RESIDUAL], before, behind])
            leaves = [t for t in (*given[:RESIDUAL], before, behind) if t.requires_grad]
            dy = torch.randn_like(y)
            found = (torch.autograd.grad(of, leaves, dy) for of in (y, expected))
            compare(*found)
        assert y.grad_fn.name() == NATIVE


def test_a_sum_of_another_dtype_than_the_norms(gpu, monkeypatch):
    """As under autocast, where nothing widens it: its gradient is converted before it is read."""
    chain, bf16 = "silu|layer_norm(1e-05)|returns(sum)", torch.bfloat16
    facts, calls = (chain, "epilogue", False, torch.float32), NativeCalls()
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: bf16)
    for _ in range(6):
        x, weight = (torch.randn(size).to(bf16) for size in ((M, K), (N, K)))
        bias, gamma, beta = (torch.randn(N).requires_grad_() for _ in range(3))
        given = (x, weight, bias, gamma, beta)
        executable = executable_for_call(
            (x, weight, bias.to(bf16), gamma, beta, ()), facts, True, True
        )
        with torch.autocast("cpu", bf16):  # which the imaginary GPU's tensors are under
            made = calls.find(given)
            if made is None:
                made = differentiable(executable, facts, cast(given, torch.float32))
            calls.keep(executable, given, facts, True, True)
        dys = [torch.randn_like(t) for t in made]
        s = nn.functional.silu(nn.functional.linear(x.double(), weight.double(), bias.double()))
        y = nn.functional.layer_norm(s, (N,), gamma.double(), beta.double(), 1e-5)
        found = torch.autograd.grad(made, (bias, gamma, beta), dys)
        exact = torch.autograd.grad((y, s), (bias, gamma, beta), [dy.double() for dy in dys])
        for ours, theirs in zip(found, exact, strict=True):
            assert (ours - theirs).norm() < 0.03 * theirs.norm()
    assert made[0].grad_fn.name() == NATIVE
