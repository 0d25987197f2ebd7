"""The cache on disk: what it keeps, what it refuses, and how it behaves when things go wrong."""

import errno
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from epinorm import said
from epinorm.backends import cache
from epinorm.backends.cuda.runtime import jit
from epinorm.backends.cuda.runtime.jit import KernelSource
from processes import run_python

KEY = cache.key_of("a kernel")
FACTS = {"entry": "k", "arch": "sm_90a", "registers": 10}
SOURCE = KernelSource(
    "k", 'extern "C" __global__ void k(float* x) { x[threadIdx.x] *= 2.f; }', "sm_90a"
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing warned about yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(folder))
    monkeypatch.delenv("EPINORM_CACHE_SIZE", raising=False)
    said.forget()
    return folder


def file_of(key: str = KEY) -> Path:
    return cache.cache_root() / "cubins" / f"{key}.cubin"


def keep(key: str = KEY, payload: bytes = b"code") -> Path:
    assert cache.write(key, FACTS, payload)
    return file_of(key)


def assert_recompiled(words: str) -> None:
    """`SOURCE` still compiles, with one warning, and what is loaded is never the planted file."""
    with pytest.warns(RuntimeWarning, match=words) as caught:
        results = [jit.compiled(SOURCE) for _ in range(2)]
    assert len(caught) == 1
    assert all(result.cubin.startswith(b"\x7fELF") for result in results)
    assert results[0].registers > 0


def test_what_is_written_is_read() -> None:
    assert cache.read(KEY) is None
    payload = bytes(range(256)) * 3 + b"\n\n"
    cache.write(KEY, FACTS, payload)
    record = cache.read(KEY)
    assert record is not None
    assert record.payload == payload
    assert {name: record.facts[name] for name in FACTS} == FACTS
    assert cache.read(cache.key_of("another")) is None


def test_folders_and_files_are_private(root: Path) -> None:
    old = os.umask(0)
    try:
        path = keep()
    finally:
        os.umask(old)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_our_own_folder_is_made_private_and_the_users_is_left_alone(root: Path) -> None:
    (root / "cubins").mkdir(parents=True)
    root.chmod(0o755)
    (root / "cubins").chmod(0o777)
    keep()
    assert stat.S_IMODE((root / "cubins").stat().st_mode) == 0o700
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_the_default_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPINORM_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")
    assert cache.cache_root() == Path("/x/cache/epinorm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache.cache_root() == Path("/home/me/.cache/epinorm")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_root() == Path("/home/me/Library/Caches/epinorm")


@pytest.mark.parametrize(
    "text, size",
    [("", 512 * 2**20), ("1000", 1000), ("2K", 2048), ("3mb", 3 * 2**20), ("1G", 2**30), ("0", 0)],
)
def test_the_size_can_be_set(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("EPINORM_CACHE_SIZE", text)
    assert cache.size_limit() == size


@pytest.mark.parametrize("text", ["lots", "-1", "1.5G", "1KM", "K"])
def test_a_size_that_is_none_is_said_and_the_default_holds(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("EPINORM_CACHE_SIZE", text)
    said = f"EPINORM_CACHE_SIZE must be .* but got '{text}'; the default of 512M holds"
    with pytest.warns(RuntimeWarning, match=said):
        assert cache.write(cache.key_of("one"), {"entry": "one", "arch": "none"}, b"1")
    assert cache.size_limit() == cache.info().limit == 512 * 2**20
    assert re.match(said, cache.info().mistake or "")


@pytest.mark.parametrize("damage", ["byte", "cut", "empty", "text"])
def test_a_damaged_file_is_compiled_again_and_replaced(damage: str) -> None:
    jit.compiled(SOURCE)
    path = file_of(jit.cache_key(SOURCE))
    good = path.read_bytes()
    bad = {
        "byte": good[:-100] + bytes([good[-100] ^ 1]) + good[-99:],
        "cut": good[: len(good) // 2],
        "empty": b"",
        "text": b"hello",
    }[damage]
    path.write_bytes(bad)
    assert_recompiled("is damaged; the kernel is compiled again")
    record = cache.read(jit.cache_key(SOURCE))
    assert record is not None
    assert good.endswith(record.payload)


def test_a_file_of_another_user_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(jit.cache_key(SOURCE), b"planted")
    real = os.fstat

    def foreign(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[4] = os.geteuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", foreign)
    assert_recompiled(r"belongs to another user \(id ")
    monkeypatch.undo()
    assert b"planted" not in path.read_bytes()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_loaded(mode: int) -> None:
    path = keep(jit.cache_key(SOURCE), b"planted")
    path.chmod(mode)
    assert_recompiled("can be written by other users")
    assert b"planted" not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    path = keep(jit.cache_key(SOURCE), b"planted")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert_recompiled("is a symbolic link; the kernel is compiled again")
    assert not path.is_symlink()


def test_a_file_under_another_kernels_name_is_not_loaded() -> None:
    keep(KEY, b"planted").rename(file_of(jit.cache_key(SOURCE)))
    assert_recompiled("holds another kernel than its name says")


@pytest.mark.parametrize("which", ["", "cubins"])
def test_a_folder_that_is_a_link_is_refused(root: Path, tmp_path: Path, which: str) -> None:
    keep(jit.cache_key(SOURCE), b"planted")
    (root / which).rename(tmp_path / "elsewhere")
    (root / which).symlink_to(tmp_path / "elsewhere")
    assert_recompiled("is a symbolic link; kernels are compiled anew")
    assert "is a symbolic link" in str(cache.info().problem)
    assert cache.list_entries() == []
    assert cache.clear() == 0


@pytest.mark.parametrize("which", ["", "cubins"])
def test_a_folder_of_another_user_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    keep(jit.cache_key(SOURCE), b"planted")
    real = Path.lstat

    def foreign(path: Path) -> os.stat_result:
        fields = list(real(path))
        fields[4] += path == root / which
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "lstat", foreign)
    assert_recompiled(r"belongs to another user \(id ")


def test_a_file_in_place_of_the_folder_means_compiling_in_memory(root: Path) -> None:
    root.write_text("not a folder")
    assert_recompiled("Not a directory .* kernels are compiled anew in each process")
    assert cache.info().problem is not None
    assert root.read_text() == "not a folder"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["open", "write", "replace", "mkdir"])
def test_a_cache_that_cannot_be_written_means_one_warning(
    monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    """Read-only or full, at whichever step: the kernel is compiled and nothing is left behind."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number), "somewhere")

    with monkeypatch.context() as patch:
        if call == "write":
            patch.setattr(cache.os, "fdopen", lambda *_: _FailingFile(fail))
        elif call == "mkdir":
            patch.setattr(Path, "mkdir", fail)
        else:
            patch.setattr(cache.os, call, fail)
        assert_recompiled(os.strerror(number))
    folder = cache.cache_root() / "cubins"
    assert not folder.exists() or list(folder.iterdir()) == []
    jit.compiled(SOURCE)  # it works again as soon as there is room
    assert len(cache.list_entries()) == 1


class _FailingFile:
    def __init__(self, fail: Any) -> None:
        self.write = fail

    def __enter__(self) -> "_FailingFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_no_home_means_compiling_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache, "cache_root", homeless)
    assert_recompiled("no folder for the kernel cache")


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [cache.key_of(str(i)) for i in range(4)]
    for age, key in enumerate(keys[:3]):
        path = keep(key, bytes(10_000))
        os.utime(path, (0, 1000 + age))
    assert cache.read(keys[0]) is not None  # now the last used
    monkeypatch.setenv("EPINORM_CACHE_SIZE", "31K")
    keep(keys[3], bytes(10_000))
    assert {entry.key for entry in cache.list_entries()} == {keys[0], keys[2], keys[3]}
    assert cache.info().size <= 31 * 1024
    monkeypatch.setenv("EPINORM_CACHE_SIZE", "5000")
    assert not cache.write(keys[1], FACTS, bytes(10_000))
    assert len(cache.list_entries()) == 3


def test_what_is_kept_can_be_listed_and_cleared(root: Path) -> None:
    assert cache.list_entries() == []
    assert cache.clear() == 0
    for i in range(3):
        keep(cache.key_of(str(i)), bytes(100 * i))
    file_of(cache.key_of("1")).write_bytes(b"damaged")
    (root / "cubins" / ".tmp-1-ab").write_bytes(b"half")
    entries = cache.list_entries()
    assert sorted(entry.entry for entry in entries) == ["(not loadable)", "k", "k"]
    info = cache.info()
    assert (info.entries, info.problem, info.folder) == (3, None, root / "cubins")
    assert info.size == sum(entry.size for entry in entries)
    assert cache.clear() == 3
    assert list((root / "cubins").iterdir()) == []


def test_a_writer_killed_half_way_leaves_only_a_temporary_file(root: Path) -> None:
    """The child dies by SIGKILL after half of the bytes; nothing that can be loaded is left."""
    code = (
        "import os, signal\n"
        "from epinorm.backends import cache\n"
        "class Half:\n"
        "    def __init__(self, d, mode): self.d = d\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *_): pass\n"
        "    def write(self, data):\n"
        "        os.write(self.d, data[:len(data) // 2]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "cache.os.fdopen = Half\n"
        f"cache.write({KEY!r}, {{}}, bytes(1000))\n"
    )
    done = run_python(code)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = (root / "cubins").iterdir()
    assert left.name.startswith(".tmp-")
    assert cache.read(KEY) is None
    assert cache.list_entries() == []
    keep()
    assert left.exists()  # it could still be a live writer's
    long_ago = time.time() - cache.ABANDONED_AFTER_SECONDS - 1
    os.utime(left, (long_ago, long_ago))
    keep(cache.key_of("next"))
    assert not left.exists()


def _compile_in_child(barrier: Any, results: Any) -> None:
    warnings.simplefilter("error")
    barrier.wait()
    results.put(jit.compiled(SOURCE))


def test_processes_that_race_on_an_empty_cache_all_succeed(root: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    barrier, results = context.Barrier(6), context.Queue()
    children = [
        context.Process(target=_compile_in_child, args=(barrier, results)) for _ in range(6)
    ]
    for child in children:
        child.start()
    compiled = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 6
    assert all(result.cubin == compiled[0].cubin for result in compiled)
    assert [path.suffix for path in (root / "cubins").iterdir()] == [".cubin"]
    assert jit.compiled(SOURCE).cubin == compiled[0].cubin
