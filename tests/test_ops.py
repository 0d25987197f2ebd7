"""The operators inside PyTorch: autograd, torch.func, compile, modes, and what each may cost."""

import contextlib
import itertools
import shutil

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import epinorm
from epinorm import Chain, GroupNorm, LinearNorm
from epinorm.chain import reference
from epinorm.operator import dispatch, schema, transforms
from epinorm.operator.calls import run_inference
from processes import run_python
from watching import SeesOperators

pytestmark = pytest.mark.usefixtures("kernels_that_compile_fast")

NORMS = ["group_norm(2,1e-05)", "layer_norm(1e-05)", "rms_norm"]
STRATEGIES = ["auto", "reference"]
# A kink nowhere, operands on both sides of the norm, a residual.
SMOOTH = "mul_channel|{}|silu|scale(2)|add_residual"


def leaves(dtype=torch.float64, m=3, k=4, n=6):
    """x, weight, bias, norm_weight, norm_bias, a channel operand and a residual: all random."""
    shapes = ((m, k), (n, k), (n,), (n,), (n,), (n,), (m, n))
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def arguments(t, chain, strategy="auto"):
    return (*t[:5], list(t[5:]), chain, strategy, False, None)


def ours(chain, strategy="auto"):
    return lambda *t: dispatch.call(*t[:5], t[5:], chain, strategy)


def eager(chain):
    return lambda *t: reference.linear_norm(*t[:3], Chain.parse(chain), *t[3:5], t[5:])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(norm, strategy):
    function = ours(SMOOTH.format(norm), strategy)
    assert gradcheck(function, leaves(m=2, k=3), check_forward_ad=True, check_batched_grad=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("norm", NORMS)
def test_gradgradcheck(norm, strategy):
    function = ours(SMOOTH.format(norm), strategy)
    assert gradgradcheck(function, leaves(m=2, k=3), check_fwd_over_rev=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "norm, strategy",
    [(NORMS[0], "auto"), (NORMS[1], "reference"), (NORMS[2], "auto"), (NORMS[2], "reference")],
)
@pytest.mark.parametrize("operator", ["linear_norm", "forward", "backward"])
def test_opcheck(norm, strategy, operator):
    """In turn: with no rows; a backward pass that has gradients itself, or one for a few."""
    t, chain = leaves(torch.float32), SMOOTH.format(norm)
    if operator == "linear_norm":
        torch.library.opcheck(schema.linear_norm, arguments(t, chain, strategy))
        if norm == NORMS[2]:
            torch.library.opcheck(schema.linear_norm, arguments(leaves(m=0), chain, strategy))
        return
    plain = [v.detach() for v in t]
    if operator == "forward":
        torch.library.opcheck(schema.linear_norm_forward, arguments(plain, chain, strategy))
        return
    y, *kept = schema.linear_norm_forward(*arguments(plain, chain, strategy))
    facts = (chain, strategy, False, None)
    few = plain, [True, False] * 3 + [False]
    v, wanted = (t, [True] * 7) if strategy == "auto" else few
    called = (torch.randn_like(y), *v[:5], v[5:], *kept, *facts, wanted)
    torch.library.opcheck(schema.linear_norm_backward, called)


@pytest.mark.parametrize("norm", NORMS)
def test_only_gradients_that_are_needed(norm):
    chain = SMOOTH.format(norm)
    dy = torch.randn(3, 6, dtype=torch.float64)
    everything = leaves()
    expected = torch.autograd.grad(eager(chain)(*everything), everything, dy)
    for needed in itertools.product([False, True], repeat=7):
        t = [v.detach().requires_grad_(n) for v, n in zip(everything, needed, strict=True)]
        y = ours(chain)(*t)
        assert y.requires_grad == any(needed)
        if any(needed):
            y.backward(dy)
        for v, n, g in zip(t, needed, expected, strict=True):
            assert (v.grad is not None) == n
            if n:
                torch.testing.assert_close(v.grad, g, rtol=1e-10, atol=1e-10)


def test_backward_gets_only_what_is_wanted():
    """The operator that compiled graphs hold returns the wanted gradients and no others."""
    t, chain = [v.detach() for v in leaves()], SMOOTH.format("rms_norm")
    y, *kept = schema.linear_norm_forward(*arguments(t, chain))
    facts = (chain, "auto", False, None)
    wanted = [False, True, False, False, False, False, True]
    found = schema.linear_norm_backward(torch.randn_like(y), *t[:5], t[5:], *kept, *facts, wanted)
    assert [g.shape for g in found] == [t[1].shape, t[6].shape]


def test_retain_graph():
    t = leaves()
    y = ours(SMOOTH.format(NORMS[0]))(*t)
    first = torch.autograd.grad(y.sum(), t, retain_graph=True)
    second = torch.autograd.grad(y.sum(), t)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.sum(), t)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_inputs_changed_in_place_are_noticed(at):
    t = leaves()
    y = ours(SMOOTH.format(NORMS[1]))(*t)
    with torch.no_grad():
        t[at].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    t, function = leaves(), ours(SMOOTH.format(NORMS[0]))
    plain = torch.autograd.grad(function(*t).square().sum(), t)
    y = checkpoint(function, *t, use_reentrant=use_reentrant)
    y.square().sum().backward()
    assert all(torch.equal(v.grad, g) for v, g in zip(t, plain, strict=True))


def test_saved_tensor_hooks_see_what_is_kept():
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: packed.append(v) or v, lambda v: v):
        y = ours(SMOOTH.format(NORMS[0]))(*leaves())
    y.sum().backward()
    assert len(packed) == 10  # z, mean, rstd and the seven inputs


def test_saved_tensor_hooks_may_hand_back_other_strides():
    t, function = leaves(), ours(SMOOTH.format(NORMS[0]))
    for _ in range(2):  # the second call is like an earlier one
        plain = torch.autograd.grad(function(*t).square().sum(), t)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda v: v, lambda v: v.t().contiguous().t() if v.dim() == 2 else v
    ):
        y = function(*t)
    found = torch.autograd.grad(y.square().sum(), t)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_input_of_another_input():
    """A weight computed from x: each gradient counts its own way alone."""
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)

    def derivatives(call):
        y = call(x, x.tanh(), None, None, None).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), x)

    mine, theirs = derivatives(ours("layer_norm|silu")), derivatives(eager("layer_norm|silu"))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_third_derivative():
    t = leaves()
    function, truth = ours(SMOOTH.format(NORMS[1])), eager(SMOOTH.format(NORMS[1]))

    def third(f):
        y = f(*t).pow(3).sum()
        for _ in range(2):
            (g,) = torch.autograd.grad(y, t[0], create_graph=True)
            y = g.pow(2).sum()
        return torch.autograd.grad(y, t[0])[0]

    torch.testing.assert_close(third(function), third(truth), rtol=1e-8, atol=1e-8)


TRANSFORMS = {
    "grad": lambda f, x, w: torch.func.grad(f, (0, 1))(x, w),
    "vjp": lambda f, x, w: torch.func.vjp(f, x, w)[1](torch.ones((), dtype=x.dtype)),
    "jvp": lambda f, x, w: torch.func.jvp(f, (x, w), (torch.ones_like(x), torch.ones_like(w))),
    "jacrev": lambda f, x, w: torch.func.jacrev(f, (0, 1))(x, w),
    "jacfwd": lambda f, x, w: torch.func.jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: torch.func.hessian(f)(x, w),
    "grad of grad": lambda f, x, w: torch.func.grad(
        lambda x: torch.func.grad(f)(x, w).square().sum()
    )(x),
    "vmap": lambda f, x, w: torch.func.vmap(f, (0, None))(torch.stack([x, 2 * x]), w),
    "vmap both": lambda f, x, w: torch.func.vmap(f)(torch.stack([x, x]), torch.stack([w, 2 * w])),
    "vmap of grad": lambda f, x, w: torch.func.vmap(torch.func.grad(f, (0, 1)), (1, None))(
        torch.stack([x, 2 * x], 1), w
    ),
    "grad of vmap": lambda f, x, w: torch.func.grad(
        lambda w: torch.func.vmap(f, (0, None))(torch.stack([x, 2 * x]), w).sum()
    )(w),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(norm, name):
    t, chain = [v.detach() for v in leaves()], SMOOTH.format(norm)

    def loss(call):
        return lambda x, w: call(x, w, *t[2:]).square().sum()

    mine, theirs = (TRANSFORMS[name](loss(f), *t[:2]) for f in (ours(chain), eager(chain)))
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def compare_compiled(module, *inputs, dynamic=None, backend="aot_eager"):
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
    parameters = list(module.parameters())
    for x in inputs:
        x.requires_grad_()
        dy = torch.randn(*x.shape[:-1], 24)
        results = []
        for f in (compiled, module):
            y = f(x)
            results.append([y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)])
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)


def block(norm=None):
    made = LinearNorm(10, 24, norm=norm or GroupNorm(4), post="leaky_relu(0.01)|scale(2)")
    for p in made.parameters():
        torch.nn.init.normal_(p)
    return made


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("norm", [GroupNorm(4), epinorm.RMSNorm()], ids=str)
def test_compile_whole_graph(norm, dynamic):
    compare_compiled(block(norm), torch.randn(5, 10), torch.randn(9, 10), dynamic=dynamic)


def test_compile_leading_dimensions():
    inputs = torch.randn(2, 3, 10), torch.randn(2, 5, 10)
    compare_compiled(block(epinorm.LayerNorm()), *inputs, dynamic=True)


@pytest.mark.slow
def test_compile_inductor():
    compare_compiled(block(), torch.randn(5, 10), backend="inductor")


def test_compile_the_function():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()
            self.post = [torch.nn.LeakyReLU(0.2), "scale(2)"]

        def forward(self, x):
            linear, norm = self.block.linear, self.block.norm
            y = {"norm": GroupNorm(4), "norm_weight": norm.weight, "norm_bias": norm.bias}
            return epinorm.linear_norm(x, linear.weight, linear.bias, post=self.post, **y)

    compare_compiled(Model(), torch.randn(5, 10))


def test_compile_under_autocast():
    made, x = block(), torch.randn(5, 10)

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made(x)

    torch._dynamo.reset()
    y = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, run(x))


def test_export_holds_one_operator():
    made, dim = block(), torch.export.Dim("m", min=2)
    program = torch.export.export(made, (torch.randn(5, 10),), dynamic_shapes=({0: dim},))
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert calls == [schema.linear_norm]
    x = torch.randn(8, 10)
    assert torch.equal(program.module()(x), made(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_package_of_aotinductor(tmp_path):
    """Its calls of other libraries' operators leave None where a list of tensors is empty."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            norm = epinorm.LayerNorm()
            self.first = LinearNorm(10, 12, norm=norm, post="mul_channel", return_sum=True)
            self.second = LinearNorm(12, 12, norm=norm, pre="add_residual")
            self.third = LinearNorm(12, 7, norm=norm, post="silu", bias=False)

        def forward(self, x):
            y, total = self.first(x, self.first.linear.bias)
            return self.third(self.second(y, total)), total.cos()

    model, x = Model().requires_grad_(False), torch.randn(5, 10)
    path = str(tmp_path / "model.pt2")
    run = aoti_load_package(
        aoti_compile_and_package(torch.export.export(model, (x,)), package_path=path)
    )
    expected = model(x)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)  # whose dtypes its buffers do not have
    for mode in (contextlib.nullcontext(), torch.inference_mode(), autocast):
        with mode:
            torch.testing.assert_close(run(x), expected)
            assert torch.equal(run(x)[0], expected[0])


def test_modes_see_the_operator():
    with SeesOperators() as mode, torch.no_grad():
        block()(torch.randn(5, 10))
    assert schema.linear_norm in mode.seen
    with torch.profiler.profile() as profile, torch.no_grad():
        block()(torch.randn(5, 10))
    assert "epinorm::linear_norm" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("wanted", ["both", "weight", "nothing"])
def test_flops_are_those_of_the_products(wanted):
    x = torch.randn(6, 16, requires_grad=wanted == "both")
    weight = torch.randn(32, 16, requires_grad=wanted != "nothing")
    counts = []
    for run in (
        lambda: epinorm.linear_norm(x, weight, norm=epinorm.LayerNorm()),
        lambda: torch.nn.functional.layer_norm(torch.nn.functional.linear(x, weight), (32,)),
    ):
        with FlopCounterMode(display=False) as counter:
            y = run()
            if y.requires_grad:
                y.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_flops_of_a_backward_pass_in_two():
    facts = ("gelu", "auto", False, None)
    x, weight = torch.randn(8, 4), torch.randn(6, 4)
    y, *kept = schema.linear_norm_forward(x, weight, None, None, None, [], *facts)
    with FlopCounterMode(display=False) as counter:
        wanted = [True, True, False, False, False]
        given = (x, weight, None, None, None, [], *kept, *facts, wanted)
        *_, token = schema.linear_norm_backward_begin(y, *given)
        schema.linear_norm_backward_end(token, weight, 8, 4)
    assert counter.get_total_flops() == 2 * 2 * 8 * 4 * 6


def test_the_counter_is_told_when_it_is_imported():
    """First, last, and anew: its import loads Triton, which ours is not to wait for."""
    code = """
        import sys
        name = "torch.utils.flop_counter"
        def known(module):
            return sum("epinorm" in str(operator) for operator in module.flop_registry)
        if {first}:
            import torch.utils.flop_counter
        else:
            sys.modules.pop(name, None)
        import epinorm
        assert (name in sys.modules) == {first}
        from importlib import reload
        import torch.utils.flop_counter
        print(known(sys.modules[name]), known(reload(sys.modules[name])))
    """
    for first in (True, False):
        said = run_python(code.replace("{first}", str(first)))
        assert said.stdout.split() == ["9", "9"], said.stderr


def test_subclasses_reach_their_own_dispatch():
    class Named(torch.Tensor):
        pass

    t = [v.detach() for v in leaves()]
    t[0] = t[0].as_subclass(Named)
    assert type(ours(SMOOTH.format(NORMS[0]))(*t)) is Named


def test_inference_mode():
    made, x = block(), torch.randn(5, 10)
    with torch.inference_mode():
        y = made(x)
        assert y.is_inference()
    assert torch.equal(y, made(x))


def test_settings_are_part_of_what_is_remembered():
    """The same shapes with other facts must not find each other's plan."""
    t = [v.detach() for v in leaves(torch.float32)]
    for chain in ("layer_norm|relu", "layer_norm|tanh", "group_norm(3)|relu"):
        for bias in (t[2], None):
            inputs = (t[0], t[1], bias, t[3], None, ())
            y = run_inference(inputs, (chain, "reference", False, None))
            expected = eager(chain)(t[0], t[1], bias, t[3], None)
            assert torch.equal(y, expected)
    low = [v.bfloat16() for v in t]
    inputs = (*low[:3], None, None, ())
    assert run_inference(inputs, ("layer_norm", "reference", False, None)).dtype == torch.bfloat16
    mixed = ("layer_norm", "reference", False, torch.float32)
    assert run_inference(inputs, mixed).dtype == torch.float32


@pytest.mark.parametrize("norm", NORMS)
def test_cuda_autocast_casts_as_pytorch_does(norm):
    """The rule itself needs no GPU: the linear in 16 bit, the norm and all after it in fp32.

    PyTorch 2.9 has no such rule for RMSNorm: its own layers compute, and cast nothing here."""
    t, chain = leaves(torch.float32, m=16), SMOOTH.format(norm)
    low = torch.get_autocast_dtype("cuda")
    x, w, b = (v.to(low) for v in t[:3])
    z = torch.nn.functional.linear(x, w, b).float()
    if not transforms.norm_is_fp32_under_autocast(Chain.parse(chain)):
        z = torch.nn.functional.linear(*t[:3])
    expected = reference.epilogue(z, Chain.parse(chain), t[3], t[4], t[5:])
    y = transforms._autocast_cuda(*arguments(t, chain, "reference"))
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    mine, theirs = (torch.autograd.grad(v, t, dy) for v in (y, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_cuda_autocast_leaves_fp64_alone():
    t, chain = leaves(), SMOOTH.format(NORMS[0])
    y = transforms._autocast_cuda(*arguments(t, chain, "reference"))
    assert torch.equal(y, eager(chain)(*t))
