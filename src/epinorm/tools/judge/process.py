"""The judge's side of the solution's process: start it, ask it, end it when its time is up."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

import epinorm
from epinorm.tools.accuracy import Outcome

__all__ = ["SolutionError", "SolutionGone", "SolutionProcess"]


class SolutionError(Exception):
    """The solution raised, or answered what cannot be read; the message is one sentence."""


class SolutionGone(Exception):
    """The solution's process has ended, by itself or because its time was up."""


@dataclass
class SolutionProcess:
    """A context manager around the process. Each method is one request; raises SolutionError for
    what the solution does wrong and SolutionGone once the process is no more."""

    time_limit: float
    solution: str
    seconds: float = 0.0
    _count: int = 0
    _ended: str | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> SolutionProcess:
        shared = Path("/dev/shm")
        where = str(shared) if os.access(shared, os.W_OK) else None
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory("", "epinorm-judge-", where))
        )
        self._log = self._stack.enter_context((self.folder / "output.txt").open("w+b"))
        their_requests, self._requests = os.pipe()
        self._answers, their_answers = os.pipe()
        source = str(Path(epinorm.__file__).resolve().parents[1])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
        module = "epinorm.tools.judge.worker"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(their_requests), str(their_answers)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=(their_requests, their_answers),
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        os.close(their_requests)
        os.close(their_answers)
        self._deadline = time.monotonic() + self.time_limit
        self._buffer = b""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        os.close(self._requests)
        os.close(self._answers)
        self._stack.close()

    def _end(self) -> None:
        # Its own session: what it started ends with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer; ``seconds`` is what it took by the judge's clock."""
        if self._ended:
            raise SolutionGone(self._ended)
        started = time.monotonic()
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        try:
            os.write(self._requests, line)
        except BrokenPipeError:
            self._gone(do)
        answer = self._read(do)
        self.seconds = time.monotonic() - started
        if "error" in answer:
            raise SolutionError(str(answer["error"]))
        return answer

    def _read(self, do: str) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            left = self._deadline - time.monotonic()
            ready = left > 0 and select.select([self._answers], [], [], left)[0]
            if not ready:
                self._end()
                self._ended = (
                    f"did not end within {self.time_limit:g} s (it was asked to {_said(do)})"
                )
                raise SolutionGone(self._ended)
            data = os.read(self._answers, 65536)
            if not data:
                self._gone(do)
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            raise SolutionError("wrote over the judge's answers") from None
        if not isinstance(answer, dict):
            raise SolutionError("wrote over the judge's answers")
        return answer

    def _gone(self, do: str) -> NoReturn:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = self.output().strip().splitlines()[-1:]
        said = f"; it last wrote: {last[0][:200]}" if last else ""
        self._ended = f"its process ended with {how} when asked to {_said(do)}{said}"
        raise SolutionGone(self._ended)

    def output(self) -> str:
        """What the process printed so far."""
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def _file(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{self._count}-{name}.pt"

    def send(self, values: Any, name: str) -> str:
        """Write values that the process may read; returns the path."""
        path = self._file(name)
        torch.save(values, path)
        return str(path)

    def construct(self, init: Sequence[Any], seed: int) -> tuple[dict[str, Tensor], list[str]]:
        """ModelNew(*init) under ``seed``; its state_dict on the CPU and its trained parameters."""
        state = self._file("state")
        answer = self.ask(
            "construct", init=self.send(list(init), "init"), seed=seed, state=str(state)
        )
        return self._received(state), answer["trained"]

    def set_state(self, state: dict[str, Tensor], behind: bool = False) -> None:
        """Give the model these parameters; ``behind``: through .data."""
        path = self.send({k: v.detach().cpu() for k, v in state.items()}, "state")
        self.ask("set_state", state=path, behind=behind)
        Path(path).unlink()

    def take_inputs(self, inputs: Sequence[Any], into_old: bool = False) -> None:
        """Inputs for what follows; ``into_old``: into the memory of those before."""
        values = tuple(v.detach().cpu() if isinstance(v, Tensor) else v for v in inputs)
        path = self.send(values, "inputs")
        self.ask("take_inputs", inputs=path, into_old=into_old)
        Path(path).unlink()

    def run(
        self,
        training: bool,
        dy_seed: int,
        kept: Sequence[Tensor | None],
        device: torch.device,
    ) -> Outcome:
        """One run on the inputs taken; outputs and gradients, brought to ``device``."""
        result = self._file("result")
        masks = [None if k is None else k.cpu() for k in kept]
        path = self.send(masks, "kept") if kept else None
        self.ask("run", result=str(result), training=training, dy_seed=dy_seed, kept=path)
        return self._outcome(result, device)

    def observe(
        self, other_stream: bool, device: torch.device
    ) -> tuple[Outcome, dict[str, list[str]]]:
        """One observed run; what it returned and what was seen."""
        result = self._file("result")
        answer = self.ask("observe", result=str(result), other_stream=other_stream)
        return self._outcome(result, device), answer["seen"]

    def time(
        self, seed: int, runs: int, training: bool, device: torch.device
    ) -> tuple[dict[str, list[float]], Outcome]:
        """Timed runs; the samples, and the outputs of the last run."""
        result = self._file("result")
        answer = self.ask("time", seed=seed, runs=runs, training=training, result=str(result))
        return answer, self._outcome(result, device)

    def _outcome(self, path: Path, device: torch.device) -> Outcome:
        values = self._received(path)
        try:
            outputs = tuple(t.to(device) for t in values["outputs"])
            gradients = {
                str(k): None if v is None else v.to(device) for k, v in values["gradients"].items()
            }
        except (KeyError, AttributeError, TypeError):
            raise SolutionError("what it returned cannot be read as tensors") from None
        return Outcome(outputs, gradients)

    def _received(self, path: Path) -> Any:
        # weights_only: a file from the solution's process must not run code in the judge's.
        try:
            return torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            detail = " ".join(str(error).split())[:120]
            raise SolutionError(f"what it returned cannot be read as tensors: {detail}") from None
        finally:
            path.unlink(missing_ok=True)


_DOES = {
    "load": "load the file",
    "construct": "construct ModelNew",
    "set_state": "load a state_dict",
    "take_inputs": "take inputs",
    "keeps": "run twice",
    "time": "run for timing",
    "spin": "run without pause",
    "changes": "say what was changed",
}


def _said(do: str) -> str:
    return _DOES.get(do, "run the model")
