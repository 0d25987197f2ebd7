"""A recorded pass repeats what Python launches, with the addresses of other tensors.

The GPU is conftest.py's: it computes each launch from the bytes that the driver is given.
"""

import pytest
import torch

from epinorm.backends.cuda.runtime.replay import CannotReplay, Replay, recording
from epinorm.chain import Chain
from epinorm.chain.reference import linear_norm
from epinorm.operator.dispatch import Caller

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


def note(run):
    with recording() as noted:
        made = run()
    return noted, made


def test_runs_that_cannot_be_repeated():
    x = torch.randn(4, 4)
    noted, made = note(lambda: torch.empty(4, 4).copy_(x))
    with pytest.raises(CannotReplay, match="copy_"):
        Replay(noted, [x], [made])
    noted, made = note(lambda: torch.empty(4, 4))
    with pytest.raises(CannotReplay, match="share memory"):
        Replay(noted, [x, x[1:]], [made])
    with pytest.raises(CannotReplay, match="not its own"):
        Replay(noted, [], [x])
    with pytest.raises(CannotReplay, match="contiguous"):
        Replay(noted, [x.t()], [made])
