"""What is to be measured: a model by its name, file or import path, in a setting."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from epinorm.tools.kernelbench.problem import ProblemError, load_module, load_problem, placed
from epinorm.tools.models.named import NAMED, Made


@dataclass(frozen=True)
class Setting:
    """dtype of parameters and inputs, precision of fp32 products, and whether calls are under
    autocast to bfloat16."""

    name: str
    dtype: torch.dtype
    precision: Literal["highest", "high", "native"]
    autocast: bool = False

    def call(self, model: Callable[..., Any], *inputs: Any) -> Any:
        """The model's result in this setting."""
        if not self.autocast:
            return model(*inputs)
        device = next(value.device for value in inputs if isinstance(value, Tensor))
        with torch.autocast(device.type, torch.bfloat16):
            return model(*inputs)

    @property
    def products(self) -> torch.dtype:
        """The dtype of the matrix products' operands."""
        return torch.bfloat16 if self.autocast else self.dtype


SETTINGS: Mapping[str, Setting] = {
    "highest": Setting("highest", torch.float32, "highest"),
    "high": Setting("high", torch.float32, "high"),
    "bf16": Setting("bf16", torch.bfloat16, "native"),
    "bf16-autocast": Setting("bf16-autocast", torch.float32, "highest", True),
}


@dataclass(frozen=True)
class Subject:
    """A model that can be made anew."""

    name: str
    factory: Callable[[], Made]

    def make(self, setting: Setting, device: torch.device, seed: int = 0) -> Made:
        """The model and its inputs in a setting, the same at each call."""
        torch.manual_seed(seed)
        with device:  # a CPU takes long for millions of random numbers
            model, inputs = self.factory()
        model = model.to(device=device, dtype=setting.dtype)
        return model, placed(inputs, setting.dtype, device)


def load_subject(text: str, small: bool = False) -> Subject:
    """What ``text`` names: one of NAMED, ``FILE.py:Model`` of a problem file, or a factory as
    ``FILE.py:factory`` or ``package.module:factory``.

    A factory takes nothing and returns a model and the tuple of its inputs. Raises ProblemError for
    a name that is none of these and for what is wrong with a file.
    """
    if text in NAMED:
        return Subject(f"{text}_small" if small else text, lambda: NAMED[text](small))
    module, colon, name = text.rpartition(":")
    if not colon:
        raise ProblemError(
            f"{text!r} is no model: expected one of {', '.join(NAMED)}, FILE.py:Model, "
            "FILE.py:factory or package.module:factory"
        )
    if module.endswith(".py") and name == "Model":
        problem = load_problem(module)
        return Subject(Path(module).stem, lambda: problem.make(torch.float32, "cpu"))
    factory = getattr(_imported(module), name, None)
    if not callable(factory):
        raise ProblemError(f"{module} defines no function {name}() that returns (model, inputs)")
    return Subject(name, lambda: _made(text, factory))


def _imported(module: str) -> ModuleType:
    """A module by its import path, or a file of Python."""
    if module.endswith(".py"):
        return load_module(Path(module))
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}"
        raise ProblemError(f"{module!r} cannot be imported: {said}") from error


def _made(text: str, factory: Callable[[], Any]) -> Made:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for what the command has to say
            made = factory()
    except (Exception, SystemExit) as error:
        raise ProblemError(f"{text}() raised {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        model, inputs = made
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if any(isinstance(value, Tensor) for value in inputs):
            return model, tuple(inputs)
    got = type(made).__name__
    if isinstance(made, tuple):
        got = f"({', '.join(type(value).__name__ for value in made)})"
    raise ProblemError(f"{text}() must return (model, inputs), a tensor among them, got {got}")


def _dropouts(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where a model's modules keep what they drop: modules for it, and numbers named for it, as
    nn.MultiheadAttention's ``dropout`` and the ``attention_dropout`` of transformers."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            yield module, "p"
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                yield module, name


def most_dropout(model: nn.Module) -> float:
    """The largest share that a module of the model drops in training."""
    return max((getattr(module, name) for module, name in _dropouts(model)), default=0.0)


@contextlib.contextmanager
def dropout_off(*models: nn.Module) -> Iterator[None]:
    """Within, modules drop nothing, in training too: eager's mask is not ours."""
    places = [place for model in models for place in _dropouts(model)]
    were = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for (module, name), share in zip(places, were, strict=True):
            setattr(module, name, share)
