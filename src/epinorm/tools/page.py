"""Rows as a self-contained HTML page: verdict, picture, table, and what did not run."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from epinorm.tools.plots import svg_text
from epinorm.tools.results import Row
from epinorm.tools.tables import provenance, table
from epinorm.tools.verdict import verdict as in_words

__all__ = ["html_page"]

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
    parts += [f"<p>{html.escape(note)}</p>" for note in [*map(in_words, rows), *notes]]
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
    "In brackets stands between which numbers the ratios of eight in ten rounds lie; a ratio is "
    "“noise” where 1 is between them. "
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
