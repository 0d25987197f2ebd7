"""Prepacked weights on a Hopper GPU: the same bits as without, and never those of an old weight."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import epinorm
from epinorm import GroupNorm, LinearNorm, linear_norm
from epinorm.backends import memo
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.runtime.native import settle
from epinorm.backends.prepack import marked, prepack, prepacked, unprepack
from epinorm.capture.backend import compile_graph

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="planes are made for Hopper",
)

K, N, GROUPS = 136, 256, 16


class Net(nn.Module):
    """What fuse() finds in a user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.gn = nn.GroupNorm(GROUPS, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.gn(self.fc(x)))


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    gc.collect()
    assert not marked


@pytest.fixture(params=["highest", "high"])
def precision(request, monkeypatch):
    """Both, always as planes: small problems at ``high`` would else be multiplied as TF32, and
    others add in another order (internals/prepack.md)."""
    candidates = hopper_plan.candidates
    monkeypatch.setattr(
        hopper_plan,
        "candidates",
        lambda p: (tile for tile in candidates(p) if not (tile.tf32 or tile.converts)),
    )
    memo.clear()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)
    memo.clear()


def model() -> LinearNorm:
    made = LinearNorm(K, N, norm=GroupNorm(GROUPS), post="leaky_relu(0.01)", device="cuda")
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def single(made: LinearNorm, x: torch.Tensor) -> torch.Tensor:
    norm, linear = made.norm, made.linear
    return linear_norm(
        *(x, linear.weight, linear.bias),
        norm=GroupNorm(GROUPS),
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        post="leaky_relu(0.01)",
        strategy="single",
    )


def rows(m: int = 70) -> torch.Tensor:
    return torch.randn(m, K, device="cuda")


def weight_of(made: LinearNorm) -> nn.Parameter:
    return made.linear.weight


def check_fresh(made: LinearNorm) -> None:
    """What comes out is, to the bit, what a model with a copy of these parameters gives."""
    x = rows()
    with torch.no_grad():
        found = single(made, x)
        copy = model()
        for target, source in zip(copy.parameters(), made.parameters(), strict=True):
            target.copy_(source)
        assert id(copy.linear.weight) not in marked
        expected = single(copy, x)
    assert torch.equal(found, expected)


def has_planes(weight: torch.Tensor) -> bool:
    entry = marked.get(id(weight))
    return entry is not None and entry.buffer is not None


def test_the_same_bits_and_planes_are_kept(precision):
    made = prepack(model())
    check_fresh(made)
    entry = marked[id(weight_of(made))]
    kept, conversion = entry.buffer, entry._ready
    for _ in range(3):
        check_fresh(made)
    assert entry.buffer is kept
    assert entry._ready is conversion
    unprepack(made)
    assert not marked
    check_fresh(made)


def in_place(made: LinearNorm) -> None:
    with torch.no_grad():
        weight_of(made).mul_(-1.5)


def through_a_view(made: LinearNorm) -> None:
    with torch.no_grad():
        weight_of(made)[3:5].view(-1).add_(1)


def detached(made: LinearNorm) -> None:
    weight_of(made).detach().t()[2].add_(1)


def in_inference_mode(made: LinearNorm) -> None:
    with torch.inference_mode():
        weight_of(made).add_(1)


def replaced(made: LinearNorm) -> None:
    made.linear.weight = nn.Parameter(torch.randn(N, K, device="cuda"))


def data_replaced(made: LinearNorm) -> None:
    weight_of(made).data = torch.randn(N, K, device="cuda")


def moved(made: LinearNorm) -> None:
    made.cpu()
    weight_of(made).data.mul_(2)
    made.cuda()


def state_loaded(made: LinearNorm) -> None:
    made.load_state_dict(model().state_dict())


def state_assigned(made: LinearNorm) -> None:
    made.load_state_dict(model().state_dict(), assign=True)


def counted_by_hand(made: LinearNorm) -> None:
    weight_of(made).data.mul_(3)
    torch.autograd.graph.increment_version(weight_of(made))


def prepacked_again(made: LinearNorm) -> None:
    weight_of(made).data.mul_(3)
    prepack(made)


def stepped(**options: bool) -> Callable[[LinearNorm], None]:
    def step(made: LinearNorm) -> None:
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, **options)
        single(made, rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CHANGES = [in_place, through_a_view, detached, in_inference_mode, replaced, data_replaced, moved]
CHANGES += [state_loaded, state_assigned, counted_by_hand, prepacked_again]
CHANGES += [stepped(foreach=True), stepped(fused=True), stepped(foreach=False)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_converted_again(change, precision):
    made = prepack(model())
    check_fresh(made)
    assert has_planes(weight_of(made))
    for _ in range(3):
        before = weight_of(made).detach().clone()
        change(made)
        assert not torch.equal(before, weight_of(made))
        check_fresh(made)
        assert has_planes(weight_of(made))


def test_the_precision_decides_what_is_kept(precision):
    made = prepack(model())
    for now in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(now)
        check_fresh(made)


def test_a_view_at_another_stride_or_place_is_another_weight(precision):
    wide = torch.randn(2 * N, 2 * K, device="cuda")
    x = rows()
    for weight in (wide[:N, :K], wide[N:, :K], wide[:N, K:], wide[::2, :K]):
        prepack(weight)
        found, again = (
            linear_norm(x, weight, norm=GroupNorm(GROUPS), strategy="single") for _ in range(2)
        )
        unprepack(weight)
        expected = linear_norm(x, weight, norm=GroupNorm(GROUPS), strategy="single")
        assert torch.equal(found, expected)
        assert torch.equal(again, expected)


def test_flags_are_kept_with_the_planes(precision):
    made = model()
    with torch.no_grad():
        weight_of(made)[5, 7] = 1e30
        weight_of(made)[200] *= 1e-35
    prepack(made)
    check_fresh(made)
    check_fresh(made)


def test_training_gives_the_same_gradients(precision):
    made, x = model(), rows()

    def gradients() -> list[torch.Tensor]:
        made.zero_grad()
        single(made, x).square().mean().backward()
        return [p.grad.clone() for p in made.parameters()]

    expected = gradients()
    with prepacked(made):
        for _ in range(2):
            for one, other in zip(gradients(), expected, strict=True):
                assert torch.equal(one, other)
        assert has_planes(weight_of(made))


def test_memory_is_one_copy_and_is_given_back(precision):
    size = 2048
    weight = torch.randn(size, size, device="cuda")
    x = torch.randn(8, size, device="cuda")

    def call(weight: torch.Tensor) -> None:
        linear_norm(x, weight, norm=GroupNorm(128), strategy="single")

    call(weight)
    before = torch.cuda.memory_allocated()
    prepack(weight)
    call(weight)
    extra = torch.cuda.memory_allocated() - before
    share = 1.0 if precision == "highest" else 0.5
    assert share * weight.nbytes <= extra <= share * weight.nbytes * 1.01 + 64 * 1024
    unprepack(weight)
    assert torch.cuda.memory_allocated() == before
    prepack(weight)
    call(weight)
    del weight
    gc.collect()
    assert not marked
    assert torch.cuda.memory_allocated() <= before - size * size * 4


def test_another_stream_waits_for_the_planes(precision):
    size = 4096
    x = torch.randn(8, size, device="cuda")
    weights = [torch.randn(size, size, device="cuda") for _ in range(4)]
    expected = [linear_norm(x, w, norm=GroupNorm(256), strategy="single") for w in weights]
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    for weight, right in zip(weights, expected, strict=True):
        prepack(weight)
        torch.cuda._sleep(20_000_000)
        linear_norm(x, weight, norm=GroupNorm(256), strategy="single")
        with torch.cuda.stream(other):
            found = linear_norm(x, weight, norm=GroupNorm(256), strategy="single")
        other.synchronize()
        assert torch.equal(found, right)
        unprepack(weight)


def inferred(made: LinearNorm, x: torch.Tensor) -> torch.Tensor:
    """By the kernel that keeps nothing, which a capture finds loaded after one call of it."""
    with torch.no_grad():
        return single(made, x)


def capture(made: LinearNorm, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = inferred(made, x)
    return graph, y


def test_a_graph_with_fresh_planes_warns_once_and_sees_what_a_call_converted(precision):
    made, x = prepack(model()), rows()
    inferred(made, x)
    with pytest.warns(UserWarning, match="CUDA graph.*prepacked"):
        graph, y = capture(made, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(made, x)
    graph.replay()
    assert torch.equal(y, inferred(made, x))
    in_place(made)
    expected = inferred(made, x)  # converts again, in place
    graph.replay()
    assert torch.equal(y, expected)


def test_a_graph_keeps_what_it_reads(precision):
    made, x = prepack(model()), rows()
    inferred(made, x)
    with pytest.warns(UserWarning, match="prepacked"):
        graph, y = capture(made, x)
    graph.replay()
    expected = y.clone()
    unprepack(made)
    junk = [torch.full((N, 2 * K), float("nan"), device="cuda") for _ in range(20)]
    y.fill_(0)
    graph.replay()
    assert torch.equal(y, expected)
    del junk


def test_a_stale_weight_is_converted_inside_the_graph(precision):
    made, x = prepack(model()), rows()
    inferred(made, x)
    in_place(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph, y = capture(made, x)
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, inferred(made, x))
        weight_of(made).data.mul_(-1.25)  # seen: the graph converts W itself
        unprepack(made)


def test_fused_models_and_modules(precision):
    torch.manual_seed(0)
    net = Net().cuda().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    fused = epinorm.fuse(net)
    x = torch.randn(4096, K, device="cuda")
    with torch.no_grad():
        expected = fused(x)
        prepack(fused)
        assert torch.equal(fused(x), expected)
        assert torch.equal(torch.compile(net, backend=compile_graph)(x), expected)
        fused.fc.weight.mul_(-2)
        changed = fused(x)
        unprepack(fused)
        assert torch.equal(changed, fused(x))
        assert not torch.equal(changed, expected)
    torch._dynamo.reset()


def test_calls_repeated_by_native_code(precision):
    """Of a short pass as a CUDA graph too, where addresses come back."""
    settle()
    made, x = prepack(model()), rows()
    for _ in range(3):
        found = []
        for _ in range(8):
            check_fresh(made)
            with torch.no_grad():
                found.append(single(made, x))
        assert all(torch.equal(y, found[0]) for y in found)
        in_place(made)
    made.linear.weight.data = torch.randn(N, K, device="cuda")
    for _ in range(8):
        check_fresh(made)


def test_planes_die_with_the_weight():
    made = prepack(model())
    single(made, rows())
    buffer = weakref.ref(marked[id(weight_of(made))].buffer)
    del made
    gc.collect()
    assert buffer() is None
    assert not marked
