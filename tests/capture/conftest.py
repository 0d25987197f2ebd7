"""Every test here starts with nothing captured, and imports what the folder above holds."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import fx

from epinorm.backends import memo
from epinorm.backends.cpu import build

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def nothing_captured(fresh_dynamo: None) -> None:
    """For ``fresh_dynamo``."""


@pytest.fixture(scope="package", autouse=True)
def kernels_that_compile_fast() -> Iterator[None]:
    """Here a chain's kernel for the CPU is to compute, not to be fast; to optimise it takes more
    than half of the compiler's time. Other tests are left none of these kernels."""
    memo.clear()
    flags = tuple("-O0" if flag == "-O3" else flag for flag in build.KERNEL_FLAGS)
    runner = {name: made for name, made in build._loaded.items() if name == build._RUNNER}
    with mock.patch.multiple(build, KERNEL_FLAGS=flags, _loaded=runner):
        yield
    memo.clear()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What AOTAutograd hands to Inductor, which runs as it is: Inductor's own kernels take five
    seconds each to compile."""
    from torch._inductor import compile_fx

    graphs: list[fx.GraphModule] = []

    def inner(gm: fx.GraphModule, *_: Any, **__: Any) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    monkeypatch.setattr(
        compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=inner)
    )
    return graphs
