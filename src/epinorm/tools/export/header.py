"""What an exported file says of itself: what computes what, where, and what is not covered."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from epinorm.problem import Core
from epinorm.tools.export.core import Part
from epinorm.tools.export.recipe import Recipe
from epinorm.tools.results import commit

__all__ = ["covered", "header"]

_NORM = "one norm kernel forward and one (and a sum) backward"


def covered(cores: Mapping[Core, Part]) -> tuple[str, ...]:
    """What computes what, and what is not covered: a sentence each."""
    if not cores:
        return (
            "the matrix products, forward and backward, are PyTorch's (F.linear, torch.mm); the "
            f"norm and everything pointwise is {_NORM}",
        )
    said = [*_forward(cores), _backward(cores), _elsewhere(cores)]
    for core, part in cores.items():
        of = f" of the {core} kernels" if len(cores) > 1 else " of our own"
        said += [
            f"backward in {mode} has no products{of}: {why}"
            for mode, why in part.backward_left_out.items()
        ]
        said += [f"{mode} has no product{of}: {why}" for mode, why in part.left_out.items()]
    return tuple(said)


def _forward(cores: Mapping[Core, Part]) -> list[str]:
    product = "forward is one product of our own with everything else in its epilogue"
    said = []
    if "hopper" in cores:
        modes = ", ".join(cores["hopper"].modes)
        said.append(
            f"on Hopper (compute capability 9.0, CUDA 12 or newer), for {modes}, {product}, by "
            "wgmma and TMA"
        )
    if "portable" in cores:
        modes = ", ".join(cores["portable"].modes)
        gpus = "every other GPU" if "hopper" in cores else "every GPU"
        said.append(
            f"on {gpus} since Ampere (compute capability 8.0), for {modes}, {product}, by mma.sync"
        )
        if "hopper" in cores:
            said.append(
                "Hopper takes that one too for rows that are no multiple of 16 bytes, and for "
                "sizes that its own tiles do not serve"
            )
    return said


def _backward(cores: Mapping[Core, Part]) -> str:
    whose = "float32's" if "portable" in cores else "they"
    return (
        "backward there is one kernel (and a sum) and two products of our own, for float32 between "
        f"a split into planes and a range guard; {whose} need output features that are a multiple "
        "of 8, else they are torch.mm"
    )


def _elsewhere(cores: Mapping[Core, Part]) -> str:
    rest = ["float64", "autocast", "other channels in a group", "other parameters or constants"]
    if "portable" not in cores:
        rest = ["other GPUs", *rest, "rows that are no multiple of 16 bytes"]
    return (
        f"elsewhere ({', '.join(rest)}) the products are PyTorch's, F.linear and torch.mm; the "
        f"rest is {_NORM}"
    )


def header(name: str, recipe: Recipe, cores: Mapping[Core, Part]) -> str:
    """The docstring of the file exported from the problem file ``name``."""
    m, k, n = recipe.m_k_n
    groups = recipe.chain.groups(n)
    made = f" at commit {commit()}" if commit() else ""
    lines = [
        f"ModelNew for {name}: Linear → {str(recipe.chain).replace('|', ' → ')}.",
        "",
        f"Tuned for ({m}, {k}) → {n} in {groups} group{'s' if groups > 1 else ''} of {n // groups} "
        "channels; other sizes, dtypes (float32, float64, bfloat16, float16) and constructor "
        "arguments are served as well.",
        "",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in covered(cores)),
        "",
        "fp32 products follow torch.set_float32_matmul_precision. Statistics belong to one row and "
        "one group, in two passes. Gradients of first order, real kernels, in a fixed order of "
        "additions. Compute capability 8.0 or newer. The first call builds the kernels that it "
        "needs with nvcc, for the GPU that it runs on.",
        "",
        f"Written by epinorm{made}; the kernels are the library's own, whose tests compare them "
        "with float64. `epinorm judge` compares this very file.",
    ]
    return "\n".join(textwrap.fill(line, 98) for line in lines)
