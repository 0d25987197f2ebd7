"""A step by native code, its node in autograd's graph included, beside what else a program does."""

import copy
import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import epinorm
from epinorm.backends.cuda.runtime.native import native
from epinorm.operator.dispatch import Caller

pytestmark = pytest.mark.gpu

CHAIN = "add_residual|layer_norm(1e-05)|silu"
M, K, N = 512, 256, 768
NATIVE = "LinearNormBackward"


def tensors(dtype=torch.bfloat16, m=M, k=K):
    sizes = [(m, k), (N, k), (N,), (N,), (N,), (m, N)]
    return [torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in sizes]


def call(caller, given):
    return caller(*given[:5], tuple(given[5:]))


def eager(given):
    x, weight, bias, gamma, beta, residual = given
    z = nn.functional.linear(x, weight, bias) + residual
    return nn.functional.silu(nn.functional.layer_norm(z, (N,), gamma, beta, 1e-5))


def gradient(like):
    return torch.randn_like(like.detach())


def close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error < (2e-2 if theirs.dtype == torch.bfloat16 else 3e-3), error


def native_caller(strategy="epilogue", make=tensors):
    """One whose step is native from now on."""
    native(wait=True)
    caller = Caller(CHAIN, strategy)
    for _ in range(5):
        y = call(caller, make())
        y.backward(gradient(y))
    assert call(caller, make()).grad_fn.name() == NATIVE
    return caller


@pytest.fixture(scope="module")
def caller():
    return native_caller()


def test_streams(caller):
    """A pass runs on the stream that is current; memory is used again only behind it."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    given = tensors()
    expected_y = eager(given)
    dy = gradient(expected_y)
    expected = torch.autograd.grad(expected_y, given, dy)
    torch.cuda.synchronize()
    for i in range(30):
        first, second = streams[i % 3], streams[(i + 1) % 3]
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000)
            y = call(caller, given)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            found = torch.autograd.grad(y, given, dy)
            copies = [t.clone() for t in found]
            del found
            for t in copies:
                torch.full_like(t, float("nan"))  # into what was freed
        second.synchronize()
        close(copies, expected)


def test_a_node_that_is_called_by_itself_uses_the_current_stream(caller):
    given = tensors()
    dy = gradient(given[5])
    expected = torch.autograd.grad(eager(given), given, dy)
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        y = call(caller, given)
        node = y.grad_fn
    busy.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(1_000_000_000)
    with torch.cuda.stream(other), torch.no_grad():
        found = [t.clone() for t in node(dy)]
    other.synchronize()
    close(found, expected)
    torch.cuda.synchronize()


def test_out_of_memory_leaves_all_as_it_was():
    def make():
        return tensors(m=65536, k=64)

    caller = native_caller(make=make)
    given = make()
    dy = gradient(given[5])
    expected = torch.autograd.grad(eager(given), given, dy)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    used = torch.cuda.memory_reserved() + (96 << 20)
    total = torch.cuda.get_device_properties(0).total_memory
    y = call(caller, given)
    filler = []

    def fill():
        while True:
            filler.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))

    try:
        torch.cuda.set_per_process_memory_fraction(used / total)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fill()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            call(caller, given)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.autograd.grad(y, given, dy, retain_graph=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        filler.clear()
    close(torch.autograd.grad(y, given, dy), expected)
    y = call(caller, given)
    assert y.grad_fn.name() == NATIVE
    close(torch.autograd.grad(y, given, dy), expected)


@pytest.mark.parametrize("strategy", ["planes", "epilogue"])
def test_precision_changes_after_recording(strategy):
    def make():
        return tensors(torch.float32)

    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        caller = native_caller(strategy, make)
        given = make()
        dy = gradient(given[5])
        doubles = [t.detach().double().requires_grad_() for t in given]
        truth = torch.autograd.grad(eager(doubles), doubles, dy.double())

        def error(found):
            return max(
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(found, truth, strict=True)
            )

        assert error(torch.autograd.grad(call(caller, given), given, dy)) < 2e-6
        torch.backends.cuda.matmul.allow_tf32 = True
        lower = error(torch.autograd.grad(call(caller, given), given, dy))
        assert lower > 1e-5  # TF32 in both, as eager's
        torch.backends.cuda.matmul.allow_tf32 = False
        assert error(torch.autograd.grad(call(caller, given), given, dy)) < 2e-6
        for ways in (("highest", "high"), ("high", "highest")):  # forward, backward
            torch.set_float32_matmul_precision(ways[0])
            y = call(caller, given)
            torch.set_float32_matmul_precision(ways[1])
            found = error(torch.autograd.grad(y, given, dy))
            assert 1e-5 < found < 1e-2
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("highest")
        assert error(torch.autograd.grad(call(caller, given), given, dy)) < 2e-6
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


def test_autocast_on_and_off():
    """Each call as its own mode has it, in any order; fp64 is no dtype that autocast touches."""
    native(wait=True)
    caller = Caller(CHAIN, "auto")
    given = tensors(torch.float32)
    dy = gradient(given[5])

    def run(way, mode):
        if mode is None:
            y = way(given)
        else:
            with torch.autocast("cuda", mode, cache_enabled=mode == torch.bfloat16):
                y = way(given)
        return y.dtype, [y.detach(), *torch.autograd.grad(y, given, dy.to(y.dtype))]

    for _ in range(6):
        for mode in (None, torch.bfloat16, None, torch.float16, torch.bfloat16):
            dtype, found = run(lambda g: call(caller, g), mode)
            wanted, expected = run(eager, mode)
            assert dtype == wanted
            for ours, theirs in zip(found, expected, strict=True):
                error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
                assert error < 1.5e-2


@pytest.mark.parametrize("place", range(1, 6))
def test_fp64_under_autocast(place):
    """Each call does what the first did, though PyTorch's own casts leave fp64 alone."""
    native(wait=True)
    caller = Caller(CHAIN, "epilogue")
    given = tensors(torch.float32)
    given[place] = given[place].detach().double().requires_grad_()

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            y = call(caller, given)
        return [y, *torch.autograd.grad(y.sum(), given)]

    first = step()
    for _ in range(6):
        close(step(), first)


def test_graphed_callables():
    model = nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.SiLU()).cuda().bfloat16()
    fused = epinorm.fuse(copy.deepcopy(model), strategy="epilogue")
    native(wait=True)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(6):
        fused(x).sum().backward()
    graphed = torch.cuda.make_graphed_callables(fused, (x,))
    for _ in range(3):
        x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(M, N, device="cuda", dtype=torch.bfloat16)
        y, expected = graphed(x), model(x)
        close([y], [expected])
        found = torch.autograd.grad(y, [x, *fused.parameters()], dy)
        close(found, torch.autograd.grad(expected, [x, *model.parameters()], dy))


def footprint(folder):
    """What is fixed: GPU memory, open files, threads, files; thousands of blocks; 4 MB resident."""
    files = len(list(folder.rglob("*"))), len(os.listdir("/proc/self/fd"))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    fixed = torch.cuda.memory_allocated(), threading.active_count(), *files
    return fixed, sys.getallocatedblocks() // 1000, resident >> 22


def leaves_nothing(step, early, calls, folder):
    """Of so many calls: beyond those of the first ``early``, where every cache is full."""
    for i in range(calls):
        step(i)
        if i % 500 == 0:
            torch.cuda.synchronize()
        if i == early:
            gc.collect()
            before = footprint(folder)
    torch.cuda.synchronize()
    # The autograd engine's thread lets go of the last step's gradients when it comes to run again.
    for _ in range(100):
        gc.collect()
        fixed, blocks, resident = footprint(folder)
        if fixed == before[0]:
            break
        time.sleep(0.05)
    assert fixed == before[0]
    assert blocks - before[1] <= 2
    assert resident - before[2] <= 2


def test_memory_of_many_steps(caller, tmp_path):
    given = tensors(m=64)
    dy = gradient(given[5])
    leaves_nothing(
        lambda _: torch.autograd.grad(call(caller, given), given, dy), 2000, 20_000, tmp_path
    )


def test_memory_of_changing_constants(tmp_path, monkeypatch):
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path))  # others' compilations are not counted
    native(wait=True)
    x, weight, bias, gamma, beta, _ = [t.detach() for t in tensors(m=64)]
    truth = epinorm.linear_norm(
        *(x, weight, bias), norm=epinorm.LayerNorm(), norm_weight=gamma, norm_bias=beta
    )

    def step(i):
        y = epinorm.linear_norm(
            *(x, weight, bias),
            norm=epinorm.LayerNorm(),
            norm_weight=gamma,
            norm_bias=beta,
            post=f"scale({1 + i / 20_000})",
            strategy="epilogue",
        )
        if i % 500 == 0:
            close([y], [truth * (1 + i / 20_000)])

    leaves_nothing(step, 6000, 20_000, tmp_path)


def test_threads_with_streams_of_their_own(caller):
    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                given = tensors()
                dy = gradient(given[5])
                y = call(caller, given)
                close(
                    torch.autograd.grad(y, given, dy),
                    torch.autograd.grad(eager(given), given, dy),
                )

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work) for _ in range(4)]:
            each.result()


def test_kept_in_other_ways(caller):
    """Offloaded, checkpointed, exchanged data, no gradients, inference."""
    given = tensors()
    dy = gradient(given[5])
    expected = torch.autograd.grad(eager(given), given, dy)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = call(caller, given)
    close(torch.autograd.grad(y, given, dy), expected)
    for reentrant in (False, True):
        y = torch.utils.checkpoint.checkpoint(
            lambda *g: call(caller, g), *given, use_reentrant=reentrant
        )
        for t in given:
            t.grad = None
        y.backward(dy)
        close([t.grad for t in given], expected)
    for t in given[1:5]:
        t.data = t.data.clone()
    close(torch.autograd.grad(call(caller, given), given, dy), expected)
    with torch.inference_mode():
        close([call(caller, given)], [eager(given)])
    first = torch.autograd.grad(call(caller, given), given, dy, create_graph=True)
    close(first, expected)
    second = torch.autograd.grad(first[0].float().square().sum(), given[1])
    theirs = torch.autograd.grad(eager(given), given, dy, create_graph=True)
    want = torch.autograd.grad(theirs[0].float().square().sum(), given[1])
    assert (second[0].double() - want[0].double()).norm() < 5e-2 * want[0].double().norm()


def test_compiled_around():
    layers = nn.Linear(K, N), nn.LayerNorm(N), nn.SiLU(), nn.Linear(N, K)
    fused = epinorm.fuse(nn.Sequential(*layers).cuda().bfloat16(), strategy="epilogue")
    native(wait=True)
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        fused(x).sum().backward()
    expected = fused(x)
    compiled = torch.compile(fused, backend="aot_eager")
    for _ in range(4):
        y = compiled(x)
        y.sum().backward()
        close([y, fused(x)], [expected, expected])


EXIT = """
import torch
from epinorm.backends.cuda.runtime.native import native
from epinorm.operator.dispatch import Caller
native(wait=True)
caller = Caller("layer_norm(1e-05)|silu", "epilogue")
def step():
    given = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_()
             for s in ((64, 64), (256, 64), (256,), (256,), (256,))]
    y = caller(*given, ())
    y.backward(torch.randn_like(y))
    return caller(*given, ())
for _ in range(6):
    kept = step()
assert kept.grad_fn.name() == "LinearNormBackward"
print("done")
"""


def test_a_process_ends_with_a_graph_alive():
    ran = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "done", "")
