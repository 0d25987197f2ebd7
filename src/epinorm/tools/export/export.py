"""Write one self-contained ``ModelNew`` file from a problem file and the library's own kernels."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from epinorm.backends.cuda.plan.core import wanted_core
from epinorm.backends.cuda.plan.norm_backward import Outputs, backward_plans
from epinorm.backends.cuda.plan.norm_forward import forward_plans
from epinorm.backends.cuda.plan.norm_tile import NormTile, vector_width
from epinorm.chain import GroupNorm, Rounding
from epinorm.problem import Core, Problem, Wanted
from epinorm.tools.export.core import Part
from epinorm.tools.export.cuda import TEMPLATE_FOLDER, binding_text, norm_cuda_text
from epinorm.tools.export.header import covered, header
from epinorm.tools.export.hopper import hopper_part
from epinorm.tools.export.portable import TILE_FIELDS, portable_part
from epinorm.tools.export.recipe import Recipe, read_recipe
from epinorm.tools.export.source import Parts, split_problem
from epinorm.tools.export.text import Chains, kernel_files, product_function
from epinorm.tools.kernelbench.problem import ProblemError, load_problem
from epinorm.tools.kernelbench.protocol import NoChainError

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


def export(path: Path, gemm: Gemm = "auto", rounding: Rounding = "eager") -> Exported:
    """The exported file for a problem file.

    ``rounding`` as ``epinorm.linear_norm`` has it: "eager" is what an evaluator compares with.

    A core that $EPINORM_CORE forces is the only one in it. Raises ProblemError for what is wrong
    with the file and NoChainError, with the reason, where it holds nothing that can be exported.
    """
    problem = load_problem(path)
    model, inputs = problem.make(torch.float32, "cpu")
    recipe = read_recipe(path.name, model, inputs)
    recipe = dataclasses.replace(recipe, chain=dataclasses.replace(recipe.chain, rounding=rounding))
    _check_group(path, recipe)
    parts = split_problem(path, recipe)
    _check_imports(path)
    chains = Chains()
    cores, refusals = _cores(recipe, chains) if gemm != "library" else ({}, {})
    remarks = []
    if gemm != "library" and not cores:
        why = "; ".join(f"{core}: {reason}" for core, reason in refusals.items())
        if gemm == "own":
            raise NoChainError(
                f"{path.name} cannot be exported with a product of our own: {why}; "
                "--gemm library can"
            )
        remarks.append(f"there is no product of our own for this shape: {why}")
    text = _filled(path, recipe, parts, cores, chains)
    compile(text, "model_new.py", "exec")
    words = forbidden_words(text)
    remarks += covered(cores)
    if words:
        remarks.append(
            f"the problem file's own text holds {', '.join(words)}, which static checkers of "
            "KernelBench reject"
        )
    return Exported(text, str(recipe.chain), tuple(remarks))


def forbidden_words(text: str) -> list[str]:
    """The words in a text that static checkers of KernelBench reject, wherever they stand."""
    return sorted(set(FORBIDDEN.findall(text)))


def _cores(recipe: Recipe, chains: Chains) -> tuple[dict[Core, Part], dict[Core, str]]:
    """The cores that serve a recipe in any dtype, and why the others do not."""
    cores: dict[Core, Part] = {}
    refusals: dict[Core, str] = {}
    makers: Mapping[Core, Callable[[Recipe, Chains], Part]]
    makers = {"hopper": hopper_part, "portable": portable_part}
    for core, make in makers.items():
        if wanted_core() not in ("auto", core):
            continue
        part = make(recipe, chains)
        if part.modes:
            cores[core] = part
        else:
            refusals[core] = next(iter(part.left_out.values()))
    return cores, refusals


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


def _filled(
    path: Path, recipe: Recipe, parts: Parts, cores: Mapping[Core, Part], chains: Chains
) -> str:
    text = (TEMPLATE_FOLDER / "model_new.py.in").read_text(encoding="utf-8")
    kept = {"own", *cores} if cores else {"library"}
    text = _CONDITIONAL.sub(lambda m: m["text"] if m["part"] in kept else "", text)
    values = {
        "future": parts.future,
        "header": header(path.name, recipe, cores),
        "before": parts.before.strip("\n"),
        "chain": f"Linear → {str(recipe.chain).replace('|', ' → ')}",
        "rounding": recipe.chain.rounding,
        "reads_z": str(recipe.chain.reads_z),
        "cuda": norm_cuda_text(recipe),
        "binding_common": binding_text(recipe, "common"),
        "binding_norm": binding_text(recipe, "norm"),
        "tiles": _tiles(recipe),
        "dimensions": textwrap.indent(_dimensions(recipe), "    "),
        "model": parts.model_new.strip("\n"),
        "after": parts.after.strip("\n"),
    }
    if cores:
        values |= _own_values(recipe, cores, chains)
    for name, value in values.items():
        marker = f"@{name}@"
        # Markers that stand at a line's start have their own line; none is left empty.
        text = text.replace(marker, value)
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"


_CONDITIONAL = re.compile(
    r"^#if (?P<part>own|library|hopper|portable)\n(?P<text>.*?)^#endif\n", re.S | re.M
)
_MEANING: Mapping[Core, str] = {
    "hopper": "compute capability 9.0, wgmma and TMA",
    "portable": "compute capability 8.0 and newer, mma.sync",
}


def _own_values(recipe: Recipe, cores: Mapping[Core, Part], chains: Chains) -> dict[str, str]:
    m, k, n = recipe.m_k_n
    constants = tuple(c.value for c in recipe.constants if c.expression)
    parts = cores.values()
    forward = {core: part.forward_cuda for core, part in cores.items()}
    backward = {core: part.backward_cuda for core, part in cores.items()}
    values = {
        "kernels": kernel_files(*forward.values(), *backward.values()),
        "chains": chains.text,
        "cores": "".join(f"# {core!r}: {_MEANING[core]}.\n" for core in cores).rstrip("\n"),
        "forward_cuda": _texts(forward),
        "backward_cuda": _texts(backward),
        "binding_forward": binding_text(recipe, "forward"),
        "binding_backward": binding_text(recipe, "backward"),
        "forward": "".join(part.forward for part in parts),
        "backward": "".join(part.backward for part in parts),
        "hopper_product": product_function(),
        "tile_fields": "".join(f'    "{name}",\n' for name in TILE_FIELDS),
        "m_k_n": f"({m}, {k}, {n})",
        "channels": str(recipe.chain.channels_per_group(n)),
        "has": repr(recipe.has),
        "constants": repr(constants),
    }
    extras: Mapping[Core, str] = {"hopper": "limits", "portable": "portable_tiles"}
    return values | {extras[core]: part.extra for core, part in cores.items()}


def _texts(of: Mapping[Core, str]) -> str:
    return "".join(f'    {core!r}: r"""\n{text}""",\n' for core, text in of.items())


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


def _tile(tile: NormTile) -> str:
    values: Sequence[Any] = (
        tile.vector, tile.lanes, tile.vectors, tile.rows, tile.warps_x, tile.warps_y,
        int(tile.keep), tile.resident, int(tile.prefetch),
    )  # fmt: skip
    return repr(tuple(values))
