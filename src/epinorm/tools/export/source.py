"""From the text of a problem file to that of its ``ModelNew``: everything but ``forward`` stays."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from epinorm.tools.export.recipe import Recipe
from epinorm.tools.kernelbench.problem import ProblemError

__all__ = ["Parts", "split_problem"]

OWN_IMPORTS = ("import functools", "import hashlib", "import inspect", "import torch")
"""Lines that the exported file has anyway."""


@dataclass(frozen=True)
class Parts:
    """The problem file in parts, each a text of whole lines."""

    future: str
    before: str
    model_new: str
    after: str


def split_problem(path: Path, recipe: Recipe) -> Parts:
    """The file's text around its class Model, and that class as ModelNew.

    Raises ProblemError where Model is not a plain class statement of the file.
    """
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    found = [s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == "Model"]
    if len(found) != 1:
        raise ProblemError(f"{path.name} must define class Model once, at its top level")
    model = found[0]
    first = min([model.lineno, *(d.lineno for d in model.decorator_list)])
    before, skip = lines[: first - 1], set[int]()
    future = ""
    for index, statement in enumerate(tree.body):
        docstring = index == 0 and _is_text(statement)
        from_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if docstring or from_future:
            skip |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        if from_future:
            future = ast.get_source_segment(text, statement) or ""
    assert model.end_lineno is not None
    return Parts(
        future=f"{future}\n\n" if future else "",
        before="".join(
            line
            for n, line in enumerate(before, 1)
            if n not in skip and line.strip() not in OWN_IMPORTS
        ).strip()
        + "\n",
        model_new=_model_new(lines, model, recipe),
        after="".join(lines[model.end_lineno :]).strip() + "\n",
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _span(node: ast.stmt) -> range:
    """Line numbers of a statement, decorators and the comments right above it excluded."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)


def _model_new(lines: list[str], model: ast.ClassDef, recipe: Recipe) -> str:
    methods = {s.name: s for s in model.body if isinstance(s, ast.FunctionDef)}
    forward = methods["forward"]
    dropped = set(_span(forward))
    if _is_text(model.body[0]):
        dropped |= set(_span(model.body[0]))
    start = model.lineno
    body_start = min(_span(model.body[0]))
    header = "".join(lines[start - 1 : body_start - 1])
    kept = [line for n, line in enumerate(lines, 1) if body_start <= n <= (model.end_lineno or n)]
    body = "".join(
        line for n, line in zip(range(body_start, body_start + len(kept)), kept, strict=True)
        if n not in dropped
    )  # fmt: skip
    indent = " " * model.body[0].col_offset
    docstring = textwrap.indent(f'"""{_summary(recipe)}"""', indent) + "\n\n"
    own = "".join(line for n, line in enumerate(lines, 1) if n in _span(forward))
    own = re.sub(r"\bdef forward\(", "def _by_layers(", own, count=1)
    parts = [header, docstring, body.strip("\n") + "\n\n", own, "\n"]
    parts.append(textwrap.indent(_forward(forward, recipe), indent))
    text = re.sub(r"\bsuper\(Model, self\)", "super()", "".join(parts))
    return re.sub(r"\bModel\b", "ModelNew", text)


def _summary(recipe: Recipe) -> str:
    chain = str(recipe.chain).replace("|", " → ")
    return textwrap.fill(f"Linear → {chain}, fused, with the parameters of its layers.", 92)


def _forward(forward: ast.FunctionDef, recipe: Recipe) -> str:
    returns = f" -> {ast.unparse(forward.returns)}" if forward.returns else ""
    arguments = forward.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    names += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    lines = [
        f"def forward({ast.unparse(arguments)}){returns}:",
        "    y = _fused(",
        f"        0, {recipe.x}, {recipe.weight}, {recipe.bias},",
        f"        {recipe.norm_weight}, {recipe.norm_bias},",
        f"        operands={_tuple(recipe.operands)},",
        f"        facts={_tuple(recipe.fact_expressions)},",
        "    )",
        f"    return self._by_layers({', '.join(names)}) if y is None else y",
    ]
    return "\n".join(lines) + "\n"


def _tuple(expressions: Iterable[str]) -> str:
    texts = list(expressions)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
