"""The solution's process: loads one solution file and does with it what the judge asks.

Started as ``python -m epinorm.tools.judge.worker REQUESTS ANSWERS`` with two open file
descriptors. A request and its answer are one line of JSON each; tensors travel in files written by
``torch.save``. Values are compared in the judge's process, never here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.judge.observe import Step, Untouched, forward_step, observe, sample
from epinorm.tools.verify import draw_inputs, poisoned_memory, run_model

__all__ = ["main"]

_synchronize = torch.cuda.synchronize
_clock = time.perf_counter


class Refused(Exception):
    """The solution does not do what its format asks; the message says what."""


class Worker:
    """One loaded solution; each public method answers one kind of request."""

    def __init__(self) -> None:
        self.path = Path()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.factory: Callable[..., Any] | None = None
        self.model: nn.Module = nn.Module()
        self.inputs: tuple[Any, ...] = ()
        self.untouched: Untouched | None = None

    def load(self, path: str, device: str, dtype: str, precision: str) -> dict[str, Any]:
        self.path, self.device = Path(path), torch.device(device)
        self.dtype = getattr(torch, dtype)
        if precision != "native":
            torch.set_float32_matmul_precision(precision)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        self.untouched = Untouched()
        start = _clock()
        module = _import(self.path)
        self.factory = getattr(module, "ModelNew", None)
        if self.factory is None:
            raise Refused("defines no class ModelNew")
        if not (isinstance(self.factory, type) and issubclass(self.factory, nn.Module)):
            raise Refused("its ModelNew is not a subclass of torch.nn.Module")
        return {"seconds": _clock() - start}

    def construct(self, init: str, seed: int, state: str) -> dict[str, Any]:
        assert self.factory is not None
        arguments = torch.load(init, weights_only=False)
        torch.manual_seed(seed)
        start = _clock()
        model = self.factory(*arguments)
        seconds = _clock() - start
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        torch.save({k: v.detach().cpu() for k, v in model.state_dict().items()}, state)
        self.model = model.to(device=self.device, dtype=self.dtype)
        return {"trained": trained, "seconds": seconds}

    def set_state(self, state: str, behind: bool) -> dict[str, Any]:
        """Load a state_dict, strictly; ``behind``: through .data, which no counter notices."""
        values = torch.load(state, weights_only=True)
        if not behind:
            self.model.load_state_dict(values, strict=True)
            return {}
        for name, tensor in self.model.state_dict().items():
            tensor.data.copy_(values[name])
        return {}

    def take_inputs(self, inputs: str, into_old: bool) -> dict[str, Any]:
        """Take inputs from a file; ``into_old``: into the memory of those that are there."""
        fresh = torch.load(inputs, weights_only=False)
        fresh = tuple(v.to(self.device) if isinstance(v, Tensor) else v for v in fresh)
        if not into_old:
            self.inputs = fresh
            return {}
        for old, new in zip(self.inputs, fresh, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        return {}

    def run(self, result: str, training: bool, dy_seed: int, kept: str | None) -> dict[str, Any]:
        """One run on memory that was poisoned before; outputs and gradients go to ``result``."""
        keep = [] if kept is None else torch.load(kept, weights_only=True)
        keep = [None if k is None else k.to(self.device) for k in keep]
        with poisoned_memory([v for v in self.inputs if isinstance(v, Tensor)]):
            outcome = run_model(self.model, self.inputs, training, dy_seed, keep)
        torch.save(
            {
                "outputs": [_plain(t) for t in outcome.outputs],
                "gradients": {
                    k: None if v is None else _plain(v) for k, v in outcome.gradients.items()
                },
            },
            result,
        )
        return {}

    def observe(self, result: str, other_stream: bool) -> dict[str, Any]:
        outputs, seen = observe(self.model, self.inputs, other_stream)
        torch.save({"outputs": [_plain(t) for t in outputs], "gradients": {}}, result)
        return {"seen": seen.as_json()}

    def keeps(self, result: str) -> dict[str, Any]:
        """Is the first call's output still what it was after a second call on other inputs?"""
        with torch.no_grad():
            first = self.model(*self.inputs)
            before = first.detach().clone() if isinstance(first, Tensor) else None
            other = draw_inputs(self.inputs, "randn", 77)
            second = self.model(*other)
        del second
        kept = before is None or torch.equal(first.nan_to_num(), before.nan_to_num())
        return {"kept": kept}

    def time(self, seed: int, runs: int, training: bool, result: str) -> dict[str, Any]:
        step = self._training_step() if training else forward_step(self.model)
        samples, outputs = sample(step, self.inputs, self.device, seed, runs)
        torch.save({"outputs": [_plain(t) for t in outputs], "gradients": {}}, result)
        return {"times": samples.times, "device_wide": samples.device_wide}

    def spin(self, calls: int, training: bool) -> dict[str, Any]:
        """Calls without pause, for the judge's own clock."""
        step = self._training_step() if training else forward_step(self.model)
        for _ in range(calls):
            step(self.inputs)
        if self.device.type == "cuda":
            _synchronize(self.device)
        return {}

    def changes(self) -> dict[str, Any]:
        assert self.untouched is not None
        return {
            "functions": self.untouched.functions(),
            "settings": self.untouched.settings(),
        }

    def _training_step(self) -> Step:
        return training_step(self.model)


def training_step(model: nn.Module) -> Step:
    """Forward and backward from a fixed gradient of ones, as ``sample`` takes it."""

    def step(inputs: Any) -> list[Tensor]:
        leaves = [
            v.detach().requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in inputs
        ]
        for parameter in model.parameters():
            parameter.grad = None
        outputs = [t for t in _leaves(model(*leaves)) if t.is_floating_point()]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        return [t.detach() for t in outputs]

    return step


def _leaves(result: Any) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _plain(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        raise Refused(f"returned a {type(tensor).__name__}, no plain Tensor")
    return tensor.detach().cpu()


def _import(path: Path) -> Any:
    # A module with a file: load_inline and Triton look a solution's source up there.
    name = "epinorm_judged_solution"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _sentence(path: Path, error: BaseException) -> str:
    if isinstance(error, Refused):
        return f"{path.name} {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = f" at line {frames[-1].lineno}" if frames else ""
    detail = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}{line}: {detail}" if detail else f"{type(error).__name__}{line}"


def main(requests: int, answers: int) -> None:
    """Answer requests until there are no more."""
    worker = Worker()
    with os.fdopen(requests, "r") as reader, os.fdopen(answers, "w") as writer:
        for line in reader:
            request: Mapping[str, Any] = json.loads(line)
            arguments = {k: v for k, v in request.items() if k != "do"}
            try:
                answer = getattr(worker, request["do"])(**arguments)
            except (Exception, SystemExit) as error:
                # Whatever a solution raises is an answer about the solution.
                answer = {"error": _sentence(worker.path, error)}
                traceback.print_exc()
            writer.write(json.dumps(answer) + "\n")
            writer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
