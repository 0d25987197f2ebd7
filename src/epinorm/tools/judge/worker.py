"""The solution's process: loads one solution file and does with it what the judge asks.

Started as ``python -m ...worker CHANNEL INBOX OUTBOX`` with three open file descriptors: a
socket, and a memory file for each direction. A request and its answer are one line of JSON each.
Nothing that is said here is trusted: values are compared in the judge's process, and times are
checked against its clock.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.accuracy import Outcome
from epinorm.tools.judge import wire
from epinorm.tools.judge.loop import Loop, Recipe
from epinorm.tools.judge.observe import Untouched, observe
from epinorm.tools.kernelbench.problem import told
from epinorm.tools.verify import draw_inputs, poisoned_memory, run_model, stop_dropout

_clock = time.perf_counter


class Refused(Exception):
    """The solution does not do what its format asks; the message says what."""


class Worker:
    """One loaded solution; each public method answers one kind of request."""

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.most = 0
        self.path = Path()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.factory: Callable[..., Any] | None = None
        self.model: nn.Module = nn.Module()
        self.inputs: tuple[Any, ...] = ()
        self.untouched: Untouched | None = None
        self.loop: Loop | None = None

    def load(self, path: str, device: str, dtype: str, precision: str, most: int) -> dict[str, Any]:
        self.path, self.device, self.most = Path(path), torch.device(device), most
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

    def construct(self, seed: int, dropout_off: bool) -> dict[str, Any]:
        assert self.factory is not None
        arguments = wire.load(self._inbox)
        torch.manual_seed(seed)
        model = self.factory(*arguments)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        answer = self._sent(model.state_dict())
        if dropout_off:
            stop_dropout(model)
        self.model = model.to(device=self.device, dtype=self.dtype)
        return {**answer, "trained": trained}

    def set_state(self, behind: bool, tensors: list[Any]) -> dict[str, Any]:
        """Load a state_dict, strictly; ``behind``: through .data, which no counter notices."""
        values = wire.receive(self._inbox, tensors, sys.maxsize)
        if not behind:
            self.model.load_state_dict(values, strict=True)
            return {}
        for name, tensor in self.model.state_dict().items():
            tensor.data.copy_(values[name])
        return {}

    def take_inputs(self, into_old: bool) -> dict[str, Any]:
        """Take inputs; ``into_old``: into the memory of those that are there."""
        fresh = wire.load(self._inbox)
        fresh = tuple(v.to(self.device) if isinstance(v, Tensor) else v for v in fresh)
        if not into_old:
            self.inputs = fresh
            return {}
        for old, new in zip(self.inputs, fresh, strict=True):
            if isinstance(old, Tensor):
                old.copy_(new)
        return {}

    def run(self, training: bool, dy_seed: int, masked: bool) -> dict[str, Any]:
        """One run on memory that was poisoned before: outputs and gradients."""
        keep = (
            [None if k is None else k.to(self.device) for k in wire.load(self._inbox)]
            if masked
            else []
        )
        with poisoned_memory([v for v in self.inputs if isinstance(v, Tensor)]):
            outcome = run_model(self.model, self.inputs, training, dy_seed, keep)
        return self._outcome(outcome)

    def observe(self, other_stream: bool) -> dict[str, Any]:
        outputs, seen = observe(self.model, self.inputs, other_stream)
        return {**self._outcome(Outcome(tuple(outputs), {})), "seen": seen}

    def keeps(self) -> dict[str, Any]:
        """Is the first call's output still what it was after a second call on other inputs?"""
        with torch.no_grad():
            first = self.model(*self.inputs)
            before = first.detach().clone() if isinstance(first, Tensor) else None
            other = draw_inputs(self.inputs, "randn", 77)
            second = self.model(*other)
        del second
        kept = before is None or torch.equal(first.nan_to_num(), before.nan_to_num())
        return {"kept": kept}

    def prepare(self, **recipe: Any) -> dict[str, Any]:
        """Make ready what timed runs need."""
        self.loop = Loop(self.model, self.inputs, Recipe(**recipe))
        return {}

    def time(self, state: int, runs: int, cold: bool) -> dict[str, Any]:
        """Timed runs, as the loop describes them."""
        assert self.loop is not None
        times, sums = self.loop.run(state, runs, cold)
        return {"times": times, "sums": sums}

    def changes(self) -> dict[str, Any]:
        assert self.untouched is not None
        return {
            "functions": self.untouched.functions(),
            "settings": self.untouched.settings(),
        }

    def _sent(self, tensors: wire.Named) -> dict[str, Any]:
        return {"tensors": wire.send(self._outbox, tensors, self.most)}

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        tensors: dict[str, Tensor | None] = {
            f"output {i}": t for i, t in enumerate(outcome.outputs)
        }
        tensors |= outcome.gradients
        for tensor in tensors.values():
            if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
                raise Refused(f"returned a {type(tensor).__name__}, no plain Tensor")
        return {**self._sent(tensors), "outputs": len(outcome.outputs)}


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
    if isinstance(error, wire.BadData):
        return str(error)
    return told(path, error, 400)


def main(channel: int, inbox: int, outbox: int) -> None:
    """Answer requests until there are no more."""
    for number in (channel, inbox, outbox):
        os.set_inheritable(number, False)
    worker = Worker(inbox, outbox)
    with socket.socket(fileno=channel) as ours, ours.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            request: Mapping[str, Any] = json.loads(line)
            arguments = {k: v for k, v in request.items() if k != "do"}
            try:
                answer = getattr(worker, request["do"])(**arguments)
            except (Exception, SystemExit) as error:
                # Whatever a solution raises is an answer about the solution.
                answer = {"error": _sentence(worker.path, error)}
                traceback.print_exc()
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
