"""From the text of a problem file to that of its ``ModelNew``: everything but ``forward`` stays."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from epinorm.tools.export.recipe import Recipe
from epinorm.tools.kernelbench.problem import ProblemError

OWN_IMPORTS = ("import functools", "import hashlib", "import inspect", "import torch")
"""Lines that the exported file has anyway."""


def model_class(path: Path) -> ast.ClassDef:
    """The class Model of a problem file; raises ProblemError where it is not a plain class
    statement of the file with a method forward whose statements have lines of their own."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = [s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == "Model"]
    if len(found) != 1:
        raise ProblemError(f"{path.name} must define class Model once, at its top level")
    if not any(isinstance(s, ast.FunctionDef) and s.name == "forward" for s in found[0].body):
        raise ProblemError(f"{path.name}: class Model must define forward itself")
    lines = text.encode().splitlines()
    for statement in forward_of(found[0]).body:
        if before := lines[statement.lineno - 1][: statement.col_offset].strip():
            raise ProblemError(
                f"{path.name}, line {statement.lineno}: a statement of forward stands behind "
                f"{before.decode()!r}; give it a line of its own"
            )
    return found[0]


def forward_of(model: ast.ClassDef) -> ast.FunctionDef:
    """The method forward of a class that defines it."""
    return next(s for s in model.body if isinstance(s, ast.FunctionDef) and s.name == "forward")


def split_problem(path: Path, recipes: Sequence[Recipe]) -> dict[str, str]:
    """The file's text before its class Model and after, and that class as ModelNew, by their names
    in the template; imports from __future__ apart, which must come first."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    model = model_class(path)
    skip, future = set[int](), ""
    for index, statement in enumerate(tree.body):
        from_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if from_future or (index == 0 and _is_text(statement)):
            skip |= set(_span(statement))
        if from_future:
            future = (ast.get_source_segment(text, statement) or "") + "\n\n"
    before = enumerate(lines[: _span(model)[0] - 1], 1)
    kept = [line for n, line in before if n not in skip and line.strip() not in OWN_IMPORTS]
    return {
        "future": future,
        "before": "".join(kept).strip(),
        "model": _model_new(lines, model, recipes).strip("\n"),
        "after": "".join(lines[model.end_lineno :]).strip(),
    }


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _span(node: ast.stmt) -> range:
    """Line numbers of a statement, decorators and the comments right above it excluded."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    return range(first, (node.end_lineno or node.lineno) + 1)


def _model_new(lines: list[str], model: ast.ClassDef, recipes: Sequence[Recipe]) -> str:
    forward = forward_of(model)
    dropped = set(_span(model.body[0])) if _is_text(model.body[0]) else set[int]()
    changed = _changed(lines, forward, recipes)
    body_start = min(_span(model.body[0]))
    text = ["".join(lines[model.lineno - 1 : body_start - 1])]
    indent = " " * model.body[0].col_offset
    text.append(textwrap.indent(f'"""{_summary(recipes)}"""', indent) + "\n\n")
    kept = range(body_start, (model.end_lineno or body_start) + 1)
    body = "".join(changed.get(n, lines[n - 1]) for n in kept if n not in dropped)
    text.append(body.strip("\n") + "\n")
    renamed = re.sub(r"\bsuper\(Model, self\)", "super()", "".join(text))
    return re.sub(r"\bModel\b", "ModelNew", renamed)


def _summary(recipes: Sequence[Recipe]) -> str:
    chains = "; ".join(dict.fromkeys(chain_of(recipe) for recipe in recipes))
    return textwrap.fill(f"{chains}: fused, with the parameters of its layers.", 92)


def chain_of(recipe: Recipe) -> str:
    """The chain for people: Linear → ... ."""
    text = str(dataclasses.replace(recipe.chain, rounding="once"))
    return " → ".join(["Linear", *(part for part in text.split("|") if part != "identity")])


def _changed(
    lines: list[str], forward: ast.FunctionDef, recipes: Sequence[Recipe]
) -> dict[int, str]:
    """Lines of the file, by number, that each chain's first and other statements become."""
    names = {n.id for n in ast.walk(forward) if isinstance(n, ast.Name)}
    fused = next(name for name in ("fused", "fused_", "fused__") if name not in names)
    changed: dict[int, str] = {}
    for number, recipe in enumerate(recipes):
        of = forward.body[recipe.span.first : recipe.span.last + 1]
        span = range(of[0].lineno, (of[-1].end_lineno or of[-1].lineno) + 1)
        indent = " " * of[0].col_offset
        facts = _tuple(expression for expression, _ in recipe.facts)
        call = [
            f"# {chain_of(recipe)}",
            f"{fused} = _fused(",
            f"    {number}, {recipe.x}, {recipe.weight}, {recipe.bias},",
            f"    {recipe.norm_weight}, {recipe.norm_bias},",
            f"    operands={_tuple(recipe.operands)}, facts={facts},",
            ")",
        ]
        own = [lines[n - 1] for n in span]
        if recipe.span.target is None:
            call += [f"if {fused} is not None:", f"    return {fused}"]
            rest = "".join(own)
        else:
            call.append(f"if {fused} is None:")
            rest = "".join(f"    {line}" if line.strip() else line for line in own)
            rest += f"{indent}else:\n{indent}    {recipe.span.target} = {fused}\n"
        changed |= dict.fromkeys(span, "")
        changed[span[0]] = "".join(f"{indent}{line}\n" for line in call) + rest
    return changed


def _tuple(expressions: Iterable[str]) -> str:
    texts = list(expressions)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"
