"""A recorded pass repeats what Python launches, with the addresses of other tensors.

The GPU is conftest.py's: it computes each launch from the bytes that the driver is given.
"""

import ctypes
import sys
import weakref
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from epinorm import said
from epinorm.backends import unpromised
from epinorm.backends.cpu.build import BuildError
from epinorm.backends.cuda import recorded
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.fp32.planes import splitter
from epinorm.backends.cuda.plan import hopper
from epinorm.backends.cuda.replayed import ReplayedBackward
from epinorm.backends.cuda.runtime import launch, prepared
from epinorm.backends.cuda.runtime.replay import CannotReplay, recording, replay
from epinorm.backends.prepack import marked, prepacked
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.operator import calls
from epinorm.operator.dispatch import Caller
from epinorm.problem import Forward, Gradients, Inputs, Wanted

CHAIN = "layer_norm(1e-05)|leaky_relu(0.25)|add_residual"
M, K, N = 32, 64, 512


def tensors(m=M):
    operand = torch.randn(m, N)
    return [torch.randn(m, K), torch.randn(N, K), *(torch.randn(N) for _ in range(3)), operand]


def check(caller, given, chain=CHAIN):
    with torch.no_grad():
        y = caller(*given[:5], (given[5],))
    doubles = [t.double() for t in given]
    x, weight, bias, gamma, beta, operand = doubles
    expected = linear_norm(x, weight, bias, Chain.parse(chain), gamma, beta, [operand])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    return y


@pytest.fixture
def caller(gpu):
    """One whose pass is repeated from now on."""
    made = Caller(CHAIN, "planes")
    for _ in range(3):
        check(made, tensors())
    assert gpu.replayed
    return made


def test_the_first_run_is_not_repeated(gpu):
    caller = Caller(CHAIN, "planes")
    check(caller, tensors())
    check(caller, tensors())
    assert gpu.replayed == 0
    gpu.kinds()
    check(caller, tensors())
    assert gpu.replayed == len(gpu.kinds()) == 4


def test_other_tensors_values_streams_and_sizes(gpu, caller):
    kept = []
    for stream in (5, 6, 5):
        gpu.stream = stream
        given = tensors()
        kept.append((check(caller, given), given))
        assert {launch.stream for launch in gpu.launches} == {stream}
        gpu.kinds()
    check(caller, tensors(m=M + 8))
    kept[0][1][0].mul_(2)
    check(caller, kept[0][1])


def test_what_is_not_like_the_recorded_run_is_launched_as_before(gpu, caller):
    before = gpu.replayed
    given = tensors()
    given[5] = torch.randn(M, 2 * N)[:, :N]
    check(caller, given)
    odd = torch.empty(M * K + 1)[1:].view(M, K)
    check(caller, [odd.copy_(given[0]), *tensors()[1:]])
    other = CHAIN.replace("0.25", "0.5")
    check(Caller(other, "planes"), tensors(), other)
    assert gpu.replayed == before


def test_the_same_tensor_twice(gpu, caller):
    given = tensors()
    given[3] = given[4]
    check(caller, given)


def test_a_call_in_the_middle_of_a_recorded_one(gpu):
    caller = Caller(CHAIN, "planes")
    check(caller, tensors())
    for _ in range(4):
        gpu.interrupt = lambda: check(caller, tensors())  # as a signal handler's or a finalizer's
        check(caller, tensors())


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_a_prepacked_weight_is_read_where_it_is_kept(gpu, streams):
    def run(weight, m=M):
        gpu.replayed = 0
        check(caller, [(given := tensors(m))[0], weight, *given[2:]])
        return gpu.kinds().count("split"), gpu.replayed

    caller, packed, plain = Caller(CHAIN, "planes"), torch.randn(N, K), torch.randn(N, K)
    with prepacked(packed):
        assert run(packed)[0] == 2  # the weight's, and x's at each call
        assert run(packed) == run(packed) == (1, 0)
        assert run(packed) == (1, 4)
        for change in (lambda: packed.mul_(2), lambda: packed.set_(torch.randn(N, K))):
            change()
            assert run(packed) == (2, 0)
            assert run(packed) == (1, 4)
        gpu.stream += 1
        assert run(packed) == (1, 0)  # it waits for the conversion
        assert run(packed) == (1, 4)
        for _ in range(3):
            run(plain, M + 8)
        assert run(plain, M + 8)[1] == 4


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_planes_of_another_precision_are_not_taken_for_its_own(gpu, streams, monkeypatch):
    """Those of `high` are half as many, and were there when a call at `highest` was captured, which
    converts nothing to keep."""
    every = hopper.candidates

    def by_planes(problem):
        return (t for t in every(problem) if not (t.tf32 or t.converts))

    monkeypatch.setattr(hopper, "candidates", by_planes)

    def splits():
        check(caller, [(given := tensors())[0], packed, *given[2:]])
        return gpu.kinds().count("split")

    caller, packed = Caller(CHAIN, "planes"), torch.randn(N, K)
    with prepacked(packed):
        assert [splits() for _ in range(4)] == [2, 1, 1, 1]
        own = marked[id(packed)].converter
        torch.set_float32_matmul_precision("high")
        assert splits() == 2
        torch.set_float32_matmul_precision("highest")
        gpu.capturing = True
        assert splits() == 1  # x and W in one
        gpu.capturing = False
        assert marked[id(packed)].converter is not own
        assert splits() == 2
        assert marked[id(packed)].converter is own
        assert (splits(), gpu.replayed > 0) == (1, True)


@pytest.mark.filterwarnings("ignore:prepack keeps nothing")
def test_planes_that_another_thread_makes_meanwhile_are_not_taken(gpu, streams, monkeypatch):
    """Of the same weight in another precision: between two looks at what is kept."""
    packed, cpu = torch.randn(N, K), torch.device("cpu")
    ours, theirs = (splitter(planes, K, N, 0, cpu) for planes in (2, 1))

    def interrupted(_):
        monkeypatch.setattr(unpromised, "current_stream", lambda _: gpu.stream)
        entry.converted(packed, theirs)
        return gpu.stream

    with prepacked(packed):
        entry = marked[id(packed)]
        entry.converted(packed, ours)
        monkeypatch.setattr(unpromised, "current_stream", interrupted)
        assert entry.current(packed, ours) is None


def note(run, *given):
    with recording(given) as noted:
        made = run()
    return noted, made


def test_runs_that_cannot_be_repeated():
    x = torch.randn(4, 4)
    noted, made = note(lambda: torch.empty(4, 4).copy_(x), x)
    with pytest.raises(CannotReplay, match="copy_"):
        replay(noted, [made])
    noted, made = note(lambda: torch.empty(4, 4), x, x[1:])
    with pytest.raises(CannotReplay, match="share memory"):
        replay(noted, [made])
    noted, made = note(lambda: torch.empty(4, 4), x.t())
    with pytest.raises(CannotReplay, match="contiguous"):
        replay(noted, [made])
    noted, made = note(lambda: torch.empty(4, 4))
    with pytest.raises(CannotReplay, match="not its own"):
        replay(noted, [x])
    with pytest.raises(CannotReplay, match="not its own"):
        replay(noted, [made[1:]])


def test_what_a_run_frees_is_freed_when_it_is_recorded_and_repeated(gpu):
    """The memory between two launches, and what is given and held by nobody else."""
    gpu.signature_of_add = lambda _: "pp"
    alive, peak = [], []
    gpu.compute_add = lambda _, *at: peak.append(sum(t() is not None for t in alive))
    add = gpu.load(("add", None)).prepare("pp", 1, 32)

    def run(given):
        made = [torch.empty(N) for _ in range(2)]
        alive.extend(map(weakref.ref, (*made, *given)))
        add(given[0].data_ptr(), made[0].data_ptr())
        given.clear()
        add(made.pop(0).data_ptr(), made[0].data_ptr())
        return made[0]

    given = [torch.randn(N)]
    with recording(given) as noted:
        made = run(given)
    assert peak == [3, 1]
    repeat = replay(noted, [made])
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        given = [torch.empty(N)]
        alive[:], peak[:] = [weakref.ref(given[0])], []
        assert repeat.fits(given)
        made = repeat(given)
    changes = [event.cpu_memory_usage for event in profile.function_events]
    # The result not before what is given was freed.
    assert changes == [4 * N, 4 * N, -4 * N, 4 * N, -4 * N]
    assert (given, peak) == ([], [1, 0])


def numbers_at(address):
    return torch.frombuffer((ctypes.c_char * (4 * N)).from_address(address), dtype=torch.float32)


@pytest.fixture
def backward(gpu):
    """One whose pass is repeated from now on: dz = (dy + z + x's planes) + x, by two launches."""
    gpu.signature_of_add = lambda _: "ppppi"
    gpu.compute_add = lambda _, *at: numbers_at(at[3]).copy_(
        sum(numbers_at(each) for each in at[:3] if each)
    )
    add = gpu.load(("add", None)).prepare("ppppi", 1, 32)

    def run(inputs, kept, dy, want, left):
        planes = None if left is None else left.take_x()
        if planes is None:
            planes = torch.empty(N)
            add(inputs.bias.data_ptr(), 0, 0, planes.data_ptr(), N)
        between, dz = torch.empty(N), torch.empty(N)
        z, plane = kept[0].z, planes.data_ptr()
        add(dy.data_ptr(), z.data_ptr(), plane, between.data_ptr(), N)
        assert want.x
        last_row = inputs.x.data_ptr() + 4 * inputs.x.stride(0)
        add(last_row, between.data_ptr(), 0, dz.data_ptr(), N)
        kept.clear()
        return Gradients(dz, None, None, None, None, ())

    made = ReplayedBackward(run)
    for _ in range(3):
        check_backward(made)
    assert gpu.replayed
    return made


class Vanishing(KeptPlanes):
    """Another thread makes room as soon as these planes were seen."""

    seen = False

    def __getattribute__(self, name):
        if name == "x":
            if self.seen:
                self.__dict__["x"] = None
            self.seen = True
        return super().__getattribute__(name)


def check_backward(backward, left=None, z=None, dy=None, x=None):
    x = torch.randn(2, N) if x is None else x
    planes, bias = torch.randn(N), torch.randn(N)
    left = KeptPlanes(planes, None) if left is None else left(planes)
    inputs = Inputs(x, torch.randn(N, N), bias, None, None, (), ())
    dy = torch.randn(N) if dy is None else dy
    z = torch.randn(N) if z is None else z
    kept = [Forward(z, z, torch.randn(1), torch.randn(1))]
    dz, *_ = backward(inputs, kept, dy, Wanted(True, False, False, False, False, ()), left)
    found = dz - dy - z - x[1]
    assert any(torch.allclose(found, each, atol=1e-5) for each in (planes, bias))


def test_planes_that_another_thread_frees_meanwhile(backward):
    check_backward(backward, left=lambda planes: Vanishing(planes, None))
    check_backward(backward)


def test_a_gradient_that_is_what_was_kept(gpu, backward):
    """As where an operator is called by hand; then it is given once."""
    before, same = gpu.replayed, torch.randn(N)
    check_backward(backward, z=same, dy=same)
    assert gpu.replayed == before
    check_backward(backward)
    assert gpu.replayed > before


def test_an_input_whose_rows_move_apart_after_the_forward_pass(backward):
    check_backward(backward, x=torch.randn(2, 2 * N)[:, :N])


@pytest.mark.parametrize("module", [launch, prepared])
def test_a_recording_that_ends_while_another_thread_launches(gpu, module, monkeypatch):
    """Between looking whether there is one and telling it."""
    caller = Caller(CHAIN, "planes")
    check(caller, tensors())
    lines = Path(module.__file__).read_text().splitlines()
    last = [i for i, line in enumerate(lines, 1) if ".note_" in line][-1]

    def trace(frame, event, _):
        if event == "line" and frame.f_lineno == last:
            module.recording = None
        return trace if frame.f_code.co_filename == module.__file__ else None

    if module is prepared:
        monkeypatch.setattr(unpromised, "current_device", lambda: 0)
        made = torch.empty(4)
        monkeypatch.setattr(unpromised, "empty_strided", lambda *_: made)
        new = prepared.new_tensor((4,), torch.float32, torch.device("cuda", 0))
    monkeypatch.setattr(
        module,
        "recording",
        SimpleNamespace(note_launch=lambda *_: None, note_allocation=lambda *_: None),
    )
    sys.settrace(trace)
    try:
        new() if module is prepared else check(caller, tensors())
    finally:
        sys.settrace(None)


def test_without_a_compiler_python_launches(gpu, monkeypatch, caplog):
    def missing():
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr(recorded, "native", missing)
    said.forget()
    caller = Caller(CHAIN, "planes")
    for _ in range(4):
        check(caller, tensors())
    assert gpu.replayed == 0
    assert caplog.text.count("no C++ compiler") == 1


def until_a_graph(gpu, caller, given):
    """Calls with the same tensors: what they make lies where it lay before, sooner or later."""
    before = gpu.graph_launches
    for _ in range(50):
        check(caller, given)
        if gpu.graph_launches > before:
            return
    pytest.fail("no graph was launched")


def test_addresses_that_come_back_are_a_graph(gpu, caller):
    given = tensors()
    until_a_graph(gpu, caller, given)
    for t in given:
        t.normal_()
    gpu.stream = 9
    until_a_graph(gpu, caller, given)
    assert {launch.stream for launch in gpu.launches[-4:]} == {9}
    kept = [check(caller, tensors()) for _ in range(3)]  # other addresses
    expected = [y.clone() for y in kept]
    until_a_graph(gpu, caller, given)
    assert all(map(torch.equal, kept, expected))


@pytest.mark.parametrize("training", [False, True])
def test_where_memory_peaks_no_graph_holds_it(gpu, training):
    """In training the planes of x and W are given back before y is made: 4 MB of Dreamer's peak.
    In inference y takes z's place."""
    x, weight, bias, gamma, beta, operand = tensors()
    facts = (CHAIN, "planes", False, None)
    inputs = Inputs(x, weight, bias, gamma, beta, (operand,), calls.constants_of(facts))
    executable = calls.executable_of(inputs, facts, training)
    for _ in range(3):
        executable.forward(*inputs)
    assert gpu.replayed
    for kind in gpu.kinds():
        setattr(gpu, f"compute_{kind}", lambda *_: None)  # which would take memory of its own
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        made = executable.forward(*inputs)
    held = list(accumulate(event.cpu_memory_usage for event in profile.function_events))
    planes, of_matrix = 2 * 2 * K * (M + N), made.y.nbytes
    assert planes + of_matrix < max(held) < planes + 2 * of_matrix


def test_no_graph_while_a_stream_is_captured(gpu, caller):
    given = tensors()
    until_a_graph(gpu, caller, given)
    before, gpu.capturing = gpu.graph_launches, True
    for _ in range(5):
        check(caller, given)
    assert gpu.graph_launches == before


def test_what_cannot_be_a_graph_is_launched_or_raises(gpu, caller):
    given = tensors()
    gpu.refuses_graphs = True
    for _ in range(5):
        check(caller, given)
    assert not gpu.graph_launches
    gpu.refuses_graphs, gpu.refused = False, "norm_forward"
    for _ in range(5):
        with pytest.raises(RuntimeError, match="launch 4 of 4 failed"):
            check(caller, given)
    gpu.refused = ""
    until_a_graph(gpu, caller, given)


def test_what_raises_while_a_graph_is_made_is_launched_and_tried_again(gpu, monkeypatch):
    """The maps of x and W have one place among those kept: a captured launch encodes both anew."""
    monkeypatch.setattr("epinorm.backends.cuda.runtime.replay.FEWEST_LAUNCHES", 1)
    m, k, n, places, step = 24, 64, 128, 512, 256  # maps kept; bytes from one place to the next
    weight, *vectors = (torch.randn(size).bfloat16() for size in ((n, k), n, n, n))
    memory = torch.empty((places + 1) * step + 2 * m * k, dtype=torch.uint8)
    first = -(-memory.data_ptr() // step)
    # Of maps with ids that follow each other: 479 * 31 % 512 == 1.
    apart = (weight.data_ptr() // step - first + 479) % places
    begin = (first + apart) * step - memory.data_ptr()
    x = memory[begin:][: 2 * m * k].view(torch.bfloat16).view(m, k).normal_()
    x64, weight64, bias, *affine = (t.double() for t in (x, weight, *vectors))
    z = nn.functional.linear(x64, weight64, bias)
    expected = nn.functional.group_norm(z, 8, *affine, 1e-5)
    caller = Caller("group_norm(8,1e-05)", "single")

    def call_until(happened):
        for _ in range(50):
            with torch.no_grad():
                y = caller(x, weight, *vectors, ())
            torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
            if happened():
                return
        pytest.fail("no graph was tried")

    gpu.refuses_maps = True
    call_until(lambda: gpu.maps_refused > 2)  # sixteen times end it for good
    assert (gpu.graph_launches, gpu.captured, gpu.streams, gpu.capture_mode) == (0, None, 0, 0)
    gpu.refuses_maps = False
    call_until(lambda: gpu.graph_launches)


def test_large_and_short_passes_are_no_graphs(gpu, monkeypatch):
    monkeypatch.setattr("epinorm.backends.cuda.runtime.replay.MOST_MADE", 1000)
    caller, given = Caller(CHAIN, "planes"), tensors()
    for _ in range(8):
        check(caller, given)
    assert gpu.replayed
    assert not gpu.graph_launches
