"""The sweep's shapes are the same each time, and its picture says what was wrong or slow."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from epinorm.chain import Chain
from speedups import THEMES
from sweep_plot import svg


def sweep() -> Any:
    path = Path(__file__).parents[1] / "benchmarks" / "sweep.py"
    spec = importlib.util.spec_from_file_location("sweep", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sweep"] = module
    spec.loader.exec_module(module)
    return module


def test_shapes_and_picture():
    module = sweep()
    drawn = module.shapes()
    assert drawn == module.shapes()
    assert [shape.training for shape in drawn].count(True) == 100
    for shape in drawn:
        chain = Chain.parse(shape.chain)
        assert chain.norm is None or chain.channels_per_group(shape.n) > 0
    facts = {"gpu": "a GPU", "torch": "2", "ours_wall_us": 10.0, "eager_wall_us": 10.0}
    rows = [
        {"verified": True, "training": False, "eager_us": 100.0, "ours_us": 25.0, **facts},
        {"verified": True, "training": True, "eager_us": 100.0, "ours_us": 110.0, **facts},
        {"verified": False, "training": True, **facts},
    ]
    for theme in THEMES.values():
        picture = svg(rows, theme)
        assert picture.count("<circle") == 2
        assert "below 0.97: 1 by the GPU’s time, 0 in a loop; 1 wrong" in picture
