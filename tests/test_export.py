"""Exported files: what a machine without a GPU can say about them."""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda.bindings import nvrtc
from torch.utils import cpp_extension
from typer.testing import CliRunner

from epinorm.backends.cuda.runtime.jit import KernelSource, compile_cubin
from epinorm.chain import Chain
from epinorm.tools.export.dump import GPUS, Tables
from epinorm.tools.export.export import export, forbidden_words
from epinorm.tools.judge.source import remarks
from epinorm.tools.kernelbench import ProblemError
from epinorm.tools.kernelbench.protocol import NoChainError
from epinorm_cli.commands import app
from processes import run_python

sys.path.insert(0, str(Path(__file__).parent))

from export_case import load

ZOO = Path(__file__).parent / "zoo"
FEW: dict[str, Any] = {"gpus": ["h200"], "modes": ["float32 highest"]}
"""Quick to export."""

LAYER_NORM = '''
"""A docstring that is not carried over."""
from __future__ import annotations
import torch
import torch.nn as nn
import torch.nn.functional as F

K, N = 96, 320  # sizes

class Model(nn.Module):
    """The original."""

    def __init__(self, k, n, high=0.3, *, factor=3.0):
        super(Model, self).__init__()
        self.net = nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.LayerNorm(n, eps=1e-3))
        self.act = nn.Hardtanh(-0.5, high)
        self.gain = nn.Parameter(torch.randn(n))
        self.factor = factor

    def forward(self, x, residual):
        y = self.act(self.net(x)) * self.gain + residual
        return F.silu(y) * self.factor

def get_inputs():
    return [torch.rand(4, 16, K), torch.randn(4, 16, N)]

def get_init_inputs():
    return [K, N]
'''

RMS_NORM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.lin = nn.Linear(k, n, bias=False)
        self.norm = nn.RMSNorm(n)

    def forward(self, x):
        return torch.clamp(self.norm(self.lin(x)), min=-1.0).tanh()

def get_inputs():
    return [torch.rand(64, 256)]

def get_init_inputs():
    return [256, 768]
"""

TEXTS = {"layer_norm": LAYER_NORM, "rms_norm": RMS_NORM}


@pytest.fixture(scope="module", params=["zoo", *TEXTS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A problem file and what is exported from it."""
    folder = tmp_path_factory.mktemp(request.param)
    problem, path = folder / "problem.py", folder / "model_new.py"
    zoo = ZOO / "problem.py"
    problem.write_text(zoo.read_text() if request.param == "zoo" else TEXTS[request.param])
    path.write_text(export(problem, **FEW).text)
    return problem, path


@pytest.fixture
def exported(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The zoo's problem exported, for a PyTorch with the CUDA of the library's compiler here."""
    folder = tmp_path_factory.mktemp("exported")
    path = folder / "model_new.py"
    path.write_text(export(ZOO / "problem.py", **FEW).text)
    module = load(path, "exported")
    _, major, minor = nvrtc.nvrtcVersion()
    module.CUDA_VERSION = f"{major}.{minor}"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
    return module


@pytest.mark.slow
def test_parameters_are_those_of_the_model_under_one_seed(pair: tuple[Path, Path]) -> None:
    problem, exported = load(pair[0], "problem"), load(pair[1], "exported")
    torch.manual_seed(3)
    model = problem.Model(*problem.get_init_inputs())
    torch.manual_seed(3)
    model_new = exported.ModelNew(*exported.get_init_inputs())
    theirs, ours = model.state_dict(), model_new.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    model.load_state_dict(ours, strict=True)
    model_new.load_state_dict(theirs, strict=True)


def test_signatures_and_inputs_are_carried_over(pair: tuple[Path, Path]) -> None:
    trees = [ast.parse(path.read_text()) for path in pair]
    classes = [
        next(s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == name)
        for tree, name in zip(trees, ("Model", "ModelNew"), strict=True)
    ]
    for method in ("__init__", "forward"):
        signatures = [
            ast.unparse(next(f for f in cls.body if getattr(f, "name", "") == method).args)
            for cls in classes
        ]
        assert signatures[0] == signatures[1]
    for function in ("get_inputs", "get_init_inputs"):
        texts = [
            ast.unparse(next(f for f in tree.body if getattr(f, "name", "") == function))
            for tree in trees
        ]
        assert texts[0] == texts[1]


def test_static_checks_find_nothing(pair: tuple[Path, Path]) -> None:
    text = pair[1].read_text()
    assert forbidden_words(text) == []
    ast.parse(text, feature_version=(3, 8))
    assert not any(note.startswith("imports") for note in remarks(pair[1]))
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert "Model" not in names
    assert "import epinorm" not in text
    assert "load_inline" in text
    assert "__global__" in text
    exported = load(pair[1], "exported")
    # Not every machine on which it is built writes and reads more.
    for part in (exported.HOST, str(exported.FILES), str(exported.KERNELS), str(exported.SHARED)):
        assert part.isascii()


def test_without_a_gpu_the_layers_run(pair: tuple[Path, Path]) -> None:
    problem, exported = load(pair[0], "problem"), load(pair[1], "exported")
    torch.manual_seed(3)
    model = problem.Model(*problem.get_init_inputs())
    inputs = problem.get_inputs()
    model_new = exported.ModelNew(*exported.get_init_inputs())
    model_new.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match="runs PyTorch's own layers here: .* a tensor on cpu"):
        y = model_new(*inputs)
    assert torch.equal(y, model(*inputs))


@pytest.mark.parametrize("pair", ["zoo"], indirect=True)
def test_it_needs_no_epinorm(pair: tuple[Path, Path]) -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import model_new as m; "
        "m.ModelNew(*m.get_init_inputs()); print('epinorm' in sys.modules)"
    )
    done = run_python(code, folder=pair[1].parent)
    assert done.stdout.split() == ["False"], done.stderr


def test_it_compiles_what_the_library_does(exported: ModuleType) -> None:
    """Kernels are taken apart in the file, and put together there."""
    names = [name for name, *_ in exported.KERNELS]
    assert {"linear_norm", "split", "rescue", "norm_backward"} <= set(names)
    for name in ("split", "norm_column_sums"):
        number = names.index(name)
        entry, _, arch, _ = exported.KERNELS[number]
        text = exported._text(number)
        expected = compile_cubin(KernelSource(entry, text, arch)).cubin
        found = exported._machine_code(number)
        assert len(found) > 1000
        assert abs(len(found) - len(expected)) < 300  # the file's name is in it


def test_machine_code_is_kept(exported: ModuleType, tmp_path: Path) -> None:
    """And read again only where nobody else can have written it."""
    number = [name for name, *_ in exported.KERNELS].index("norm_column_sums")

    def code() -> bytes:
        exported._machine_code.cache_clear()
        return bytes(exported._machine_code(number))

    first = code()
    (kept,) = Path(exported._folder()).rglob("*.cubin")
    kept.write_bytes(b"kept")
    assert code() == b"kept"
    for path in (kept, kept.parent, kept.parent.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert code() == first
        path.chmod(mode)
        assert code() == b"kept"


def test_a_killed_build_is_in_nobodys_way(
    exported: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder and its lock stay, and the next build has a folder of its own."""
    built: list[Path] = []

    def load_inline(*, name: str, build_directory: str, **_: Any) -> Any:
        built.append(Path(build_directory))
        (built[-1] / "lock").touch()
        if len(built) == 1:
            raise KeyboardInterrupt
        (built[-1] / f"{name}.so").touch()

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    with pytest.raises(KeyboardInterrupt):
        exported._host()
    with pytest.raises(ImportError):  # what was built is empty
        exported._host()
    assert len(set(built)) == 2


def test_facts_come_from_the_constructor(tmp_path: Path) -> None:
    problem, path = tmp_path / "problem.py", tmp_path / "model_new.py"
    problem.write_text(LAYER_NORM)
    path.write_text(export(problem, **FEW).text)
    exported = load(path, "exported")
    assert exported.CHAINS[0][-1] == (1e-3, -0.5, 0.3, "none", 3.0)
    seen = []
    exported._fused = lambda *args, **kwargs: seen.append(kwargs["facts"]) or 1
    exported.ModelNew(96, 320, high=0.75, factor=5.0)(None, None)
    assert seen == [(1e-3, -0.5, 0.75, "none", 5.0)]


@pytest.mark.slow
def test_only_what_was_asked_for_is_there(exported: ModuleType, tmp_path: Path) -> None:
    assert {key[1:3] for key in exported.TABLES} == {((9, 0), "float32 highest")}
    made = export(ZOO / "problem.py", "epilogue", gpus=["a100"], modes=["bfloat16", "float16"])
    (tmp_path / "x.py").write_text(made.text)
    tables = load(tmp_path / "x.py", "other").TABLES
    assert {key[1:3] for key in tables} == {((8, 0), "bfloat16"), ((8, 0), "float16")}
    assert all(any(len(step) == 3 for step in table[-1]) for table in tables.values())
    assert any("bfloat16 on a100: asked for by name" in note for note in made.remarks)


def test_a_strategy_that_serves_nothing_is_refused() -> None:
    with pytest.raises(NoChainError, match=r"cannot be exported: bfloat16 on h200, inference: "):
        export(ZOO / "problem.py", "planes", gpus=["h200"], modes=["bfloat16"])


REFUSED = {
    "no Linear": ("return x.relu()", "there is no Linear in it"),
    "goes on": ("return self.gn(self.fc(x)).sum(1)", "in the midst of a statement"),
    "goes before": ("return self.gn(self.fc(x.sin()))", "is no variable where it begins"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused(name: str, tmp_path: Path) -> None:
    line, words = REFUSED[name]
    text = (ZOO / "problem.py").read_text()
    start = text.index("        x = self.fc(x)")
    end = text.index("        return x + x\n") + len("        return x + x\n")
    path = tmp_path / "problem.py"
    path.write_text(f"{text[:start]}        {line}\n{text[end:]}")
    with pytest.raises(NoChainError, match=words):
        export(path)


@pytest.mark.parametrize(
    ("chain", "words"),
    [
        (Chain.parse("dropout(0.1)|layer_norm"), "a chain that drops"),
        (
            dataclasses.replace(Chain.parse("add_residual|layer_norm"), returns_sum=True),
            "two results",
        ),
    ],
)
def test_chains_that_no_table_can_have(chain: Chain, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tables(["h200"]).add(chain, 32, 96, 128, (True, True, True))


def test_statistics_are_rounded_as_by_the_pytorch_that_runs_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(export(ZOO / "problem.py", gpus=["h200"], modes=["bfloat16"]).text)
    exported = load(path, "exported")
    number = [name for name, *_ in exported.KERNELS].index("linear_norm")
    for version, rounds in (("2.11.0+cu130", 1), ("2.13.0", 0)):
        monkeypatch.setattr(torch, "__version__", version)
        text = exported._text(number)
        assert text.startswith(f"#define PYTORCH_ROUNDS_STATISTICS {rounds}\n")
        assert "#if PYTORCH_ROUNDS_STATISTICS\n#define EPINORM_STATISTICS bf16\n#endif" in text


def test_third_party_imports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text("import pytest\n" + (ZOO / "problem.py").read_text())
    with pytest.raises(ProblemError, match="imports pytest"):
        export(path)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "new.py"
    run = CliRunner().invoke
    problem = str(ZOO / "problem.py")
    result = run(app, ["export", problem, "-o", str(out), "--gpu", "h200"])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.stdout
    assert "bfloat16 on h200: one kernel" in " ".join(result.stdout.split())
    assert out.read_text() == export(ZOO / "problem.py", gpus=["h200"]).text
    assert run(app, ["export", str(tmp_path / "none.py"), "-o", str(out)]).exit_code == 2
    for wrong in (["--strategy", "cpu"], ["--gpu", "abacus"]):
        assert run(app, ["export", problem, "-o", str(out), *wrong]).exit_code == 2
    same = tmp_path / "same.py"
    same.write_text((ZOO / "problem.py").read_text())
    result = run(app, ["export", str(same), "-o", f"{tmp_path}/../{tmp_path.name}/same.py"])
    assert result.exit_code == 2
    assert "which would be lost" in " ".join(result.stderr.split())
    assert same.read_text() == (ZOO / "problem.py").read_text()


def test_an_h100_is_a_gpu_to_export_for() -> None:
    """As the H200 that serves it: the tables are those of the architecture."""
    assert GPUS["h100"] == GPUS["h200"]


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["zoo"], indirect=True)
def test_the_text_is_the_same_each_time(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever the order of a process' sets."""
    code = (
        "import sys; from pathlib import Path; from epinorm.tools.export.export import export; "
        f"Path(sys.argv[2]).write_text(export(Path(sys.argv[1]), **{FEW}).text)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    out = tmp_path / "model_new.py"
    command = [sys.executable, "-c", code, str(pair[0]), str(out)]
    subprocess.run(command, env=environment, check=True)
    assert out.read_text() == pair[1].read_text()
