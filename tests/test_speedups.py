"""README's picture: every measured number of it, none of a row that failed."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from epinorm.tools.models import ModelRow
from epinorm.tools.results import Row, read_rows
from readme_tables import newest
from speedups import PICTURED, THEMES, speedup_svg

ROOT = Path(__file__).parents[1]
ROW = next(
    row
    for row in read_rows(ROOT / "benchmarks" / "results" / "nvidia-h200.json")
    if row.shape == "kb62" and row.precision == "highest" and row.pass_ == "forward"
)
ROW = replace(ROW, ours_us=100.0, eager_us=450.0, compile_us=375.0, gpu="A <GPU>")


def texts(svg: str) -> list[str]:
    """Every text of the picture; raises if it is no XML."""
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter()
            if element.tag.endswith("}text")]  # fmt: skip


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_the_picture_holds_both_ratios_and_where_they_were_measured(theme: object) -> None:
    svg = speedup_svg([ROW], theme)
    said = texts(svg)
    assert "4.5×" in said
    assert "1.2×" in said
    assert "fp32" in said
    assert any("1024 rows, 8192 → 8192, GroupNorm, groups of 16 channels" in text for text in said)
    assert any("A <GPU>, PyTorch" in text for text in said)
    assert svg == speedup_svg([ROW], theme)


def test_what_failed_or_did_not_run_is_not_drawn() -> None:
    failed = replace(ROW, precision="high", verified=False, ours_us=None, eager_us=None)
    alone = replace(ROW, pass_="training", compile_us=None, ours_us=150.0)
    said = texts(speedup_svg([ROW, failed, alone], THEMES["light"]))
    assert "TF32" not in said
    assert said.count("1.2×") == 1
    assert "3.0×" in said
    with pytest.raises(ValueError, match="no verified row of kb62"):
        speedup_svg([failed, replace(ROW, shape="other")], THEMES["light"])


MODEL = ModelRow(
    "tdmpc2", "bf16-autocast", "float32", "highest", "training", True, 4, 4, 0, 0,
    "A <GPU>", "2.11", "abc", "2026-01-01",
    eager_ms=60.0, compile_ms=40.0, fused_ms=10.0, backend_ms=7.5,
)  # fmt: skip


def test_whole_models_come_first_by_the_faster_of_our_ways() -> None:
    chain = replace(ROW, shape="kb62")
    said = texts(speedup_svg([chain], THEMES["light"], [MODEL, replace(MODEL, eager_ms=None)]))
    assert said.count("8.0×") == 1
    assert said.count("1.5×") == 1
    assert said.index("autocast") < said.index("fp32")
    assert any("4 × (Linear 512 → 512" in text for text in said)


def test_what_noise_does_not_tell_from_eager_has_no_number() -> None:
    noisy = replace(
        MODEL, spreads={"fused": [0.1, 1.1], "backend": [0.1, 1.1], "compile": [0.9, 1.2]}
    )
    said = texts(speedup_svg([], THEMES["light"], [noisy]))
    assert not any(text.endswith("×") for text in said)
    wide = replace(ROW, spreads={"eager": [0.9, 9.0]})
    assert texts(speedup_svg([wide], THEMES["light"])).count("4.5×") == 0


def test_every_pictured_shape_is_drawn_once_it_is_measured() -> None:
    said = texts(speedup_svg([replace(ROW, shape=name) for name in PICTURED], THEMES["dark"]))
    assert said.count("4.5×") == len(PICTURED)


def test_the_newest_row_counts_and_on_one_day_the_fastest() -> None:
    old = replace(ROW, date="2026-01-01", ours_us=50.0)
    slow = replace(ROW, strategy="epilogue", ours_us=200.0)
    other = replace(ROW, dtype="bfloat16")
    rows: list[Row] = [old, slow, ROW, other]
    assert newest(rows) == [ROW, other]
    failed = replace(ROW, date="2027-01-01", verified=False, ours_us=None)
    assert newest([*rows, failed]) == [failed, other]
