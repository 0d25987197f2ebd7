"""What README and docs show of benchmarks/results: tables between markers, and the pictures.

    python benchmarks/report.py --readme    rewrite the generated tables and the pictures
    python benchmarks/report.py FILE.json   draw a results file: FILE.png, FILE.svg and FILE.html

A marked place is ``<!-- begin:NAME -->`` ... ``<!-- end:NAME -->``, where NAME is a results file
and a pass: ``nvidia-h200-forward`` is the times of the forward rows of
``benchmarks/results/nvidia-h200.json``, with ``-details`` their errors and memory, with ``-loop``
what short calls wait for, and ``-short`` a few of the times. A table has at most six columns.
``models-nvidia-h200-forward`` is the forward rows of ``benchmarks/results/models``, with
``-details`` their errors, memory and coverage, ``models-nvidia-h200-section`` README's choice of
them; ``kernelbench-nvidia-h200`` is ``benchmarks/results/kernelbench``, and
``kernelbench-exported-nvidia-h200`` what its rows with ``--exported`` come to, in a sentence.
``judged`` is the verdicts of ``epinorm judge --json`` in ``benchmarks/results/judged``;
``exported`` the rows of ``benchmarks/exported.py``,
``accumulation``, ``others``, ``host`` and ``rounding`` those of ``benchmarks/accumulation.py`` and
so on, ``matrix`` and ``coverage`` those of ``make matrix`` and ``make coverage``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from epinorm.tools.models.rows import ModelRow, in_order
from epinorm.tools.models.suite import SuiteRow
from epinorm.tools.page import write_report
from epinorm.tools.results import Row, read_rows, read_rows_of, write_atomic
from readme_tables import (
    KINDS,
    accumulation_table,
    columns_table,
    coverage_table,
    details_table,
    exported_files,
    exported_table,
    host_table,
    judged_table,
    matrix_table,
    models_section,
    models_table,
    others_table,
    rounding_table,
    short_table,
    suite_table,
    sums_table,
)
from speedups import THEMES, speedup_svg
from sweep_plot import svg as sweep_svg

ROOT = Path(__file__).resolve().parents[1]
PICTURED_RESULTS = "nvidia-h200"


FOLDERS = {
    "judged": judged_table,
    "exported": exported_table,
    "others": others_table,
    "accumulation": accumulation_table,
    "matrix": matrix_table,
    "sums": sums_table,
    "host": host_table,
    "rounding": rounding_table,
    "coverage": coverage_table,
}
"""What makes a table of a folder of results, by its name."""

_MARKED = re.compile(r"(<!-- begin:(?P<name>[\w.-]+) -->\n).*?(<!-- end:(?P=name) -->)", re.DOTALL)


def update_marked(text: str, results: Path) -> str:
    """The text with what stands between its markers made anew from the results folder.

    Raises ValueError for a marker that names no pass, or is never closed.
    """
    opened = re.findall(r"<!-- begin:([\w.-]+) -->", text)
    closed = [match["name"] for match in _MARKED.finditer(text)]
    if opened != closed:
        missing = next(name for name in opened if name not in closed)
        raise ValueError(f"<!-- begin:{missing} --> has no <!-- end:{missing} -->")
    return _MARKED.sub(lambda m: f"{m[1]}{marked_table(m['name'], results)}\n{m[3]}", text)


def marked_table(name: str, results: Path) -> str:
    """The table that a marker's NAME stands for, or that it is not measured yet."""
    if name in FOLDERS:
        return FOLDERS[name](results / name)
    for kind, table in (("models-", _models_table), ("kernelbench-", _suite_table)):
        if name.startswith(kind):
            return table(name.removeprefix(kind), results)
    found = re.fullmatch(r"(.+)-(forward|training)(-short|-details|-loop)?", name)
    if found is None:
        raise ValueError(
            f"marker {name!r} must end in -forward or -training (and then -short, -details or "
            f"-loop), after the name of a results file, or be one of {', '.join(FOLDERS)}"
        )
    slug, pass_, kind = found.groups()
    rows = [row for row in _rows_of(slug, results) if row.pass_ == pass_]
    return short_table(rows) if kind == "-short" else columns_table(rows, KINDS[kind or ""])


def _models_table(name: str, results: Path) -> str:
    if name.endswith("-section"):
        return models_section(_model_rows_of(name.removesuffix("-section"), results))
    details = name.endswith("-details")
    slug, _, pass_ = name.removesuffix("-details").rpartition("-")
    if pass_ not in ("forward", "training"):
        raise ValueError(
            f"marker 'models-{name}' must end in -section, -forward or -training, and then -details"
        )
    rows = [row for row in _model_rows_of(slug, results) if row.pass_ == pass_]
    return details_table(rows) if details else models_table(rows)


def _model_rows_of(slug: str, results: Path) -> list[ModelRow]:
    path = results / "models" / f"{slug}.json"
    return in_order(read_rows_of(ModelRow, path)) if path.is_file() else []


def _suite_table(slug: str, results: Path) -> str:
    path = results / "kernelbench" / f"{slug}.json"
    rows = read_rows_of(SuiteRow, path) if path.is_file() else []
    table = exported_files if slug.startswith("exported-") else suite_table
    return table(sorted(rows, key=lambda row: row.problem))


def _rows_of(slug: str, results: Path) -> list[Row]:
    path = results / f"{slug}.json"
    return read_rows(path) if path.is_file() else []


def marked_files(root: Path) -> list[Path]:
    """README and the pages of docs/ that hold a generated table."""
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [p for p in files if p.is_file() and "<!-- begin:" in p.read_text(encoding="utf-8")]


def update_readme(root: Path, check: bool) -> list[Path]:
    """Rewrite (or with ``check`` only compare) the marked files and the pictures; returns those
    that are out of date."""
    results = root / "benchmarks" / "results"
    current = {p: update_marked(p.read_text("utf-8"), results) for p in marked_files(root)}
    rows = _rows_of(PICTURED_RESULTS, results)
    models = _model_rows_of(PICTURED_RESULTS, results)
    sweep = results / "sweep" / f"{PICTURED_RESULTS}.json"
    for name, theme in THEMES.items():
        current[root / "docs" / f"speedups-{name}.svg"] = speedup_svg(rows, theme, models)
        if sweep.is_file():
            drawn = sweep_svg(json.loads(sweep.read_text()), theme)
            current[root / "docs" / f"sweep-{name}.svg"] = drawn
    changed = []
    for path, new in current.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != new:
            changed.append(path)
            if not check:
                write_atomic(path, new)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line above; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python benchmarks/report.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--readme", action="store_true", help="rewrite tables and picture")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    chosen = parser.parse_args(arguments)
    if not (chosen.files or chosen.readme or chosen.check):
        parser.error("name a results file, or say --readme or --check")
    try:
        for path in chosen.files:
            for written in write_report(path.parent, path.stem, read_rows(path), path.stem):
                print(written)
        if chosen.readme or chosen.check:
            changed = update_readme(ROOT, chosen.check)
            for path in changed:
                print(f"{path}: {'out of date' if chosen.check else 'rewritten'}")
            return 1 if chosen.check and changed else 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
