"""The Markdown tables of README and docs, from what benchmarks/results holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from epinorm.tools.models.rows import COMPETITORS, OURS, ModelRow
from epinorm.tools.models.suite import SuiteRow
from epinorm.tools.models.tables import (
    NAMES,
    SUITE,
    exported_sentence,
    milliseconds,
    suite_cells,
    suite_sentence,
)
from epinorm.tools.results import Row
from epinorm.tools.tables import (
    COLUMNS,
    MARKDOWN,
    Cell,
    microseconds,
    over,
    over_text,
    pair,
    provenance,
    setting,
    table,
    times,
)

NOT_MEASURED = "Not measured yet."


def measured_table(
    heads: Sequence[str], cells: Sequence[Sequence[str]], measured: Sequence[Any]
) -> str:
    """A Markdown table, with the machine, torch and commit of what was ``measured`` below it."""
    if not measured:
        return NOT_MEASURED
    return "\n".join([*markdown_lines(heads, cells), "", provenance(measured)])


def markdown_table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, with the machine, torch and commit below it."""
    return measured_table(*table(rows), rows) if rows else NOT_MEASURED


SHORT = ("shape", "dtype", "epinorm", "eager", "compile", "over eager")
SHORT_SHAPES = ("kb62", "skinny", "bert_out")
_SETTINGS = ("highest", "high", "native")


def short_table(rows: Sequence[Row]) -> str:
    """As ``markdown_table``, but the columns SHORT, for SHORT_SHAPES, and of several strategies the
    newest row."""
    chosen = [row for row in newest(rows) if row.shape in SHORT_SHAPES]
    chosen.sort(key=lambda r: (SHORT_SHAPES.index(r.shape), _SETTINGS.index(r.precision)))
    columns = dict(COLUMNS)
    cells = [[columns[head](row) for head in SHORT] for row in chosen]
    return measured_table(SHORT, cells, chosen)


def _case(row: Row) -> str:
    return f"{setting(row, MARKDOWN)}, {row.strategy}"


def _beside(key: str) -> Cell:
    """The competitor's time, and how many times as fast ours is."""

    def cell(row: Row) -> str:
        time = getattr(row, f"{key}_us")
        ratio = over_text(row, key)
        return microseconds(time, row.eager_us) + (f" ({ratio})" if ratio != "–" else "")

    return cell


_OWN = {"dtype, strategy": _case, "eager": _beside("eager"), "compile": _beside("compile")}
KINDS = {
    "": ("shape", "m, k → n", "dtype, strategy", "epinorm", "eager", "compile"),
    "-details": (
        *("shape", "dtype, strategy", "linear alone", "prepacked"),
        *("error, ours / eager", "peak MB, ours / eager"),
    ),
    "-loop": (
        *("shape", "dtype, strategy"),
        *("on the GPU, ours / linear", "in a loop, ours / eager"),
    ),
}
"""The columns of a table of rows, by what its marker ends in."""


def columns_table(rows: Sequence[Row], heads: Sequence[str]) -> str:
    """These columns of the rows; a row or a column that holds nothing else is left out."""
    names = ("shape", "m, k → n", "dtype, strategy")
    columns = {head: (dict(COLUMNS) | _OWN)[head] for head in heads}
    cells = [{head: cell(row) for head, cell in columns.items()} for row in rows]
    filled = {head for line in cells for head in line if line[head] != "–"}
    kept = [
        (row, [line[head] for head in heads if head in filled])
        for row, line in zip(rows, cells, strict=True)
        if any(text != "–" for head, text in line.items() if head not in names)
    ]
    shown = [head for head in heads if head in filled]
    return measured_table(shown, [line for _, line in kept], [row for row, _ in kept])


def markdown_lines(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return [*lines, *("| " + " | ".join(line) + " |" for line in cells)]


def newest(rows: Iterable[Row]) -> list[Row]:
    """One row for each shape, dtype, precision, pass and GPU, in their order: the newest,
    and of strategies measured on one day the fastest that is verified."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row.shape, row.dtype, row.precision, row.pass_, row.gpu)
        old = best.get(key)
        if old is None or _rank(row) > _rank(old):
            best[key] = row
    return list(best.values())


def _rank(row: Row) -> tuple[str, float]:
    return row.date, -(row.ours_us or math.inf)


def _of_folder(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]


def judged_table(folder: Path) -> str:
    """A line for each verdict's pass, with the machine, torch and commit below; a verdict that is
    not clean has no times."""
    verdicts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    heads = ("problem", "dtype, pass", "exported file", "eager", "over eager", "verdict")
    lines = []
    for verdict in verdicts:
        said = "clean" if verdict["clean"] else "not clean"
        timings = verdict["timings"] or [dict.fromkeys(("pass", "solution_us", "eager_us"))]
        for timing in timings:
            ours, eager = timing["solution_us"], timing["eager_us"]
            case = f"{setting(verdict, MARKDOWN)}, {timing['pass'] or 'not timed'}"
            cells = [verdict["problem"].removesuffix(".py"), case]
            cells += [microseconds(ours), microseconds(eager, ours), times(over(eager, ours)), said]
            lines.append(cells)
    return measured_table(heads, lines, verdicts)


def exported_table(folder: Path) -> str:
    """A line for each pass that ``benchmarks/exported.py`` timed; one not verified has no times."""
    rows = _of_folder(folder)
    timed = [row for row in rows if row["pass"] != "start"]
    heads = ("dtype", "pass", "exported file", "library", "file / library", "over eager")
    lines = []
    for row in timed:
        cells = [setting(row, MARKDOWN), row["pass"]]
        if row["verified"]:
            file, library = row["exported_us"], row["fused_us"]
            cells += [microseconds(file, library), microseconds(library, file)]
            cells += [f"{file / library:.3f}", times(row["exported_speedup"])]
        else:
            cells += ["not verified", *["–"] * 3]
        lines.append(cells)
    return measured_table(heads, lines, timed)


def accumulation_table(folder: Path) -> str:
    """A line for each row of ``benchmarks/accumulation.py``; in brackets, how many times as fast
    the sum in place is."""
    measured = _of_folder(folder)
    heads = (
        *("shape, dtype", "in place", "added by autograd", "eager", "compile"),
        "peak MB, in place / added / eager",
    )
    names = ("in_place", "ours", "eager", "compile")
    lines = []
    for row in measured:
        cells = [f"{row['shape']}, {setting(row, MARKDOWN)}"]
        if row["verified"]:
            cells.append(microseconds(row["in_place_us"]))
            for us in (row[f"{name}_us"] for name in names[1:]):
                cells.append(f"{microseconds(us)} ({times(over(us, row['in_place_us']))})")
            cells.append(" / ".join(f"{row[f'{name}_peak_mb']:.0f}" for name in names[:3]))
        else:
            cells += ["not verified", *["–"] * 4]
        lines.append(cells)
    return measured_table(heads, lines, measured)


def sums_table(folder: Path) -> str:
    """A line for each row of ``benchmarks/sums.py``, forward: what the second result costs."""
    measured = _of_folder(folder)
    lines = [
        [
            row["shape"],
            row["kind"],
            *(microseconds(row[n]) for n in ("one", "two", "eager", "compile")),
        ]
        for row in measured
    ]
    heads = ("shape", "setting", "y alone", "y and the sum", "eager, both", "compile, both")
    return measured_table(heads, lines, measured)


def others_table(folder: Path) -> str:
    """A line for each row of ``benchmarks/others.py``, with the libraries' versions below."""
    measured = _of_folder(folder)
    heads = ("beside", "what", "setting", "eager", "with its norms", "epinorm")
    lines = []
    for row in measured:
        eager = row.get("eager_us")
        setting = f"{row['setting']}, {row['pass']}"
        cells = [row["library"], row["case"], setting, microseconds(eager)]
        for name in ("other", "fused"):
            us = row.get(f"{name}_us")
            low, high = row.get("spreads", {}).get(name, (0.0, 0.0))
            ratio = "noise" if low <= 1 <= high else times(over(eager, us))
            error = (row.get(f"{name}_error") or 0.0) / (row.get("eager_error") or 1.0)
            more = f", error {error:.1f}× eager's" if error > 1.1 else ""
            cells.append(f"{microseconds(us, eager)} ({ratio}{more})" if us else "not verified")
        lines.append(cells)
    versions = ", ".join(sorted({f"{row['library']} {row['version']}" for row in measured}))
    below = f" {versions}." if measured else ""
    return measured_table(heads, lines, measured) + below


def host_table(folder: Path) -> str:
    """A line for each model and pass of ``benchmarks/host.py``; first calls in a sentence below."""
    measured = _of_folder(folder)
    loops = [row for row in measured if "us" in row]
    names = ("eager", "fuse", "inductor", "backend")
    heads = ("model", "pass", "eager", "`fuse`", "Inductor", '`backend="epinorm"`')
    cells = [
        [f"{row['name']} × {row['blocks']}, {row['setting']}", row["pass"]]
        + [microseconds(row["us"].get(name)) for name in names]
        for row in loops
    ]
    first = "".join(
        f" First call of {row['name']} fused, {row['setting']} {row['pass']}, {there}: "
        f"{row['seconds'][state]['first']:.1f} s."
        for row in measured
        for state, there in (("warm", "compiled before"), ("cold", "nothing on disk"))
        if state in row.get("seconds", ())
    )
    return measured_table(heads, cells, loops) + first


def rounding_table(folder: Path) -> str:
    """A line for each shape of ``benchmarks/rounding.py``: eager's roundings over rounding once."""
    measured = _of_folder(folder)
    ratio = {(r["shape"], r["dtype"], r["pass"]): r["eager_us"] / r["once_us"] for r in measured}
    passes = [(dtype, pass_) for dtype in ("bf16", "fp16") for pass_ in _NAMED_PASSES]
    lines = [
        [
            shape,
            *(f"{ratio[(shape, *key)]:.3f}" if (shape, *key) in ratio else "–" for key in passes),
        ]
        for shape in dict.fromkeys(row["shape"] for row in measured)
    ]
    return measured_table(("shape", *(", ".join(key) for key in passes)), lines, measured)


def coverage_table(folder: Path) -> str:
    """A line for each kind of norm that ``make coverage`` counted, with the packages below."""
    measured = _of_folder(folder)
    if not measured:
        return NOT_MEASURED
    lines = [
        [row["kind"], *(f"{row[f'{pass_}_fused']} of {row[f'{pass_}_places']}" for pass_ in _MODES)]
        for row in measured
    ]
    (packages,) = {f"{row['models']} architectures; {row['packages']}" for row in measured}
    (when,) = {f"commit {row['commit']}, {row['date']}" for row in measured}
    heads = ("places where a Linear's result reaches", *(f"fused in {mode}" for mode in _MODES))
    return "\n".join([*markdown_lines(heads, lines), "", f"{packages}, {when}."])


def matrix_table(folder: Path) -> str:
    """A line for each version of PyTorch that ``make matrix`` ran the tests against."""
    rows = _of_folder(folder)
    if not rows:
        return NOT_MEASURED
    rows.sort(key=lambda row: [int(part) for part in row["torch"].split(".")])
    heads = ("PyTorch", "Python", "passed", "failed", "skipped", "commit, date")
    lines = [
        [
            *(str(row[key]) for key in ("torch", "python", "passed", "failed", "skipped")),
            f"{(row['commit'] or 'unknown')[:7]}, {row['date']}",
        ]
        for row in rows
    ]
    return "\n".join(markdown_lines(heads, lines))


def _cell(row: ModelRow, name: str) -> str:
    value = getattr(row, f"{name}_ms")
    if value is None:
        return "not verified" if name in (row.reasons or {}) and name != "compile" else "–"
    if row.is_noise(name):
        return f"{milliseconds(value)} (within noise)"
    ratio = "" if name == "eager" else f" ({times(row.over(name))})"
    return milliseconds(value) + ratio


def models_table(rows: Sequence[ModelRow]) -> str:
    """Six columns: each way's time and how many times as fast as eager it is."""
    heads = ("model", "setting", *(NAMES[name] for name in COMPETITORS))
    cells = [[row.model, row.setting, *(_cell(row, name) for name in COMPETITORS)] for row in rows]
    return measured_table(heads, cells, rows)


SHORT_MODELS = ("bert_base", "vit_b", "llama_4", "mlp_2048", "tdmpc2", "dreamer")
SHORT_SETTINGS = ("highest", "high", "bf16")
_NAMED_PASSES = {"forward": "inference", "training": "training"}
_MODES = ("training", "eval")


def models_section(rows: Sequence[ModelRow]) -> str:
    """README's section of whole models, by the faster of our two ways; nothing if none was
    measured."""
    rows = [r for r in rows if r.model in SHORT_MODELS and r.setting in SHORT_SETTINGS]
    if not rows:
        return ""
    known = {(row.model, row.setting, row.pass_): row for row in rows}
    heads = ["model", "setting"]
    for name in _NAMED_PASSES.values():
        heads += [f"{name}: eager → epinorm", "`torch.compile`"]
    cells = []
    for case in dict.fromkeys((row.model, row.setting) for row in rows):
        line = [*case]
        for pass_ in _NAMED_PASSES:
            line += _beside_eager(known.get((*case, pass_)))
        cells.append(line)
    said = (
        f"By the faster of {NAMES['fused']} and {NAMES['backend']}; `epinorm bench bert_base` "
        "measures one, outputs and all gradients verified first. Under `torch.compile` "
        "transformers gives BERT an attention mask that it leaves out in eager, which costs it "
        "much of its speed in 16 bit."
    )
    return "\n".join(["## Whole models", "", said, "", measured_table(heads, cells, rows)])


def _beside_eager(row: ModelRow | None) -> list[str]:
    """Eager's time and ours with the ratio, and torch.compile's ratio alone."""
    if row is None:
        return ["–", "–"]
    timed = [name for name in OURS if getattr(row, f"{name}_ms")]
    if not timed:
        return ["not verified", _ratio(row, "compile")]
    ours = min(timed, key=lambda name: getattr(row, f"{name}_ms"))
    eager = milliseconds(row.eager_ms).removesuffix(" ms")
    ours_ms = milliseconds(getattr(row, f"{ours}_ms"))
    return [f"{eager} → {ours_ms} ({_ratio(row, ours)})", _ratio(row, "compile")]


def _ratio(row: ModelRow, name: str) -> str:
    return "noise" if row.is_noise(name) and row.over(name) else times(row.over(name))


def details_table(rows: Sequence[ModelRow]) -> str:
    """What verification, memory and coverage were."""
    heads = (
        *("model", "setting", "error, ours / eager", "gradients' error, ours / eager"),
        "peak MB + what cuBLAS works in, fused / backend / eager",
        "chains that can be fused, other Linears fused",
    )
    cells = [
        [
            *(row.model, row.setting),
            pair(row.ours_error, row.eager_error, ".1e"),
            pair(row.ours_gradient_error, row.eager_gradient_error, ".1e"),
            " / ".join(_memory(row, name) for name in (*OURS, "eager")),
            f"{row.fused_places} of {row.places}, {row.fused_linears} of {row.linears}",
        ]
        for row in rows
    ]
    return measured_table(heads, cells, rows)


def _memory(row: ModelRow, name: str) -> str:
    """Before cuBLAS' part was measured, without it."""
    found = [getattr(row, f"{name}_{what}_mb") for what in ("peak", "workspace")]
    return " + ".join(f"{mb:.0f}" for mb in found if mb is not None) or "–"


def exported_files(rows: Sequence[SuiteRow]) -> str:
    """What KernelBench's problems as exported files come to."""
    return f"{exported_sentence(rows)}.\n\n{provenance(rows)}" if rows else "Not measured yet."


def suite_table(rows: Sequence[SuiteRow]) -> str:
    """KernelBench's problems in six columns, and the sentence over all of them."""
    if not rows:
        return "Not measured yet."
    lines = markdown_lines(SUITE, [suite_cells(row) for row in rows])
    return "\n".join([*lines, "", suite_sentence(rows), "", provenance(rows)])
