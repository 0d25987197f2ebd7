"""Compiled kernels on disk, so that the second process starts without compiling.

What is loaded from here runs on the user's GPU in the user's process, so the folder belongs to the
user alone, and a file is believed only if it is the user's, nobody else may write it, and its
checksum and key are right. Anything else is compiled again and replaced.

Writers make a temporary file and rename it: any number of processes may race, and one that is
killed half-way leaves nothing but a temporary file, which a later writer removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from epinorm.said import warn_once

FORMAT_VERSION = "1"
DEFAULT_SIZE = 512 * 2**20
ABANDONED_AFTER_SECONDS = 600
"""Age at which a temporary file is taken to be left by a process that was killed."""

_MAGIC = b"epinorm-cubin-" + FORMAT_VERSION.encode()
_SUFFIX = ".cubin"
_TEMPORARY = ".tmp-"
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # these two exist on one kind of platform each
_BINARY = getattr(os, "O_BINARY", 0)
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Record:
    """What one file holds: facts about the kernel and its machine code."""

    facts: Mapping[str, str | int]
    payload: bytes


@dataclass(frozen=True)
class CacheEntry:
    """One kernel in the cache; `used` is the time of its last use in seconds since the epoch."""

    key: str
    entry: str
    arch: str
    size: int
    used: float
    path: Path


@dataclass(frozen=True)
class CacheInfo:
    """State of the cache; `problem` is None, or one sentence that says why nothing is kept;
    `mistake` likewise, what is wrong with EPINORM_CACHE_SIZE."""

    folder: Path | None
    entries: int
    size: int
    limit: int
    problem: str | None
    mistake: str | None = None


class _Refused(Exception):
    """The cache's folder or a file in it cannot be used; the text says why."""


def cache_root() -> Path:
    """`$EPINORM_CACHE_DIR`, or `epinorm` in the user's cache folder of this platform."""
    chosen = os.environ.get("EPINORM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (Path(base) if base else Path.home() / "AppData" / "Local") / "epinorm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "epinorm"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "epinorm"


def size_limit() -> int:
    """Bytes that the cache may take: `$EPINORM_CACHE_SIZE`, such as 1048576 or 512M; 0 keeps none.

    A text that is not a size is said in one warning, and the default holds.
    """
    limit, mistake = _size()
    if mistake is not None:
        warn_once(f"epinorm: {mistake}", RuntimeWarning, "cache size")
    return limit


def _size() -> tuple[int, str | None]:
    """The limit, and what is wrong with the text that should say it."""
    text = os.environ.get("EPINORM_CACHE_SIZE", "").strip()
    if not text:
        return DEFAULT_SIZE, None
    number = text.upper().removesuffix("B").rstrip("KMG")
    unit = text.upper().removesuffix("B")[len(number) :]
    if not number.isdecimal() or unit not in _UNITS:
        return DEFAULT_SIZE, (
            "EPINORM_CACHE_SIZE must be a number of bytes such as 1048576 or 512M, "
            f"but got {text!r}; the default of {DEFAULT_SIZE >> 20}M holds"
        )
    return int(number) * _UNITS[unit], None


def key_of(*parts: str) -> str:
    """Name of a cache entry: sha256 over the parts, each with its length, and the file format."""
    digest = hashlib.sha256()
    for part in (FORMAT_VERSION, *parts):
        data = part.encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


def read(key: str) -> Record | None:
    """The record kept under `key`, or None if there is none that can be trusted.

    Says in one warning why a file was not loaded. Raises nothing for a broken cache, and says
    nothing about one: the write that follows does.
    """
    folder = _folder_or_none()
    if folder is None:
        return None
    path = folder / (key + _SUFFIX)
    try:
        record = _parse(_read_own_file(path), key, path)
    except OSError:
        return None
    except _Refused as error:
        warn_once(f"epinorm: {error}; the kernel is compiled again", RuntimeWarning, "cache read")
        return None
    # The least recently used go first when the cache is full. Another process may have removed it.
    with contextlib.suppress(OSError):
        os.utime(path)
    return record


def write(key: str, facts: Mapping[str, str | int], payload: bytes) -> bool:
    """Keep `payload` under `key`; False, with one warning, where the cache cannot be written."""
    header = json.dumps({**facts, "key": key}).encode()
    body = header + b"\n" + payload
    data = b"\n".join((_MAGIC, hashlib.sha256(body).hexdigest().encode(), body))
    limit = size_limit()
    if len(data) > limit:
        return False
    try:
        folder = _folder(create=True)
        assert folder is not None
        _write_and_rename(folder, key + _SUFFIX, data)
        _prune(folder, limit, keep=key)
    except (_Refused, OSError) as error:
        said = f"epinorm: {_reason(error)}; kernels are compiled anew in each process"
        said += " until EPINORM_CACHE_DIR names a folder that can be used"
        warn_once(said, RuntimeWarning, "cache write")
        return False
    return True


def list_entries() -> list[CacheEntry]:
    """The kernels in the cache, the last used first; raises nothing where there is no cache."""
    folder = _folder_or_none()
    if folder is None:
        return []
    entries = []
    for path, status in _files(folder, _SUFFIX):
        try:
            facts = _parse(_read_own_file(path), path.name.removesuffix(_SUFFIX), path).facts
        except (_Refused, OSError):
            facts = {"entry": "(not loadable)", "arch": "-"}
        name, arch = str(facts.get("entry", "?")), str(facts.get("arch", "?"))
        key = path.name.removesuffix(_SUFFIX)
        entries.append(CacheEntry(key, name, arch, status.st_size, status.st_mtime, path))
    return sorted(entries, key=lambda entry: -entry.used)


def clear() -> int:
    """Remove every kernel and every temporary file; the number of kernels removed.

    Raises `OSError` for a file that cannot be removed.
    """
    folder = _folder_or_none()
    if folder is None:
        return 0
    removed = 0
    for path, _ in _files(folder, _SUFFIX):
        path.unlink(missing_ok=True)
        removed += 1
    for path, _ in _files(folder, ""):
        if path.name.startswith(_TEMPORARY):
            path.unlink(missing_ok=True)
    return removed


def info() -> CacheInfo:
    """Where the cache is, how much it holds and whether it can be used."""
    try:
        folder, problem = _folder(create=True), None
    except (_Refused, OSError) as error:
        folder, problem = None, _reason(error)
    sizes = [status.st_size for _, status in _files(folder, _SUFFIX)] if folder else []
    limit, mistake = _size()
    return CacheInfo(folder, len(sizes), sum(sizes), limit, problem, mistake)


def _folder_or_none() -> Path | None:
    try:
        return _folder(create=False)
    except (_Refused, OSError):
        return None


def _folder(create: bool, name: str = "cubins") -> Path | None:
    """The folder of the kernels, or another, checked; None if not there and not to be made.

    It is a folder of its own inside the one that the user names, because it is made private: that
    must not happen to, say, /tmp.
    """
    try:
        root = cache_root()
    except RuntimeError as error:  # no home folder
        raise _Refused(f"no folder for the kernel cache: {error}") from error
    folder = root / name
    if create:
        root.parent.mkdir(parents=True, exist_ok=True)
        for path in (root, folder):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
    for path in (root, folder):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(status.st_mode):
            raise _Refused(f"the kernel cache {path} is a symbolic link")
        if not stat.S_ISDIR(status.st_mode):
            raise _Refused(f"the kernel cache {path} is not a folder")
        if not _is_ours(status):
            raise _Refused(f"the kernel cache {path} belongs to another user (id {status.st_uid})")
        mode = stat.S_IMODE(status.st_mode)
        if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX and path == root:
            raise _Refused(f"the kernel cache {path} can be written by everyone (mode {mode:o})")
    if os.name == "posix" and stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def _is_ours(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def _read_own_file(path: Path) -> bytes:
    """Contents of a file that only this user can have written; checked on the open file itself."""
    if path.is_symlink():  # and should it become one now, then O_NOFOLLOW fails
        raise _Refused(f"{path} in the kernel cache is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW | _BINARY)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise _Refused(f"{path} in the kernel cache is not a regular file")
        if not _is_ours(status):
            raise _Refused(
                f"{path} in the kernel cache belongs to another user (id {status.st_uid})"
            )
        if os.name == "posix" and status.st_mode & _OTHERS_MAY_WRITE:
            raise _Refused(f"{path} in the kernel cache can be written by other users")
        return file.read()


def _parse(data: bytes, key: str, path: Path) -> Record:
    magic, _, rest = data.partition(b"\n")
    checksum, _, body = rest.partition(b"\n")
    if magic != _MAGIC or hashlib.sha256(body).hexdigest().encode() != checksum:
        raise _Refused(f"{path} in the kernel cache is damaged")
    header, _, payload = body.partition(b"\n")
    facts = json.loads(header)
    if facts.get("key") != key:
        raise _Refused(f"{path} in the kernel cache holds another kernel than its name says")
    return Record(facts, payload)


def _write_and_rename(folder: Path, name: str, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=folder)  # which we alone read
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, folder / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _prune(folder: Path, limit: int, keep: str) -> None:
    """Remove abandoned temporary files, then the least recently used kernels above the limit."""
    now = time.time()
    kernels = []
    for item, status in _entries(folder):
        if item.name.endswith(_SUFFIX):
            kernels.append((item, status))
        elif item.name.startswith(_TEMPORARY) and now - status.st_mtime > ABANDONED_AFTER_SECONDS:
            Path(item).unlink(missing_ok=True)
    total = sum(status.st_size for _, status in kernels)
    for item, status in sorted(kernels, key=lambda kernel: kernel[1].st_mtime):
        if total <= limit:
            return
        if item.name != keep + _SUFFIX:
            Path(item).unlink(missing_ok=True)
            total -= status.st_size


def _files(folder: Path, suffix: str) -> Iterator[tuple[Path, os.stat_result]]:
    return ((Path(item), status) for item, status in _entries(folder, suffix))


def _entries(folder: Path, suffix: str = "") -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    for item in list(os.scandir(folder)):
        if item.name.endswith(suffix):
            try:
                yield item, item.stat(follow_symlinks=False)
            except FileNotFoundError:  # another process removed it since
                continue


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"the kernel cache cannot be used: {error.strerror or error}{where}"
    return str(error)
