"""Rows in files, tables, pictures and pages; README's tables are those of the results."""

import importlib
import json
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import readme_tables
import report
from epinorm.tools import tables
from epinorm.tools.models import ModelRow
from epinorm.tools.page import html_page, write_report
from epinorm.tools.plots import draw
from epinorm.tools.results import Row, commit, device_slug, merge_rows, read_rows, write_atomic
from processes import run_script

ROOT = Path(__file__).parents[1]

ROW = Row(
    shape="kb62",
    m=1024,
    k=8192,
    n=8192,
    groups=512,
    norm="group_norm",
    dtype="float32",
    precision="highest",
    pass_="forward",
    chain="group_norm(512,1e-05)|leaky_relu(0.01)|scale(2)",
    verified=True,
    strategy="single",
    gpu="NVIDIA H200",
    torch="2.11.0",
    commit="abcdef012345",
    date="2026-01-02",
    ours_us=714.0,
    eager_us=3070.0,
    compile_us=2707.0,
    linear_us=2688.0,
    ours_error=5.4e-7,
    eager_error=1.5e-6,
    error_of="output, randn",
)
TRAINING = replace(ROW, pass_="training", ours_us=2000.0, eager_us=8884.0, compile_us=None)
FAILED = replace(
    ROW,
    shape="skinny",
    verified=False,
    ours_us=None,
    eager_us=None,
    compile_us=None,
    linear_us=None,
    ours_error=float("inf"),
    reason="output on randn: 5 elements are <NaN>",
)


def test_a_row_has_the_keys_of_the_protocol() -> None:
    keys = (
        "shape m k n groups norm dtype precision pass chain ours_us ours_prepacked_us eager_us "
        "compile_us compile_autotune_us linear_us ours_error eager_error ours_peak_mb "
        "eager_peak_mb compile_peak_mb strategy gpu torch commit date"
    ).split()
    assert set(keys) <= set(ROW.as_json())


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    merge_rows(tmp_path / "a.json", [ROW])
    assert read_rows(tmp_path / "a.json") == [ROW]


def test_an_infinite_error_is_null_in_the_file(tmp_path: Path) -> None:
    merge_rows(tmp_path / "a.json", [FAILED])
    assert json.loads((tmp_path / "a.json").read_text())[0]["ours_error"] is None


def test_a_newer_row_replaces_the_one_that_measures_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    merge_rows(path, [ROW, TRAINING])
    merge_rows(path, [replace(ROW, ours_us=600.0)])
    assert [r.ours_us for r in read_rows(path)] == [600.0, 2000.0]
    for other in ({"dtype": "bfloat16"}, {"precision": "high"}, {"strategy": "epilogue"}):
        merge_rows(path, [replace(ROW, **other)])
    assert len(read_rows(path)) == 5


def test_a_file_that_is_no_results_file_is_said(tmp_path: Path) -> None:
    for text in ("{", '{"a": 1}', '[{"shape": "x"}]'):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match="is not a results file"):
            read_rows(tmp_path / "a.json")


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_commit_is_read_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPINORM_COMMIT", raising=False)
    assert commit(tmp_path) is None
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit(tmp_path) is None
    (git / "packed-refs").write_text("# pack-refs\n" + "b" * 40 + " refs/heads/main\n")
    assert commit(tmp_path / "deeper") == "b" * 12
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert commit(tmp_path) == "a" * 12
    own = git / "worktrees" / "side"
    own.mkdir(parents=True)
    (own / "HEAD").write_text("ref: refs/heads/main\n")
    (own / "commondir").write_text("../..\n")
    worktree = tmp_path / "worktree"
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {own}\n")
    assert commit(worktree) == "a" * 12
    monkeypatch.setenv("EPINORM_COMMIT", "c" * 40)
    assert commit(tmp_path) == "c" * 12


def test_device_names_become_file_names() -> None:
    assert device_slug("NVIDIA H200") == "nvidia-h200"
    assert device_slug("CPU AMD EPYC, 2 threads") == "cpu-amd-epyc-2-threads"


def test_times_are_given_in_one_unit() -> None:
    assert tables.microseconds(714.2) == "714 µs"
    assert tables.microseconds(13.456) == "13.5 µs"
    assert tables.microseconds(45_600) == "45.6 ms"
    assert tables.microseconds(1500, of=45_600) == "1.5 ms"
    assert tables.microseconds(None) == "–"


def test_the_table_holds_the_numbers_and_no_empty_column() -> None:
    text = readme_tables.markdown_table([ROW])
    assert "| kb62 | 1024, 8192 → 8192, 512 groups | float32 `highest` | 714 µs | 3070 µs |" in text
    assert "4.30×" in text
    assert "0.36×" in text
    assert "prepacked" not in text
    assert "NVIDIA H200, PyTorch 2.11.0, commit abcdef012345" in text


def test_a_failed_row_shows_no_speed() -> None:
    line = readme_tables.markdown_table([FAILED]).splitlines()[2]
    assert "not verified" in line
    assert "µs" not in line


def test_the_page_needs_nothing_from_outside() -> None:
    page = html_page("kb62", [ROW, TRAINING, FAILED], [replace(ROW, date="2025-12-31")])
    assert page.count('class="bars"') == 2
    assert "1 earlier run" in page
    assert "2025-12-31" in page
    assert "Not verified" in page
    assert "&lt;NaN&gt;" in page
    links = re.findall(r"""(?:src|href)=["'](?!#)([^"']*)""", page)
    assert links == []
    assert "@import" not in page
    assert "<script" not in page
    assert "url(http" not in page


def test_a_page_with_verified_rows_alone_says_so() -> None:
    page = html_page("kb62", [ROW])
    assert "Verified: every error" in page
    assert "What did not run" not in page


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[ROW], [ROW, TRAINING, FAILED]])
def test_pictures_are_drawn(rows: list[Row]) -> None:
    assert draw(rows, "png").startswith(b"\x89PNG")
    svg = draw(rows, "svg").decode()
    assert "</svg>" in svg
    assert svg == draw(rows, "svg").decode()  # no date: the same rows give the same file


def test_nothing_verified_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no verified row"):
        draw([FAILED], "png")


def test_accumulation_table(tmp_path: Path) -> None:
    assert readme_tables.accumulation_table(tmp_path) == "Not measured yet."
    row = {"shape": "kb62", "dtype": "float32", "precision": "high", "verified": True}
    row |= {"gpu": "G", "torch": "2.11", "commit": "abc", "date": "2026-11-22"}
    for name, us, peak in (("in_place", 800, 286), ("ours", 950, 404), ("eager", 2400, 436)):
        row |= {f"{name}_us": us, f"{name}_peak_mb": peak}
    row["compile_us"] = 1600
    refused = {**row, "precision": "native", "dtype": "bfloat16", "verified": False}
    (tmp_path / "g.json").write_text(json.dumps([row, refused]))
    lines = readme_tables.accumulation_table(tmp_path).splitlines()
    assert lines[2] == (
        "| kb62, float32 `high` | 800 µs | 950 µs (1.19×) | 2400 µs (3.00×) | 1600 µs (2.00×) "
        "| 286 / 404 / 436 |"
    )
    assert lines[3].startswith("| kb62, bfloat16 | not verified |")
    assert lines[2].count("|") == lines[3].count("|") == lines[0].count("|")
    assert "commit abc" in lines[-1]


def test_judged_table(tmp_path: Path) -> None:
    verdict = {
        "problem": "p.py", "dtype": "float32", "precision": "high", "clean": True, "gpu": "G",
        "torch": "2", "commit": "abc", "date": "2026-01-01",
        "timings": [{"pass": "forward", "solution_us": 100.0, "eager_us": 250.0}],
    }  # fmt: skip
    assert readme_tables.judged_table(tmp_path) == "Not measured yet."
    (tmp_path / "a.json").write_text(json.dumps(verdict))
    wrong = {**verdict, "clean": False, "timings": [], "dtype": "bfloat16", "precision": "native"}
    (tmp_path / "b.json").write_text(json.dumps(wrong))
    lines = readme_tables.judged_table(tmp_path).splitlines()
    assert lines[2] == "| p | float32 `high`, forward | 100 µs | 250 µs | 2.50× | clean |"
    assert lines[3] == "| p | bfloat16, not timed | – | – | – | not clean |"
    assert lines[-1] == "G, PyTorch 2, commit abc, 2026-01-01. Medians of interleaved runs."


def test_tables_of_rows_have_six_columns_and_none_that_is_empty(tmp_path: Path) -> None:
    merge_rows(tmp_path / "gpu.json", [replace(ROW, ours_peak_mb=3.0, eager_peak_mb=5.0), FAILED])
    lines = report.marked_table("gpu-forward", tmp_path).splitlines()
    assert lines[0] == "| shape | m, k → n | dtype, strategy | epinorm | eager | compile |"
    assert lines[2].endswith(" | 714 µs | 3070 µs (4.30×) | 2707 µs (3.79×) |")
    assert lines[3].endswith(" | not verified | – | – |")
    lines = report.marked_table("gpu-forward-details", tmp_path).splitlines()
    assert lines[0].endswith("| linear alone | error, ours / eager | peak MB, ours / eager |")
    assert lines[2].endswith(" | 2688 µs | 5.4e-07 / 1.5e-06 (0.36×) | 3 / 5 |")
    assert report.marked_table("gpu-forward-loop", tmp_path) == "Not measured yet."


def test_rounding_table(tmp_path: Path) -> None:
    row = {"shape": "mid", "dtype": "fp16", "pass": "training", "once_us": 100.0, "eager_us": 102.0}
    row |= {"gpu": "G", "torch": "2", "commit": "abc", "date": "2026-01-01"}
    (tmp_path / "g.json").write_text(json.dumps([row]))
    lines = readme_tables.rounding_table(tmp_path).splitlines()
    assert lines[0].endswith("| fp16, forward | fp16, training |")
    assert lines[2] == "| mid | – | – | – | 1.020 |"


def test_coverage_table(tmp_path: Path) -> None:
    assert readme_tables.coverage_table(tmp_path) == "Not measured yet."
    row = {"kind": "BatchNorm", "training_fused": 0, "training_places": 6, "eval_fused": 6}
    row |= {"eval_places": 6, "models": 2, "packages": "timm 1", "commit": "a", "date": "today"}
    (tmp_path / "g.json").write_text(json.dumps([row]))
    lines = readme_tables.coverage_table(tmp_path).splitlines()
    assert lines[2] == "| BatchNorm | 0 of 6 | 6 of 6 |"
    assert lines[-1] == "2 architectures; timm 1, commit a, today."


def test_sums_table(tmp_path: Path) -> None:
    facts = {"gpu": "a GPU", "torch": "2", "commit": "abc", "date": "2026-01-02"}
    row = {"shape": "bert_out", "kind": "high", "one": 90.0, "two": 101.0, "eager": 146.0, **facts}
    (tmp_path / "gpu.json").write_text(json.dumps([row | {"compile": 109.0}]))
    lines = readme_tables.sums_table(tmp_path).splitlines()
    assert lines[2] == "| bert_out | high | 90 µs | 101 µs | 146 µs | 109 µs |"


def test_others_table(tmp_path: Path) -> None:
    assert readme_tables.others_table(tmp_path) == "Not measured yet."
    row = {"library": "quack", "version": "0.6", "case": "mid", "setting": "high"}
    row |= {"pass": "forward", "eager_us": 300.0, "fused_us": 100.0}
    row |= {"gpu": "G", "torch": "2", "commit": "abc", "date": "2026-01-01"}
    off = {**row, "other_us": 200.0, "other_error": 3e-3, "eager_error": 2e-3}
    near = {**off, "spreads": {"other": [0.9, 1.2]}, "other_error": 2e-3}
    (tmp_path / "g.json").write_text(json.dumps([row, off, near]))
    lines = readme_tables.others_table(tmp_path).splitlines()
    assert lines[2] == "| quack | mid | high, forward | 300 µs | not verified | 100 µs (3.00×) |"
    assert "| 200 µs (1.50×, error 1.5× eager's) |" in lines[3]
    assert "| 200 µs (noise) |" in lines[4]
    assert lines[-1].endswith("Medians of interleaved runs. quack 0.6.")


def test_host_table(tmp_path: Path) -> None:
    facts = {"gpu": "G", "torch": "2", "commit": "abc", "date": "2026-01-01", "pass": "forward"}
    loop = {"name": "kb62_v0", "blocks": 1, "setting": "bf16", "us": {"eager": 50.0, "fuse": 20.0}}
    first = {"name": "bert_base", "blocks": 12, "setting": "highest"}
    first |= {"seconds": {"cold": {"first": 9.0}, "warm": {"first": 5.0}}}
    (tmp_path / "g.json").write_text(json.dumps([loop | facts, first | facts]))
    lines = readme_tables.host_table(tmp_path).splitlines()
    assert lines[2] == "| kb62_v0 × 1, bf16 | forward | 50 µs | 20 µs | – | – |"
    assert lines[-1].endswith(
        "bert_base fused, highest forward, compiled before: 5.0 s. "
        "First call of bert_base fused, highest forward, nothing on disk: 9.0 s."
    )


def test_matrix_table(tmp_path: Path) -> None:
    reports = []
    for i, counts in enumerate(('tests="7" skipped="1" failures="1" errors="1"', 'tests="3"')):
        reports.append(str(tmp_path / f"{i}.xml"))
        Path(reports[i]).write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    row = runpy.run_path(str(ROOT / "scripts" / "matrix_row.py"))["row_of"](reports)
    assert (row["passed"], row["skipped"], row["failed"]) == (7, 1, 2)
    assert readme_tables.matrix_table(tmp_path) == "Not measured yet."
    older = {
        **row,
        "torch": "2.9.1",
        "commit": "abcdef0123",
        "date": "2026-01-02",
        "python": "3.11",
    }
    (tmp_path / "cpu.json").write_text(json.dumps([{**older, "torch": "2.10.0"}, older]))
    lines = readme_tables.matrix_table(tmp_path).splitlines()
    assert lines[2] == "| 2.9.1 | 3.11 | 7 | 2 | 1 | abcdef0, 2026-01-02 |"
    assert lines[3].startswith("| 2.10.0")


def test_write_report(tmp_path: Path) -> None:
    written = write_report(tmp_path, "a", [ROW], "title")
    assert [p.name for p in written] == ["a.png", "a.svg", "a.html"]
    assert [p.name for p in write_report(tmp_path, "b", [FAILED], "t")] == ["b.html"]


MARKED = "before\n<!-- begin:gpu-forward -->\nold\n<!-- end:gpu-forward -->\nafter\n"


def test_marked_tables_are_made_anew(tmp_path: Path) -> None:
    merge_rows(tmp_path / "gpu.json", [ROW, TRAINING])
    text = report.update_marked(MARKED, tmp_path)
    assert text.startswith("before\n<!-- begin:gpu-forward -->\n| shape |")
    assert text.endswith("<!-- end:gpu-forward -->\nafter\n")
    assert "old" not in text
    assert "8884" not in text
    assert report.update_marked(text, tmp_path) == text


def test_the_short_table_has_six_columns_and_one_row_a_setting(tmp_path: Path) -> None:
    slower = replace(ROW, strategy="epilogue", ours_us=900.0)
    high = replace(ROW, precision="high")
    merge_rows(tmp_path / "gpu.json", [high, ROW, slower, TRAINING, replace(ROW, shape="other")])
    text = report.update_marked(MARKED.replace("-forward", "-forward-short"), tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| shape | dtype | epinorm | eager | compile | over eager |"
    assert lines[2] == "| kb62 | float32 `highest` | 714 µs | 3070 µs | 2707 µs | 4.30× |"
    assert [line.split(" | ")[1] for line in lines[3:]] == ["float32 `high`"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MARKED.replace("-forward", "-sideways"), "must end in -forward"),
        (MARKED.replace("<!-- end:gpu-forward -->", ""), "has no <!-- end:gpu-forward -->"),
    ],
)
def test_a_wrong_marker_is_said(tmp_path: Path, text: str, said: str) -> None:
    merge_rows(tmp_path / "gpu.json", [ROW])
    with pytest.raises(ValueError, match=re.escape(said)):
        report.update_marked(text, tmp_path)


def test_what_is_not_measured_is_said(tmp_path: Path) -> None:
    assert "\nNot measured yet.\n" in report.update_marked(MARKED, tmp_path)


def test_readme_and_docs_hold_the_tables_of_the_results() -> None:
    assert report.update_readme(ROOT, check=True) == [], "run: make report"


def test_the_cost_model_of_several_gpus_is_that_of_the_results(tmp_path: Path) -> None:
    page = ROOT / "docs" / "scale.md"
    copied = tmp_path / "scale.md"
    copied.write_text(page.read_text())
    sys.path.insert(0, str(ROOT / "docs" / "internals"))
    scale_model = importlib.import_module("scale_model")
    scale_model.write(scale_model.RESULTS, copied)
    assert copied.read_text() == page.read_text(), "run: make report"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["precision", "training"])
def test_a_page_with_a_plot_is_that_of_the_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "internals" / f"{name}.md"
    (tmp_path / page.name).write_text(page.read_text())
    monkeypatch.syspath_prepend(page.parent)
    plot = importlib.import_module(f"plot_{name}")
    monkeypatch.setattr(plot, "HERE", tmp_path)
    plot.main()
    assert (tmp_path / page.name).read_text() == page.read_text(), "run: make report"


def test_every_results_file_reads_back() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        rows = read_rows(path)
        assert rows, path
        for row in rows:
            assert row.verified or row.ours_us is None, (path, row)


@pytest.mark.slow
def test_the_command_draws_a_results_file(tmp_path: Path) -> None:
    merge_rows(tmp_path / "gpu.json", [ROW])
    script = ROOT / "benchmarks" / "report.py"
    done = run_script(script, str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.json", "gpu.png", "gpu.svg", "gpu.html"}
    done = run_script(script, str(tmp_path / "no.json"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_markers_of_whole_models_and_of_kernelbench(tmp_path: Path) -> None:
    forward = ModelRow(
        "bert_base", "bf16", "bfloat16", "native", "forward", True, 24, 24, 48, 0,
        "H200", "2.11", "abc", "2026-01-01", eager_ms=6.0, fused_ms=5.0,
    )  # fmt: skip
    first = replace(forward, setting="highest", pass_="forward", eager_ms=40.0, fused_ms=10.0)
    other = replace(first, pass_="training")
    merge_rows(tmp_path / "models" / "h200.json", [forward, first, other])
    table = report.marked_table("models-h200-forward", tmp_path)
    assert [line.split(" | ")[1] for line in table.splitlines()[2:4]] == ["highest", "bf16"]
    assert "40 ms | – | 10 ms (4.00×)" in table
    assert "| 24 of 24, 0 of 48 |" in report.marked_table("models-h200-forward-details", tmp_path)
    section = report.marked_table("models-h200-section", tmp_path)
    assert "| bert_base | highest | 40 → 10 ms (4.00×) | – | 40 → 10 ms (4.00×) | – |" in section
    assert "| bert_base | bf16 | 6 → 5 ms (1.20×) | – | – | – |" in section
    assert report.marked_table("models-a100-section", tmp_path) == ""
    assert report.marked_table("models-a100-training", tmp_path) == "Not measured yet."
    assert report.marked_table("kernelbench-h200", tmp_path) == "Not measured yet."
    with pytest.raises(ValueError, match="must end in"):
        report.marked_table("models-h200-backward", tmp_path)
