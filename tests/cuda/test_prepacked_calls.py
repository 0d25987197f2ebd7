"""Calls of prepacked weights: native code computes them too, and never of what has gone stale.

The GPU is conftest.py's, of which a weight's planes are what they were when it was converted.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from epinorm.backends import memo, prepack
from epinorm.backends.cuda.plan import hopper
from epinorm.backends.cuda.replayed import ReplayedForward
from epinorm.backends.cuda.runtime.replay import recording
from epinorm.backends.prepack import converted_once, marked, prepacked, unprepack
from epinorm.operator import calls, schema
from epinorm.operator.dispatch import Caller

pytestmark = pytest.mark.usefixtures("marking")

M, K, N = 24, 256, 32
CHAIN = "layer_norm(1e-05)|silu"
WARM = 5
"""Calls after which one of that kind is native: the first is planned, the second loads kernels,
the third is recorded, what the fourth repeats is native from then on; and one is to spare."""


@pytest.fixture
def marking(gpu: Any, streams: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, where fp32 is converted and no memory comes back to the same graph."""
    gpu.refuses_graphs = True
    not_fp32 = {False: None, True: "only float32 is converted"}
    monkeypatch.setattr(prepack, "why_not", lambda t: not_fp32[t.dtype != torch.float32])
    yield
    for entry in list(marked.values()):
        unprepack(entry.weight())


class Layer:
    """A weight with calls of it, by an operator or by a model's chain; each is compared."""

    def __init__(self, by: str, strategy: str = "single", chain: str = CHAIN) -> None:
        self.by, self.facts = by, (chain, strategy, False, None)
        self.caller = Caller(*self.facts[:3])
        self.weight: Tensor = torch.randn(N, K)
        self.vectors = list(torch.randn(3, N))
        self.beside: list[Tensor] = []  # what is to live as long

    def __call__(self, x: Tensor | None = None) -> None:
        x = torch.randn(M, K, dtype=self.weight.dtype) if x is None else x
        given = (x, self.weight, *[v.to(x.dtype) for v in self.vectors])
        with torch.no_grad():
            if self.by == "operator":
                y = schema.linear_norm(*given, [], *self.facts)
            else:
                y = self.caller(*given, ())
            self.compare(y, *given)

    def compare(self, y: Tensor, *given: Tensor) -> None:
        weight_is_fp32 = given[1].dtype == torch.float32
        x, weight, bias, gamma, beta = (t.double() for t in given)
        z = nn.functional.linear(x, weight, bias)
        expected = nn.functional.silu(nn.functional.layer_norm(z, (N,), gamma, beta))
        tolerance = 1e-4 if weight_is_fp32 else 0.05
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)

    def weight_is_not_marked(self) -> bool:
        return id(self.weight) not in marked

    def warm(self) -> None:
        for _ in range(WARM):
            self()


@pytest.fixture(params=["operator", "model"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each pass that Python has run or begun since this was last cleared."""
    passes, run = [], ReplayedForward.__call__

    def counted(*given: Any) -> Any:
        passes.append(1)
        return run(*given)

    monkeypatch.setattr(ReplayedForward, "__call__", counted)
    return passes


@pytest.fixture
def is_native(gpu: Any, by_python: list[int]) -> Callable[..., bool]:
    def is_native(layer: Layer, kernels: list[str] = KEPT) -> bool:
        """Whether a call is computed by native code alone, by these kernels."""
        gpu.kinds()
        by_python.clear()
        layer()
        found = gpu.kinds()
        assert found == kernels or by_python
        return not by_python

    return is_native


def rows_split(gpu: Any, layer: Layer) -> list[int]:
    """Of x, or of x and the weight, by each splitting kernel of a call."""
    gpu.launches.clear()
    layer()
    return [launch.arguments[11] for launch in gpu.launches if launch.kind == "split"]


KEPT = ["split", "linear_norm", "rescue"]  # x is split, the weight is not
NOTHING_KEPT = ["linear_norm"]


def test_a_call_that_reads_what_is_kept_is_native(layer, is_native):
    with prepacked(layer.weight):
        layer.warm()
        assert [is_native(layer) for _ in range(3)] == [True] * 3
        layer(torch.randn(M + 8, K))
        assert is_native(layer)


def test_a_call_that_keeps_nothing_is_native(layer, is_native):
    """As in TF32, whose kernel reads the weight itself."""
    torch.set_float32_matmul_precision("high")
    with prepacked(layer.weight):
        layer.warm()
        layer.weight.normal_()
        assert [is_native(layer, NOTHING_KEPT) for _ in range(3)] == [True] * 3
    assert marked == {}


@pytest.mark.parametrize("by", ["operator", "model"])
def test_a_product_of_pytorchs_is_native(by, is_native):
    layer = Layer(by, "epilogue")
    with prepacked(layer.weight):
        layer.warm()
        layer.weight.normal_()
        assert is_native(layer, ["norm_forward"])


def test_strategy_planes(is_native):
    layer = Layer("operator", "planes")
    with prepacked(layer.weight):
        layer.warm()
        assert is_native(layer, [*KEPT, "norm_forward"])
        layer.weight.normal_()
        assert not is_native(layer)
        assert is_native(layer, [*KEPT, "norm_forward"])


# ---- what changes the weight ----


def in_place(layer: Layer) -> None:
    layer.weight.normal_()


def through_a_view(layer: Layer) -> None:
    layer.weight[3:].normal_()


def detached(layer: Layer) -> None:
    layer.weight.detach().normal_()


def in_inference_mode(layer: Layer) -> None:
    with torch.inference_mode():
        layer.weight.normal_()


def other_data(layer: Layer) -> None:
    layer.weight.data = torch.randn(N, K)


def data_at_the_same_address(layer: Layer) -> None:
    """Storage of its own, at the address of the old one."""
    old = layer.weight.data.normal_()
    memory = old.untyped_storage()
    whole = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
    layer.weight.data = torch.frombuffer(whole, dtype=torch.float32).as_strided(
        old.shape, old.stride(), old.storage_offset()
    )
    assert layer.weight.data_ptr() == old.data_ptr()
    layer.beside.append(old)


def transposed_data(layer: Layer) -> None:
    layer.weight.data = torch.randn(K, N).t()


def data_with_apart_rows(layer: Layer) -> None:
    layer.weight.data = torch.randn(N, 2 * K)[:, :K]


def data_that_is_odd(layer: Layer) -> None:
    layer.weight.data = torch.randn(N * K + 1)[1:].view(N, K)


def counted(layer: Layer) -> None:
    layer.weight.data.normal_()
    torch.autograd.graph.increment_version(layer.weight)


def marked_again(layer: Layer) -> None:
    layer.weight.data.normal_()
    prepack.prepack(layer.weight)


def unmarked_for_a_change(layer: Layer) -> None:
    unprepack(layer.weight)
    layer()
    layer.weight.data.normal_()
    layer()
    prepack.prepack(layer.weight)


def stepped(layer: Layer) -> None:
    """By a fused optimizer, which leaves the version counter alone."""
    parameter = nn.Parameter(layer.weight)
    layer.weight = prepack.prepack(parameter)
    layer.warm()
    version = parameter._version
    parameter.grad = torch.randn(N, K)
    torch.optim.SGD([parameter], lr=1.0, fused=True).step()
    assert parameter._version in (version, version + 1)


def replaced(layer: Layer) -> None:
    layer.weight = prepack.prepack(torch.randn(N, K))


def loaded(layer: Layer) -> None:
    module = nn.Linear(K, N)
    module.weight = nn.Parameter(layer.weight)
    prepack.prepack(module)
    layer.weight = module.weight
    layer.warm()
    module.load_state_dict(nn.Linear(K, N).state_dict())


def planned_anew(layer: Layer) -> None:
    layer.weight.normal_()
    memo.clear()


CHANGES = [in_place, through_a_view, detached, in_inference_mode, other_data, counted]
CHANGES += [data_at_the_same_address, transposed_data, data_with_apart_rows, data_that_is_odd]
CHANGES += [marked_again, unmarked_for_a_change, stepped, replaced, loaded, planned_anew]
SMALL_CHANGES = CHANGES[: CHANGES.index(stepped)]
UNLIKE = (transposed_data, data_with_apart_rows, data_that_is_odd)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_changes_of_the_weight(layer, change, precision, is_native):
    torch.set_float32_matmul_precision(precision)
    kernels = KEPT if precision == "highest" else NOTHING_KEPT
    prepack.prepack(layer.weight)
    layer.warm()
    assert is_native(layer, kernels)
    old = layer.weight.data  # so that no memory is given back and taken again
    change(layer)
    layer.warm()
    assert is_native(layer, kernels) or change in UNLIKE
    if change in UNLIKE:
        layer.weight.data = torch.randn(N, K)
        layer.warm()
        assert is_native(layer, kernels)
    del old


def test_data_of_another_kind(layer):
    """Which raises as it does for any weight, and leaves nothing behind."""
    prepack.prepack(layer.weight)
    layer.warm()
    for data in (torch.randn(()), torch.randn(N), torch.randn(N, K + 8)):
        layer.weight.data = data
        with pytest.raises(RuntimeError, match=r"weight"):
            layer()
    for data in (torch.randn(N, K).bfloat16(), torch.randn(N, K)):
        layer.weight.data = data
        layer.warm()


# ---- what else decides whether it may be read ----


def test_a_stream_that_has_not_waited(gpu, layer, is_native):
    with prepacked(layer.weight):
        layer.warm()
        for stream in (6, 7):
            gpu.stream = stream
            assert not is_native(layer)
            assert is_native(layer)
            assert {launch.stream for launch in gpu.launches} <= {stream}
        gpu.stream = 5
        assert is_native(layer)
        layer.weight.normal_()
        assert not is_native(layer)
        gpu.stream = 6
        assert not is_native(layer)


def test_while_a_stream_is_captured(gpu, layer, is_native):
    prepack.prepack(layer.weight)
    layer.warm()
    gpu.capturing = True
    with pytest.warns(UserWarning, match="cannot see that a weight has changed"):
        assert not is_native(layer)
    layer.weight.normal_()
    assert [is_native(layer) for _ in range(3)] == [False] * 3
    gpu.capturing = False
    assert not is_native(layer)
    assert is_native(layer)


def test_a_captured_call_that_keeps_nothing_is_native(gpu, layer, is_native):
    torch.set_float32_matmul_precision("high")
    with prepacked(layer.weight):
        layer.warm()
        gpu.capturing = True
        assert is_native(layer, NOTHING_KEPT)


def test_what_is_kept_later_is_no_matter_to_a_call_that_reads_the_weight(layer, is_native):
    with prepacked(layer.weight):
        for setting, kernels in (("high", NOTHING_KEPT), ("highest", KEPT)) * 3:
            torch.set_float32_matmul_precision(setting)
            layer.warm()
            assert is_native(layer, kernels)
            layer.weight.normal_()
    for setting in ("high", "highest"):
        torch.set_float32_matmul_precision(setting)
        layer.weight.normal_()
        layer.warm()


def test_two_converters_of_one_weight(layer, is_native, monkeypatch):
    """Whichever has converted last is taken, by its own calls alone."""
    every = hopper.candidates
    planes = lambda p: (t for t in every(p) if not (t.tf32 or t.converts))  # noqa: E731
    monkeypatch.setattr(hopper, "candidates", planes)
    with prepacked(layer.weight):
        for setting in ("highest", "high") * 3:
            torch.set_float32_matmul_precision(setting)
            layer.warm()
            assert is_native(layer)
        for setting in ("highest", "high") * 3:
            torch.set_float32_matmul_precision(setting)
            assert not is_native(layer)
        assert is_native(layer)


def test_two_chains_share_what_is_kept(gpu, is_native):
    layers = [Layer("operator"), Layer("model"), Layer("operator", "planes")]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    with prepacked(layers[0].weight):
        for layer in layers:
            layer.warm()
        layers[0].weight.normal_()
        gpu.kinds()
        assert [is_native(layer, [*KEPT, "norm_forward"]) for layer in layers[2:]] == [False]
        assert [is_native(layer) for layer in layers[:2]] == [True, True]


def test_marked_for_a_while(layer, is_native):
    for _ in range(2):
        layer.warm()
        assert is_native(layer)  # x and the weight are split at once
        layer.weight.data.normal_()
        with prepacked(layer.weight):
            assert not is_native(layer)
            layer.warm()
            assert is_native(layer)
        layer.weight.data.normal_()


def test_converted_once(layer, is_native):
    with converted_once(layer.weight):
        layer.warm()
    for _ in range(3):
        layer.weight.data.normal_()
        with converted_once(layer.weight):
            assert not is_native(layer)
            assert is_native(layer)
            assert is_native(layer)
    assert marked == {}


def test_a_weight_of_inference_mode(layer, is_native):
    with torch.inference_mode():
        layer.weight = torch.randn(N, K)
    with pytest.warns(UserWarning, match="no version counter"):
        prepack.prepack(layer.weight)
    for _ in range(2):
        layer.warm()
        assert is_native(layer)
        with torch.inference_mode():
            layer.weight.normal_()


def test_inference_mode_around_calls(layer, is_native):
    with prepacked(layer.weight):
        for _ in range(2):
            with torch.inference_mode():
                layer.warm()
                assert is_native(layer)
            layer.warm()
            assert is_native(layer)
            layer.weight.normal_()


def test_autocast_reads_no_planes():
    layer = Layer("model", "auto")
    with prepacked(layer.weight):
        for _ in range(2):
            layer.warm()
            for _ in range(WARM):
                given = (torch.randn(M, K), layer.weight, *layer.vectors)
                with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                    y = layer.caller(*given, ())
                    z = nn.functional.linear(*given[:3])
                    z = nn.functional.layer_norm(z, (N,), *given[3:])
                    assert torch.equal(y, nn.functional.silu(z))
                layer.weight.normal_()


def test_an_x_that_is_the_weight(layer, by_python):
    layer.weight = torch.randn(N, N)
    with prepacked(layer.weight):
        for _ in range(2):
            for _ in range(WARM):
                layer(layer.weight)
            by_python.clear()
            layer(layer.weight)
            layer(torch.randn(N, N))
            assert not by_python
            layer.weight.normal_()


def test_modes_see_no_look_at_the_weight(layer):
    class Sees(TorchFunctionMode):
        seen: list[str]

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    def seen() -> list[str]:
        with Sees() as mode:
            mode.seen = []
            if layer.by == "operator":
                schema.linear_norm(*given, [], *layer.facts)
            else:
                layer.caller(*given, ())
        return mode.seen

    given = (torch.randn(M, K), layer.weight, *layer.vectors)
    expected = seen()
    with prepacked(layer.weight):
        layer.warm()
        assert seen() == expected


def test_a_profile_shows_what_the_operator_is_given(is_native):
    layer = Layer("operator")
    with prepacked(layer.weight):
        layer.warm()
        with torch.profiler.profile(record_shapes=True) as profile:
            assert is_native(layer)
    (event,) = [event for event in profile.events() if "epinorm" in event.name]
    assert event.input_shapes == [[M, K], [N, K], [N], [N], [N]]


@pytest.mark.parametrize("steps", [True, False])
def test_training_and_then_inference(steps, is_native):
    layer = Layer("model", "planes")
    layer.weight = nn.Parameter(layer.weight)
    prepack.prepack(layer.weight)
    optimizer = torch.optim.SGD([layer.weight], lr=0.01)
    for _ in range(3):
        for _ in range(WARM):
            given = (torch.randn(M, K, requires_grad=True), layer.weight, *layer.vectors)
            y = layer.caller(*given, ())
            layer.compare(y, *given)
            z = nn.functional.linear(*given[:3])
            expected = nn.functional.silu(nn.functional.layer_norm(z, (N,), *given[3:]))
            ours, theirs = (torch.autograd.grad(t.square().sum(), given[:2]) for t in (y, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
            layer.weight.grad = ours[1]
            if steps:
                optimizer.step()
        layer.warm()
        assert is_native(layer, [*KEPT, "norm_forward"])


def test_threads():
    layers = [Layer(by) for by in ("operator", "model")] * 2
    for layer in layers:
        layer.weight = layers[0].weight

    def work(layer: Layer) -> None:
        for _ in range(15):
            layer()

    for _ in range(3):
        with prepacked(layers[0].weight), ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(work, layer) for layer in layers]:
                each.result()
        layers[0].weight.data.normal_()


def test_nothing_is_kept_alive_and_another_weight_there_is_another(layer, is_native):
    prepack.prepack(layer.weight)
    layer.warm()
    assert is_native(layer)
    layer.weight = torch.randn(N, K)
    assert marked == {}
    layer.warm()


def test_a_run_that_converts_is_not_repeated(layer):
    """As where another thread changes the weight between a look at it and the recorded run."""
    with prepacked(layer.weight):
        layer.warm()
        entry = marked[id(layer.weight)]
        layer.weight.normal_()
        with recording([layer.weight]) as noted:
            entry.converted(layer.weight, entry.converter)
        assert "converts a weight" in noted.refused


@pytest.mark.parametrize("change", [in_place, lambda layer: unprepack(layer.weight)])
@pytest.mark.parametrize("at", [2, 3])
def test_what_happens_between_a_look_and_the_run(gpu, layer, change, at, is_native, monkeypatch):
    """By another thread, to the weight or its mark, as in the call that is recorded."""
    look, looks = prepack.Marked.current, []

    def looked(*given: Any) -> Any:
        found = look(*given)
        looks.append(found)
        if len(looks) == at:
            change(layer)
        return found

    prepack.prepack(layer.weight)
    monkeypatch.setattr(prepack.Marked, "current", looked)
    for _ in range(4):
        layer.warm()
        if layer.weight_is_not_marked():
            prepack.prepack(layer.weight)
    assert is_native(layer)
    assert rows_split(gpu, layer) == [M]


def test_a_pass_that_was_recorded_of_other_weights(gpu, layer, monkeypatch):
    """It converts the weight: a marked one is converted once all the same."""
    monkeypatch.setattr(calls, "keeps", lambda _: False)
    layer.warm()
    assert rows_split(gpu, layer) > [M]
    with prepacked(layer.weight):
        layer.warm()
        assert rows_split(gpu, layer) == [M]
    assert rows_split(gpu, layer) > [M]


# ---- all at once ----


class Walk:
    """A weight, four ways to call with it, and all that may happen to it."""

    def __init__(self, gpu: Any, by_python: list[int], seed: int) -> None:
        self.gpu, self.by_python, self.random = gpu, by_python, random.Random(seed)
        ways = [("operator", "single"), ("model", "single"), ("model", "planes")]
        self.layers = [Layer(*way) for way in [*ways, ("operator", "epilogue")]]
        self.weight = torch.randn(N, K)
        self.native = 0

    def call(self) -> None:
        layer, m = self.random.choice(self.layers), self.random.choice((M, M, M + 8))
        layer.weight = self.weight
        for _ in range(self.random.randint(1, 4)):
            self.by_python.clear()
            layer(torch.randn(m, K))
            self.native += bool(marked) and not self.by_python

    def change(self) -> None:
        layer = self.layers[0]
        layer.weight = self.weight
        others = [self.mark] * 3 + [self.renew] * 3 + [other_data] * 3 + [self.unmark]
        with torch.no_grad():
            self.random.choice((*SMALL_CHANGES, *others))(layer)
        self.weight = layer.weight

    def mark(self, _: Layer) -> None:
        prepack.prepack(self.weight)

    def unmark(self, _: Layer) -> None:
        unprepack(self.weight)

    def renew(self, layer: Layer) -> None:
        layer.weight = self.random.choice((nn.Parameter, torch.clone))(torch.randn(N, K))
        prepack.prepack(layer.weight)

    def setting(self) -> None:
        self.random.choice((self.precision, self.stream, self.capture, self.plan))()

    def precision(self) -> None:
        torch.set_float32_matmul_precision(self.random.choice(("highest", "highest", "high")))

    def stream(self) -> None:
        self.gpu.stream = self.random.choice((5, 6))

    def capture(self) -> None:
        self.gpu.capturing = True
        self.call()
        self.gpu.capturing = False

    def plan(self) -> None:
        if self.random.random() < 0.1:
            memo.clear()

    def within(self) -> None:
        for_weight = self.random.choice(
            (converted_once, prepacked, lambda _: torch.inference_mode())
        )
        with for_weight(self.weight):
            self.call()
            self.call()


@pytest.mark.filterwarnings("ignore:a CUDA graph is being captured")
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens(gpu, by_python, seed):
    torch.manual_seed(seed)
    walk = Walk(gpu, by_python, seed)
    for _ in range(300):
        what = (walk.call, walk.change, walk.setting, walk.within)
        walk.random.choices(what, (12, 3, 1, 1))[0]()
    assert walk.native > 60
