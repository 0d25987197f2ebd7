"""First use, second use, and everything that can be in the way of compiling."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from epinorm.backends import cache
from epinorm.backends.cpu import build, supports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels need Linux")

SOURCE = str(Path(build.__file__).parents[3])

RUN = """
    import warnings, torch
    from epinorm.chain import Chain
    from epinorm.backends.cpu import backend, supports
    from epinorm.backends.choice import plan_for
    from epinorm.problem import Inputs, Plan, Problem
    from epinorm.backends import reference as reference_backend

    torch.manual_seed(0)
    chain = Chain.parse("group_norm(4)|leaky_relu(0.02)|scale(2)")
    facts = (chain, 70, 24, 32, *[torch.float32] * 3, True, True, True, False)
    problem = Problem(*facts, torch.device("cpu"), "highest")
    inputs = Inputs(torch.randn(70, 24), torch.randn(32, 24), *torch.randn(3, 32).unbind(), ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        print("before:", supports(problem))
        y = backend.forward(problem, Plan("cpu", ""), inputs).y
        backend.forward(problem, Plan("cpu", ""), inputs)
        print("after:", supports(problem))
        print("plan:", plan_for(problem))
    for warning in caught:
        print("warning:", warning.message)
    expected = reference_backend.forward(problem, Plan("reference", ""), inputs).y
    torch.testing.assert_close(y, expected)
    print("bits of the reference:", torch.equal(y, expected))
"""


def start(cache_dir: Path, code: str = RUN, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "PYTHONPATH": SOURCE,
            "EPINORM_CACHE_DIR": str(cache_dir),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


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


@needs_compiler
def test_first_use_compiles_and_second_use_does_not(tmp_path):
    out, err = run(tmp_path / "new")
    assert "before: None\nafter: None" in out
    assert "warning" not in out
    assert err.count("epinorm: compiling") == 2, err
    assert len([line for line in err.splitlines() if "epinorm" in line]) == 2
    kept = files(tmp_path / "new")
    assert len(kept) == 2
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    out, err = run(tmp_path / "new")
    assert "before: None" in out
    assert err == ""
    assert files(tmp_path / "new") == kept


@needs_compiler
@pytest.mark.parametrize("harm", ["damaged", "writable by others", "a link"])
def test_kept_code_that_cannot_be_trusted_is_not_loaded(tmp_path, harm):
    run(tmp_path / "c")
    for path in files(tmp_path / "c"):
        if harm == "damaged":
            path.write_bytes(path.read_bytes()[:-100] + bytes(100))
        elif harm == "writable by others":
            path.chmod(0o622)
        else:
            path.rename(path.with_suffix(".moved"))
            path.symlink_to(path.with_suffix(".moved"))
    out, err = run(tmp_path / "c")
    assert "before: None\nafter: None" in out
    assert err.count("epinorm: compiling") == 2


@needs_compiler
def test_killed_build_does_not_stop_the_next(tmp_path):
    """PyTorch's own build leaves a lock behind here, and waits for it forever."""
    first = start(tmp_path / "c", TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 100
    while not list(tmp_path.glob("epinorm-*/log")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    extensions = tmp_path / "extensions"
    for folder in (extensions, extensions / "runner"):
        folder.mkdir()
        (folder / "lock").touch()
    began = time.monotonic()
    out, _ = run(tmp_path / "c", TORCH_EXTENSIONS_DIR=str(extensions), TMPDIR=str(tmp_path))
    assert "after: None" in out
    assert time.monotonic() - began < 100


@needs_compiler
def test_two_processes_at_once(tmp_path):
    both = [start(tmp_path / "c") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert "after: None" in out
    assert len(files(tmp_path / "c")) == 2


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
    assert "plan: Plan(strategy='reference', reason='there is no C++ compiler" in out
    assert out.count("warning: ") == 1
    assert "bits of the reference: True" in out
    assert err == ""


def test_compiler_named_in_cxx_is_missing(tmp_path):
    out, _ = run(tmp_path, CXX="no-such-compiler")
    assert "there is no C++ compiler: CXX=no-such-compiler is not a program" in out


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
    assert "plan: Plan(strategy='reference'" in out
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
    """Another compiler, CPU, PyTorch or source is another kernel."""
    keys = []
    monkeypatch.setattr(build, "_compiler", lambda: ("g++", versions[0]))
    monkeypatch.setattr(build, "_cpu", lambda: versions[1])
    monkeypatch.setattr(build, "_compile", lambda *_: b"code")
    monkeypatch.setattr(cache, "write", lambda key, *_: keys.append(key))
    monkeypatch.setattr(cache, "read", lambda key: None)
    versions = ["12", "zen4"]
    for change in (None, (0, "13"), (1, "zen3")):
        if change is not None:
            versions[change[0]] = change[1]
        build._machine_code({"kernel.cpp": "a"}, "kernel.cpp", ["-O3"], "a")
    build._machine_code({"kernel.cpp": "b"}, "kernel.cpp", ["-O3"], "b")
    build._machine_code({"kernel.cpp": "b"}, "kernel.cpp", ["-O2"], "b")
    monkeypatch.setattr(torch, "__version__", "9.9")
    build._machine_code({"kernel.cpp": "b"}, "kernel.cpp", ["-O2"], "b")
    assert len(set(keys)) == len(keys) == 6


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
