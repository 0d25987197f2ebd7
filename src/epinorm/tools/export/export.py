"""Write one self-contained ``ModelNew`` file from a problem file and the library's own kernels."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from epinorm.chain import Rounding
from epinorm.problem import Strategy
from epinorm.tools.export.dump import MODES, Tables
from epinorm.tools.export.header import covered, header
from epinorm.tools.export.recipe import read_recipes, refusal
from epinorm.tools.export.source import chain_of, forward_of, model_class, split_problem
from epinorm.tools.export.text import template, values_of
from epinorm.tools.kernelbench.problem import ProblemError, ProblemFile, load_problem

STRATEGIES: tuple[Strategy, ...] = ("auto", "single", "planes", "epilogue")
DEFAULT_GPUS = ("h200", "a100")

FORBIDDEN = re.compile(r"\b(try|except|pass)\b")


@dataclass(frozen=True)
class Exported:
    """The file's text, and what a user should know of it: each a sentence."""

    text: str
    chain: str
    remarks: tuple[str, ...]


def export(
    path: Path,
    strategy: Strategy = "auto",
    rounding: Rounding = "eager",
    gpus: Sequence[str] = DEFAULT_GPUS,
    modes: Sequence[str] = tuple(MODES),
) -> Exported:
    """The exported file for a problem file, for these GPUs (``dump.GPUS``) and modes.

    ``strategy``: as ``epinorm.linear_norm`` has it, where it serves a mode; ``rounding`` as well:
    "eager" is what an evaluator compares with. Raises ProblemError for what is wrong with the file
    and NoChainError, with the reason, where it holds nothing that can be exported.
    """
    problem = load_problem(path)
    model, inputs = _made(problem)
    found, left = read_recipes(path, forward_of(model_class(path)), model, inputs)
    _check_imports(path)
    tables, recipes = Tables(gpus, modes, strategy), []
    for recipe in found:
        values = tuple(value for _, value in recipe.facts)
        chain = dataclasses.replace(recipe.chain, rounding=rounding)
        tables.add(chain, *recipe.m_k_n, recipe.has, values, recipe.dims)
        recipes.append(dataclasses.replace(recipe, chain=chain))
    if not tables.tables:
        raise refusal(path, "; ".join(dict.fromkeys(tables.refused)))
    parts = {
        **split_problem(path, recipes),
        "header": header(path.name, recipes, tables),
        **values_of(tables),
    }
    text = re.sub(r"@(\w+)@", lambda match: parts[match[1]], template("model_new.py.in"))
    text = re.sub(r"\n{4,}", "\n\n\n", text).rstrip("\n") + "\n"
    compile(text, "model_new.py", "exec")
    remarks = (*covered(tables), *(f"left to PyTorch: {said}" for said in left))
    if words := forbidden_words(text):
        remarks += (
            f"the problem file's own text holds {', '.join(words)}, which static checkers of "
            "KernelBench reject",
        )
    return Exported(text, "; ".join(chain_of(recipe) for recipe in recipes), remarks)


def _made(problem: ProblemFile) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model and its inputs without values; with them where its code asks for a value."""
    try:
        with torch.device("meta"):
            return problem.make(torch.float32, "meta")
    except ProblemError:
        return problem.make(torch.float32, "cpu")


def forbidden_words(text: str) -> list[str]:
    """The words in a text that static checkers of KernelBench reject, wherever they stand."""
    return sorted(set(FORBIDDEN.findall(text)))


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
