"""First use, second use, and everything that can be in the way of compiling."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import epinorm
from epinorm.backends import cache, memo
from epinorm.backends.cpu import abi, build, supports
from epinorm.tools import environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels need Linux")

RUN = """
    import warnings, torch
    from epinorm.chain import Chain
    from epinorm.backends.cpu import supports
    from epinorm.backends.engine import executable_for, plan_for
    from epinorm.problem import Inputs, Layout, Plan, Problem
    from epinorm.backends import reference as reference_backend

    torch.manual_seed(0)
    chain = Chain.parse("group_norm(4)|leaky_relu(0.02)|scale(2)")
    facts = (chain, 70, 24, 32, *[torch.float32] * 3, True, True, True, False)
    problem = Problem(*facts, torch.device("cpu"), "highest")
    inputs = Inputs(torch.randn(70, 24), torch.randn(32, 24), *torch.randn(3, 32).unbind(), ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print("before:", supports(problem))
        for _ in range(2):
            made = executable_for(problem, Plan("cpu", ""), Layout(24, 24, (70, 32)))
            y = made.forward(*inputs).y
        print("after:", supports(problem))
        print("plan:", plan_for(problem))
    for warning in caught:
        print("warning:", warning.message)
    expected = reference_backend.forward(problem, inputs).y
    torch.testing.assert_close(y, expected)
    print("bits of the reference:", torch.equal(y, expected))
"""


def start(cache_dir: Path, code: str = RUN, **environment: str) -> Process:
    cache = {"EPINORM_CACHE_DIR": str(cache_dir)}
    return Process(code, {**os.environ, **cache, **environment})


def run(cache_dir: Path, **environment: str) -> tuple[str, str]:
    process = start(cache_dir, **environment)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def files(cache_dir: Path) -> list[Path]:
    return sorted(path for path in cache_dir.rglob("*") if path.is_file())


needs_compiler = pytest.mark.skipif(
    build.compiler_problem() is not None, reason=str(build.compiler_problem())
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache as a first use leaves it, and what that said."""
    folder = tmp_path_factory.mktemp("built") / "new"
    return folder, *run(folder)


@pytest.fixture
def warm(built, tmp_path):
    """A copy of that cache."""
    return Path(shutil.copytree(built[0], tmp_path / "c"))


@needs_compiler
def test_first_use_compiles_and_second_use_does_not(built, warm):
    folder, out, err = built
    assert "before: None\nafter: None" in out
    assert "warning" not in out
    assert err.count("epinorm: compiling") == 2, err
    assert len([line for line in err.splitlines() if "epinorm" in line]) == 2
    kept = files(folder)
    assert len(kept) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    before = files(warm)
    out, err = run(warm)
    assert "before: None" in out
    assert "epinorm" not in err
    assert files(warm) == before


@needs_compiler
@pytest.mark.parametrize("harm", ["damaged", "writable by others", "a link"])
def test_kept_code_that_cannot_be_trusted_is_not_loaded(warm, harm):
    for path in files(warm):
        if harm == "damaged":
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        elif harm == "writable by others":
            path.chmod(0o622)
        else:
            path.rename(path.with_suffix(".moved"))
            path.symlink_to(path.with_suffix(".moved"))
    out, err = run(warm)
    assert "before: None\nafter: None" in out
    assert err.count("epinorm: compiling") == 2


def killed_while_compiling(process, temporary):
    """End a process, and all that it started, once its compiler runs."""
    deadline = time.monotonic() + 200
    while not list(temporary.glob("epinorm-build-*/log")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@needs_compiler
def test_a_killed_build_does_not_stop_the_next_and_is_removed_later(tmp_path):
    """PyTorch's own build leaves a lock behind here, and waits for it forever."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    killed_while_compiling(start(tmp_path / "c", CXX="g++", TMPDIR=str(temporary)), temporary)
    (left,) = temporary.iterdir()
    extensions = tmp_path / "extensions"
    for folder in (extensions, extensions / "runner"):
        folder.mkdir()
        (folder / "lock").touch()
    began = time.monotonic()
    out, _ = run(tmp_path / "c", TORCH_EXTENSIONS_DIR=str(extensions), TMPDIR=str(temporary))
    assert "after: None" in out
    assert time.monotonic() - began < 100
    assert left.exists()  # it might be under way
    os.utime(left, (0, time.time() - 3600))
    run(tmp_path / "other", TMPDIR=str(temporary))
    assert not list(temporary.iterdir())


def structs() -> str:
    """What the runner is called with, in C++, without PyTorch's headers."""
    text = (build.HERE / "runner.cpp").read_text()
    fields = text[text.index("struct Problem {") :].partition("  int64_t n() const")[0]
    return f'#include "call.h"\nnamespace epinorm {{\n{fields}}};\n}}\n'


WITHOUT_BIAS = """
EPINORM_EXPORT int epinorm_forward(const epinorm::Problem* p) {
  const float *x = (const float*)p->x, *w = (const float*)p->weight;
  const int64_t n = p->call.n;
  float* const z = new float[p->m * n]();
  for (int64_t i = 0; i < p->m * n; ++i)
    for (int64_t k = 0; k < p->k; ++k)
      z[i] += x[i / n * p->x_stride + k] * w[i % n * p->weight_stride + k];
  p->kernel.forward(&p->call, 0, p->m, z, n, p->y, p->y_stride, nullptr);
  delete[] z;
  return 0;
}
EPINORM_EXPORT int epinorm_backward(const epinorm::Problem*) { return 1; }
EPINORM_EXPORT int epinorm_can_pack() { return 0; }
EPINORM_EXPORT const char* epinorm_message() { return ""; }
"""
LIAR = """#!/bin/sh
[ "$1" = --version ] || [ ! -e {folder}/lie ] || {{ {lie}; }}
exec {compiler} "$@"
"""
LIES = {
    "nothing": "exit 0",
    "text": "echo hello > kernel.so; exit 0",
    "a failure": "exit 3",
    "a wrong kernel": "sed -i 's/- mean\\[l\\] - shift\\[l\\]/- shift[l]/' stages.h",
    "a wrong gradient": "sed -i 's/rstd\\[l\\] \\* g\\[l\\]/g[l]/' stages.h",
    "a wrong runner": "cp ${0%/*}/wrong.cpp runner.cpp",
}


@needs_compiler
@pytest.mark.parametrize("lie", LIES)
def test_what_a_compiler_made_wrong_once_is_neither_used_nor_kept(tmp_path, lie):
    liar = tmp_path / "g++"
    compiler = os.environ.get("CXX", "g++")
    liar.write_text(LIAR.format(folder=tmp_path, lie=LIES[lie], compiler=compiler))
    liar.chmod(0o755)
    (tmp_path / "wrong.cpp").write_text(structs() + WITHOUT_BIAS)
    (tmp_path / "lie").touch()
    out, _ = run(tmp_path / "c", CXX=str(liar))
    assert "bits of the reference: True" in out
    assert "plan: reference" in out
    assert out.count("warning: ") == 1
    kept = len(files(tmp_path / "c"))
    assert kept <= ("wrong" in lie)  # one of the two was made right
    if kept and lie != "a wrong gradient":  # nothing but the cache passes to a later process
        (tmp_path / "lie").unlink()
        out, _ = run(tmp_path / "c", CXX=str(liar))
        assert "after: None" in out
        assert len(files(tmp_path / "c")) == 2


@needs_compiler
def test_kept_code_that_computes_something_else_is_compiled_again(warm):
    for path in files(warm):  # as another machine or C library could have made it
        record = cache._parse(path.read_bytes(), path.stem, path)
        body = json.dumps(dict(record.facts)).encode() + b"\n" + b"\x7fELF of another world"
        digest = hashlib.sha256(body).hexdigest().encode()
        path.write_bytes(b"\n".join((path.read_bytes().partition(b"\n")[0], digest, body)))
    out, err = run(warm)
    assert "after: None" in out
    assert err.count("epinorm: compiling") == 2
    assert "epinorm" not in run(warm)[1]


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"


@needs_compiler
@pytest.mark.parametrize("size", [4_000, 60_000])
def test_a_full_disk(tmp_path, size):
    process = start(tmp_path / "c", FULL.format(size) + textwrap.dedent(RUN))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out.count("warning: ") == 1
    out, _ = run(tmp_path / "c")
    assert "after: None" in out
    assert len(files(tmp_path / "c")) == 2


COMPILED = """#!/bin/sh
[ "$1" = --version ] && exec {compiler} --version
case $LIE in
  failing) exit 3 ;;
  text) echo hello > kernel.so; exit 0 ;;
  wrong) sed -i 's/- mean\\[l\\] - shift\\[l\\]/- shift[l]/' stages.h; exec {compiler} "$@" ;;
esac
sleep 0.3
for file in "$@"; do [ ! -e {folder}/$file ] || exec cp {folder}/$file kernel.so; done
"""
"""A compiler that has what it makes ready, so that many processes are at it at a time."""


@needs_compiler
def test_eight_processes_at_once_of_which_half_fail(built, tmp_path):
    """One is killed, one's disk is full, one's compiler fails, and one's is wrong."""
    for path in files(built[0]):
        record = cache._parse(path.read_bytes(), path.stem, path)
        main = "runner.cpp" if record.facts["entry"].endswith("runner") else "kernel.cpp"
        (tmp_path / main).write_bytes(record.payload)
    compiler = tmp_path / "g++"
    real = os.environ.get("CXX", "g++")
    compiler.write_text(COMPILED.format(compiler=real, folder=tmp_path))
    compiler.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = tmp_path / "c", RUN
    killed = start(*shared, CXX=str(compiler), TMPDIR=str(temporary))
    full = FULL.format(60_000) + textwrap.dedent(RUN)
    failing = [start(tmp_path / "c", full, CXX=str(compiler))]
    failing += [start(*shared, CXX=str(compiler), LIE=lie) for lie in ("failing", "text", "wrong")]
    others = [start(*shared, CXX=str(compiler)) for _ in range(3)]
    killed_while_compiling(killed, temporary)
    for process in (*failing, *others):
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err  # y is right in each
        assert "after: None" in out or process in failing
    assert len(files(tmp_path / "c")) == 2
    out, err = run(tmp_path / "c", CXX=str(compiler))
    assert "after: None" in out
    assert "epinorm" not in err


@needs_compiler
def test_a_cache_that_everyone_may_write_is_not_used(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    out, err = run(tmp_path / "c")
    assert f"the kernel cache {tmp_path}/c can be written by everyone (mode 777)" in out
    assert out.count("warning: ") == 1
    assert "after: None" in out
    assert not files(tmp_path / "c")
    assert err.count("epinorm: compiling") == 2


@needs_compiler
def test_cache_that_cannot_be_written(tmp_path):
    """A file where the folder should be: that holds for root as well, unlike permissions."""
    (tmp_path / "file").touch()
    out, err = run(tmp_path / "file" / "c")
    assert "before: None\nafter: None" in out
    assert out.count("warning: ") <= 2
    assert err.count("epinorm: compiling") == 2


def test_without_a_compiler(tmp_path):
    out, err = run(tmp_path, PATH=str(tmp_path), CXX="")
    assert "before: there is no C++ compiler: install g++ (12 or newer), or name one in CXX" in out
    assert "plan: reference: there is no C++ compiler" in out
    assert out.count("warning: ") == 1
    assert "bits of the reference: True" in out
    assert "epinorm" not in err


def test_compiler_named_in_cxx_is_missing(tmp_path):
    out, _ = run(tmp_path, CXX="no-such-compiler")
    assert "there is no C++ compiler: CXX=no-such-compiler is not a program" in out


@pytest.mark.parametrize("fused", [False, True])
def test_the_warning_names_the_users_line(monkeypatch, fused):
    monkeypatch.setenv("CXX", f"no-such-compiler-{fused}")
    layer = epinorm.LinearNorm(64, 64, norm=epinorm.GroupNorm(8), post=f"scale({1.25 + fused})")
    model = epinorm.fuse(torch.nn.Sequential(layer)) if fused else layer
    with pytest.warns(UserWarning, match="computes with PyTorch's own layers") as caught:
        model(torch.randn(2048, 64))
    assert [warning.filename for warning in caught] == [__file__]


def test_info_names_the_compiler_that_builds(monkeypatch, tmp_path):
    """Not one that is refused."""
    (tmp_path / "clang++").touch(mode=0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.facts()["host compiler"] is None
    (tmp_path / "g++").touch(mode=0o755)
    assert environment.facts()["host compiler"] == str(tmp_path / "g++")


@pytest.mark.parametrize(
    "version,reason",
    [
        ("g++ (GCC) 9.4.0\nFree Software Foundation", "need g++ 12 or newer, and"),
        ("clang version 17.0.1", "the CPU kernels need g++, and"),
        ("g++ (GCC) 13.1.0\nFree Software Foundation", "failed on group_norm(4"),
    ],
)
def test_compiler_that_does_not_serve(tmp_path, version, reason):
    """Too old, another one, one that fails: the reference, one warning, and the plan says so."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && printf "{version}\n" && exit 0\n'
        'echo "fatal error: out of sorts" >&2; exit 3\n'
    )
    compiler.chmod(0o755)
    out, _ = run(tmp_path / "c", CXX=str(compiler))
    assert "before: None" in out
    assert f"{reason}" in out.split("after: ")[1].splitlines()[0]
    assert "plan: reference" in out
    assert out.count("warning: ") == 1
    assert "bits of the reference: True" in out
    assert not files(tmp_path / "c")


def test_time_limit(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "TIME_LIMIT_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(build.BuildError, match=r"did not finish it within 0.2 s"):
        build._run([str(compiler)], str(tmp_path), "it")
    assert time.monotonic() - began < 20


def test_key_covers_what_the_code_depends_on(monkeypatch):
    """Another compiler, CPU, C library, PyTorch, source or flag is another kernel."""
    files, flags = {"kernel.cpp": "a"}, ["-O3"]
    keys = [
        build._key("g++ 12", files, flags),
        build._key("g++ 13", files, flags),
        build._key("g++ 12", {"kernel.cpp": "b"}, flags),
        build._key("g++ 12", files, ["-O2"]),
    ]
    for owner, name, value in (
        (Path, "read_text", lambda _: "model name: zen3"),  # of /proc/cpuinfo
        (build.platform, "libc_ver", lambda: ("glibc", "9.9")),
        (torch, "__version__", "9.9"),
    ):
        monkeypatch.setattr(owner, name, value)
        memo.clear()
        keys.append(build._key("g++ 12", files, flags))
    assert len(set(keys)) == 7
    monkeypatch.undo()
    memo.clear()


STRUCTS = {
    "EpinormCall": abi.Call,
    "EpinormKernel": abi.Kernel,
    "EpinormBlocks": abi.Blocks,
    "epinorm::Problem": abi.Problem,
}


@needs_compiler
def test_structs_lie_in_memory_as_the_compiler_has_them(tmp_path):
    """Fields are read from the C++ by their text: size and place of each, and of the whole."""
    asserted = []
    for name, struct in STRUCTS.items():
        asserted.append(f"sizeof({name}) == {ctypes.sizeof(struct)}")
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            asserted.append(f"offsetof({name}, {field}) == {place.offset}")
            asserted.append(f"sizeof({name}::{field}) == {place.size}")
    assert len(asserted) == 4 + 2 * (15 + 6 + 7 + 22)
    files, main, _ = build._runner_parts()
    asserts = "".join(f"static_assert({one});\n" for one in asserted)
    (tmp_path / main).write_text("#include <cstddef>\n" + structs() + asserts)
    (tmp_path / "call.h").write_text(files["call.h"])
    command = [os.environ.get("CXX", "g++"), *build.COMMON_FLAGS, "-fsyntax-only", main]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr


def test_what_is_not_supported(make_case):
    problem = make_case("layer_norm", 8, 8, 8).problem
    changed = problem.__class__

    def why(**facts):
        return supports(changed(**{**problem.__dict__, **facts})) or ""

    assert "float16" in why(dtype=torch.float16)
    assert "float16" in why(norm_dtype=torch.float16)
    assert "on cuda" in why(device=torch.device("cuda"))
    assert "nothing to compute" in why(m=0)
    assert "for 1 rows" in why(m=1, k=8192, n=8192)
    assert "float64 product" in why(m=1024, k=4096, n=4096, dtype=torch.float64)
