"""KernelBench's problems as the files that ``epinorm export`` writes of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn

from epinorm.tools.export.dump import GPUS
from epinorm.tools.export.export import export
from epinorm.tools.judge.facts import JudgeOptions
from epinorm.tools.judge.judge import judge
from epinorm.tools.kernelbench.problem import ProblemError, ProblemFile, load_module

MODE = "float32 highest"
OWN_LAYERS = "ModelNew runs PyTorch's own layers"
"""How the warning of an exported file begins that has no kernels for what it is given."""


def write_exported(path: Path, file: Path, device: torch.device) -> None:
    """Export a problem for the device's GPU; on a CPU the file will run the problem's own layers.

    Raises ProblemError and NoChainError as ``export`` does.
    """
    made = export(path, gpus=[_gpu_name(device)], modes=[MODE])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(made.text, encoding="utf-8")


def exported_model(problem: ProblemFile, model: nn.Module, file: Path) -> nn.Module:
    """The file's ModelNew with the model's parameters, on its device, in its mode."""
    made: nn.Module = load_module(file).ModelNew(*problem.get_init_inputs())
    made.load_state_dict(model.state_dict())
    return made.to(next(model.parameters()).device).train(model.training)


def left_to_pytorch(warned: list[warnings.WarningMessage], device: torch.device) -> str | None:
    """What is wrong on a GPU if one of these says that the file's kernels did not run."""
    said = [str(w.message) for w in warned if str(w.message).startswith(OWN_LAYERS)]
    return said[0] if said and device.type == "cuda" else None


def judged(path: Path, file: Path, device: torch.device, scale: int) -> str | None:
    """What the judge holds against an exported file, its gradients too; None: it is clean."""
    verdict = judge(path, file, JudgeOptions(device=str(device), timing=False, scale=scale))
    if verdict.clean:
        return None
    failed = [f"{check.name}: {check.reason}" for check in verdict.failures]
    return "; ".join(failed) or "no check was made"


def _gpu_name(device: torch.device) -> str:
    if device.type != "cuda":
        return next(iter(GPUS))
    capability = torch.cuda.get_device_capability(device)
    names = [name for name, gpu in GPUS.items() if gpu.capability == capability]
    if not names:
        raise ProblemError(f"nothing is exported for compute capability {capability}")
    return names[0]
