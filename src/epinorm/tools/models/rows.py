"""One measured model, and the files ``benchmarks/results/models/<gpu>.json`` that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from epinorm.tools.models.named import NAMED
from epinorm.tools.results import JsonRow, Row

COMPETITORS = ("eager", "compile", "fused", "backend")
"""Eager, torch.compile, ``epinorm.fuse`` and ``torch.compile(backend="epinorm")``."""
OURS = ("fused", "backend")
AGAINST = "{} over {}"
"""Among a ModelRow's ``spreads``, those that are not against eager."""
COMPILED = "compile against eager"
"""Among the spreads of ``as_row``, the one that is not against ours."""
_SETTINGS = ("highest", "high", "bf16", "bf16-autocast")


@dataclass(frozen=True)
class ModelRow(JsonRow):
    """One model, setting and pass. Times in ms: by CUDA's events, and ``wall`` from call to call in
    a loop; memory in 10^6 bytes, ``workspace`` what a process that runs nothing else holds besides
    for the library's products; None: not there.

    ``ours_error`` and ``eager_error`` are relative to float64's output, the ``gradient`` ones those
    of all gradients together; ours is that of ``fused``. What is not verified has no times.
    ``places``: where a Linear's result reaches a norm, ``fused_places`` of them can be fused,
    those included that their plans leave to PyTorch's layers; ``linears`` are those without a norm,
    ``fused_linears`` of them run as ours. ``dropout``: the largest p while
    timed; verification is without. ``families``: GPU ms of each kind of kernel, of
    eager and of fused. ``reasons``: why a competitor has no times. ``spreads``: for each, eight of
    ten rounds' times over eager's.
    """

    KEY = ("model", "setting", "pass", "gpu")

    model: str
    setting: str
    dtype: str
    precision: str
    pass_: str
    verified: bool
    places: int
    fused_places: int
    linears: int
    fused_linears: int
    gpu: str
    torch: str
    commit: str | None
    date: str
    eager_ms: float | None = None
    compile_ms: float | None = None
    fused_ms: float | None = None
    backend_ms: float | None = None
    eager_wall_ms: float | None = None
    compile_wall_ms: float | None = None
    fused_wall_ms: float | None = None
    backend_wall_ms: float | None = None
    eager_peak_mb: float | None = None
    compile_peak_mb: float | None = None
    fused_peak_mb: float | None = None
    backend_peak_mb: float | None = None
    eager_workspace_mb: float | None = None
    compile_workspace_mb: float | None = None
    fused_workspace_mb: float | None = None
    backend_workspace_mb: float | None = None
    ours_error: float | None = None
    eager_error: float | None = None
    ours_gradient_error: float | None = None
    eager_gradient_error: float | None = None
    dropout: float = 0.0
    runs: int | None = None
    spreads: dict[str, list[float]] | None = None
    families: dict[str, dict[str, float]] | None = None
    reasons: dict[str, str] | None = None

    def over(self, name: str, other: str = "eager") -> float | None:
        """The time of ``other`` over that of ``name``; None where one is missing."""
        ours, theirs = getattr(self, f"{name}_ms"), getattr(self, f"{other}_ms")
        return theirs / ours if ours and theirs else None

    def between(self, name: str, other: str = "eager") -> tuple[float, float] | None:
        """Between what the time of ``other`` over that of ``name`` lies in eight of ten rounds."""
        found = (self.spreads or {}).get(name if other == "eager" else AGAINST.format(name, other))
        return (1 / found[1], 1 / found[0]) if found else None

    def is_noise(self, name: str) -> bool:
        """Whether the rounds differ by more than ``name`` and eager do."""
        low, high = self.between(name) or (0.0, 0.0)
        return low <= 1 <= high

    def as_row(self) -> Row:
        """The faster of our ways as a row of one problem, for pages and pictures."""
        times = {way: ms for way in OURS if (ms := getattr(self, f"{way}_ms"))}
        best = min(times, key=times.__getitem__, default="")
        against = {other: self.between(best, other) for other in ("eager", "compile")}
        against[COMPILED] = self.between("compile")
        reasons = self.reasons or {}
        return Row(
            *(self.model, None, None, None, None, None, self.dtype),
            "autocast" if self.setting == "bf16-autocast" else self.precision,
            *(self.pass_, None, self.verified, best or None),
            *(self.gpu, self.torch, self.commit, self.date),
            ours_us=_us(times.get(best)),
            eager_us=_us(self.eager_ms),
            compile_us=_us(self.compile_ms),
            ours_error=self.ours_error,
            eager_error=self.eager_error,
            reason=next((reasons[way] for way in OURS if way in reasons), None),
            compile_reason=reasons.get("compile"),
            runs=self.runs,
            spreads={name: list(found) for name, found in against.items() if found} or None,
        )


def _us(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else 1000 * milliseconds


def in_order(rows: Iterable[ModelRow]) -> list[ModelRow]:
    """By model, those of NAMED first, setting and pass."""
    rows = list(rows)
    models = [*NAMED, *(row.model for row in rows)]
    return sorted(rows, key=lambda r: (models.index(r.model), _SETTINGS.index(r.setting), r.pass_))
