"""Whole models as tables for README, docs and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from epinorm.tools.models.suite import SEEDS, SuiteRow, geometric_mean
from epinorm.tools.tables import microseconds, pair, three_digits, times

NAMES = {
    "eager": "eager",
    "compile": "`torch.compile`",
    "fused": "`epinorm.fuse`",
    "backend": '`backend="epinorm"`',
}


def milliseconds(value: float | None) -> str:
    """Three digits, with the unit; a dash for None."""
    return "–" if value is None else three_digits(value, "ms")


SUITE = ("problem", "epinorm", "eager", "compile", "over eager", "error, ours / eager")


def suite_cells(row: SuiteRow) -> list[str]:
    """One problem of KernelBench in the columns of SUITE."""
    ours = microseconds(row.ours_us, row.eager_us) if row.right else "not right"
    both = pair(row.ours_error, row.eager_error, ".1e")
    others = [microseconds(t, row.eager_us) for t in (row.eager_us, row.compile_us)]
    return [row.name.replace("_", " ", 1), ours, *others, times(row.over("eager")), both]


def suite_sentence(rows: Sequence[SuiteRow]) -> str:
    """How many are right, the geometric mean, and the slowest."""
    right = [row for row in rows if row.right]
    said = f"{len(right)} of {len(rows)} problems are right"
    mean, to_compile = geometric_mean(right), geometric_mean(right, "compile")
    if mean is None:
        return f"{said}."
    said += f"; {mean:.2f} times as fast as eager in the geometric mean"
    said += f", {to_compile:.2f} times as fast as torch.compile" if to_compile else ""
    said += f"; {sentence}" if (sentence := exported_sentence(rows)) else ""
    odd = [str(row.problem) for row in right if row.seeds < len(SEEDS)]
    if odd:
        said += f"; KernelBench's rule fails Model in float64 too, and so ours, in {', '.join(odd)}"
    slowest = min(right, key=lambda row: row.over("eager") or 0.0)
    return f"{said}; the least is {slowest.over('eager'):.2f} ({slowest.name})."


def exported_sentence(rows: Sequence[SuiteRow]) -> str:
    """Of the exported files: how many are right, their geometric mean, and what the judge says."""
    files = [row for row in rows if row.exported_seeds is not None]
    if not files:
        return ""
    right = [row for row in files if row.judged is not None or row.exported_reason is None]
    said = f"{len(right)} of {len(files)} exported files are right"
    mean = geometric_mean([row for row in right if row.right], mine="exported")
    said += f", {mean:.2f} times as fast as eager" if mean else ""
    judged = [row for row in files if row.judged is not None]
    if judged:
        said += f"; of {len(judged)} that were judged {sum(map(_is_clean, judged))} are clean"
    unclean = [str(row.problem) for row in judged if not _is_clean(row)]
    return f"{said}, not so {', '.join(unclean)}" if unclean else said


def _is_clean(row: SuiteRow) -> bool:
    return bool(row.judged)
