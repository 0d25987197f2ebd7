"""What a call does besides its result: inputs, aliases, streams, threads, processes, settings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from epinorm.tools.accuracy import Comparison, Outcome
from epinorm.tools.judge.facts import Result
from epinorm.tools.judge.observe import Observed, observe
from epinorm.tools.judge.session import Session


def conduct(session: Session) -> list[Result]:
    """What one call does besides its result; held against what the original itself does."""
    inputs = session.drawn(105)
    copies = [v.clone() if isinstance(v, Tensor) else v for v in inputs]
    theirs = observe(session.model, copies)[1]
    truth = session.expected(inputs)
    streams = (False, True) if session.device.type == "cuda" else (False,)
    found: list[Comparison] = []
    seen: Observed = {name: [] for name in theirs}
    for other in streams:
        session.process.take_inputs(inputs)
        outcome, observed = session.process.observe(other)
        label = "randn, on a stream of its own" if other else "randn, inputs arriving late"
        if session.device.type == "cuda":
            outputs = tuple(t for t in outcome.outputs if t.is_floating_point())
            found += session.judged(label, truth, Outcome(outputs, {}), True)
        for name, known in theirs.items():
            seen[name] += [e for e in observed.get(name, ()) if e not in known]
    return [
        _seen(seen["changed"], "changed its ", "inputs, parameters and buffers as before"),
        _seen(seen["aliases"], "", "outputs have memory of their own"),
        _seen(seen["odd types"], "", "outputs are plain tensors"),
        _stream(session, seen["late"], found),
        _seen(seen["threads"], "started threads that still run: ", "no thread left behind"),
    ]


def _seen(entries: Sequence[str], before: str, otherwise: str) -> Result:
    unique = list(dict.fromkeys(entries))
    if unique:
        return "failed", before + ", ".join(unique[:4])
    return "passed", otherwise


def _stream(session: Session, late: Sequence[str], found: Sequence[Comparison]) -> Result:
    if late:
        return "failed", "; ".join(dict.fromkeys(late))
    failed = [c for c in found if not c.passed]
    if failed:
        return "failed", f"does not work on the current stream: {failed[0]}"
    if session.device.type != "cuda":
        return "passed", "nothing was written after the call had returned (streams need a GPU)"
    return "passed", "right with inputs that arrive late, on the default and on another stream"


def untouched(session: Session) -> list[Result]:
    """Functions and settings, by what the solution's process says; processes, by ``/proc``."""
    functions, settings = session.process.changes()
    return [
        _seen(functions, "replaced ", "no function of torch or time was replaced"),
        _seen(settings, "changed ", "PyTorch's settings are as they were"),
        _seen(session.process.running(), "started what still runs: ", "no process left behind"),
    ]
