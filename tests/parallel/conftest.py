"""Lets these tests import ranks.py beside them, as its workers do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
