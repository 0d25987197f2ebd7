"""``epinorm bench`` for whole models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from epinorm_cli.options import UsageError, device_of, one_of, passes_of

if TYPE_CHECKING:
    from epinorm.tools.models.rows import ModelRow
    from epinorm.tools.models.suite import SuiteRow


def is_whole_model(text: str) -> bool:
    """Whether the text is a name or an import path, not a problem file."""
    return not text.endswith(".py") and not Path(text).exists()


def bench_models(
    text: str,
    settings: str,
    training: bool | None,
    small: bool,
    device: str | None,
    compile_: bool,
    runs: int | None,
    out_folder: Path,
    as_json: bool,
) -> bool:
    """Measure a model in each setting and pass; whether all of it was verified."""
    from dataclasses import replace

    from epinorm.tools.console import out, pass_name, print_json, progress
    from epinorm.tools.models import SETTINGS, bench_model, load_subject
    from epinorm.tools.models.bench import FEW_RUNS
    from epinorm.tools.verdict import verdict

    where = device_of(device)
    names = dict.fromkeys(name.strip() for name in settings.split(","))
    chosen = [SETTINGS[one_of("--settings", name, tuple(SETTINGS))] for name in names]
    if where.type != "cuda" and any(s.precision == "high" for s in chosen):
        raise UsageError(f"setting high (TF32) exists on CUDA alone, the device is {where}")
    subject = load_subject(text, small)
    timing = FEW_RUNS if runs is None else replace(FEW_RUNS, runs=runs)
    rows = []
    for setting in chosen:
        for is_training in passes_of(training):
            label = f"{subject.name}, {setting.name}, {pass_name(is_training)}"
            with progress(label) as notify:
                competitors = ("compile", "backend") if compile_ else ()
                row = bench_model(subject, setting, is_training, where, competitors, timing, notify)
            rows.append(row)
            path = _write_row(out_folder / "models", row)
            if not as_json:
                _show(row)
    page = _write_page(out_folder / f"{subject.name}.html", rows)
    if as_json:
        print_json([row.as_json() for row in rows])
    else:
        for row in rows:
            out.print(f"{row.setting}: {verdict(row.as_row())}", style="bold", markup=False)
        out.print(f"results: {path}", markup=False)
        if page:
            out.print(f"page: {page}", markup=False)
    return all(row.verified for row in rows)


def _write_row(folder: Path, row: ModelRow | SuiteRow) -> Path:
    """Add a row to its GPU's results in the folder, or say why that failed; the file's path."""
    from epinorm.tools.console import err
    from epinorm.tools.results import device_slug, merge_rows

    path = folder / f"{device_slug(row.gpu)}.json"
    try:
        merge_rows(path, [row])
    except (OSError, ValueError) as error:
        err.print(f"results were not written to {path}: {error}", markup=False)
    return path


def _write_page(path: Path, rows: list[ModelRow]) -> Path | None:
    from epinorm.tools.console import err
    from epinorm.tools.page import html_page
    from epinorm.tools.results import write_atomic

    try:
        write_atomic(path, html_page(path.stem, [row.as_row() for row in rows]))
    except OSError as error:
        err.print(f"the page was not written to {path}: {error}", markup=False)
        return None
    return path


def _show(row: ModelRow) -> None:
    from epinorm.tools.console import out, pass_name, plain_table
    from epinorm.tools.models.rows import COMPETITORS
    from epinorm.tools.models.tables import NAMES, milliseconds

    pass_ = pass_name(row.pass_ == "training")
    out.print(
        f"{row.model}, {row.setting}, {pass_}: {row.fused_places} of {row.places} chains can be "
        f"fused, {row.fused_linears} of {row.linears} other Linears are, on {row.gpu}",
        style="bold", markup=False,
    )  # fmt: skip
    table = plain_table([""], ("time", "over eager", "in a loop", "peak MB"))
    for name in COMPETITORS:
        values: Any = [getattr(row, f"{name}_{key}") for key in ("ms", "wall_ms", "peak_mb")]
        if values[0] is None and name not in (row.reasons or {}):
            continue
        peak = "–" if values[2] is None else f"{values[2]:.0f}"
        cells = [milliseconds(values[0]), _ratio(row, name), milliseconds(values[1]), peak]
        table.add_row(NAMES[name], *cells)
    out.print(table)
    if row.ours_error is not None and row.eager_error is not None:
        out.print(f"error {row.ours_error:.1e}, eager's {row.eager_error:.1e}", markup=False)
    if row.ours_gradient_error is not None and row.eager_gradient_error is not None:
        both = f"{row.ours_gradient_error:.1e}, eager's {row.eager_gradient_error:.1e}"
        out.print(f"gradients' error {both}", markup=False)
    for name, reason in (row.reasons or {}).items():
        out.print(f"{NAMES[name]}: {reason}", style="red", markup=False)
    for name, of in (row.families or {}).items():
        said = ", ".join(f"{family} {ms:.3g} ms" for family, ms in of.items())
        out.print(f"{NAMES[name]}: {said}", markup=False)
    out.print()


def _ratio(row: ModelRow, name: str) -> str:
    from epinorm.tools.tables import times

    between = row.between(name)
    if between is None:
        return times(row.over(name))
    said = f"{between[0]:.2f} to {between[1]:.2f}"
    if row.is_noise(name):
        return f"not distinguishable ({said})"
    return f"{times(row.over(name))} ({said})"


def bench_suite(
    folder: Path,
    problems: str | None,
    scale: int,
    device: str | None,
    compile_: bool,
    runs: int | None,
    out_folder: Path,
    as_json: bool,
    exported: bool = False,
    judged: bool = False,
) -> bool:
    """Run KernelBench's problems that begin with a product; whether all of them are right."""
    from dataclasses import replace

    from epinorm.tools.console import err, out, plain_table, print_json, progress
    from epinorm.tools.models import suite
    from epinorm.tools.models.bench import FEW_RUNS
    from epinorm.tools.models.tables import SUITE, suite_cells, suite_sentence
    from epinorm.tools.tables import times

    where = device_of(device)
    files = suite.problem_files(folder)
    if problems is not None:
        chosen = [one_of("--problems", p, tuple(map(str, files))) for p in problems.split(",")]
        files = {int(p): files[int(p)] for p in chosen}
    timing = FEW_RUNS if runs is None else replace(FEW_RUNS, runs=runs)
    rows: list[suite.SuiteRow] = []
    for done, (number, path) in enumerate(files.items(), 1):
        with progress(f"{done} of {len(files)}, {path.stem}") as notify:
            row = suite.bench_problem(
                *(number, path, where),
                compile=compile_, scale=scale, timing=timing, notify=notify, judging=judged,
                exported=out_folder / "exported" / path.name if exported or judged else None,
            )  # fmt: skip
        rows.append(row)
        _write_row(out_folder / "kernelbench", row)
        said = times(row.over("eager")) if row.right else f"not right: {row.reason}"
        err.print(f"{done} of {len(files)}, {row.name}: {said}", markup=False)
    if as_json:
        print_json([row.as_json() for row in rows])
    else:
        table = plain_table()
        table.add_column(SUITE[0], overflow="fold")  # where a terminal is narrow, it gives way
        for head in SUITE[1:]:
            table.add_column(head, no_wrap=True)
        for row in rows:
            table.add_row(*suite_cells(row))
        out.print(table)
        for row in rows:
            if row.reason:
                out.print(f"{row.name}: {row.reason}", style="red", markup=False)
            if row.exported_reason:
                said = f"{row.name}, exported: {row.exported_reason}"
                out.print(said, style="red", markup=False)
        out.print(suite_sentence(rows), markup=False)
    return all(row.is_right for row in rows)
