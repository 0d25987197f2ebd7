"""Calls of a fused model that native code runs without Dynamo's guards, and what ends that.

What guards may look at is in tests/capture/test_python_state.py, whose probes run both ways.
"""

import copy
import gc
import os
import socket
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import epinorm
from epinorm.backends.cpu.build import BuildError
from epinorm.backends.cuda import recorded
from epinorm.backends.cuda.runtime.native import native
from epinorm.capture import unchanged
from epinorm.capture.fuse import fused_of

M, K, N = 12, 16, 32
CALLS = 12  # behind which all that may be native is


def block():
    return nn.Sequential(nn.Linear(K, N), nn.GroupNorm(4, N), nn.LeakyReLU(0.1)).double()


def given():
    return torch.randn(M, K, dtype=torch.float64)


def by_python(model):
    return fused_of(model).calls.by_python


def train(model, x):
    """y and the gradients."""
    y = model(x)
    return y, *torch.autograd.grad(y, list(model.parameters()), torch.ones_like(y))


def compare(model, plain, native=True):
    """Of two calls: the second is native again, whatever the first is."""
    for is_native in (False, native):
        before, x = by_python(model), given()
        found, expected = train(model, x), train(plain, x)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert by_python(model) == before or not is_native


@pytest.fixture
def model(gpu):
    made = epinorm.fuse(block())
    for _ in range(CALLS):
        train(made, given())
    compare(made, copy.deepcopy(made))
    return made


def test_calls_in_training_and_in_inference(model):
    plain = copy.deepcopy(model)
    for _ in range(CALLS):
        with torch.no_grad():
            model(given())
    before, x = by_python(model), given()
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-10)
    compare(model, plain)
    assert by_python(model) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[2], "negative_slope", 0.3),
        lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach() * 2)),
        lambda m: setattr(m, "2", nn.Tanh()),
        lambda m: m[0].weight.requires_grad_(False).requires_grad_(),
        lambda m: m.register_forward_hook(lambda module, x, y: y * 3),
        lambda m: m[1].register_forward_pre_hook(lambda module, x: (x[0] * 3,)),
        lambda m: m.append(nn.ReLU()),
        lambda m: setattr(m[1], "forward", lambda x, norm=m[1]: nn.GroupNorm.forward(norm, x) + 1),
        lambda m: setattr(m[1], "__class__", Doubling),
    ],
    ids=["slope", "weight", "child", "flag", "hook", "pre_hook", "appended", "forward", "class"],
)
def test_a_change_is_seen_at_the_next_call(model, change):
    plain = copy.deepcopy(model)
    for each in (model, plain):
        change(each)
    compare(model, plain, native=False)


class Doubling(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_changed_class_is_seen(model, monkeypatch):
    own = nn.LeakyReLU.forward
    plain = copy.deepcopy(model)
    monkeypatch.setattr(nn.LeakyReLU, "forward", lambda self, x: own(self, x) + 1)
    compare(model, plain, native=False)


def test_settings_are_looked_at_each_time(model, monkeypatch):
    plain, x = copy.deepcopy(model), given()
    with torch.device("meta"):
        assert model(x).device == plain(x).device
    with torch.compiler.set_stance("force_eager"):
        assert model(x).grad_fn.name() == plain(x).grad_fn.name()
    before = by_python(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        model(x)
    assert by_python(model) > before
    compare(model, plain)


def test_other_sizes_are_another_call(model):
    plain = copy.deepcopy(model)
    x = torch.randn(M + 1, K, dtype=torch.float64)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-10)
    compare(model, plain)


def test_what_is_replaced_is_freed_at_once(model):
    weight, child = weakref.ref(model[0].weight), weakref.ref(model[2])
    model[0].weight = nn.Parameter(torch.ones(N, K, dtype=torch.float64))
    model[2] = nn.Tanh()
    gc.collect()
    known = fused_of(model).known
    assert known
    assert child() is None
    assert weight() is None


def test_what_is_swapped_is_the_new_one(model):
    plain = copy.deepcopy(model)
    for each in (model, plain):
        new = nn.Parameter(torch.full((N, K), 0.5, dtype=torch.float64))
        torch.utils.swap_tensors(each[0].weight, new)
    compare(model, plain)


def test_an_error_within_is_the_models_own(model):
    with pytest.raises(RuntimeError, match="mat1 and mat2|shapes|size"):
        model(torch.randn(M, K + 1, dtype=torch.float64))
    compare(model, copy.deepcopy(model))


def test_several_chains_are_one_graph(gpu, monkeypatch):
    monkeypatch.setattr(unchanged.native_calls, "WORTH", ("cpu",))
    model = nn.Sequential(block(), nn.Linear(N, K).double(), block())
    plain = copy.deepcopy(model)
    epinorm.fuse(model)
    for _ in range(CALLS):
        train(model, given())
    compare(model, plain)
    model[2][2].negative_slope = plain[2][2].negative_slope = 0.7
    compare(model, plain, native=False)


def test_no_compiler_costs_nothing_but_time(gpu, monkeypatch):
    def fails(wait=False):
        raise BuildError("no compiler")

    monkeypatch.setattr(unchanged.native_calls, "WORTH", ("cpu",))
    for module in (recorded, unchanged):
        monkeypatch.setattr(module, "native", fails)
    model = nn.Sequential(block(), nn.Linear(N, K).double(), block())
    plain = copy.deepcopy(model)
    epinorm.fuse(model)
    for _ in range(CALLS):
        train(model, given())
    compare(model, plain, native=False)


def test_a_sum_that_is_kept_for_its_gradient_is_no_result():
    """As calls under CUDA's autocast give it besides y."""
    host, x = native(wait=True), given()
    calls = host.Calls()
    calls.add_layers([x], None, lambda x: (x + 1, x))
    known = unchanged.Unchanged(([0, torch.Tensor],), (), lambda: True, (0,), calls)
    torch.testing.assert_close(host.as_before([known], None, x), x + 1)


def test_a_class_that_is_gone_is_not_none():
    host, x = native(wait=True), given()
    calls = host.Calls()
    calls.add_layers([x], None, lambda _: "native")
    gone = weakref.ref(type("Gone", (), {}))
    gc.collect()
    assert gone() is None
    known = unchanged.Unchanged(([gone], [0, torch.Tensor]), (), lambda: True, (0,), calls)
    assert host.as_before([known], lambda *_: "python", None, x) == "python"


def test_calls_under_hooks_do_not_take_others_places(model):
    x = given()
    for _ in range(70):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            model(x).sum().backward()
    compare(model, copy.deepcopy(model))
    before = by_python(model)
    train(model, x)
    assert by_python(model) == before


def test_keywords_are_pythons(model):
    x = given()
    torch.testing.assert_close(model(input=x), model(x))


@pytest.fixture
def mesh(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setitem(os.environ, name, str(value))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_sharded_unit(gpu, mesh):
    """Its parameters are others within its hooks than around them."""
    model = nn.Sequential(block(), nn.Sequential(nn.Linear(N, K).double()), block())
    plain = copy.deepcopy(model)
    for unit in (model[0], model[2]):
        fully_shard(unit, mesh=mesh)
    epinorm.fuse(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    units, before = (model[0], model[2]), []
    for step in range(CALLS + 2):
        x = given()
        if step >= CALLS:
            before = [by_python(unit) for unit in units]
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-10)
        assert step < CALLS or [by_python(unit) for unit in units] == before


def test_a_training_step_holds_no_more_as_a_graph(gpu):
    """fp32, whose forward pass frees nothing before its last launch."""
    model = epinorm.fuse(nn.Sequential(nn.Linear(64, 64), nn.GroupNorm(4, 64), nn.ReLU()))
    x, dy = torch.randn(64, 64), torch.randn(64, 64)
    for _ in range(200):  # until the same memory comes back
        model(x).backward(dy)
        if gpu.graph_launches:
            return
    pytest.fail("no graph was launched")
