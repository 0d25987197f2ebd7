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
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # the check of the file says it
    found, nodes = [], list(ast.walk(tree))
    modules = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    modules |= {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    imported = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    if others := sorted(imported - {"torch"}):
        found.append(f"imports {', '.join(others)}")
    functions = [n.func for n in nodes if isinstance(n, ast.Call)]
    called = {getattr(f, "attr", getattr(f, "id", "")) for f in functions}
    if calls := sorted({_LIBRARY[name] for name in called if name in _LIBRARY}):
        found.append(f"calls {', '.join(calls)}")
    kinds = (("try", ast.Try), ("pass", ast.Pass))
    if words := [word for word, kind in kinds if any(isinstance(n, kind) for n in nodes)]:
        found.append(f"holds {' and '.join(words)}, which static checkers of that community reject")
    return tuple(found)
