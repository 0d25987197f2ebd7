"""The backward pass as a compiled graph holds it where memory peaks: begun, and dX at its end."""

import sys
import weakref
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from epinorm.backends.cuda import plane_products
from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.replayed import ReplayedBackward
from epinorm.chain import Chain
from epinorm.operator import autograd, calls, halves, schema
from epinorm.problem import Forward, Gradients, Inputs, Rest, Wanted
from imaginary import imaginary_h200

M, K, N = 2048, 1024, 1024
FACTS = ("auto", False, None)


@pytest.fixture
def in_halves(monkeypatch):
    """Passes of any size are held in two, on this device too."""
    monkeypatch.setattr(halves, "DEVICES", ("cpu",))
    monkeypatch.setitem(halves.LARGE, "highest", 1)


def linear(x, weight, bias, chain):
    return torch.ops.epinorm.linear_norm(x, weight, bias, None, None, [], chain, *FACTS)


def two_layers(chain):
    def run(x, weight, bias):
        return linear(linear(x, weight, bias, chain), weight, bias, chain)

    return torch.compile(run, backend="aot_eager", dynamic=False, fullgraph=True)


def step(m, k, n, chain, run=two_layers):
    tensors = [torch.empty(size).requires_grad_() for size in ((m, k), (n, k), (n,))]
    y = run(chain)(*tensors)
    y.backward(torch.empty_like(y))


def launched(api):
    found = [launch["kernel"] for launch in api.launches]
    api.launches.clear()
    return found


@pytest.mark.parametrize("chain", ["relu", "gelu"])
def test_nothing_that_was_given_is_there_when_dx_is_allocated(in_halves, monkeypatch, chain):
    """dy, which is the second layer's dX, and z."""
    given, fate = [], []
    backward, guard = CudaExecutable.backward, plane_products.prepare_rescue

    def begin(self, inputs, kept, dy, *rest):
        given.append([weakref.ref(t) for t in (dy, kept[0].z)])
        return backward(self, inputs, kept, dy, *rest)

    def end(result, dz, other, of_weight, *rest, **more):
        if not of_weight:
            fate.append([t() is None for t in given[-1]])
        return guard(result, dz, other, of_weight, *rest, **more)

    monkeypatch.setattr(CudaExecutable, "backward", begin)
    monkeypatch.setattr(plane_products, "prepare_rescue", end)
    with imaginary_h200() as api:
        step(M, K, N, chain)
        kernels = launched(api)
        monkeypatch.setitem(halves.LARGE, "highest", 1 << 40)
        torch._dynamo.reset()
        step(M, K, N, chain)
        whole = launched(api)
    assert kernels == whole
    assert fate[1] == [True, True]  # the first layer's
    assert fate[3] == [False, False]


@pytest.mark.parametrize("chain", ["add_residual|relu", "identity", "relu"])
def test_dz_that_is_a_gradient_by_itself_waits_for_nothing(chain):
    """What reads it next may write over it."""
    with imaginary_h200():
        residual = (torch.empty(M, N),) * ("residual" in chain)
        tensors = (torch.empty(M, K), torch.empty(N, K), torch.empty(N), None, None, residual)
        facts = (chain, *FACTS)
        y, *kept = schema.linear_norm_forward(*tensors[:5], list(residual), *facts)
        kept[0] = y if Chain.parse(chain).saves_y else kept[0]
        later = []
        wanted = [True, True, True, False, False, *[True] * len(residual)]
        calls.run_backward(tensors, facts, kept, torch.empty_like(y), wanted, later=later)
    assert bool(later) == (chain == "relu")


@pytest.mark.parametrize("chain", ["relu", "gelu"])
def test_a_weight_that_is_turned_is_read_as_rows(in_halves, monkeypatch, chain):
    """By the second half too: kernels are given an address and the stride of rows."""
    strides, guard = [], plane_products.prepare_rescue

    def seen(result, dz, other, *rest, **more):
        strides.append(other.stride())
        return guard(result, dz, other, *rest, **more)

    monkeypatch.setattr(plane_products, "prepare_rescue", seen)

    def run(chain):
        turned = lambda x, weight, bias: linear(x, weight.t(), bias, chain)  # noqa: E731
        return torch.compile(turned, backend="aot_eager", dynamic=False, fullgraph=True)

    with imaginary_h200():
        tensors = [torch.empty(size).requires_grad_() for size in ((M, K), (K, N), (N,))]
        y = run(chain)(*tensors)
        y.backward(torch.empty_like(y))
    assert strides == [(K, 1), (K, 1)]  # dW's x, dX's weight


def test_dx_is_of_the_weight_that_its_operator_is_given(monkeypatch):
    """Not of what the first one saw: a graph that changes a weight may keep a copy for dX."""
    guard, seen = plane_products.prepare_rescue, []
    monkeypatch.setattr(
        plane_products, "prepare_rescue", lambda *given, **more: seen.append(given) or guard(*given)
    )
    with imaginary_h200():
        tensors = (torch.empty(M, K), torch.empty(N, K), torch.empty(N), None, None, ())
        facts = ("relu", *FACTS)
        y, *kept = schema.linear_norm_forward(*tensors[:5], [], *facts)
        kept[0], later = y, []
        wanted = [True, True, True, False, False]
        calls.run_backward(tensors, facts, kept, torch.empty_like(y), wanted, later=later)
        copy = torch.empty(N, K)
        later[0](copy)
    assert [other is copy for _, _, other, of_weight, *_ in seen if not of_weight] == [True]


@pytest.mark.parametrize("chain", ["relu", "gelu"])
def test_gradients_are_those_of_one_pass(in_halves, monkeypatch, chain):
    x, weight, bias, dy = (torch.randn(size) for size in ((32, 16), (16, 16), (16,), (32, 16)))
    found = []
    for large in (1, 1 << 40):
        monkeypatch.setitem(halves.LARGE, "highest", large)
        torch._dynamo.reset()
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = two_layers(chain)(*leaves)
        found += [torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2)]
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


@pytest.mark.parametrize(
    ("sizes", "chain", "least", "expected"),
    [
        ((32, 16, 16), "relu", 32 * 16 * 16, True),
        ((32, 16, 16), "relu", 32 * 16 * 16 + 1, False),
        ((16, 16, 16), "relu", 1, False),  # dW comes last
        ((32, 16, 16), "add_residual|relu", 1, False),  # dz is the residual's gradient
        ((32, 16, 16), "identity", 1, False),  # dz is dy
    ],
)
def test_which_are_held_in_two(in_halves, monkeypatch, sizes, chain, least, expected):
    monkeypatch.setitem(halves.LARGE, "highest", least)
    begin, seen = autograd.linear_norm_backward_begin, []
    monkeypatch.setattr(
        autograd, "linear_norm_backward_begin", lambda *given: seen.append(given) or begin(*given)
    )
    m, k, n = sizes
    made = [torch.randn(size).requires_grad_() for size in ((m, k), (n, k), (n,), (m, n))]

    def run(x, weight, bias, residual):
        operands = [residual] if "residual" in chain else []
        facts = (chain, *FACTS)
        return torch.ops.epinorm.linear_norm(x, weight, bias, None, None, operands, *facts)

    torch._dynamo.reset()
    torch.compile(run, backend="aot_eager")(*made).sum().backward()
    assert bool(seen) == expected


class Pass:
    """A backward pass that PyTorch computes, in two; runs: how often each half did so."""

    def __init__(self):
        self.constant, self.runs = torch.randn(N_OF_PASS, N_OF_PASS, dtype=torch.float64), [0, 0]
        self.replayed = ReplayedBackward(self.run)

    def run(self, inputs, kept, dy, want, left, later=None):
        self.runs[0] += 1
        kept.clear()
        dz = torch.mm(dy, self.constant)
        dw = torch.mm(dz.t(), inputs.x)
        if later is None:
            return Gradients(torch.mm(dz, inputs.weight), dw, None, None, None, ())
        later.append(Rest([dz], self.rest))
        return Gradients(None, dw, None, None, None, ())

    def rest(self, carried, weight):
        self.runs[1] += 1
        return torch.mm(carried.pop(), weight)

    def begin(self, inputs, dy):
        later, nothing = [], torch.empty(0, dtype=torch.float64)
        kept = [Forward(nothing, dy, nothing, nothing)]
        found = self.replayed(inputs, kept, dy, WANT_OF_PASS, None, later)
        assert not kept
        return found, later[0]

    def check(self, inputs, dy, found, dx):
        dz = dy @ self.constant
        torch.testing.assert_close(found.weight, dz.t() @ inputs.x)
        torch.testing.assert_close(dx, dz @ inputs.weight)


N_OF_PASS = 6
WANT_OF_PASS = Wanted(True, True, False, False, False, ())


def inputs_of_pass(m=8, k=4):
    x, weight, dy = (
        torch.randn(size, dtype=torch.float64) for size in ((m, k), (N_OF_PASS, k), (m, N_OF_PASS))
    )
    return Inputs(x, weight, None, None, None, ()), dy


def test_each_half_is_repeated_by_native_code(gpu):
    made = Pass()
    for _ in range(4):
        inputs, dy = inputs_of_pass()
        found, rest = made.begin(inputs, dy)
        made.check(inputs, dy, found, rest(inputs.weight))
    before = list(made.runs)
    begun = []
    for _ in range(3):  # several wait, and are ended in another order
        inputs, dy = inputs_of_pass()
        begun.append((inputs, dy, *made.begin(inputs, dy)))
    for inputs, dy, found, rest in reversed(begun):
        made.check(inputs, dy, found, rest(inputs.weight))
        assert not rest.carried
    assert made.runs == before
    inputs, dy = inputs_of_pass()
    found, rest = made.begin(inputs, dy)
    apart = inputs.weight.t().contiguous().t()  # lies otherwise than the recorded one
    made.check(inputs, dy, found, rest(apart))
    assert made.runs == [before[0], before[1] + 1]
    _, rest = made.begin(inputs, dy)
    with pytest.raises(RuntimeError, match="shapes"):
        rest(inputs.weight[1:].clone())


def test_what_is_repeated_whole_is_not_taken_for_a_half(gpu):
    made = Pass()
    for _ in range(4):
        inputs, dy = inputs_of_pass()
        kept = [Forward(dy, dy, torch.empty(0), torch.empty(0))]
        whole = made.replayed(inputs, kept, dy, WANT_OF_PASS, None)
        made.check(inputs, dy, whole, whole.x)
        found, rest = made.begin(inputs, dy)
        assert found.x is None
        made.check(inputs, dy, found, rest(inputs.weight))


def test_what_is_carried_over_is_all_that_is_held(gpu):
    made = Pass()
    for _ in range(5):
        inputs, dy = inputs_of_pass()
        found, rest = made.begin(inputs, dy)
        given = [weakref.ref(t) for t in (inputs.x, dy)]
        weight = inputs.weight
        del inputs, dy, found
        assert all(t() is None for t in given)
        assert rest(weight) is not None


def begun(chain="gelu"):
    tensors = [torch.randn(8, 4), torch.randn(6, 4), torch.randn(6), None, None, []]
    facts = (chain, *FACTS)
    y, *kept = schema.linear_norm_forward(*tensors, *facts)
    wanted = [True, True, True, False, False]
    return torch.randn_like(y), *tensors, *kept, *facts, wanted


def test_operators():
    arguments = begun()
    torch.library.opcheck(schema.linear_norm_backward_begin, arguments)
    expected = schema.linear_norm_backward(*arguments)
    *found, token = schema.linear_norm_backward_begin(*arguments)
    found = [schema.linear_norm_backward_end(token, arguments[2], 8, 4), *found]
    assert all(map(torch.equal, found, expected))


def test_the_second_half_by_the_dispatcher():
    """As a compiled graph names dz where dy was not spent; the short way takes no such weight."""
    arguments = begun()
    *_, token = schema.linear_norm_backward_begin(*arguments)
    weight = arguments[2].clone().requires_grad_()
    dx = schema.linear_norm_backward_end(token, weight, 8, 4, dz=None)
    assert torch.equal(dx, schema.linear_norm_backward(*arguments)[0])


def test_a_copy_of_dy_is_told_from_it():
    """What dz was written over is another's memory by then, perhaps."""
    dy = torch.randn(8, 6)
    weight = torch.randn(6, 4)

    def token():
        rest = Rest([dy], lambda carried, w: carried.pop() @ w)
        return halves.begun([], [rest], dy)[-1]

    assert torch.equal(halves.ended(token(), weight, dy), dy @ weight)
    assert torch.equal(halves.ended(token(), weight), dy @ weight)
    with pytest.raises(RuntimeError, match="copy of dy"):
        halves.ended(token(), weight, dy.clone())


@pytest.mark.parametrize("cut", [False, True])
def test_a_graph_that_inductor_may_cut_holds_it_whole(in_halves, monkeypatch, cut):
    """Into CUDA graphs, which know no memory but their results'."""
    from torch._inductor import config

    begin, seen = autograd.linear_norm_backward_begin, []
    monkeypatch.setattr(
        autograd, "linear_norm_backward_begin", lambda *given: seen.append(given) or begin(*given)
    )
    x, weight, bias = (torch.randn(size).requires_grad_() for size in ((32, 16), (16, 16), (16,)))
    torch._dynamo.reset()
    with config.patch({"triton.cudagraphs": cut, "graph_partition": cut}):
        two_layers("relu")(x, weight, bias).sum().backward()
    assert bool(seen) != cut


def test_what_was_not_begun_cannot_be_ended():
    with pytest.raises(RuntimeError, match="linear_norm_backward_begin"):
        schema.linear_norm_backward_end(torch.empty(0), torch.empty(6, 4), 8, 4)
    *_, token = schema.linear_norm_backward_begin(*begun())
    schema.linear_norm_backward_end(token, torch.empty(6, 4), 8, 4)
    with pytest.raises(RuntimeError, match="once"):
        schema.linear_norm_backward_end(token, torch.empty(6, 4), 8, 4)
