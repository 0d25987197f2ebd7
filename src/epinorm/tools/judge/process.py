"""The judge's side of the solution's process: start it, ask it, end it when its time is up.

All that comes from there is checked before it is used: text is cut and freed of control characters,
numbers are finite, tensors are plain bytes of a bounded size. Every wait has an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import epinorm
from epinorm.tools.accuracy import Outcome
from epinorm.tools.judge import guard, wire

WORKER = f"{__package__}.worker"
LONGEST_ANSWER = 16 * 1024 * 1024
KEPT_OUTPUT = 8192
ENTRIES = 100
_ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""torch.compile's pool of processes would outlive the call."""
GONE_SECONDS = 2.0
END_SECONDS = guard.SWEEP_SECONDS + 5.0


class SolutionError(Exception):
    """The solution raised, or answered what cannot be read; the message is one sentence."""


class SolutionGone(Exception):
    """The solution's process has ended, by itself or because its time was up."""


def start_guard(
    life: int, status: int, log: int, passed: tuple[int, ...], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a guard and the worker behind it; ``passed``: the descriptors that the worker is given,
    ``log``: what both print to."""
    guarding = [sys.executable, "-I", "-S", guard.__file__, str(life), str(status)]
    return subprocess.Popen(
        [*guarding, sys.executable, "-m", WORKER, *map(str, passed)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(*passed, life, status),
        env=environment,
        start_new_session=True,
    )


class SolutionProcess:
    """A context manager around the process. Each method is one request; raises SolutionError for
    what the solution does wrong and SolutionGone once the process is no more.

    ``seconds``: what the last request took by the judge's clock. ``most``: the bytes of tensors
    that an answer may have; ``device``: where they are brought. ``held``: what the guard took from
    the solution (see guard).
    """

    def __init__(self, time_limit: float, solution: Path, most: int = 1 << 26) -> None:
        self.time_limit, self.solution, self.most = time_limit, str(solution.resolve()), most
        self.device = torch.device("cpu")
        self.seconds = 0.0
        self.held: list[str] = []
        self.left_behind = False
        self._worker = 0
        self._ended: str | None = None
        self._output = self._buffer = self._reports = b""

    def __enter__(self) -> SolutionProcess:
        with contextlib.ExitStack() as stack:
            stack.enter_context(guard.alone())
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("inbox", "outbox")]
        self._channel, theirs = socket.socketpair()
        self._answers = self._channel.fileno()
        life, self._life = os.pipe()
        self._status, status = os.pipe()
        self._log, log = os.pipe()
        for number in (*self._files, self._status, self._log):
            stack.callback(os.close, number)
        stack.callback(self._channel.close)
        self._before = frozenset(pid for pid, _ in guard.descendants(os.getpid()))
        source = str(Path(epinorm.__file__).resolve().parents[1])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
        passed = (theirs.fileno(), *self._files)
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        environment = {**os.environ, "PYTHONPATH": path, **_ENVIRONMENT, **threads}
        self._guard = start_guard(life, status, log, passed, environment)
        theirs.close()
        for number in (life, status, log):
            os.close(number)
        self._deadline = time.monotonic() + self.time_limit

    def __exit__(self, *_: object) -> None:
        self._end()
        self._stack.close()

    def _end(self) -> None:
        """End the process with all that it started; ``left_behind`` where that is not certain."""
        if self._life < 0:
            return
        os.close(self._life)
        self._life = -1
        end = time.monotonic() + END_SECONDS
        while self._guard.poll() is None and time.monotonic() < end:
            self._drain(0.02)
        self._drain(0.0)
        self._guard.kill()
        self._guard.wait()
        last = self._reported()
        if (
            not last or last.get("left") is not False
        ):  # the guard itself was killed: orphans are ours
            self.left_behind = not guard.sweep(self._before)

    def _drain(self, seconds: float) -> list[int]:
        """Wait for the process at most so long; keep what it printed and what its guard reported;
        the descriptors that have something to read."""
        ready = select.select([self._answers, self._log, self._status], [], [], seconds)[0]
        if self._log in ready:
            data = os.read(self._log, 65536)
            self._output = (self._output + data)[-KEPT_OUTPUT:]
            if not data and ready == [self._log]:
                time.sleep(min(seconds, 0.005))  # it closed its output, and may go on
        if self._status in ready:
            self._reports += os.read(self._status, 65536)
            if b"\n" in self._reports and not self._worker:
                first = json.loads(self._reports.split(b"\n")[0])
                self.held, self._worker = first["held"], first["worker"]
        return ready

    def _reported(self) -> dict[str, Any]:
        """How it ended, by its guard, the one writer of these lines; empty before that."""
        lines = self._reports.split(b"\n")[1:-1]
        return json.loads(lines[-1]) if lines else {}

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer."""
        if self._ended:
            raise SolutionGone(self._ended)
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        if self._buffer or self._answers in self._drain(0.0):
            self._check_channel(do)
        started = time.monotonic()
        try:
            self._channel.settimeout(max(0.001, self._deadline - started))
            self._channel.sendall(line)
        except TimeoutError:
            self._late(do)
        except OSError:
            self._gone(do)
        answer = self._read(do)
        self.seconds = time.monotonic() - started
        return self._checked(answer)

    def cpu_seconds(self) -> float:
        """What its process with its threads, and all that it started, have computed so far."""
        known = {pid for pid, _ in guard.descendants(self._guard.pid)}
        return sum(map(_computed, known | {self._guard.pid, self._worker}))

    def _check_channel(self, do: str) -> None:
        """Nothing may be said before it is asked."""
        if not self._buffer and not self._receive():
            self._gone(do)
        self._stop("wrote over the judge's answers")

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(1 << 20)
        except OSError:
            return b""

    def _read(self, do: str) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while not (chunks and chunks[-1].endswith(b"\n")):
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._late(do)
            ready = self._drain(left)
            if self._answers in ready:
                data = self._receive()
                if not data:
                    self._gone(do)
                chunks.append(data)
                size += len(data)
                if size > LONGEST_ANSWER:
                    self._stop("wrote over the judge's answers")
            elif self._status in ready and (self._reported() or self._guard.poll() is not None):
                self._gone(do)
        return b"".join(chunks)

    def _checked(self, line: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self._stop("wrote over the judge's answers")
        if "error" in answer:
            raise SolutionError(_clean(answer["error"]))
        return answer

    def _stop(self, reason: str) -> NoReturn:
        """What cannot be trusted to be in step with its requests is ended."""
        self._ended = reason
        self._end()
        raise SolutionGone(reason)

    def _late(self, do: str) -> NoReturn:
        self._stop(f"did not end within {self.time_limit:g} s (it was asked to {_said(do)})")

    def _gone(self, do: str) -> NoReturn:
        end = time.monotonic() + GONE_SECONDS
        while not self._reported() and self._guard.poll() is None and time.monotonic() < end:
            self._drain(0.02)
            time.sleep(0.002)
        self._end()
        code = self._reported().get("ended")
        how = "its process closed the judge's channel"
        if code is not None:
            how = f"its process ended with {_how(code)}"
        elif self._guard.returncode:
            how = "its guard was killed"
        last = self.output().strip().splitlines()[-1:]
        said = f"; it last wrote: {_clean(last[0])[:200]}" if last else ""
        self._stop(f"{how} when asked to {_said(do)}{said}")

    def output(self) -> str:
        """The end of what the process printed so far."""
        return self._output.decode(errors="replace")

    def running(self) -> list[str]:
        """The names of processes that the solution started and that still run."""
        below = guard.descendants(self._guard.pid)
        return [_clean(name) for pid, name in below if pid != self._worker]

    def construct(
        self, init: Sequence[Any], seed: int, dropout_off: bool
    ) -> tuple[dict[str, Tensor], list[str]]:
        """ModelNew(*init) under ``seed``; its state_dict on the CPU and its trained parameters."""
        wire.save(self._files[0], list(init))
        answer = self.ask("construct", seed=seed, dropout_off=dropout_off)
        state = self._tensors(answer)
        return {k: v for k, v in state.items() if v is not None}, _texts(answer.get("trained"))

    def set_state(self, state: dict[str, Tensor], behind: bool = False) -> None:
        """Give the model these parameters; ``behind``: through .data."""
        self.ask("set_state", behind=behind, tensors=wire.send(self._files[0], state, sys.maxsize))

    def take_inputs(self, inputs: Sequence[Any], into_old: bool = False) -> None:
        """Inputs for what follows; ``into_old``: into the memory of those before."""
        wire.save(
            self._files[0], tuple(v.detach().cpu() if isinstance(v, Tensor) else v for v in inputs)
        )
        self.ask("take_inputs", into_old=into_old)

    def run(
        self, training: bool = False, dy_seed: int = 0, kept: Sequence[Tensor | None] = ()
    ) -> Outcome:
        """One run on the inputs taken; outputs and gradients."""
        if kept:
            wire.save(self._files[0], [None if k is None else k.cpu() for k in kept])
        answer = self.ask("run", training=training, dy_seed=dy_seed, masked=bool(kept))
        return self._outcome(answer)

    def observe(self, other_stream: bool) -> tuple[Outcome, dict[str, list[str]]]:
        """One observed run; what it returned and what was seen."""
        answer = self.ask("observe", other_stream=other_stream)
        seen = answer.get("seen")
        if not isinstance(seen, dict):
            raise SolutionError("did not say what was seen of a call")
        return self._outcome(answer), {str(k): _texts(v) for k, v in seen.items()}

    def time(
        self, state: int, runs: int, parts: int, cold: bool
    ) -> tuple[list[float], list[list[float]]]:
        """Timed runs: microseconds, as claimed, and ``parts`` checksums of each."""
        answer = self.ask("time", state=state, runs=runs, cold=cold)
        rows = answer.get("sums")
        if not isinstance(rows, list) or len(rows) != runs:
            raise SolutionError(f"did not return checksums of {runs} timed runs")
        times = _numbers(answer.get("times"), runs)
        if min(times) <= 0:
            raise SolutionError("says that a timed run took no time")
        return times, [_numbers(row, parts) for row in rows]

    def changes(self) -> tuple[list[str], list[str]]:
        """Functions and settings that are not as they were."""
        answer = self.ask("changes")
        return _texts(answer.get("functions")), _texts(answer.get("settings"))

    def _outcome(self, answer: dict[str, Any]) -> Outcome:
        tensors = self._tensors(answer)
        outputs, gradients = [], {}
        for name, tensor in tensors.items():
            there = None if tensor is None else tensor.to(self.device)
            if name.startswith("output ") and there is not None:
                outputs.append(there)
            else:
                gradients[name] = there
        return Outcome(tuple(outputs), gradients)

    def _tensors(self, answer: dict[str, Any]) -> dict[str, Tensor | None]:
        try:
            return wire.receive(self._files[1], answer.get("tensors"), self.most)
        except (wire.BadData, OSError, RuntimeError, ValueError, OverflowError) as error:
            raise SolutionError(
                f"what it returned cannot be read as tensors: {_clean(error)[:120]}"
            ) from None


def _computed(pid: int) -> float:
    """Seconds of a CPU: by a process' own clock (clock_getcpuclockid(3)) and of children that it
    waited for (proc_pid_stat(5))."""
    try:
        own = time.clock_gettime((~pid << 3) | 2)
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return own + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")


def _clean(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())[:500]


def _how(code: int) -> str:
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"signal {names.get(-code, -code)}"


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise SolutionError("answered what is no list of texts")
    return [_clean(v) for v in values[:ENTRIES]]


def _numbers(values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise SolutionError(f"answered what is no list of {count} numbers")
    if not all(type(v) in (int, float) and abs(v) < 1e300 for v in values):
        raise SolutionError("answered a time or a checksum that is no finite number")
    return [float(v) for v in values]


_DOES = {
    "load": "load the file",
    "construct": "construct ModelNew",
    "set_state": "load a state_dict",
    "take_inputs": "take inputs",
    "keeps": "run twice",
    "prepare": "make ready for timing",
    "time": "run for timing",
    "changes": "say what was changed",
}


def _said(do: str) -> str:
    return _DOES.get(do, "run the model")
