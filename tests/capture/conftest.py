"""Every test here starts with nothing captured, and imports what the folder above holds."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import fx

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def nothing_captured(fresh_dynamo: None) -> None:
    """For ``fresh_dynamo``."""


@pytest.fixture(scope="module", autouse=True)
def nothing_optimised(kernels_that_compile_fast: None) -> None:
    """For ``kernels_that_compile_fast``."""


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
