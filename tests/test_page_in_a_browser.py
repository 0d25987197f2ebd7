"""The page of `epinorm bench` in a real browser: no overflow on a desk or a phone, no error."""

import html
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from epinorm.tools.page import html_page
from epinorm.tools.results import Row

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"),
)
WIDTHS = (1280, 390)

ROW = Row(
    *("a_problem_with_a_long_name_and_then_some", 1024, 8192, 8192, 512, "group_norm"),
    *("float32", "highest", "forward", "group_norm(512,1e-05)|leaky_relu(0.01)|scale(2)", True),
    *("single", "NVIDIA H200", "2.11.0+cu130", "abcdef012345", "2026-01-02"),
    **{"ours_us": 714.0, "ours_prepacked_us": 553.0, "eager_us": 3070.0, "compile_us": 2707.0},
    **{"linear_us": 2688.0, "ours_error": 1.2e-7, "eager_error": 6e-7, "error_of": "dW on rand"},
    **{"ours_peak_mb": 441.0, "eager_peak_mb": 436.0, "runs": 30},
    spreads={"eager": [4.1, 4.4], "compile": [3.6, 3.9]},
)
FAILED = replace(ROW, pass_="training", verified=False, ours_us=None, reason="dW is " + "x" * 90)

# The page in a frame of each width: how far it reaches to the right.
FRAMES = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<iframe srcdoc="{page}" style="border:0;height:900px"></iframe>
<script>onload = () => {{
  const frame = document.querySelector("iframe"), found = [];
  for (const width of {widths}) {{
    frame.style.width = width + "px";
    for (const fold of frame.contentDocument.querySelectorAll("details")) fold.open = true;
    const page = frame.contentDocument.documentElement;
    found.push(width + " " + page.scrollWidth + " " + page.querySelectorAll(".bar").length);
  }}
  document.getElementById("found").textContent = found.join(";");
}};</script>"""


@pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="there is no Chromium here")
def test_no_overflow_and_no_error(tmp_path: Path) -> None:
    page = html_page("a title", [ROW, FAILED], [replace(ROW, date="2025-12-31")] * 3)
    frames = FRAMES.format(page=html.escape(page), widths=list(WIDTHS))
    (tmp_path / "frames.html").write_text(frames, "utf-8")
    assert CHROMIUM is not None, "CI installs Chromium (.ci/run)"
    done = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={tmp_path}/user", f"file://{tmp_path}/frames.html"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    found = re.search(r'id="found">([^<]+)<', done.stdout)
    assert found is not None, done.stderr
    for said, width in zip(found[1].split(";"), WIDTHS, strict=True):
        asked, reaches, bars = map(int, said.split())
        assert (asked, bars) == (width, 5)
        assert reaches <= width
    assert "CONSOLE" not in done.stderr
