"""Attention's launches without Triton: what it would have compiled is launched as our kernels are,
from the second call of a kind on."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from epinorm.backends import memo

METADATA = SimpleNamespace(
    name="attention_forward", num_warps=4, warp_size=32, shared=73728,
    global_scratch_size=0, profile_scratch_size=0,
    num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
)  # fmt: skip


@pytest.fixture
def seen(monkeypatch):
    """Launches by Triton, prepared ones as (signature, grid, threads, shared bytes), and theirs."""
    triton = MagicMock()
    triton.jit = lambda function: function
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", triton.language)
    for name in ("launch", "kernels"):
        monkeypatch.delitem(sys.modules, f"epinorm.backends.cuda.attention.{name}", raising=False)
    from epinorm.backends.cuda.attention import launch

    found = SimpleNamespace(triton=[], prepared=[], launched=[], metadata=METADATA, refuses=False)

    class Compiled:
        __name__ = "attention_forward"

        def __getitem__(self, grid):
            def run(*given, **_):
                found.triton.append((grid, given))
                return SimpleNamespace(asm={"cubin": b"code"}, metadata=found.metadata)

            return run

    def prepare(signature, grid, threads, *, shared_bytes):
        if found.refuses:
            raise TypeError("other arguments")
        found.prepared.append((signature, grid, threads, shared_bytes))
        return lambda *values: found.launched.append(values)

    monkeypatch.setattr(launch.kernels, "attention_forward", Compiled())
    monkeypatch.setattr(launch, "load_cubin", lambda *_: SimpleNamespace(prepare=prepare))
    monkeypatch.setattr(launch, "driver", lambda: SimpleNamespace(has_parameter_info=True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch, "prepared", {})
    found.run = launch.run_forward
    yield found
    memo.clear()
    for name in ("launch", "kernels"):
        sys.modules.pop(f"epinorm.backends.cuda.attention.{name}", None)


def heads(count=3, rows=128, offset=0):
    flat = torch.zeros(2 * count * rows * 64 + offset)
    return flat[offset:].view(2, rows, count, 64).transpose(1, 2)


def test_the_second_call_of_a_kind_is_launched_with_the_numbers_of_the_first(seen):
    given = [heads() for _ in range(3)]
    seen.run(*given, 0.5)
    out, _ = seen.run(*given, 0.25)
    assert len(seen.triton) == 1
    assert seen.prepared == [("p" * 5 + "i" * 15 + "f" + "pp", 6, 128, 73728)]
    (values,) = seen.launched
    _, by_triton = seen.triton[0]
    assert values[:3] == tuple(t.data_ptr() for t in given)
    assert values[3] == out.data_ptr()
    assert values[5:20] == by_triton[5:20]
    assert values[20] == pytest.approx(0.25 * 1.4426950408889634)
    assert values[21:] == (0, 0)


def test_numbers_that_are_one_are_compiled_in(seen):
    for _ in range(2):
        seen.run(*[heads(count=1) for _ in range(3)], 0.5)
    (values,) = seen.launched
    (prepared,) = seen.prepared
    assert prepared[0] == "p" * 5 + "i" * 14 + "f" + "pp"
    assert len(values) == 22


def test_other_sizes_and_strides_are_other_kinds(seen):
    kinds = [heads(), heads(rows=64), heads(count=4), heads().contiguous()]
    for tensor in kinds:
        seen.run(tensor, tensor, tensor, 0.5)
    assert len(seen.prepared) == len(seen.triton) == len(kinds)
    assert not seen.launched


def test_what_is_not_aligned_is_left_to_triton(seen):
    for _ in range(3):
        seen.run(*[heads(offset=1) for _ in range(3)], 0.5)
    assert len(seen.triton) == 3
    assert not seen.prepared


@pytest.mark.parametrize("what", ["refused", "scratch", "clusters", "other metadata"])
def test_what_is_not_as_known_is_left_to_triton(seen, what):
    seen.refuses = what == "refused"
    if what == "scratch":
        seen.metadata = SimpleNamespace(**{**vars(METADATA), "global_scratch_size": 64})
    if what == "clusters":
        seen.metadata = SimpleNamespace(**{**vars(METADATA), "num_ctas": 2})
    if what == "other metadata":
        seen.metadata = SimpleNamespace(name="attention_forward")
    for _ in range(3):
        seen.run(*[heads() for _ in range(3)], 0.5)
    assert len(seen.triton) == 3
    assert not seen.launched
