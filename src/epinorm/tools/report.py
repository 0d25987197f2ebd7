"""Rows as tables, as a self-contained HTML page, and between markers in README and docs.

    python -m epinorm.tools.report --readme    rewrite the generated tables from benchmarks/results
    python -m epinorm.tools.report FILE.json   draw a results file: FILE.png, FILE.svg and FILE.html

A marked place is ``<!-- begin:NAME -->`` ... ``<!-- end:NAME -->``, where NAME is a results file
and a pass: ``nvidia-h200-forward`` is the forward rows of ``benchmarks/results/nvidia-h200.json``.
``judged`` is the verdicts of ``epinorm judge --json`` in ``benchmarks/results/judged``;
``accumulation`` the rows of ``benchmarks/accumulation.py``.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epinorm.tools.plots import draw, svg_text
from epinorm.tools.results import Row, read_rows, write_atomic

__all__ = ["html_page", "main", "markdown_table", "microseconds", "update_marked", "write_report"]

ROOT = Path(__file__).resolve().parents[3]

Cell = Callable[[Row], str]


def microseconds(value: float | None, of: float | None = None) -> str:
    """A time for people: three digits, in ms from 20 ms on, else in µs; a dash for None.

    With ``of``, in the unit of that time, so that what is compared stands in one unit.
    """
    if value is None:
        return "–"
    in_ms = (of or value) >= 20_000
    number = value / 1000 if in_ms else value
    return (
        f"{number:.0f} {'ms' if in_ms else 'µs'}"
        if number >= 100
        else (f"{number:.3g} {'ms' if in_ms else 'µs'}")
    )


def times(value: float | None) -> str:
    """A ratio such as a speed-up; a dash for None."""
    return "–" if value is None else f"{value:.2f}×"


def over(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def setting(row: Row) -> str:
    """The row's dtype, with the precision of its products where PyTorch has a choice."""
    return row.dtype if row.precision == "native" else f"{row.dtype} `{row.precision}`"


def size(row: Row) -> str:
    if row.m is None:
        return "–"
    groups = f", {row.groups} groups" if row.groups and row.groups > 1 else ""
    return f"{row.m}, {row.k} → {row.n}{groups}"


def _ours(row: Row) -> str:
    return microseconds(row.ours_us, row.eager_us) if row.verified else "not verified"


def _time(key: str) -> Cell:
    return lambda row: microseconds(getattr(row, f"{key}_us"), row.eager_us)


def _errors(row: Row) -> str:
    if row.ours_error is None or row.eager_error is None:
        return "–"
    ratio = f" ({row.error_ratio:.2f}×)" if row.error_ratio is not None else ""
    return f"{row.ours_error:.1e} / {row.eager_error:.1e}{ratio}"


COLUMNS: tuple[tuple[str, Cell], ...] = (
    ("shape", lambda r: r.shape),
    ("m, k → n", size),
    ("dtype", setting),
    ("pass", lambda r: r.pass_),
    ("epinorm", _ours),
    ("prepacked", _time("ours_prepacked")),
    ("eager", _time("eager")),
    ("compile", _time("compile")),
    ("max-autotune", _time("compile_autotune")),
    ("linear alone", _time("linear")),
    ("copy", _time("copy")),
    ("on the GPU, ours / linear", lambda r: _short(r, r.ours_gpu_us, r.linear_gpu_us)),
    ("in a loop, ours / eager", lambda r: _short(r, r.ours_wall_us, r.eager_wall_us)),
    ("over eager", lambda r: times(r.speedup)),
    ("over compile", lambda r: times(over(r.compile_us, r.ours_us))),
    ("error, ours / eager", _errors),
    ("peak MB, ours / eager", lambda r: _pair(r.ours_peak_mb, r.eager_peak_mb)),
    ("strategy", lambda r: r.strategy or "–"),
)


SHORT_MICROSECONDS = 100.0
WAITS_FOR_HOST = 1.25
"""Times what the GPU needs, from which on a call is known to wait for the host."""


def _short(row: Row, ours: float | None, other: float | None) -> str:
    """What decides short calls, and those that waited for a slow host: the GPU's share, or the time
    from call to call in a loop."""
    if ours is None or other is None:
        return "–"
    waited = (row.ours_us or 0) > WAITS_FOR_HOST * (row.ours_gpu_us or math.inf)
    if not waited and min(row.ours_us or 0, row.linear_us or 0) > SHORT_MICROSECONDS:
        return "–"
    return f"{microseconds(ours, other)} / {microseconds(other)}"


def _pair(ours: float | None, eager: float | None) -> str:
    return "–" if ours is None or eager is None else f"{ours:.0f} / {eager:.0f}"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells; a column without a value is left out, and "pass" where there is but one."""
    cells = [[cell(row) for _, cell in COLUMNS] for row in rows]
    used = [i for i in range(len(COLUMNS)) if any(line[i] != "–" for line in cells)]
    if len({row.pass_ for row in rows}) == 1:
        used.remove([head for head, _ in COLUMNS].index("pass"))
    return [COLUMNS[i][0] for i in used], [[line[i] for i in used] for line in cells]


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with the machine, torch and commit below it."""
    if not rows:
        return "Not measured yet."
    heads, cells = table(rows)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([*lines, "", provenance(rows)])


def provenance(rows: Sequence[Row]) -> str:
    """Where, with what and when the rows were measured, in a line."""
    return _provenance_of([vars(row) for row in rows])


def _provenance_of(measured: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        label + " and ".join(sorted({one[key] or "unknown" for one in measured}))
        for label, key in (("", "gpu"), ("PyTorch ", "torch"), ("commit ", "commit"), ("", "date"))
    ]
    return ", ".join(parts) + ". Medians of interleaved runs."


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: left;
  white-space: nowrap; }
th { border-bottom: 2px solid #888; }
.bad { color: #a00; font-weight: 600; } .note { color: #555; }
svg { max-width: 100%; height: auto; }
"""


def html_page(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """A page that needs nothing from outside itself: verdict, drawing, tables, reasons."""
    verified = bool(rows) and all(row.verified for row in rows)
    verdict = (
        "Verified: every error is within what eager's own error allows, before and after timing."
        if verified
        else "Not verified: a row without times failed; the reason stands below."
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="{"good" if verified else "bad"}">{verdict}</p>',
    ]
    parts += [f"<p>{html.escape(note)}</p>" for note in notes]
    if any(row.ours_us for row in rows):
        parts += ["<h2>Picture</h2>", svg_text(rows)]
    parts += ["<h2>Table</h2>", _html_table(*table(rows))]
    parts += [f'<p class="note">{html.escape(provenance(rows))}</p>']
    parts += _html_reasons(rows)
    chains = sorted({row.chain for row in rows if row.chain})
    if chains:
        parts += ["<h2>Chain</h2>"] + [f"<p><code>{html.escape(c)}</code></p>" for c in chains]
    parts += ["<h2>How to read it</h2>", f"<p>{HOW_TO_READ}</p>", "</body></html>"]
    return "\n".join(parts) + "\n"


HOW_TO_READ = (
    "Times are medians; all competitors run alternately in one process on the same inputs. "
    "“Linear alone” is the matrix product and its bias by PyTorch, without norm and activation. "
    "An error is ‖result − truth‖ / ‖truth‖ against the same module in float64, of the output or "
    "gradient that comes closest to its limit; parameters and inputs are random. The limit is "
    "eager's own error, 1.1 times it in 16 bit; an error of a few roundings always passes."
)


def _html_table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{_html_cell(text)}</td>" for text in line) + "</tr>"
        for line in cells
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _html_cell(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _html_reasons(rows: Sequence[Row]) -> list[str]:
    reasons = []
    for row in rows:
        for what, reason in (
            ("not verified", row.reason),
            ("torch.compile", row.compile_reason),
            ("torch.compile max-autotune", row.compile_autotune_reason),
        ):
            if reason:
                where = f"{row.shape}, {row.dtype}, {row.pass_}: {what}: {reason}"
                reasons.append(f"<li>{html.escape(where)}</li>")
    return ["<h2>What did not run</h2>", f"<ul>{''.join(reasons)}</ul>"] if reasons else []


def write_report(folder: Path, name: str, rows: Sequence[Row], title: str) -> list[Path]:
    """Write NAME.png, NAME.svg (if there are times) and NAME.html; returns what was written."""
    written = []
    if any(row.ours_us for row in rows):
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            write_atomic(path, draw(rows, kind))
            written.append(path)
    page = folder / f"{name}.html"
    write_atomic(page, html_page(title, rows))
    return [*written, page]


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
    if name == "judged":
        return judged_table(results / "judged")
    if name == "accumulation":
        return accumulation_table(results / "accumulation")
    slug, _, pass_ = name.rpartition("-")
    if pass_ == "micro":
        keep = [r for r in _rows_of(slug, results) if r.pass_ not in ("forward", "training")]
    elif pass_ in ("forward", "training"):
        keep = [r for r in _rows_of(slug, results) if r.pass_ == pass_]
    else:
        raise ValueError(
            f"marker {name!r} must end in -forward, -training or -micro, after the name of a "
            "results file, or be 'judged' or 'accumulation'"
        )
    return markdown_table(keep)


def judged_table(folder: Path) -> str:
    """A line for each verdict's pass, with the machine, torch and commit below; a verdict that is
    not clean has no times."""
    verdicts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not verdicts:
        return "Not measured yet."
    heads = ("problem", "dtype", "pass", "exported file", "eager", "over eager", "verdict")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for verdict in verdicts:
        precision = verdict["precision"]
        dtype = verdict["dtype"] + ("" if precision == "native" else f" `{precision}`")
        said = "clean" if verdict["clean"] else "not clean"
        timings = verdict["timings"] or [dict.fromkeys(("pass", "solution_us", "eager_us"))]
        for timing in timings:
            ours, eager = timing["solution_us"], timing["eager_us"]
            cells = [verdict["problem"], dtype, timing["pass"] or "–", microseconds(ours)]
            cells += [microseconds(eager, ours), times(over(eager, ours)), said]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _provenance_of(verdicts)])


def accumulation_table(folder: Path) -> str:
    """A line for each row of ``benchmarks/accumulation.py``."""
    files = sorted(folder.glob("*.json"))
    measured = [row for path in files for row in json.loads(path.read_text())]
    if not measured:
        return "Not measured yet."
    heads = (
        *("shape", "dtype", "in place", "added by autograd", "eager", "compile"),
        *("over eager", "over compile", "peak MB, in place / added / eager"),
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in measured:
        native = row["precision"] == "native"
        cells = [row["shape"], row["dtype"] + ("" if native else f" `{row['precision']}`")]
        if not row["verified"]:
            lines.append("| " + " | ".join([*cells, "not verified", *["–"] * 6]) + " |")
            continue
        names = ("in_place", "ours", "eager", "compile")
        cells += [microseconds(row[f"{name}_us"]) for name in names]
        cells += [times(over(row[f"{name}_us"], row["in_place_us"])) for name in names[2:]]
        cells.append(" / ".join(f"{row[f'{name}_peak_mb']:.0f}" for name in names[:3]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _provenance_of(measured)])


def _rows_of(slug: str, results: Path) -> list[Row]:
    path = results / f"{slug}.json"
    return read_rows(path) if path.is_file() else []


def marked_files(root: Path) -> list[Path]:
    """README and the pages of docs/ that hold a generated table."""
    files = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    return [p for p in files if p.is_file() and "<!-- begin:" in p.read_text(encoding="utf-8")]


def update_readme(root: Path, check: bool) -> list[Path]:
    """Rewrite (or with ``check`` only compare) the marked files; returns those out of date."""
    changed = []
    for path in marked_files(root):
        old = path.read_text(encoding="utf-8")
        new = update_marked(old, root / "benchmarks" / "results")
        if new != old:
            changed.append(path)
            if not check:
                write_atomic(path, new)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line above; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m epinorm.tools.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    parser.add_argument("--readme", action="store_true", help="rewrite the generated tables")
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
