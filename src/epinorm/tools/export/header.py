"""What an exported file says of itself: what computes what, where, and what is not covered."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from epinorm.tools.export.dump import Tables
from epinorm.tools.export.recipe import Recipe
from epinorm.tools.export.source import chain_of
from epinorm.tools.results import commit

ELSEWHERE = (
    "elsewhere (other sizes, GPUs, constructor arguments and dtypes, autocast, the CPU) the layers "
    "of the problem file run, and a warning says so"
)


def covered(tables: Tables) -> tuple[str, ...]:
    """What computes what, and what is not covered: a sentence each."""
    said = [f"{s.mode} on {s.gpu}: {s.plan.reason}" for s in tables.served]
    said += [f"{refused}; PyTorch's own layers run" for refused in tables.refused]
    return (*said, ELSEWHERE)


def header(name: str, recipes: Sequence[Recipe], tables: Tables) -> str:
    """The docstring of the file exported from the problem file ``name``."""
    made = f" at commit {commit()}" if commit() else ""
    lines = [
        f"ModelNew for {name}.",
        "",
        *("{}: {}, ({}, {}) → {}.".format(i, chain_of(r), *r.m_k_n) for i, r in enumerate(recipes)),
        "",
        "The launches are those of the library, written down as tables; everything around these "
        "chains is the problem file's own text.",
        "",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in covered(tables)),
        "",
        "fp32 products follow torch.set_float32_matmul_precision. Statistics belong to one row and "
        "one group, in two passes. Gradients of first order, real kernels, in a fixed order of "
        "additions. CUDA 12 or newer. The first call compiles the kernels that it needs with "
        "NVRTC, which comes with PyTorch, and what launches them with a C++ compiler.",
        "",
        f"Written by epinorm{made}; the kernels are the library's own, whose tests compare them "
        "with float64. `epinorm judge` compares this very file.",
    ]
    return "\n".join(textwrap.fill(line, 98) for line in lines)
