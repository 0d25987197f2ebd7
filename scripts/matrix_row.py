"""Keep what the tests said against one version of PyTorch, for docs/reference/settings.md.

VENV/bin/python scripts/matrix_row.py REPORT.xml...    # pytest's --junitxml, of all parts of a run
"""

import platform
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

from epinorm.tools.results import commit, put_values, today

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "matrix" / "cpu.json"
KEY = ("torch",)


def row_of(reports: list[str]) -> dict[str, object]:
    """How many tests passed, were skipped and failed, in all of the reports together."""
    found: Counter[str] = Counter()
    for report in reports:
        for suite in ElementTree.parse(report).iter("testsuite"):
            found.update({key: int(suite.get(key, 0)) for key in ("tests", "skipped")})
            found["failed"] += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {
        "torch": torch.__version__.partition("+")[0], "python": platform.python_version(),
        "passed": found["tests"] - found["skipped"] - found["failed"],
        "skipped": found["skipped"], "failed": found["failed"],
        "commit": commit(), "date": today(),
    }  # fmt: skip


if __name__ == "__main__":
    put_values(RESULTS, row_of(sys.argv[1:]), KEY)
