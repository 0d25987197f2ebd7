"""When a gradient may be added in place: on a CPU, by a stand-in for the kernels that add.

tests/gpu/test_accumulation.py has the kernels, streams and CUDA graphs.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import epinorm
from epinorm.operator import accumulation, autograd

M, K, N = 16, 32, 48


@pytest.fixture
def added(monkeypatch):
    """An entry for each gradient that was added in place, which happens on the CPU here."""
    found = []
    real = autograd.run_backward

    def adding(tensors, *rest):
        *given, into = rest
        computed = real(tensors, *given, None)
        if into is None:
            return computed
        found.append("in place")
        like = next(i for i, g in enumerate(computed) if g.shape == into.shape)
        into.add_(computed[like])
        return [into if i == like else g for i, g in enumerate(computed)]

    monkeypatch.setattr(accumulation, "DEVICES", ("cpu",))
    monkeypatch.setattr(autograd, "run_backward", adding)
    return found


def block():
    torch.manual_seed(0)
    return epinorm.fuse(nn.Sequential(nn.Linear(K, N), nn.GroupNorm(6, N), nn.SiLU()))


def batch(seed=1):
    torch.manual_seed(seed)
    return torch.randn(M, K), torch.randn(M, N)


def weight_of(model):
    return next(p for p in model.parameters() if p.dim() == 2)


def step(model, x, dy, **options):
    model(x).backward(dy, **options)


def gradients(model, batches, inside):
    """After a step outside, and then one for each further batch, within or not."""
    epinorm.fuse(model).zero_grad(set_to_none=True)  # a copy is not fused
    step(model, *batches[0])
    for given in batches[1:]:
        with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
            step(model, *given)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_the_same_sums(added):
    model, batches = block(), [batch(seed) for seed in range(3)]
    usual, ours = (gradients(copy.deepcopy(model), batches, inside) for inside in (False, True))
    assert added == ["in place"] * 2
    for name, gradient in usual.items():
        assert torch.equal(ours[name], gradient), name


def test_a_cpu_adds_as_usual():
    model, batches = block(), [batch(seed) for seed in range(2)]
    usual, ours = (gradients(copy.deepcopy(model), batches, inside) for inside in (False, True))
    for name, gradient in usual.items():
        assert torch.equal(ours[name], gradient), name


def test_it_ends_with_the_last_block(added):
    model, given = block(), batch()
    step(model, *given)

    def interrupted():
        with epinorm.accumulate_in_place():
            with epinorm.accumulate_in_place():
                pass
            step(model, *given)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    step(model, *given)
    assert added == ["in place"]


def test_the_first_gradient_is_autograds_own(added):
    model = block()
    with epinorm.accumulate_in_place():
        step(model, *batch())
    assert added == []
    assert weight_of(model).grad is not None


def test_a_weight_used_twice_and_elsewhere(added):
    model, (x, dy) = block(), batch()
    weight, found = weight_of(model), []
    for inside in (False, True):
        model.zero_grad(set_to_none=True)
        step(model, x, dy)
        with epinorm.accumulate_in_place() if inside else contextlib.nullcontext():
            ((model(x) + model(-x)) * dy + (x @ weight.t())).sum().backward()
        found.append(weight.grad.clone())
    assert added == ["in place"] * 2
    torch.testing.assert_close(*found)


def test_a_retained_graph(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    once = weight_of(model).grad.clone()
    y = model(x)
    with epinorm.accumulate_in_place():
        y.backward(dy, retain_graph=True)
        y.backward(dy)
    assert added == ["in place"] * 2
    torch.testing.assert_close(weight_of(model).grad, 3 * once)


def test_the_gradient_is_known_to_have_changed(added):
    model, given = block(), batch()
    step(model, *given)
    factor = torch.ones(N, K, requires_grad=True)
    product = (factor * weight_of(model).grad).sum()
    with epinorm.accumulate_in_place():
        step(model, *given)
    assert added == ["in place"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_their_gradient(register, added):
    model, given, seen = block(), batch(), []
    step(model, *given)
    handle = getattr(weight_of(model), register)(lambda t: seen.append(t.shape) and None)
    with epinorm.accumulate_in_place():
        step(model, *given)
        assert (seen, added) == ([(N, K)], [])
        handle.remove()
        step(model, *given)
    assert (len(seen), added) == (1, ["in place"])


def test_autograd_grad_leaves_the_existing_one_alone(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    weight = weight_of(model)
    before = weight.grad.clone()
    with epinorm.accumulate_in_place():
        (found,) = torch.autograd.grad(model(x), weight, dy)
    assert added == []
    assert torch.equal(weight.grad, before)
    assert torch.equal(found, before)


def test_backward_of_other_inputs_leaves_it_alone(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    weight, leaf = weight_of(model), x.clone().requires_grad_()
    before = weight.grad.clone()
    with epinorm.accumulate_in_place():
        step(model, leaf, dy, inputs=[leaf])
        assert added == []
        assert torch.equal(weight.grad, before)
        step(model, leaf, dy, inputs=[weight])
    assert added == ["in place"]
    assert torch.equal(weight.grad, before + before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    expected = weight_of(model).grad * 2
    with epinorm.accumulate_in_place():
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=use_reentrant).backward(dy)
    assert added == ["in place"] * use_reentrant  # else a saved-tensor hook hands back a copy
    assert torch.equal(weight_of(model).grad, expected)


def test_a_graph_of_the_gradient(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    with epinorm.accumulate_in_place():
        model(x).backward(dy, create_graph=True)
    assert added == []
    assert weight_of(model).grad.requires_grad


@pytest.mark.filterwarnings("ignore:.*nomaly", "ignore:Error detected")
def test_anomalies_are_found(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    with (
        epinorm.accumulate_in_place(),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        step(model, x, dy * float("nan"))
    assert added == []


def shared_with_x(weight, x):
    both = torch.zeros(N * K + M * K)
    x.set_(both[: M * K].view(M, K).copy_(x))
    return both[M * K :].view(N, K)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(
    "make",
    [
        lambda weight, x: torch.zeros(K, N).t(),
        lambda weight, x: torch.zeros(N * K + 1)[1:].view(N, K),  # not on 16 bytes
        shared_with_x,
    ],
    ids=["transposed", "unaligned", "shared with x"],
)
def test_memory_that_kernels_cannot_add_to(make, added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    expected = weight_of(model).grad.clone()
    weight_of(model).grad = make(weight_of(model), x)
    with epinorm.accumulate_in_place():
        step(model, x, dy)
    assert added == []
    assert torch.equal(weight_of(model).grad, expected)


def test_a_gradient_of_another_shape_is_refused_as_ever(added):
    model, given = block(), batch()
    step(model, *given)
    weight_of(model).grad.data = torch.zeros(4, 16)
    with epinorm.accumulate_in_place(), pytest.raises(RuntimeError, match="size"):
        step(model, *given)
    assert added == []


def test_a_frozen_weight(added):
    model, (x, dy) = block(), batch()
    step(model, x, dy)
    weight = weight_of(model)
    before = weight.grad.clone()
    weight.requires_grad_(False)
    with epinorm.accumulate_in_place():
        step(model, x, dy)
    assert added == []
    assert torch.equal(weight.grad, before)
