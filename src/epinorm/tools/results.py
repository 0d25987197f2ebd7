"""One measured row, and the JSON files that hold rows."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch


class JsonRow:
    """A dataclass that a results file holds; ``pass_`` is written as "pass".

    Two rows with the same values under KEY measure the same thing: the newer one replaces the
    older.
    """

    KEY: ClassVar[tuple[str, ...]]

    @property
    def key(self) -> tuple[Any, ...]:
        """The values under KEY."""
        values = self.as_json()
        return tuple(values[name] for name in self.KEY)

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in a results file: numbers to four digits."""
        values = asdict(self)  # type: ignore[call-overload]
        return {("pass" if k == "pass_" else k): rounded(v) for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a row back; keys that this version does not know are left out."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        renamed = {("pass_" if k == "pass" else k): v for k, v in values.items()}
        return cls(**{k: v for k, v in renamed.items() if k in known})


@dataclass(frozen=True)
class Row(JsonRow):
    """One shape, dtype, precision and pass. Times in µs, memory in 10^6 bytes; None: not there.

    Errors are those of ``error_of``, the tensor and input whose
    error comes closest to what is allowed. A row that is not ``verified`` has no times.
    ``spreads`` are those of ``verdict.spreads``, over ``runs`` rounds.
    """

    KEY = ("shape", "dtype", "precision", "pass", "strategy", "gpu")

    shape: str
    m: int | None
    k: int | None
    n: int | None
    groups: int | None
    norm: str | None
    dtype: str
    precision: str
    pass_: str
    chain: str | None
    verified: bool
    strategy: str | None
    gpu: str
    torch: str
    commit: str | None
    date: str
    ours_us: float | None = None
    ours_prepacked_us: float | None = None
    eager_us: float | None = None
    compile_us: float | None = None
    compile_autotune_us: float | None = None
    linear_us: float | None = None
    copy_us: float | None = None
    ours_gpu_us: float | None = None
    ours_prepacked_gpu_us: float | None = None
    eager_gpu_us: float | None = None
    compile_gpu_us: float | None = None
    compile_autotune_gpu_us: float | None = None
    linear_gpu_us: float | None = None
    ours_wall_us: float | None = None
    eager_wall_us: float | None = None
    linear_wall_us: float | None = None
    ours_error: float | None = None
    eager_error: float | None = None
    error_of: str | None = None
    ours_peak_mb: float | None = None
    eager_peak_mb: float | None = None
    compile_peak_mb: float | None = None
    reason: str | None = None
    compile_reason: str | None = None
    compile_autotune_reason: str | None = None
    runs: int | None = None
    spreads: dict[str, list[float]] | None = None

    @property
    def speedup(self) -> float | None:
        """Eager's time over ours."""
        return self.eager_us / self.ours_us if self.eager_us and self.ours_us else None

    def is_noise(self, key: str) -> bool:
        """Whether the runs differ by more than ours and the competitor ``key`` do."""
        low, high = (self.spreads or {}).get(key, (0.0, 0.0))
        return low <= 1 <= high

    @property
    def error_ratio(self) -> float | None:
        """Our error over eager's; None where eager has none."""
        if self.ours_error is None or not self.eager_error:
            return None
        return self.ours_error / self.eager_error


def rounded(value: Any) -> Any:
    """Floats to four digits, in lists and dicts too."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if not isinstance(value, float):
        return value
    # JSON has no Inf and NaN; `reason` says what went wrong with such an error.
    return float(f"{value:.4g}") if math.isfinite(value) else None


def today() -> str:
    """As it stands in a row: 2026-01-31."""
    return date.today().isoformat()


def device_name(device: torch.device) -> str:
    """The GPU's name, e.g. "NVIDIA H200"; for a CPU its model and the number of threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        model = platform.machine()  # no /proc outside Linux
    return f"CPU {model}, {torch.get_num_threads()} threads"


def measured_on(device: torch.device) -> dict[str, Any]:
    """What every row says of where, with what and when it was measured."""
    facts = {"gpu": device_name(device), "torch": torch.__version__}
    return {**facts, "commit": commit(), "date": today()}


def device_slug(name: str) -> str:
    """A device's name as a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit(root: Path | None = None) -> str | None:
    """The commit that is measured: EPINORM_COMMIT, else HEAD of the .git above, else None.

    Read from the files, since a GPU machine need not have git.
    """
    if named := os.environ.get("EPINORM_COMMIT"):
        return named[:12]
    start = root or Path(__file__).resolve().parent
    for folder in (start, *start.parents):
        git = folder / ".git"
        if git.exists():
            return _head(git)
    return None


def _head(git: Path) -> str | None:
    """HEAD of a repository or of a worktree, whose ``.git`` is a file that says where."""
    try:
        if git.is_file():
            git = git.parent / git.read_text().strip().removeprefix("gitdir: ")
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:12] or None
        ref = head.removeprefix("ref: ")
        shared = git / "commondir"
        if shared.is_file():
            git = git / shared.read_text().strip()
        if (git / ref).is_file():
            return (git / ref).read_text().strip()[:12]
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {ref}"):
                return line[:12]
    except OSError:
        return None  # a folder named .git that is none, or a branch without a commit
    return None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing: into a temporary file beside it, then renamed.

    Raises OSError where the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file; raises ValueError if the file is not one."""
    return read_rows_of(Row, path)


AnyRow = TypeVar("AnyRow", bound=JsonRow)


def read_rows_of(kind: type[AnyRow], path: Path) -> list[AnyRow]:
    """As ``read_rows``, for rows of this kind."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return [kind.from_json(value) for value in values]
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a results file: {error}") from None


def merge_rows(path: Path, rows: Sequence[JsonRow]) -> None:
    """Put rows of one kind into a results file, each in place of the one with the same key."""
    there = [row for kind in {type(row) for row in rows} for row in _rows_there(kind, path)]
    _write(path, {row.key: row for row in (*there, *rows)}.values())


def _rows_there(kind: type[AnyRow], path: Path) -> list[AnyRow]:
    return read_rows_of(kind, path) if path.exists() else []


def add_run(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Append rows to a file that keeps those of every run, oldest first; returns the earlier ones.

    A file there that holds something else is a ValueError.
    """
    earlier = _rows_there(Row, path)
    _write(path, (*earlier, *rows))
    return earlier


def put_values(path: Path, values: Mapping[str, Any], key: Sequence[str]) -> None:
    """Put one measurement that is no row into a file of them, in place of those that have the same
    values under ``key``."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [old for old in kept if any(old[name] != values[name] for name in key)]
    write_atomic(path, json.dumps([*kept, dict(values)], indent=1, allow_nan=False) + "\n")


def _write(path: Path, rows: Iterable[JsonRow]) -> None:
    text = json.dumps([row.as_json() for row in rows], indent=1, allow_nan=False)
    write_atomic(path, text + "\n")
