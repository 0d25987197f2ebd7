"""The notebooks' code runs from top to bottom, on a CPU."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path) -> None:
    names: dict[str, object] = {"__name__": "notebook"}
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code
    for number, text in enumerate(code, 1):
        exec(compile(text, f"{path.name} cell {number}", "exec"), names)
