"""Rows as a self-contained HTML page: verdict, bars, tables, earlier runs, and what did not run;
and the files that `epinorm bench` writes of them."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from epinorm.tools.plots import draw
from epinorm.tools.results import Row, write_atomic
from epinorm.tools.tables import (
    COMPETITORS,
    microseconds,
    not_run,
    over_text,
    provenance,
    setting,
    size,
    table,
)
from epinorm.tools.verdict import PASSES, verdict

# One column on a phone. Colours by names that the dark scheme gives other values.
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --line: #ddd; --quiet: #595959;
  --ours: #1a6e3c; --other: #9aa5b1; --bad: #a00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --page: #15181c; --line: #3a3f45;
  --quiet: #a9b1ba; --ours: #4cc27f; --other: #667079; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: var(--text); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { font-size: 1.1rem; font-weight: 600; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: .35rem .8rem;
  align-items: center; }
.track { min-width: 0; } .bar { height: 1.1rem; background: var(--other); }
.ours .bar { background: var(--ours); } .ours { font-weight: 600; }
.bars > div { display: contents; } .bar { display: block; }
.time { font-variant-numeric: tabular-nums; text-align: right; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: normal; }
.bad { color: var(--bad); font-weight: 600; } .note { color: var(--quiet); }
@media (max-width: 40rem) {
  h1 { font-size: 1.2rem; } .bars { grid-template-columns: 1fr max-content; }
  .bars > div { display: grid; grid-template-columns: subgrid; grid-column: 1 / -1; }
  .track { grid-column: 1 / -1; } .name, .time { grid-row: 1; } }
"""


def write_report(
    folder: Path, name: str, rows: Sequence[Row], title: str, earlier: Sequence[Row] = ()
) -> list[Path]:
    """Write NAME.png, NAME.svg (if there are times) and NAME.html, with the rows of earlier runs;
    returns what was written."""
    written = []
    if any(row.ours_us for row in rows):
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            write_atomic(path, draw(rows, kind))
            written.append(path)
    page = folder / f"{name}.html"
    write_atomic(page, html_page(title, rows, earlier))
    return [*written, page]


def html_page(title: str, rows: Sequence[Row], earlier: Sequence[Row] = ()) -> str:
    """A page that needs nothing from outside itself. earlier: rows of runs before, oldest first."""
    verified = bool(rows) and all(row.verified for row in rows)
    said = (
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
        *(f'<p class="verdict">{html.escape(verdict(row))}</p>' for row in rows),
        f'<p class="{"good" if verified else "bad"}">{said}</p>',
    ]
    for row in rows:
        parts += [f"<h2>{html.escape(_heading(row))}</h2>", *_bars(row), _facts(row)]
        parts += _history([old for old in earlier if _same(old, row)], row)
    parts += [f'<p class="note">{html.escape(provenance(rows))}</p>'] if rows else []
    parts += _html_reasons(rows)
    chains = sorted({row.chain for row in rows if row.chain})
    if chains:
        parts += ["<h2>Chain</h2>"] + [f"<p><code>{html.escape(c)}</code></p>" for c in chains]
    parts += ["<h2>How to read it</h2>", f"<p>{HOW_TO_READ}</p>", "</body></html>"]
    return "\n".join(parts) + "\n"


HOW_TO_READ = (
    "Times are medians; all competitors run alternately in one process on the same inputs. "
    "In brackets stands between which numbers the ratios of eight in ten rounds lie; a ratio is "
    "“noise” where 1 is between them. "
    "“Linear alone” is the matrix product and its bias by PyTorch, without norm and activation. "
    "An error is ‖result − truth‖ / ‖truth‖ against the same module in float64, of the output or "
    "gradient that comes closest to its limit; parameters and inputs are random. The limit is "
    "eager's own error, 1.1 times it in 16 bit; an error of a few roundings always passes."
)


def _heading(row: Row) -> str:
    passed = PASSES.get(row.pass_, row.pass_)
    return f"{row.shape}, {passed.lower()}, {setting(row)}"


def _bars(row: Row) -> list[str]:
    """One bar a competitor, as long as its time."""
    found = [(key, name, getattr(row, f"{key}_us")) for key, name in COMPETITORS]
    timed = [(key, name, us) for key, name, us in found if us is not None]
    if row.ours_us is None or not timed:
        return []
    longest = max(us for _, _, us in timed)
    lines = []
    for key, name, us in timed:
        ratio = "" if key.startswith("ours") else f" ({over_text(row, key)})"
        text = f"{microseconds(us, row.eager_us)}{ratio}"
        lines.append(
            f"<div{' class=ours' if key.startswith('ours') else ''}>"
            f'<span class="name">{html.escape(name)}</span><span class="track">'
            f'<span class="bar" style="width:{100 * us / longest:.1f}%"></span></span>'
            f'<span class="time">{html.escape(text)}</span></div>'
        )
    return ['<div class="bars">', *lines, "</div>"]


def _facts(row: Row) -> str:
    """All that was measured of a row, a line each: it fits any width."""
    heads, (cells,) = table([row])
    lines = "".join(
        f"<tr><th>{html.escape(head)}</th><td>{_html_cell(cell)}</td></tr>"
        for head, cell in zip(heads, cells, strict=True)
        if head not in ("shape", "dtype", "m, k → n")
    )
    numbers = f"<details><summary>Numbers</summary><table>{lines}</table></details>"
    return (f"<p>{html.escape(size(row))}</p>" if row.m is not None else "") + numbers


def _same(one: Row, other: Row) -> bool:
    first, second = one.as_json(), other.as_json()
    return all(first[name] == second[name] for name in Row.KEY if name != "strategy")


def _history(earlier: Sequence[Row], row: Row) -> list[str]:
    """Earlier runs of the same on the same machine, newest first."""
    if not earlier:
        return []
    heads = ("run", "epinorm", "eager", "over eager")
    lines = [
        (
            *(f"{old.date} {(old.commit or '')[:7]}", microseconds(old.ours_us, row.eager_us)),
            *(microseconds(old.eager_us, row.eager_us), over_text(old, "eager")),
        )
        for old in reversed(earlier)
    ]
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    said = f"{len(lines)} earlier run{'s' if len(lines) > 1 else ''}"
    return [
        f"<details open><summary>{said}</summary><table><tr>{head}</tr>{body}</table></details>"
    ]


def _html_cell(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _html_reasons(rows: Sequence[Row]) -> list[str]:
    reasons = []
    for row in rows:
        of_ours = [("not verified", row.reason)] if row.reason else []
        for what, reason in (*of_ours, *not_run(row)):
            where = f"{row.shape}, {row.dtype}, {row.pass_}: {what}: {reason}"
            reasons.append(f"<li>{html.escape(where)}</li>")
    return ["<h2>What did not run</h2>", f"<ul>{''.join(reasons)}</ul>"] if reasons else []
