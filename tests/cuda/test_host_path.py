"""Calls like an earlier one skip all checks: whatever changes between two of them must still show.

The GPU is conftest.py's: it computes each launch from the bytes that the driver is given.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epinorm
from epinorm.backends import unpromised
from epinorm.backends.cuda.norm.forward import NormForward
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.chain import Chain
from epinorm.operator import kinds as kinds_module
from epinorm.operator.dispatch import Caller
from epinorm.problem import Inputs, Problem
from imaginary import imaginary_h200

K, N, GROUPS, ROWS = 64, 128, 8, 24
BF16, FP32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    def __init__(self, norm: nn.Module | None = None, k: int = K) -> None:
        super().__init__()
        self.fc = nn.Linear(k, N)
        self.norm = norm or nn.GroupNorm(GROUPS, N)
        self.act = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.fc(x)))
        return x + x


class Residual(Model):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return self.act(self.norm(self.fc(x))) + r


def randomised(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


def check(fused: nn.Module, *inputs: Tensor) -> Tensor:
    """A fused model's output is what its layers compute one by one, in double precision."""
    y = fused(*inputs)
    assert torch.isfinite(y).all()
    model = epinorm.unfuse(copy.deepcopy(fused)).double()
    expected = model(*(t.double() for t in inputs))
    tolerance = 2e-2 if inputs[0].dtype != FP32 else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    assert y.dtype == inputs[0].dtype
    return y


def fused_model(
    dtype: torch.dtype, strategy: Any = "single", kind: type[Model] = Model, **kwargs: Any
) -> nn.Module:
    """Fused where 16 bit take one kernel; else the model's call is what a fused one's comes to, a
    Caller, without TorchDynamo, whose captures and guards are the same whatever the way."""
    model = randomised(kind(**kwargs)).to(dtype)
    if (dtype, strategy) == (BF16, "single"):
        return epinorm.fuse(model, strategy=strategy)
    grouped = isinstance(model.norm, nn.GroupNorm)
    norm, last = f"group_norm({GROUPS})", "scale(2)" if kind is Model else "add_residual"
    caller = Caller(f"{norm if grouped else 'layer_norm'}|leaky_relu(0.01)|{last}", strategy)

    def call(x: Tensor, *operands: Tensor) -> Any:
        linear, norm = model.fc, model.norm
        return caller(x, linear.weight, linear.bias, norm.weight, norm.bias, operands)

    model.__dict__["_compiled_call_impl"] = call
    return model


KERNELS = {
    ("single", BF16, "highest"): ["linear_norm"],
    ("single", FP32, "high"): ["linear_norm"],
    ("single", FP32, "highest"): ["split", "linear_norm", "rescue"],
    ("planes", FP32, "highest"): ["split", "linear_norm", "rescue", "norm_forward"],
    ("epilogue", BF16, "highest"): ["norm_forward"],
    ("epilogue", FP32, "highest"): ["norm_forward"],
}


@pytest.fixture(params=KERNELS, ids=lambda p: f"{p[0]}-{str(p[1])[6:]}-{p[2]}")
def way(request: pytest.FixtureRequest, gpu: Any) -> tuple[Any, torch.dtype, list[str]]:
    strategy, dtype, precision = request.param
    torch.set_float32_matmul_precision(precision)
    return strategy, dtype, KERNELS[request.param]


def test_the_second_call_takes_the_short_way(way: Any, gpu: Any, short: list[bool]) -> None:
    strategy, dtype, kernels = way
    fused = fused_model(dtype, strategy)
    with torch.no_grad():
        for _ in range(3):
            check(fused, torch.randn(ROWS, K).to(dtype))
            assert gpu.kinds() == kernels
    assert short == [False, True, True]


def in_place(fused: nn.Module) -> None:
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.mul_(-3)


def replaced(fused: nn.Module) -> None:
    for module in (fused.fc, fused.norm):
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(torch.randn_like(parameter)))


def data_set(fused: nn.Module) -> None:
    for parameter in fused.parameters():
        parameter.data = torch.randn_like(parameter)


def loaded(fused: nn.Module) -> None:
    fused.load_state_dict({k: torch.randn_like(v) for k, v in fused.state_dict().items()})


def row_strided(fused: nn.Module) -> None:
    wide = torch.randn(N, K + 8).to(fused.fc.weight.dtype)
    fused.fc.weight = nn.Parameter(wide[:, :K])


def unaligned(fused: nn.Module) -> None:
    flat = torch.randn(N * K + 1).to(fused.fc.weight.dtype)
    fused.fc.weight = nn.Parameter(flat[1:].view(N, K))


def transposed(fused: nn.Module) -> None:
    fused.fc.weight = nn.Parameter(torch.randn(K, N).to(fused.fc.weight.dtype).t())


def wider(fused: nn.Module) -> None:
    """The same storage as before, read as another shape."""
    fused.fc.weight.data = fused.fc.weight.data[: N // 2]
    fused.fc.bias.data = fused.fc.bias.data[: N // 2]
    fused.norm = nn.GroupNorm(GROUPS, N // 2).to(fused.fc.weight.dtype)


def without(layer: str, name: str) -> Callable[[nn.Module], None]:
    return lambda fused: setattr(getattr(fused, layer), name, None)


CHANGES = {
    "in place": in_place,
    "replaced": replaced,
    "data": data_set,
    "state dict": loaded,
    "rows apart": row_strided,
    "not aligned": unaligned,
    "transposed": transposed,
    "shape of the same memory": wider,
    "no bias": without("fc", "bias"),
    "no norm weight": without("norm", "weight"),
    "no norm bias": without("norm", "bias"),
}


@pytest.mark.filterwarnings("ignore:epinorm")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_parameters_are_used(way: Any, gpu: Any, change: Any) -> None:
    strategy, dtype, _ = way
    fused, x = fused_model(dtype, strategy), torch.randn(ROWS, K).to(dtype)
    with torch.no_grad():
        for _ in range(2):
            before = check(fused, x)
        change(fused)
        for _ in range(3):
            after = check(fused, x)
    assert after.shape != before.shape or not torch.equal(after, before)


def test_other_inputs_are_used(way: Any, gpu: Any, short: list[bool]) -> None:
    strategy, dtype, _ = way
    fused = fused_model(dtype, strategy)
    wide = torch.randn(200, K + 8).to(dtype)
    inputs = [
        *(torch.randn(m, K).to(dtype) for m in (ROWS, 1, 40, ROWS, 129)),
        *(wide[:ROWS, :K], wide[:40, 8:], wide[8:48, 8:]),  # rows apart
        wide.view(-1)[: ROWS * K].view(ROWS, K),  # at the same address, and not apart
        wide.view(-1)[1 : 1 + ROWS * K].view(ROWS, K),  # not aligned
        torch.randn(K, ROWS).to(dtype).t(),  # not dense: copied
        torch.empty(0, K, dtype=dtype),
    ]
    with torch.no_grad():
        for _ in range(2):
            for x in inputs:
                assert check(fused, x).shape == (x.shape[0], N)
    assert all(short[len(inputs) :])


def test_other_dtypes_are_other_kernels(gpu: Any) -> None:
    fused = fused_model(BF16)
    with torch.no_grad():
        for dtype in (BF16, FP32, torch.float16, BF16, FP32):
            fused.to(dtype)
            for _ in range(2):
                check(fused, torch.randn(ROWS, K).to(dtype))


def test_the_precision_setting_is_read_at_each_call(gpu: Any) -> None:
    fused, x = epinorm.fuse(randomised(Model(k=256)), strategy="single"), torch.randn(ROWS, 256)
    kernels = {"highest": ["split", "linear_norm", "rescue"], "high": ["linear_norm"]}
    with torch.no_grad():
        for setting in ("highest", "high", "highest", "high", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            check(fused, x)
            assert gpu.kinds() == kernels[setting]
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        check(fused, x)
        assert gpu.kinds() == kernels["high"]


def test_few_functions_stand_between_a_call_and_its_kernel(gpu: Any) -> None:
    """Of Python's, TorchDynamo's included: 22 with PyTorch 2.11 and 2.13, 25 with 2.15. Counted,
    since time on a shared machine says little; benchmarks/instructions.py counts instructions."""
    fused, x = epinorm.fuse(randomised(Model()).bfloat16()), torch.randn(ROWS, K).bfloat16()
    entered: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    with torch.no_grad():
        for _ in range(4):
            fused(x)
        before = gpu.replayed
        sys.setprofile(profile)
        fused(x)
        sys.setprofile(None)
    assert gpu.replayed == before + 1
    first_launch = next(i for i, name in enumerate(entered) if name.endswith("launch_kernel"))
    assert first_launch <= 27, entered[:first_launch]


def test_the_current_stream_is_read_at_each_call(way: Any, gpu: Any) -> None:
    strategy, dtype, _ = way
    fused, x = fused_model(dtype, strategy), torch.randn(ROWS, K).to(dtype)
    with torch.no_grad():
        for stream in (5, 5, 11, 2**40, 5):
            gpu.stream = stream
            check(fused, x)
            assert {launch.stream for launch in gpu.launches} == {stream}
            gpu.launches.clear()


def test_grad_mode_and_requires_grad_are_read_at_each_call(way: Any, gpu: Any) -> None:
    strategy, dtype, kernels = way
    fused, x = fused_model(dtype, strategy), torch.randn(ROWS, K).to(dtype)

    def keeps() -> bool:
        (kernel,) = (
            launch for launch in gpu.launches if launch.kind in ("linear_norm", kernels[-1])
        )
        return kernel.arguments[-5 if kernel.kind == "linear_norm" else 6] != 0

    for _ in range(3):
        gpu.launches.clear()
        assert check(fused, x).grad_fn is not None
        with torch.no_grad():
            assert check(fused, x).grad_fn is None
        with torch.inference_mode():
            assert fused(x).is_inference()
        fused.requires_grad_(False)
        y = check(fused, x)
        assert not y.requires_grad
        assert not y.is_inference()
        assert check(fused, x.clone().requires_grad_()).requires_grad
        fused.requires_grad_(True)


@pytest.mark.parametrize("shape", [(2, 3, K), (K,), (4, 1, 2, K), (0, 3, K), (ROWS, K)])
@pytest.mark.parametrize("training", [False, True])
def test_leading_dimensions(
    way: Any, gpu: Any, shape: tuple[int, ...], training: bool, short: list[bool]
) -> None:
    strategy, dtype, _ = way
    fused = fused_model(dtype, strategy, norm=nn.LayerNorm(N))
    with torch.set_grad_enabled(training):
        for _ in range(3):
            y = check(fused, torch.randn(shape).to(dtype))
            assert y.shape == (*shape[:-1], N)
            assert y.is_contiguous()
        middle = torch.randn(*shape[:-1], K + 8).to(dtype)[..., :K]
        check(fused, middle)
    assert short[:3] == [False, True, True]


def test_leading_dimensions_of_an_x_that_is_converted_on_the_way() -> None:
    """The product itself reads it, by a map of a matrix."""
    torch.set_float32_matmul_precision("high")
    layer = epinorm.LinearNorm(3072, 768, norm=epinorm.LayerNorm(), post="relu")
    with imaginary_h200() as api, torch.no_grad():
        for _ in range(3):
            api.launches.clear()
            assert layer(torch.empty(128, 128, 3072)).shape == (128, 128, 768)
            assert [launch["kernel"] for launch in api.launches][1] == "linear_norm_fp32_input"


def test_operands_of_other_shapes_and_strides(way: Any, gpu: Any) -> None:
    strategy, dtype, _ = way
    fused = fused_model(dtype, strategy, Residual)
    wide = torch.randn(ROWS, N + 8).to(dtype)
    with torch.no_grad():
        for _ in range(2):
            for m in (ROWS, 8):
                for r in (torch.randn(m, N).to(dtype), wide[:m, :N], wide[:m, 8:]):
                    check(fused, torch.randn(m, K).to(dtype), r)


@pytest.mark.filterwarnings("ignore:epinorm")
def test_an_operand_that_does_not_fit_is_noticed_at_any_call(way: Any, gpu: Any) -> None:
    strategy, dtype, _ = way
    fused = epinorm.fuse(randomised(Residual()).to(dtype), strategy=strategy)
    x, r = torch.randn(ROWS, K).to(dtype), torch.randn(ROWS, N).to(dtype)
    with torch.no_grad():
        for _ in range(3):
            check(fused, x, r)
        check(fused, x, r[:1])  # broadcast, layer by layer
        with pytest.raises(RuntimeError, match="size of tensor"):
            fused(x, r[:8])


@pytest.mark.parametrize("extra", [0, 1, 8])
def test_the_norm_kernel_reads_rows_apart(gpu: Any, extra: int) -> None:
    problem = Problem(
        *(Chain.parse("layer_norm|relu"), ROWS, K, N, BF16, BF16, BF16),
        *(False, False, False, False, torch.device("cpu"), "native"),
    )
    nothing = torch.empty(0)
    for z in (torch.randn(ROWS, N + extra).bfloat16()[:, :N] for _ in range(3)):
        y = NormForward(problem)(z, Inputs(nothing, nothing, None, None, None, ())).y
        torch.testing.assert_close(
            y, nn.functional.layer_norm(z, (N,)).relu(), rtol=2e-2, atol=2e-2
        )
        assert y.is_contiguous()


def test_a_launch_in_the_middle_of_a_launch_leaves_it_alone(way: Any, gpu: Any) -> None:
    """As a signal handler or a finalizer may do."""
    strategy, dtype, _ = way
    gpu.capturing = True  # so that no graph stands for the launches where addresses come back
    fused = fused_model(dtype, strategy)
    x, other = torch.randn(2, ROWS, K).to(dtype)
    with torch.no_grad():
        for _ in range(4):
            gpu.interrupt = lambda: check(fused, other)
            check(fused, x)
            assert gpu.interrupt is None


def test_memory_that_is_used_again_is_read_again(way: Any, gpu: Any) -> None:
    """The same address with other values, and another tensor at the address of one that died."""
    strategy, dtype, _ = way
    fused = fused_model(dtype, strategy)
    memory = torch.empty(ROWS * K, dtype=dtype)
    with torch.no_grad():
        for m in (ROWS, ROWS, 8, ROWS):
            memory.copy_(torch.randn(ROWS * K))
            check(fused, memory[: m * K].view(m, K))


def test_a_new_plan_is_followed(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from epinorm.backends import memo

    fused, x = fused_model(BF16), torch.randn(ROWS, K).bfloat16()
    with torch.no_grad():
        check(fused, x)
        check(fused, x)
        before = gpu.launches[-1].source.tile
        tiles = [t for t in hopper_plan.candidates(problem_of(gpu)) if t != before]
        monkeypatch.setattr(hopper_plan, "choose_tile", lambda *_, **__: tiles[0])
        memo.clear()
        check(fused, x)
    assert gpu.launches[-1].source.tile == tiles[0]


def problem_of(gpu: Any) -> Any:
    from epinorm.operator import calls

    (executable,) = calls._executables.values()
    return executable.problem


def test_two_layers_share_a_caller_and_nothing_else(gpu: Any) -> None:
    made = [
        epinorm.LinearNorm(K, N, norm=epinorm.GroupNorm(GROUPS), post="relu", dtype=BF16)
        for _ in "ab"
    ]
    x = torch.randn(ROWS, K).bfloat16()
    for block in (*made, *made):
        randomised(block)
        y = block(x)
        expected = nn.Sequential(block.linear, block.norm, nn.ReLU())(x)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_without_pytorchs_guard_every_call_goes_the_long_way(
    way: Any, gpu: Any, short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, dtype, kernels = way
    monkeypatch.setattr(unpromised, "TensorGuards", None)
    fused = fused_model(dtype, strategy)
    with torch.no_grad():
        for _ in range(3):
            check(fused, torch.randn(ROWS, K).to(dtype))
            assert gpu.kinds() == kernels
    assert short == [False] * 3


def test_more_kinds_than_are_kept_are_right_too(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds_module, "MOST_KINDS", 2)
    monkeypatch.setattr(kinds_module, "MOST_SIZES", 2)
    fused = fused_model(BF16)
    wide = torch.randn(ROWS, K + 32).bfloat16()
    with torch.no_grad():
        for _ in range(2):
            for extra in (0, 8, 16, 24):
                check(fused, wide[:, extra : extra + K])
                check(fused, torch.randn(ROWS + extra, K + extra).bfloat16()[:, :K])


def test_threads_do_not_see_each_others_arguments(gpu: Any) -> None:
    fused = fused_model(BF16)
    inputs = [torch.randn(ROWS + i, K).bfloat16() for i in range(4)]
    with torch.no_grad():
        expected = [check(fused, x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(100):
                # While anything of this process is traced, as what an earlier test left behind may
                # be, calls run the model's own code, whose roundings are others.
                y = fused(inputs[i])
                same = y.shape == expected[i].shape
                if not (same and torch.allclose(y, expected[i], rtol=0.02, atol=0.02)):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("strategy", ["single", "epilogue"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_other_constants_are_other_arguments_of_the_same_kernel(
    strategy: Any, dtype: torch.dtype, gpu: Any
) -> None:
    """Of chains of one structure one kernel is loaded, whatever their numbers, call after call."""
    x, weight = torch.randn(ROWS, K).to(dtype), torch.randn(N, K).to(dtype)
    vectors = [torch.randn(N).to(dtype) for _ in range(3)]
    names = ("bias", "norm_weight", "norm_bias")
    truth = torch.nn.functional.group_norm(
        torch.nn.functional.linear(x.double(), weight.double(), vectors[0].double()),
        GROUPS, vectors[1].double(), vectors[2].double(),
    )  # fmt: skip
    sources = None
    for step in range(100):
        slope, factor = 0.01 + step / 7, 3.3 + step
        y = epinorm.linear_norm(
            x, weight, norm=epinorm.GroupNorm(GROUPS), post=f"leaky_relu({slope})|scale({factor})",
            strategy=strategy, **dict(zip(names, vectors, strict=True)),
        )  # fmt: skip
        expected = torch.nn.functional.leaky_relu(truth, slope) * factor
        error = (y.double() - expected).norm() / expected.norm()
        assert error < (1e-2 if dtype == BF16 else 1e-6)
        sources = sources or len(gpu.sources)
        assert len(gpu.sources) == sources


def test_a_scale_by_a_power_of_two_is_one_more_kernel(gpu: Any) -> None:
    """Gamma and beta carry it: one kernel for all powers of two, one for all other factors."""
    x, weight, *vectors = (torch.randn(s).to(BF16) for s in ((ROWS, K), (N, K), (N,), (N,), (N,)))
    counts = []
    for factor in (2.0, 3.0, 0.25, 0.3, 8.0, -2.0, -7.0):
        y = epinorm.linear_norm(
            x, weight, vectors[0], norm=epinorm.GroupNorm(GROUPS), norm_weight=vectors[1],
            norm_bias=vectors[2], post=f"scale({factor})", strategy="single",
        )  # fmt: skip
        expected = torch.nn.functional.group_norm(
            torch.nn.functional.linear(x, weight, vectors[0]).double(), GROUPS,
            vectors[1].double(), vectors[2].double(),
        )  # fmt: skip
        torch.testing.assert_close(y.double(), expected * factor, rtol=3e-2, atol=0.2)
        counts.append(len(gpu.sources))
    assert counts == [1, 2, 2, 2, 2, 2, 2]
