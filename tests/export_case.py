"""Exported files, loaded."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from epinorm.backends.cuda.runtime.device import gpu_of
from epinorm.tools.export.dump import GPUS

__all__ = ["gpu_here", "load"]


def gpu_here() -> str:
    """The name that exports have for the GPU that is there."""
    capability = gpu_of().capability
    return next(name for name, gpu in GPUS.items() if gpu.capability == capability)


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module
