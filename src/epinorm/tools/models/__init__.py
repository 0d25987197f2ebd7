"""Whole models: which, in which settings, how exact and how fast, and where the time went."""

from epinorm.tools.models.bench import bench_model
from epinorm.tools.models.named import NAMED
from epinorm.tools.models.rows import ModelRow
from epinorm.tools.models.subject import SETTINGS, Subject, load_subject

__all__ = [
    "NAMED",
    "SETTINGS",
    "ModelRow",
    "Subject",
    "bench_model",
    "load_subject",
]
