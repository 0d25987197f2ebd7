"""Problem files: Python files that define ``Model``, ``get_inputs()`` and ``get_init_inputs()``.

The format of KernelBench (Ouyang et al., 2025, arXiv 2502.10517). A file runs as a module of its
own; whatever is wrong with it becomes one sentence, a ``ProblemError``.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

SIZE_WORDS = frozenset(
    "batch batches size sizes features feature hidden dim dims channels channel groups group rows "
    "columns cols width in out input output inputs outputs embed d m k n".split()
)
"""``--scale`` divides a module-level integer if a word of its name (split at ``_``) is here, and
none is ``kernel``: a window of pooling is no size of a tensor."""


class ProblemError(ValueError):
    """Something is wrong with a problem file; the message is one sentence that says what."""


@dataclass(frozen=True)
class ProblemFile:
    """A loaded problem file. ``scaled`` maps each size that ``scale`` divided to its new value."""

    path: Path
    model_type: type[nn.Module]
    get_inputs: Callable[[], Any]
    get_init_inputs: Callable[[], Any]
    scale: int = 1
    scaled: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem

    def make(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> tuple[nn.Module, tuple[Any, ...]]:
        """Make the model and its inputs, floating tensors in ``dtype``, all on ``device``.

        Raises ProblemError if the file's functions raise or return the wrong thing, or if the
        model does not run on the inputs.
        """
        speaking_for = partial(_speaking_for, self.path)
        torch.manual_seed(seed)
        with speaking_for("get_init_inputs()"):
            init = self.get_init_inputs()
        if not isinstance(init, (list, tuple)):
            returned = f"a list of arguments for Model, got {_type(init)}"
            raise self._wrong(f"get_init_inputs() must return {returned}")
        with speaking_for(f"Model({', '.join(map(_short, init))})"):
            model = self.model_type(*init)
        with speaking_for("get_inputs()"):
            inputs = self.get_inputs()
        self._check_inputs(inputs)
        model = model.to(device=device, dtype=dtype)
        ready = placed(inputs, dtype, device)
        with speaking_for("Model.forward on the inputs of get_inputs()"), torch.no_grad():
            output = model(*ready)
        if not isinstance(output, (Tensor, list, tuple, dict)):
            raise self._wrong(f"Model.forward must return a tensor, got {_type(output)}")
        return model, ready

    def _check_inputs(self, inputs: Any) -> None:
        wanted, got = "a list of tensors", _type(inputs)
        if isinstance(inputs, (list, tuple)):
            kinds = [v.dtype for v in inputs if isinstance(v, Tensor)]
            if any(dtype.is_floating_point for dtype in kinds):
                return
            got = f"a list of {len(inputs)} without any tensor"
            if kinds:
                wanted = "at least one floating-point tensor"
                got = ", ".join(sorted(set(map(str, kinds))))
        raise self._wrong(f"get_inputs() must return {wanted}, got {got}")

    def _wrong(self, what: str) -> ProblemError:
        return ProblemError(f"{self.path.name}: {what}")


@contextlib.contextmanager
def _speaking_for(path: Path, what: str) -> Iterator[None]:
    """Turn what the user's code raises into one sentence; send what it prints to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{path.name}: {what} raised {told(path, error)}") from error


def load_problem(path: str | Path, scale: int = 1) -> ProblemFile:
    """Load a problem file; raises ProblemError with one sentence for whatever is wrong with it.

    ``scale`` > 1 divides every module-level size: a line ``name = integer`` of which a word of the
    name says size (batch, size, features, hidden, dim, channels, groups, m, k, n, ...). It is done
    before the file runs, so values computed from the sizes follow. Each must divide exactly.
    """
    path = Path(path)
    tree = _parse(path)
    sizes = _module_sizes(tree)
    scaled = _scale_sizes(path, sizes, scale)
    module = _execute(path, tree)
    model_type = getattr(module, "Model", None)
    if model_type is None:
        hint = f"bench and explain take {path.name}:FUNCTION too, which returns a model and inputs"
        if hasattr(module, "ModelNew"):
            hint = f"its ModelNew is judged by `epinorm judge PROBLEM {path.name}`"
        raise ProblemError(
            f"{path.name} defines no class Model; a problem file defines Model, get_inputs() and "
            f"get_init_inputs(); {hint}"
        )
    if not (isinstance(model_type, type) and issubclass(model_type, nn.Module)):
        got = "another class" if isinstance(model_type, type) else _type(model_type)
        raise ProblemError(f"{path.name}: Model must be a subclass of torch.nn.Module, got {got}")
    functions: list[Any] = []
    for name in ("get_inputs", "get_init_inputs"):
        functions.append(getattr(module, name, None))
        if not callable(functions[-1]):
            what = "defines no" if functions[-1] is None else f"has a {_type(functions[-1])} as"
            raise ProblemError(f"{path.name} {what} function {name}()")
    get_inputs, get_init_inputs = functions
    return ProblemFile(path, model_type, get_inputs, get_init_inputs, scale, scaled)


def load_module(path: Path) -> ModuleType:
    """A file of Python as a module, which may import its neighbours; raises ProblemError."""
    return _execute(path, _parse(path))


def _parse(path: Path) -> ast.Module:
    if path.is_dir():
        raise ProblemError(f"{path} is a folder; expected a Python file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        whole = "; a whole model is for bench and explain" if ":" in path.name else ""
        raise ProblemError(f"{path} does not exist; expected a Python file{whole}") from None
    except UnicodeDecodeError:
        raise ProblemError(f"{path} is not a text file in UTF-8; expected a Python file") from None
    except OSError as error:
        raise ProblemError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ProblemError(f"{path.name}{line}: not valid Python ({error.msg})") from None
    except ValueError as error:
        raise ProblemError(f"{path.name}: not valid Python ({error})") from None


def _is_size(name: str) -> bool:
    words = re.split(r"_|\d+", name.lower())
    return "kernel" not in words and any(word in SIZE_WORDS for word in words)


def _module_sizes(tree: ast.Module) -> dict[str, ast.Constant]:
    """The integer literals of module-level lines ``name = integer`` whose name says size.

    1 is none: a batch of one stays one, and ``dim = 1`` says which."""
    sizes = {}
    for statement in tree.body:
        name, value = target_of(statement), getattr(statement, "value", None)
        if name is None or isinstance(statement, ast.AugAssign) or not _is_size(name):
            continue
        if isinstance(value, ast.Constant) and type(value.value) is int and value.value > 1:
            sizes[name] = value
    return sizes


def target_of(statement: ast.stmt) -> str | None:
    """The one name that a statement assigns to."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _scale_sizes(path: Path, sizes: dict[str, ast.Constant], scale: int) -> dict[str, int]:
    """Divide the literals in place; raises ProblemError where that is not exact."""
    if scale < 1:
        raise ProblemError(f"--scale must be a whole number >= 1, got {scale}")
    if scale == 1:
        return {}
    if not sizes:
        raise ProblemError(
            f"--scale {scale}: {path.name} has no size to divide; expected module-level lines such "
            "as batch_size = 1024"
        )
    values = {name: int(constant.value) for name, constant in sizes.items()}  # type: ignore[arg-type]
    for name, value in values.items():
        if value % scale:
            common = math.gcd(*values.values())
            usable = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
            raise ProblemError(
                f"--scale {scale} does not divide {name} = {value} of {path.name}; every size here "
                f"can be divided by {usable}"
            )
    for constant in sizes.values():
        constant.value = int(constant.value) // scale  # type: ignore[arg-type]
    return {name: value // scale for name, value in values.items()}


def _execute(path: Path, tree: ast.Module) -> ModuleType:
    # A name of its own, so that two problem files never see each other; in sys.modules, because
    # dataclasses, pickle and torch.compile look a class's module up there.
    stem = re.sub(r"[^0-9A-Za-z_]", "_", path.stem)
    name = f"epinorm_problem_{stem}_{zlib.crc32(bytes(path.resolve())):08x}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with _speaking_for(path, "importing it"):
            exec(compile(tree, str(path), "exec"), module.__dict__)
    except ProblemError:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(folder)
    return module


def placed(
    values: Iterable[Any], dtype: torch.dtype, device: torch.device | str
) -> tuple[Any, ...]:
    """The values, each tensor among them on the device, floating ones in ``dtype``."""
    return tuple(
        v.to(device=device, dtype=dtype if v.is_floating_point() else None)
        if isinstance(v, Tensor)
        else v
        for v in values
    )


def told(path: Path, error: BaseException, most: int = 300) -> str:
    """Which error it is, at which line of the user's file, and what it says."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f" at line {frames[-1].lineno}" if frames else ""
    detail = " ".join(str(error).split())[:most]
    return f"{type(error).__name__}{line}" + (f": {detail}" if detail else "")


def _type(value: Any) -> str:
    return "nothing (None)" if value is None else type(value).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
