"""Training steps on a GPU: subsets of gradients, graphs, checkpointing, AMP, compile, memory."""

import copy
import gc
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from product_case import dtype_of, forced_core

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.fp32 import kept_planes
from epinorm.capture.backend import compile_graph
from epinorm.tools.accuracy import allowed_error, relative_error

M, K, N, GROUPS = 2048, 4096, 4096, 256
"""Large enough that fp32 takes planes, in its backward pass too (asserted below)."""


def takes_planes(precision):
    """Whether dX and dW come from planes. PyTorch's TF32 is faster than the portable core's."""
    return forced_core() == "hopper" or precision == "highest"


class Block(nn.Module):
    """No kink: a sign that rounding flips would be all of a gradient's error."""

    def __init__(self, k=K, n=N, groups=GROUPS):
        super().__init__()
        self.fc = nn.Linear(k, n)
        self.norm = nn.GroupNorm(groups, n)
        self.silu = nn.SiLU()
        nn.init.normal_(self.norm.weight, 1.0, 0.2)
        nn.init.normal_(self.norm.bias, 0.0, 0.2)

    def forward(self, x):
        x = self.silu(self.norm(self.fc(x)))
        return x + x


def network(dtype, blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)]).to("cuda", dtype)


def batch(dtype, seed=0):
    torch.manual_seed(seed)
    x, target = torch.randn(M, K, device="cuda"), torch.randn(M, N, device="cuda")
    return x.to(dtype), target.to(dtype)


def loss_of(model, x, target):
    return nn.functional.mse_loss(model(x).float(), target.float())


def gradients(model, x, target):
    """Of x and every parameter, by name."""
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    loss_of(model, x, target).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {"x": x.grad, **{name: g for name, g in found.items() if g is not None}}


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_the_sizes_above_take_planes_in_the_backward_pass(precision):
    fused = epinorm.fuse(network(torch.float32, blocks=1)[0])
    x, target = batch(torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients(fused, x, target)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert bool({"split_gradient", "rescale_planes"} & set(names)) == takes_planes(precision)
    assert (f"{forced_core()}_product" in names) == takes_planes(precision)


def test_gradients_are_as_accurate_as_eagers_and_the_same_bits(kind):
    dtype = dtype_of(kind)
    model, (x, target) = network(dtype, blocks=1), batch(dtype)
    fused = epinorm.fuse(copy.deepcopy(model))
    exact = copy.deepcopy(model).double()
    truth = gradients(exact, x.double(), target.double())
    eager, ours = gradients(model, x, target), gradients(fused, x, target)
    same_bits(ours, gradients(fused, x, target))
    # High: both round to 11 bits, and differ by chance.
    slack = 1.02 if kind == "high" else 1.0
    for name, right in truth.items():
        allowed = allowed_error(relative_error(eager[name], right), dtype)
        assert relative_error(ours[name], right) <= allowed * slack, name


TENSORS = ("x", "fc.weight", "fc.bias", "norm.weight", "norm.bias")


def test_every_subset_of_gradients_has_the_bits_of_all(kind):
    dtype = dtype_of(kind)
    model = epinorm.fuse(network(dtype, blocks=1)[0], strict=True)
    x, target = batch(dtype)
    every = gradients(model, x, target)
    for count in range(1, len(TENSORS)):
        for subset in itertools.combinations(TENSORS, count):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in subset)
            leaf = x.detach().requires_grad_("x" in subset)
            model.zero_grad(set_to_none=True)
            loss_of(model, leaf, target).backward()
            found = {name: p.grad for name, p in model.named_parameters()} | {"x": leaf.grad}
            assert {name for name, g in found.items() if g is not None} == set(subset)
            for name in subset:
                # Another set of outputs is another kernel, whose sums may be in another order.
                limit = 1e-5 if dtype == torch.float32 else 1e-2
                assert relative_error(found[name], every[name].double()) <= limit, (subset, name)


def test_a_retained_graph_gives_the_same_bits_twice(kind):
    dtype = dtype_of(kind)
    model = epinorm.fuse(network(dtype))
    x, target = batch(dtype)
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    loss = loss_of(model, x, target)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_gradients(precision):
    """By the reference: as eager's, from a graph that our kernels began."""
    model, (x, target) = network(torch.float32), batch(torch.float32)
    found = []
    for candidate in (model, epinorm.fuse(copy.deepcopy(model))):
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(candidate, leaf, target), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), list(candidate.parameters())[:4]))
    for eager, ours in zip(*found, strict=True):
        assert relative_error(ours, eager.double()) < (1e-4 if precision == "highest" else 2e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(kind, use_reentrant):
    dtype = dtype_of(kind)
    model, (x, target) = epinorm.fuse(network(dtype)), batch(dtype)
    expected = gradients(model, x, target)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            for block in model:  # each by itself: `fuse` is of the module that is called
                x = checkpoint(epinorm.fuse(block), x, use_reentrant=use_reentrant)
            return x

    found = gradients(Checkpointed(), x, target)
    found = {name.removeprefix("inner."): g for name, g in found.items()}
    if use_reentrant and kind == "high" and not takes_planes(kind):
        # The library's products, which on another thread of autograd may be others.
        for name, gradient in expected.items():
            assert relative_error(found[name], gradient.double()) <= 1e-3, name
    else:
        same_bits(found, expected)


def test_gradients_accumulate(kind):
    dtype = dtype_of(kind)
    model = epinorm.fuse(network(dtype))
    parts = [gradients(model, *batch(dtype, seed)) for seed in (1, 2)]
    expected = {n: parts[0][n] + parts[1][n] for n, _ in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for seed in (1, 2):
        x, target = batch(dtype, seed)
        loss_of(model, x.requires_grad_(), target).backward()  # all gradients, as above
    same_bits({n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_autocast_with_a_gradient_scaler_follows_eager(low):
    model, (x, target) = network(torch.float32), batch(torch.float32)
    losses, scales = [], []
    for candidate in (model, epinorm.fuse(copy.deepcopy(model))):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # too large: steps are skipped
        curve = []
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=low):
                loss = loss_of(candidate, x, target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            curve.append(loss.detach())
        losses.append(torch.stack(curve).tolist())
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    eager, ours = losses
    assert eager[-1] < 0.9 * eager[0]
    assert ours == pytest.approx(eager, rel=0.02)


def test_a_whole_step_under_torch_compile(kind):
    dtype = dtype_of(kind)
    model, (x, target) = epinorm.fuse(network(dtype)), batch(dtype)
    expected = gradients(model, x, target)
    # Of a fused model torch.compile alone would compile the model's own layers.
    compiled = torch.compile(model, backend=compile_graph, fullgraph=True)
    found = gradients(compiled, x, target)
    assert found.keys() == {n if n == "x" else f"_orig_mod.{n}" for n in expected}
    for name, gradient in expected.items():
        other = found[name if name == "x" else f"_orig_mod.{name}"]
        # The compiler fuses what lies between the blocks, and rounds there less often.
        limit = {torch.float32: 1e-5}.get(dtype, 2e-2)
        limit = 2e-3 if kind == "high" else limit
        assert relative_error(other, gradient.double()) <= limit, name


def test_a_whole_step_as_a_cuda_graph(kind):
    """Replays equal steps without a graph, bit for bit, momentum included."""
    dtype = dtype_of(kind)
    captured_model = epinorm.fuse(network(dtype))
    plain_model = epinorm.fuse(copy.deepcopy(captured_model))
    x, target = batch(dtype)

    def optimizer_of(model):
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(model, optimizer):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x, target)
        loss.backward()
        optimizer.step()
        return loss

    optimizers = [optimizer_of(m) for m in (captured_model, plain_model)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(captured_model, optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(plain_model, optimizers[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(captured_model, optimizers[0])
    for seed in range(1, 5):
        fresh = batch(dtype, seed)
        x.copy_(fresh[0])
        target.copy_(fresh[1])
        graph.replay()
        assert loss.isfinite()
        assert torch.equal(loss, step(plain_model, optimizers[1]))
    for a, b in zip(captured_model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_two_hundred_steps_do_not_grow(kind):
    dtype = dtype_of(kind)
    model, (x, target) = epinorm.fuse(network(dtype)), batch(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, x, target).backward()
        optimizer.step()

    gc.collect()  # what other tests left in cycles would else go on the way
    sizes = []
    for index in range(200):
        step()
        if index in (9, 199):
            torch.cuda.synchronize()
            reserved = torch.cuda.memory_reserved()
            sizes.append(
                (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), reserved)
            )
    assert sizes[0] == sizes[1]


# ---- planes that wait for their backward pass ----


def waiting(device):
    """Bytes of planes that wait, but for those that other tests left in cycles."""
    gc.collect()
    return kept_planes.nbytes_kept(device)


def test_planes_are_kept_for_the_backward_pass_and_given_back(precision):
    model, (x, target) = epinorm.fuse(network(torch.float32)), batch(torch.float32)
    for _ in range(2):  # a call's first time takes the long way, which keeps nothing
        loss_of(model, x, target).backward()
    before = waiting(x.device)
    loss = loss_of(model, x, target)
    planes = 2 if precision == "highest" else 1
    w_planes, x_planes = planes * 2 * N * K, planes * 2 * M * K
    # The second block's alone, whose backward pass comes first.
    kept = waiting(x.device) - before
    expected = w_planes + x_planes if takes_planes(precision) else 0
    assert expected <= kept <= expected + 1e6
    loss.backward()
    assert waiting(x.device) == before
    loss_of(model, x, target)  # never differentiated: gone with its graph
    assert waiting(x.device) == before


def test_no_planes_are_kept_where_hooks_decide_what_is(precision):
    model, (x, target) = epinorm.fuse(network(torch.float32)), batch(torch.float32)
    x.requires_grad_()
    for _ in range(2):
        loss_of(model, x, target).backward()
    before = waiting(x.device)
    y = checkpoint(model, x, use_reentrant=False)
    assert waiting(x.device) == before
    y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, x, target)
    assert waiting(x.device) == before
    loss.backward()


def test_without_room_for_planes_the_bits_are_the_same(precision, monkeypatch):
    model, (x, target) = epinorm.fuse(network(torch.float32)), batch(torch.float32)
    expected = gradients(model, x, target)
    same_bits(gradients(model, x, target), expected)
    monkeypatch.setenv(kept_planes.VARIABLE, "0")
    memo.clear()
    before = waiting(x.device)
    loss = loss_of(model, x, target)
    assert waiting(x.device) == before
    del loss
    same_bits(gradients(model, x, target), expected)
    monkeypatch.undo()
    memo.clear()


class Second(nn.Module):
    """The second Linear of a transformer's block, with what is behind it."""

    def __init__(self, k, n):
        super().__init__()
        self.fc, self.norm = nn.Linear(k, n), nn.LayerNorm(n)

    def forward(self, x):
        return self.norm(self.fc(x) + x[:, : self.fc.out_features].contiguous())


def test_where_scales_of_w_alone_wait_the_bits_are_the_same(precision, monkeypatch):
    """W is split again before dX; where nothing waits, x and W are before all else."""
    m, k, n = 8192, 3072, 768
    torch.manual_seed(0)
    model = epinorm.fuse(Second(k, n).cuda())
    x, target = torch.randn(m, k, device="cuda"), torch.randn(m, n, device="cuda")
    expected = gradients(model, x, target)
    for _ in range(3):
        same_bits(gradients(model, x, target), expected)
    if precision == "highest":
        before = waiting(x.device)
        loss = loss_of(model, x, target)
        assert 4 * m * k < waiting(x.device) - before < 4 * m * k + 4 * n * k
        loss.backward()
    monkeypatch.setenv(kept_planes.VARIABLE, "0")
    memo.clear()
    for _ in range(3):
        same_bits(gradients(model, x, target), expected)
    monkeypatch.undo()
    memo.clear()


def test_a_changed_weight_is_an_error_also_with_kept_planes(precision):
    model, (x, target) = epinorm.fuse(network(torch.float32)), batch(torch.float32)
    for _ in range(2):
        loss_of(model, x, target).backward()
    before = waiting(x.device)
    loss = loss_of(model, x, target)
    assert (waiting(x.device) > before) == takes_planes(precision)
    with torch.no_grad():
        model[0].fc.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    assert waiting(x.device) == before


def test_z_is_free_when_memory_peaks(kind):
    """A step needs no more than eager's: y, dz, dX and dW, and what the products read."""
    dtype = dtype_of(kind)
    model, (x, target) = network(dtype, blocks=1)[0], batch(dtype)
    x.requires_grad_()
    peaks = []
    for candidate in (model, epinorm.fuse(copy.deepcopy(model))):
        for _ in range(2):
            candidate.zero_grad(set_to_none=True)
            x.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = candidate(x)
            y.backward(target)
            peak = torch.cuda.max_memory_allocated() - before
            del y
        peaks.append(peak)
    copies_of_w = 1 if kind == "highest" else 0
    assert peaks[1] <= peaks[0] + copies_of_w * 4 * N * K
