"""Every test here starts with nothing captured, and imports what the folder above holds."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def nothing_captured(fresh_dynamo: None) -> None:
    """For ``fresh_dynamo``."""
