"""What `epinorm tune` measured on this machine's GPUs, on disk beside the compiled kernels.

One small JSON file for each GPU name, in a private folder under the cache's rules (cache.py). What
it says decides which of our own kernels runs, never what a kernel is: a tile counts only while it
is one of the plan's candidates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from epinorm.backends import cache
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.runtime.device import device_index, stand_in
from epinorm.backends.memo import memo
from epinorm.problem import Problem
from epinorm.said import warn_once

FORMAT_VERSION = 1
_FOLDER = "tuned"
_SUFFIX = ".json"
_FIELD_TYPES = typing.get_type_hints(Tile)


@dataclass(frozen=True)
class Choice:
    """What was fastest: ``single`` with a tile, or ``epilogue`` without; its time when measured."""

    strategy: Literal["single", "epilogue"]
    tile: Tile | None
    microseconds: float


def gpu_name(device: torch.device) -> str | None:
    """The GPU's name as PyTorch says it; None where there is none, or a recorder in its place."""
    if stand_in() is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device_index(device))


def key_of(problem: Problem) -> str:
    """The facts of a problem that decide which tile is fastest, as one line of text."""
    facts = {
        "planes": problem.planes,
        "channels": problem.chain.channels_per_group(problem.n),
        "m": problem.m,
        "k": problem.k,
        "n": problem.n,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "out": str(problem.out_dtype).removeprefix("torch."),
        "training": problem.training,
        "precision": problem.precision,
    }
    return " ".join(f"{name}={value}" for name, value in facts.items())


def choice(problem: Problem, candidates: Callable[[Problem], Iterable[Tile]]) -> Choice | None:
    """What was measured for this problem on its GPU; None for nothing.

    A tile that is not among ``candidates(problem)`` any more is as if it had not been measured.
    """
    name = gpu_name(problem.device)
    found = None if name is None else _table(name).get(key_of(problem))
    if found is None or found.tile is None or found.tile in candidates(problem):
        return found
    return None


def remember(problem: Problem, found: Choice) -> str | None:
    """Keep what was measured, for this process and for later ones.

    None where it is on disk now, else one sentence that says why it is not. Whoever planned before
    must plan anew: see ``memo.clear``.
    """
    name = gpu_name(problem.device)
    if name is None:
        return "there is no GPU that it could be kept for"
    forget()  # another process may have written since
    table = {**_table(name), key_of(problem): found}
    try:
        folder = cache._folder(create=True, name=_FOLDER)
        assert folder is not None
        cache._write_and_rename(folder, _file(name), _text(name, table).encode())
    except (cache._Refused, OSError) as error:
        return cache._reason(error)
    forget()
    return None


def clear() -> int:
    """Remove everything that was measured, for every GPU; how many problems that were.

    Raises ``OSError`` for a file that cannot be removed.
    """
    removed = 0
    try:
        folder = cache._folder(create=False, name=_FOLDER)
    except cache._Refused:
        folder = None
    for path, _ in cache._files(folder, _SUFFIX) if folder else ():
        try:
            removed += len(_parse(cache._read_own_file(path))[1])
        except (cache._Refused, ValueError):
            removed += 1
        path.unlink(missing_ok=True)
    forget()
    return removed


def forget() -> None:
    """Read the files again when next asked."""
    _table.cache_clear()


def _file(name: str) -> str:
    """A GPU's name is for people: the file's is a digest, with what can stand in a file name."""
    readable = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}{_SUFFIX}"


@memo()
def _table(name: str) -> dict[str, Choice]:
    """What is on disk; a table that cannot be read is empty, and a warning says why."""
    try:
        folder = cache._folder(create=False, name=_FOLDER)
        if folder is None:
            return {}
        path = folder / _file(name)
        gpu, table = _parse(cache._read_own_file(path))
        if gpu != name:
            raise ValueError(f"it is of {gpu!r}")
    except FileNotFoundError:
        return {}
    except (cache._Refused, OSError) as error:
        return _ignored(cache._reason(error))
    except ValueError as error:
        return _ignored(f"{path} cannot be read: {error}")
    return table


def _ignored(reason: str) -> dict[str, Choice]:
    said = "epinorm: what `epinorm tune` measured is not used (tune again, or tune --clear)"
    warn_once(f"{said}: {reason}", RuntimeWarning)
    return {}


def _text(name: str, table: dict[str, Choice]) -> str:
    choices = {key: dataclasses.asdict(found) for key, found in sorted(table.items())}
    return json.dumps({"version": FORMAT_VERSION, "gpu": name, "choices": choices}, indent=1)


def _parse(data: bytes) -> tuple[str, dict[str, Choice]]:
    """The GPU's name and its table; ValueError for anything that is not what ``_text`` writes."""
    value = json.loads(data.decode())  # both errors are ValueErrors
    if not isinstance(value, dict) or value.get("version") != FORMAT_VERSION:
        raise ValueError(f"it is not a table of version {FORMAT_VERSION}")
    gpu, choices = value.get("gpu"), value.get("choices")
    if not isinstance(gpu, str) or not isinstance(choices, dict):
        raise ValueError("it names no GPU or no choices")
    return gpu, {str(key): _choice(entry) for key, entry in choices.items()}


def _choice(entry: Any) -> Choice:
    if not isinstance(entry, dict) or set(entry) != {"strategy", "tile", "microseconds"}:
        raise ValueError(f"{entry!r} is not a choice")
    strategy, tile, time = entry["strategy"], entry["tile"], entry["microseconds"]
    if strategy not in ("single", "epilogue") or (tile is None) != (strategy == "epilogue"):
        raise ValueError(f"strategy {strategy!r} with tile {tile!r}")
    if type(time) not in (int, float) or not math.isfinite(time):
        raise ValueError(f"{time!r} is not a time")
    return Choice(strategy, None if tile is None else _tile(tile), float(time))


def _tile(fields: Any) -> Tile:
    if not isinstance(fields, dict):
        raise ValueError(f"{fields!r} is not a tile")
    if "group_blocks" in fields:
        fields = {**fields, "cluster_n": fields["group_blocks"]}
        del fields["group_blocks"]
    fields = {
        "fp32_weight": False,
        "fp32_input": False,
        "register_a": False,
    } | fields  # of a table from before there was such a tile
    if set(fields) != set(_FIELD_TYPES):
        raise ValueError(f"{fields!r} is not a tile")
    for name, value in fields.items():
        accepted = _FIELD_TYPES[name]
        kinds = typing.get_args(accepted) if isinstance(accepted, types.UnionType) else (accepted,)
        if type(value) not in kinds:
            raise ValueError(f"a tile's {name} is {value!r}")
    return Tile(**fields)


def path_of(name: str) -> Path:
    """Where the table of the GPU of this name is kept; the file need not be there."""
    return cache.cache_root() / _FOLDER / _file(name)
