"""What a judgement consists of: checks with their reasons, timings, and the verdict over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
Result = tuple[Status, str]


@dataclass(frozen=True)
class JudgeOptions:
    """How to judge. ``time_limit``: seconds that the solution's process may take in all;
    ``seed`` decides every input and parameter."""

    dtype: str = "float32"
    precision: Literal["highest", "high", "native"] = "highest"
    device: str = "cpu"
    training: bool = True
    timing: bool = True
    scale: int = 1
    seed: int = 0
    time_limit: float = 600.0


@dataclass(frozen=True)
class Check:
    """One line of the verdict. ``reason``: why it failed or was skipped, or what was seen."""

    name: str
    status: Status
    reason: str

    def as_json(self) -> dict[str, str]:
        return {"check": self.name, "status": self.status, "reason": self.reason}


@dataclass(frozen=True)
class Timing:
    """Microseconds a run. ``clock``: whose counts, for solution and eager alike: the solution's
    "its own", confirmed by "the judge's", or the latter with all that the loop of timed runs costs.
    ``outside_us``: the solution's by the judge's clock; ``loop_us``: the loop's part of that.
    ``solution_spread``, ``eager_spread``: the slowest batch's time over the fastest's."""

    pass_: Literal["forward", "training"]
    solution_us: float
    eager_us: float
    outside_us: float
    loop_us: float
    clock: Literal["its own", "the judge's"] = "its own"
    solution_spread: float = 1.0
    eager_spread: float = 1.0

    @property
    def speedup(self) -> float:
        """Eager's time over the solution's."""
        return self.eager_us / self.solution_us

    @property
    def speedups(self) -> tuple[float, float]:
        """The least and the largest that the batches would allow."""
        return self.speedup / self.solution_spread, self.speedup * self.eager_spread

    def __str__(self) -> str:
        """What the batches show; a ratio that is less than their noise is none."""
        least, most = self.speedups
        if least < 1.0 < most:
            said = f"not distinguishable from eager ({least:.2f} to {most:.2f}×)"
        else:
            said = f"{self.speedup:.2f}× ({least:.2f} to {most:.2f})"
        return (
            f"{self.pass_}: {self.solution_us:.0f} µs, eager {self.eager_us:.0f} µs, {said} "
            f"by {self.clock} clock"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON, to four digits."""
        return {
            "pass": self.pass_,
            "solution_us": float(f"{self.solution_us:.4g}"),
            "eager_us": float(f"{self.eager_us:.4g}"),
            "solution_outside_us": float(f"{self.outside_us:.4g}"),
            "loop_us": float(f"{self.loop_us:.4g}"),
            "clock": self.clock,
            "speedup": float(f"{self.speedup:.4g}"),
            "speedups": [float(f"{ratio:.4g}") for ratio in self.speedups],
        }


@dataclass(frozen=True)
class Verdict:
    """The outcome: clean if there are checks, none failed, and none was left out after a failure.

    ``skipped`` checks (those that need a GPU, on a CPU) do not spoil it; the table names them.
    ``not_held``: what this machine did not let the judge prevent.
    """

    problem: str
    solution: str
    checks: tuple[Check, ...]
    timings: tuple[Timing, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    not_held: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if c.status == "failed")

    @property
    def clean(self) -> bool:
        passed = any(c.status == "passed" for c in self.checks)
        return passed and not self.failures

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "problem": self.problem,
            "solution": self.solution,
            "clean": self.clean,
            "checks": [c.as_json() for c in self.checks],
            "timings": [t.as_json() for t in self.timings],
            "notes": list(self.notes),
            "not_held": list(self.not_held),
            **self.facts,
        }
