"""What the text of a solution tells: remarks for the reader, which decide nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

_LIBRARY = {
    "linear": "a library product",
    "matmul": "a library product",
    "mm": "a library product",
    "addmm": "a library product",
    "bmm": "a library product",
    "einsum": "a library product",
    "group_norm": "PyTorch's own norm",
    "layer_norm": "PyTorch's own norm",
    "rms_norm": "PyTorch's own norm",
    "compile": "torch.compile",
}


def remarks(path: Path) -> tuple[str, ...]:
    """Library calls, third-party imports, and what static checkers of KernelBench reject."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()  # the check of the file says it
    found = []
    imported = sorted(_imports(tree) - {"torch"} - set(sys.stdlib_module_names))
    if imported:
        found.append(f"imports {', '.join(imported)}")
    calls = sorted({_LIBRARY[name] for name in _called(tree) if name in _LIBRARY})
    if calls:
        found.append(f"calls {', '.join(calls)}")
    kinds = {
        "try": ast.Try,
        "pass": ast.Pass,
    }
    words = [word for word, kind in kinds.items() if _has(tree, kind)]
    if words:
        found.append(f"holds {' and '.join(words)}, which static checkers of that community reject")
    return tuple(found)


def _has(tree: ast.Module, kind: type[ast.AST]) -> bool:
    return any(isinstance(node, kind) for node in ast.walk(tree))


def _imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


def _called(tree: ast.Module) -> set[str]:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        f.attr if isinstance(f, ast.Attribute) else f.id
        for f in calls
        if isinstance(f, (ast.Attribute, ast.Name))
    }
