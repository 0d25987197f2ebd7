"""Whole models as tables for README, docs and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from epinorm.tools.models.rows import COMPETITORS, OURS, ModelRow
from epinorm.tools.models.suite import SEEDS, SuiteRow, geometric_mean
from epinorm.tools.tables import markdown_lines, measured_table, microseconds, provenance, times

__all__ = [
    "NAMES",
    "SUITE",
    "details_table",
    "milliseconds",
    "models_section",
    "models_table",
    "suite_cells",
]
__all__ += ["suite_sentence", "suite_table"]

NAMES = {
    "eager": "eager",
    "compile": "`torch.compile`",
    "fused": "`epinorm.fuse`",
    "backend": '`backend="epinorm"`',
}


def milliseconds(value: float | None) -> str:
    """Three digits, with the unit; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


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


SHORT_MODELS = ("bert_base", "vit_b", "llama_4", "mlp_2048")
SHORT_SETTINGS = ("highest", "bf16")


def models_section(rows: Sequence[ModelRow]) -> str:
    """README's section of whole models, by the faster of our two ways; nothing if none was
    measured."""
    rows = [r for r in rows if r.model in SHORT_MODELS and r.setting in SHORT_SETTINGS]
    if not rows:
        return ""
    heads = ("model", "setting", "pass", "eager", "`torch.compile`", "epinorm")
    cells = []
    for row in rows:
        timed = [name for name in OURS if getattr(row, f"{name}_ms")]
        ours = min(timed, key=lambda name: getattr(row, f"{name}_ms")) if timed else OURS[0]
        ways = [_cell(row, name) for name in ("eager", "compile", ours)]
        cells.append([row.model, row.setting, row.pass_, *ways])
    said = (
        f"Whole models, by the faster of {NAMES['fused']} and {NAMES['backend']}; "
        "`epinorm bench bert_base` measures one, outputs and all gradients verified first."
    )
    return "\n".join(["## Whole models", "", said, "", measured_table(heads, cells, rows)])


def details_table(rows: Sequence[ModelRow]) -> str:
    """What verification, memory and coverage were."""
    heads = (
        *("model", "setting", "error, ours / eager", "gradients' error, ours / eager"),
        *("peak MB, fused / eager", "chains that can be fused, other Linears fused"),
    )
    cells = [
        [
            *(row.model, row.setting),
            _pair(row.ours_error, row.eager_error, ".1e"),
            _pair(row.ours_gradient_error, row.eager_gradient_error, ".1e"),
            _pair(row.fused_peak_mb, row.eager_peak_mb, ".0f"),
            f"{row.fused_places} of {row.places}, {row.fused_linears} of {row.linears}",
        ]
        for row in rows
    ]
    return measured_table(heads, cells, rows)


def _pair(ours: float | None, eager: float | None, form: str) -> str:
    return "–" if ours is None or eager is None else f"{ours:{form}} / {eager:{form}}"


SUITE = ("problem", "epinorm", "eager", "compile", "over eager", "error, ours / eager")


def suite_cells(row: SuiteRow) -> list[str]:
    """One problem of KernelBench in the columns of SUITE."""
    ours = microseconds(row.ours_us, row.eager_us) if row.right else "not right"
    both = _pair(row.ours_error, row.eager_error, ".1e")
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
    odd = [str(row.problem) for row in right if row.seeds < len(SEEDS)]
    if odd:
        said += f"; KernelBench's rule fails Model in float64 too, and so ours, in {', '.join(odd)}"
    slowest = min(right, key=lambda row: row.over("eager") or 0.0)
    return f"{said}; the least is {slowest.over('eager'):.2f} ({slowest.name})."


def suite_table(rows: Sequence[SuiteRow]) -> str:
    """KernelBench's problems in six columns, and the sentence over all of them."""
    if not rows:
        return "Not measured yet."
    lines = markdown_lines(SUITE, [suite_cells(row) for row in rows])
    return "\n".join([*lines, "", suite_sentence(rows), "", provenance(rows)])
