"""Write one self-contained ``ModelNew`` file from a problem file and the library's own kernels."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from epinorm.chain import GroupNorm
from epinorm.cuda.norm_backward_text import Outputs, backward_plans
from epinorm.cuda.norm_forward import forward_plans
from epinorm.cuda.norm_tile import Tile, vector_width
from epinorm.kernelbench.export_cuda import TEMPLATE_FOLDER, binding_text, norm_cuda_text
from epinorm.kernelbench.export_hopper import Hopper, hopper_of
from epinorm.kernelbench.export_recipe import Recipe, read_recipe
from epinorm.kernelbench.export_source import Parts, split_problem
from epinorm.kernelbench.problem import ProblemError, load_problem
from epinorm.kernelbench.protocol import NoChainError
from epinorm.plan import Problem, Wanted
from epinorm.results import commit

__all__ = ["GEMMS", "STRATEGIES", "Exported", "Gemm", "chosen_gemm", "export", "forbidden_words"]

Gemm = Literal["auto", "own", "library"]
"""Whose matrix product; auto: our own where it serves the shape, else PyTorch's."""
GEMMS = ("own", "library")
STRATEGIES = ("auto", "single", "epilogue")

FORBIDDEN = re.compile(r"\b(try|except|pass)\b")
LARGEST_GROUP = 16384
TUNED_FOR_SHARED = 228 * 1024
"""Shared memory of a block on Hopper; forward_plans wants to know it for very wide groups."""


def chosen_gemm(strategy: str, gemm: str | None) -> Gemm:
    """Whose product a file of this strategy has; raises ValueError where the two contradict."""
    if gemm is None:
        return {"auto": "auto", "single": "own", "epilogue": "library"}[strategy]  # type: ignore[return-value]
    if (strategy, gemm) in (("single", "library"), ("epilogue", "own")):
        raise ValueError(
            f"--strategy {strategy} and --gemm {gemm} contradict: single is our own product, "
            "epilogue PyTorch's"
        )
    return "own" if gemm == "own" else "library"


@dataclass(frozen=True)
class Exported:
    """The file's text, and what a user should know of it: each a sentence."""

    text: str
    chain: str
    remarks: tuple[str, ...]


def export(path: Path, gemm: Gemm = "auto") -> Exported:
    """The exported file for a problem file.

    Raises ProblemError for what is wrong with the file and NoChainError, with the reason, where it
    holds nothing that can be exported.
    """
    problem = load_problem(path)
    model, inputs = problem.make(torch.float32, "cpu")
    recipe = read_recipe(path.name, model, inputs)
    _check_group(path, recipe)
    parts = split_problem(path, recipe)
    _check_imports(path)
    hopper = hopper_of(recipe, recipe.has) if gemm != "library" else None
    remarks = []
    if hopper is not None and not hopper.modes:
        why = next(iter(hopper.left_out.values()))
        if gemm == "own":
            raise NoChainError(
                f"{path.name} cannot be exported with a product of our own: {why}; "
                "--gemm library can"
            )
        remarks.append(f"there is no product of our own for this shape: {why}")
        hopper = None
    text = _filled(path, recipe, parts, hopper)
    compile(text, "model_new.py", "exec")
    words = forbidden_words(text)
    remarks += _covered(hopper)
    if words:
        remarks.append(
            f"the problem file's own text holds {', '.join(words)}, which static checkers of "
            "KernelBench reject"
        )
    return Exported(text, str(recipe.chain), tuple(remarks))


def forbidden_words(text: str) -> list[str]:
    """The words in a text that static checkers of KernelBench reject, wherever they stand."""
    return sorted(set(FORBIDDEN.findall(text)))


def _covered(hopper: Hopper | None) -> tuple[str, ...]:
    """What computes what, and what is not covered: a sentence each."""
    norm = "one norm kernel forward and one (and a sum) backward"
    if hopper is None:
        return (
            "the matrix products, forward and backward, are PyTorch's (F.linear, torch.mm); the "
            f"norm and everything pointwise is {norm}",
        )
    said = [
        f"on Hopper (compute capability 9.0, CUDA 12 or newer), for {', '.join(hopper.modes)}, "
        "forward is one product of our own with everything else in its epilogue",
        "backward there is one kernel (and a sum) and, where the output features are a multiple of "
        "8, two products of our own, for float32 between a split into planes and a range guard",
        "elsewhere (other GPUs, float64, autocast, other channels in a group, other constants, "
        "rows that are no multiple of 16 bytes) the products are PyTorch's, F.linear and torch.mm; "
        f"the rest is {norm}",
    ]
    said += [
        f"backward in {mode} has no products of our own: {why}"
        for mode, why in hopper.backward_left_out.items()
    ]
    said += [f"{mode} has no product of our own: {why}" for mode, why in hopper.left_out.items()]
    return tuple(said)


def _check_group(path: Path, recipe: Recipe) -> None:
    channels = recipe.chain.channels_per_group(recipe.m_k_n[2])
    if channels > LARGEST_GROUP:
        raise NoChainError(
            f"{path.name} cannot be exported: a group has {channels} channels, and an exported "
            f"kernel holds at most {LARGEST_GROUP}"
        )


def _check_imports(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else ["."]
        for name in names:
            root = name.partition(".")[0]
            if root != "torch" and root not in sys.stdlib_module_names:
                raise ProblemError(
                    f"{path.name} imports {name}; an exported file needs torch and the standard "
                    "library alone"
                )


def _filled(path: Path, recipe: Recipe, parts: Parts, hopper: Hopper | None) -> str:
    text = (TEMPLATE_FOLDER / "model_new.py.in").read_text(encoding="utf-8")
    kept = "library" if hopper is None else "own"
    text = _CONDITIONAL.sub(lambda m: m["text"] if m["gemm"] == kept else "", text)
    values = {
        "future": parts.future,
        "header": _header(path, recipe, hopper),
        "before": parts.before.strip("\n"),
        "chain": f"Linear → {str(recipe.chain).replace('|', ' → ')}",
        "cuda": norm_cuda_text(recipe),
        "binding_common": binding_text(recipe, "common"),
        "binding_norm": binding_text(recipe, "norm"),
        "tiles": _tiles(recipe),
        "dimensions": textwrap.indent(_dimensions(recipe), "    "),
        "model": parts.model_new.strip("\n"),
        "after": parts.after.strip("\n"),
    }
    if hopper is not None:
        values |= _hopper_values(recipe, hopper)
    for name, value in values.items():
        marker = f"@{name}@"
        # Markers that stand at a line's start have their own line; none is left empty.
        text = text.replace(marker, value)
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"


_CONDITIONAL = re.compile(r"^#if (?P<gemm>own|library)\n(?P<text>.*?)^#endif\n", re.S | re.M)


def _hopper_values(recipe: Recipe, hopper: Hopper) -> dict[str, str]:
    m, k, n = recipe.m_k_n
    constants = tuple(c.value for c in recipe.constants if c.expression)
    return {
        "hopper_modes": ", ".join(hopper.modes),
        "hopper_cuda": hopper.cuda,
        "backward_cuda": hopper.backward_cuda,
        "binding_backward": binding_text(recipe, "backward"),
        "bodies": hopper.bodies,
        "backward_instances": hopper.backward,
        "binding_hopper": binding_text(recipe, "hopper"),
        "hopper_chains": hopper.chains,
        "hopper_instances": hopper.instances,
        "hopper_limits": hopper.limits,
        "hopper_product": hopper.product,
        "m_k_n": f"({m}, {k}, {n})",
        "channels": str(recipe.chain.channels_per_group(n)),
        "has": repr(recipe.has),
        "constants": repr(constants),
    }


def _dimensions(recipe: Recipe) -> str:
    if isinstance(recipe.chain.norm, GroupNorm):
        return (
            "if x.dim() != 2:\n"
            '    raise ValueError(f"the input must be a matrix (M, K), got {list(x.shape)}")'
        )
    return (
        "if x.dim() == 0:\n"
        '    raise RuntimeError("both arguments to linear need to be at least 1D, but x is 0D")'
    )


def _header(path: Path, recipe: Recipe, hopper: Hopper | None) -> str:
    m, k, n = recipe.m_k_n
    groups = recipe.chain.groups(n)
    made = f" at commit {commit()}" if commit() else ""
    lines = [
        f"ModelNew for {path.name}: Linear → {str(recipe.chain).replace('|', ' → ')}.",
        "",
        f"Tuned for ({m}, {k}) → {n} in {groups} group{'s' if groups > 1 else ''} of {n // groups} "
        "channels; other sizes, dtypes (float32, float64, bfloat16, float16) and constructor "
        "arguments are served as well.",
        "",
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in _covered(hopper)),
        "",
        "fp32 products follow torch.set_float32_matmul_precision. Statistics belong to one row and "
        "one group, in two passes. Gradients of first order, real kernels, in a fixed order of "
        "additions. Compute capability 8.0 or newer. The first call builds the kernels with nvcc.",
        "",
        f"Written by epinorm{made}; the kernels are the library's own, whose tests compare them "
        "with float64. `epinorm judge` compares this very file.",
    ]
    return "\n".join(textwrap.fill(line, 98) for line in lines)


def _tiles(recipe: Recipe) -> str:
    """A line for each size of a value: the library's tiles for the problem's own sizes."""
    lines = []
    m, k, n = recipe.m_k_n
    channels = recipe.chain.channels_per_group(n)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        problem = Problem(
            recipe.chain, m, k, n, dtype, dtype, dtype,
            *recipe.has,
            True, torch.device("cuda"), "native",
        )  # fmt: skip
        vector = vector_width(channels, dtype.itemsize, ())
        forward = forward_plans(problem, vector, TUNED_FOR_SHARED)[0]
        wants = Wanted(True, True, True, True, True, tuple(True for _ in recipe.operands))
        backward = backward_plans(problem, vector, Outputs.of(problem, wants))[0]
        if forward.kind != "registers" or backward.row_sums is not None:
            continue
        pair = f"({_tile(forward.tile)}, {_tile(backward.tile)})"
        lines.append(f"    ({channels}, {dtype.itemsize}): {pair},\n")
    return "".join(lines)


def _tile(tile: Tile) -> str:
    values: Sequence[Any] = (
        tile.vector, tile.lanes, tile.vectors, tile.rows, tile.warps_x, tile.warps_y,
        int(tile.keep), tile.resident, int(tile.prefetch),
    )  # fmt: skip
    return repr(tuple(values))
