"""Exported files: what a machine without a GPU can say about them."""

import ast
import dataclasses
import inspect
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from epinorm.backends.cuda.plan.hopper import choose_tile
from epinorm.backends.cuda.plan.hopper_tile import Tile, fp32_weight_tiles
from epinorm.backends.cuda.runtime.jit import KernelSource, compiled
from epinorm.problem import Problem
from epinorm.tools.export import hopper as export_hopper
from epinorm.tools.export.export import chosen_gemm, export, forbidden_words
from epinorm.tools.judge.source import remarks
from epinorm.tools.kernelbench import ProblemError
from epinorm.tools.kernelbench.protocol import NoChainError
from epinorm_cli.commands import app

sys.path.insert(0, str(Path(__file__).parent))

from export_case import EXAMPLE, MODES, check_kernels, exported_of, load

ZOO = Path(__file__).parent / "zoo"

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


@pytest.fixture(params=["example", "zoo", *TEXTS])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A problem file and what is exported from it; the example with small sizes."""
    if request.param == "example":
        problem = tmp_path / "example.py"
        text = EXAMPLE.read_text().replace("8192", "128").replace("512", "8")
        problem.write_text(text)
    elif request.param == "zoo":
        problem = ZOO / "problem.py"
    else:
        problem = tmp_path / f"{request.param}.py"
        problem.write_text(TEXTS[request.param])
    path = tmp_path / "model_new.py"
    gemm = "own" if request.param in ("example", "layer_norm") else "library"
    path.write_text(export(problem, gemm).text)
    return problem, path


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
    assert exported.CHAIN in repr(model_new)


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
    ast.parse(text, feature_version=(3, 8))  # what the oldest torch that it serves runs on
    assert not any(note.startswith("imports") for note in remarks(pair[1]))
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    assert "Model" not in names
    assert "import epinorm" not in text
    exported = load(pair[1], "exported")
    for name in ("CUDA", "CPP", "FORWARD_CPP", "BACKWARD_CPP"):
        assert getattr(exported, name, "").isascii()


def test_no_gpu_is_said_in_one_sentence(pair: tuple[Path, Path]) -> None:
    exported = load(pair[1], "exported")
    model = exported.ModelNew(*exported.get_init_inputs())
    with pytest.raises(RuntimeError, match="computes on a CUDA GPU, but its input is on cpu"):
        model(*exported.get_inputs())


def test_it_needs_no_epinorm(tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(export(ZOO / "problem.py", "library").text)
    code = (
        "import sys; sys.path.insert(0, '.'); import model_new as m; "
        "m.ModelNew(*m.get_init_inputs()); print('epinorm' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False"]


CASES = [
    (torch.float32, torch.float32, (1, 1, 1)),
    (torch.float64, torch.float64, (1, 1, 1)),
    (torch.bfloat16, torch.bfloat16, (0, 1, 1)),
    (torch.float16, torch.float32, (1, 0, 0)),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_the_kernels_compile(pair: tuple[Path, Path], case: tuple, arch: str) -> None:
    exported = load(pair[1], "exported")
    dtype, norm_dtype, has = case
    text = exported.CUDA.split("// ---- launches")[0]
    for channels in (exported_channels(exported), 7):
        definitions = exported._definitions(dtype, norm_dtype, channels, has, (1e-5, 0.1, 0.2))
        kernel = compiled(KernelSource("norm_forward", definitions + text, arch))
        assert kernel.spill_bytes <= 0


def exported_channels(exported: ModuleType) -> int:
    return next(iter(exported.TILES))[0]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_launches_compile(pair: tuple[Path, Path], tmp_path: Path) -> None:
    exported = load(pair[1], "exported")
    channels = exported_channels(exported)
    constants = (1e-5, 0.1, 0.2)
    definitions = exported._definitions(
        torch.float32, torch.float32, channels, (1, 1, 1), constants
    )
    source = tmp_path / "x.cu"
    source.write_text(definitions + exported.CUDA)
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-c"]
    command = ["nvcc", *flags, "-o", str(tmp_path / "x.o"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "own", "own split"])
def test_the_binding_compiles(name: str, tmp_path: Path) -> None:
    import sysconfig

    from torch.utils.cpp_extension import include_paths

    cuda = Path("/usr/local/cuda/include")
    if not (cuda / "cuda_runtime_api.h").is_file():
        pytest.skip("needs the CUDA headers")
    if name.startswith("own"):
        exported = exported_of(tmp_path, 1024, 1024, 1024)
        mode = "float32 highest" if name == "own split" else "bfloat16"
        core = (
            "portable" if name == "own split" else "hopper"
        )  # the text is the same, not its macros
        forward = exported._forward_source(core, mode, True, (9, 0), 8, 8)[0]
        backward = exported._backward_source(core, mode, (9, 0), 8, 8)[0]
        sources = [forward + exported.FORWARD_CPP, backward + exported.BACKWARD_CPP]
    else:
        problem, path = tmp_path / "problem.py", tmp_path / "model_new.py"
        problem.write_text(TEXTS[name])
        path.write_text(export(problem).text)
        exported = load(path, "exported")
        definitions = exported._definitions(
            *(torch.float16, torch.float32, 8, (1, 1, 0), (0.1, 0.2, 0.3))
        )
        sources = [definitions + exported.CPP]
    # A header that CPU builds of PyTorch leave out, and that says nothing.
    stub = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    stub.parent.mkdir(parents=True)
    stub.touch()
    source = tmp_path / "x.cpp"
    folders = [*include_paths(), cuda, sysconfig.get_paths()["include"]]
    folders.append(str(tmp_path))
    flags = ["-std=c++20", "-fsyntax-only", "-DTORCH_EXTENSION_NAME=x"]
    command = ["g++", *flags, *(f"-I{folder}" for folder in folders), str(source)]
    for text in sources:
        source.write_text(text)
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def allowed(folder: Path, m: int, k: int, n: int) -> ModuleType:
    """As ``exported_of``, of a file without words that it must not have."""
    exported = exported_of(folder, m, k, n)
    assert forbidden_words((folder / "model_new.py").read_text()) == []
    return exported


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The example with sizes that every mode serves, exported with a product of our own."""
    return allowed(tmp_path_factory.mktemp("own"), 1024, 1024, 1024)


def test_every_mode_has_a_product_of_our_own(own: ModuleType) -> None:
    cores = ("hopper", "portable")
    assert set(own.FORWARD) == {
        (core, mode, keep) for core in cores for mode in MODES for keep in (False, True)
    }
    assert set(own.BACKWARD) == {(core, mode) for core in cores for mode in MODES}
    assert (own.OWN_CHANNELS, own.OWN_HAS) == (16, (True, True, True))
    assert own.OWN_CONSTANTS == (1e-5, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_hopper_instances_compile(own: ModuleType, mode: str, keep: bool) -> None:
    source = own._forward_source("hopper", mode, keep, (9, 0), 8, 8)
    assert "#define STARTS_EARLY 1\n" in source[0]
    assert check_kernels(*source, (9, 0)) == (3 if "#define SPLIT 1" in source[0] else 1)


@pytest.mark.slow
@pytest.mark.parametrize("split_dz", [False, True])
def test_the_norm_kernel_compiles_for_dz_that_is_split(own: ModuleType, split_dz: bool) -> None:
    definitions = own._definitions(
        *(torch.float32, torch.float32, 16, (1, 1, 1), (1e-5, 0.01), split_dz)
    )
    text = own.CUDA.split("// ---- launches")[0]
    assert compiled(KernelSource("norm_backward", definitions + text, "sm_90a")).spill_bytes <= 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_backward_instances_compile(own: ModuleType, mode: str) -> None:
    definitions, text = own._backward_source("hopper", mode, (9, 0), 8, 8)
    for namespace in ("product_dx", "product_dw"):
        assert f"namespace {namespace} {{" in text
    numbers = own.BACKWARD["hopper", mode][0]
    products = 2 + (numbers["DX_PARTS"] > 1) + (numbers["DW_PARTS"] > 1)
    kernels = check_kernels(definitions, text, (9, 0))
    assert kernels == products + (4 if "float32" in mode else 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("m_k_n", "mode", "parts"),
    [
        ((1024, 8192, 8192), "float32 highest", False),
        ((65536, 128, 128), "float32 high", True),
        ((65536, 128, 128), "float16", True),
    ],
)
def test_backward_launches_compile(
    m_k_n: tuple[int, int, int], mode: str, parts: bool, tmp_path: Path
) -> None:
    """The last two split a long sum over blocks."""
    exported = exported_of(tmp_path, *m_k_n)
    assert (exported.BACKWARD["hopper", mode][0]["DW_PARTS"] > 1) == parts
    source = tmp_path / "x.cu"
    source.write_text("".join(exported._backward_source("hopper", mode, (9, 0), 8, 8)))
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-c"]
    command = ["nvcc", *flags, "-o", str(tmp_path / "x.o"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_build_is_kept_and_a_killed_one_is_in_nobodys_way(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """load_inline itself, but for the CUDA text."""
    from torch.utils import cpp_extension

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    real, built = cpp_extension.load_inline, []

    def load_inline(cuda_sources: list[str], extra_cuda_cflags: list[str], **given: Any) -> Any:
        built.append(given["build_directory"])
        if len(built) == 1:
            Path(given["build_directory"], "lock").touch()
            raise KeyboardInterrupt
        return real(**given)

    load_inline.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    headers = "#include <torch/csrc/Exceptions.h>\n#include <torch/csrc/utils/pybind.h>\n"
    cpp = f"{headers}int answer() {{ return ANSWER; }}\n"

    def answer(value: int) -> int:
        module = own._build(f"#define ANSWER {value}\n", "", cpp, ["answer"], ())
        return module.answer()

    with pytest.raises(KeyboardInterrupt):
        answer(42)
    assert answer(42) == 42
    assert answer(42) == 42
    assert len(set(built)) == len(built) == 2
    assert not Path(built[1]).exists()  # it has its name now
    assert answer(43) == 43
    assert len(built) == 3
    kept = next(tmp_path.rglob("linear_norm_*.so"))
    value = 42 if own._loaded(kept.stem, str(kept)).answer() == 42 else 43
    for path in (kept, kept.parent, kept.parent.parent):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(0o777)  # now anybody could have written it
        count = len(built)
        assert answer(value) == value
        assert len(built) == count + 1
        path.chmod(mode)
        assert answer(value) == value
        assert len(built) == count + 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("sizes", "mode"),
    [("own", "float32 highest"), ("own", "bfloat16"), ("few_rows", "float32 high")],
)
def test_hopper_launches_compile(
    request: pytest.FixtureRequest, sizes: str, mode: str, tmp_path: Path
) -> None:
    check_launches(request.getfixturevalue(sizes), mode, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_launches_that_convert_w_compile_with_operands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A channel's and an element's, in a chain with operations before the norm."""

    def chosen(problem: Problem, sms: int) -> Tile | None:
        if problem.precision == "high":
            return fp32_weight_tiles()[0]
        return choose_tile(problem, sms)

    monkeypatch.setattr(export_hopper, "choose_tile", chosen)
    problem, path = tmp_path / "problem.py", tmp_path / "model_new.py"
    problem.write_text(LAYER_NORM.replace("320", "64"))
    path.write_text(export(problem, "own").text)
    exported = load(path, "exported")
    exported.CUDA_VERSION = (13, 0)
    assert converting(exported) == {("hopper", "float32 high", keep) for keep in (False, True)}
    assert "const typename NormType::Storage* operand1" in str(exported.FORWARD)
    check_launches(exported, "float32 high", tmp_path)


def check_launches(exported: ModuleType, mode: str, folder: Path) -> None:
    """The forward text for Hopper compiles as nvcc builds it."""
    source = folder / "x.cu"
    source.write_text("".join(exported._forward_source("hopper", mode, True, (9, 0), 8, 8)))
    flags = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-c"]
    command = ["nvcc", *flags, "-o", str(folder / "x.o"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The example with its own sizes, of which `high` converts W on the way on Hopper."""
    return allowed(tmp_path_factory.mktemp("few"), 1024, 8192, 8192)


def converting(exported: ModuleType) -> set[tuple]:
    """The instances that convert W on the way."""
    return {key for key, (numbers, _) in exported.FORWARD.items() if "FP32_WEIGHT" in numbers}


def test_w_is_converted_on_the_way_where_the_library_does(
    own: ModuleType, few_rows: ModuleType
) -> None:
    assert converting(few_rows) == {("hopper", "float32 high", keep) for keep in (False, True)}
    assert converting(own) == set()
    for exported, kept in ((few_rows, True), (own, False)):
        assert ("gemm/hopper/hopper_fp32_weight.cu" in exported.KERNELS) == kept
        assert ("FP32_WEIGHT" in exported.FORWARD_CUDA["hopper"]) == kept
        assert "FP32_WEIGHT" not in exported.FORWARD_CUDA["portable"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_instances_that_convert_w_compile(few_rows: ModuleType, keep: bool) -> None:
    numbers, preludes = few_rows.FORWARD["hopper", "float32 high", keep]
    assert "constexpr bool kWritesPlane = false;\n" in preludes["MULTIPLY"]
    assert "constexpr int kFlagsLate = 1;\n" in preludes["RESCUE"]
    source = few_rows._forward_source("hopper", "float32 high", keep, (9, 0), 8, 8)
    layout = {"multiply::kBarrierOffset + multiply::kBarrierBytes": numbers["SHARED_BYTES"]}
    assert check_kernels(*source, (9, 0), layout) == 3


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("mode", ["float32 highest", "float16"])
def test_instances_beside_them_compile(few_rows: ModuleType, mode: str, keep: bool) -> None:
    source = few_rows._forward_source("hopper", mode, keep, (9, 0), 8, 8)
    assert check_kernels(*source, (9, 0)) == (3 if "float32" in mode else 1)


BFLOAT16 = ("hopper", "bfloat16")
FALLBACK = ("portable", "bfloat16")


@pytest.mark.parametrize(
    ("change", "own_product"),
    [
        ({}, BFLOAT16),
        ({"capability": (10, 0)}, FALLBACK),
        ({"capability": (8, 0)}, FALLBACK),
        ({"cuda": (11, 8)}, FALLBACK),
        ({"k": 1028}, FALLBACK),
        ({"k": 0}, None),
        ({"groups": 32}, None),
        ({"has": (True, False, True)}, None),
        ({"constants": (1e-5, 0.02)}, None),
        ({"norm_dtype": torch.float32}, None),
        ({"dtype": torch.float64, "norm_dtype": torch.float64}, None),
        ({"dtype": torch.float32, "norm_dtype": torch.float32}, ("hopper", "float32 highest")),
    ],
)
def test_who_multiplies_what(
    own: ModuleType, monkeypatch: pytest.MonkeyPatch, change: dict, own_product: tuple | None
) -> None:
    call = {
        "capability": (9, 0), "dtype": torch.bfloat16, "norm_dtype": torch.bfloat16, "k": 1024,
        "groups": 64, "has": (True, True, True), "constants": (1e-5, 0.01), "cuda": (13, 0),
        **change,
    }  # fmt: skip
    monkeypatch.setattr(own, "CUDA_VERSION", call["cuda"])
    x = torch.empty(8, call["k"], dtype=call["dtype"])
    weight = torch.empty(1024, call["k"], dtype=call["dtype"])
    found = own._own(
        call["capability"], x, weight, call["norm_dtype"], call["groups"], call["has"],
        call["constants"], True,
    )  # fmt: skip
    assert found == own_product


@pytest.mark.parametrize(
    ("m_k_n", "limits"), [((16, 1024, 1024), (16, None)), ((65536, 128, 128), (None, (128, 128)))]
)
def test_tiles_of_few_rows_or_a_small_weight_serve_no_more(
    tmp_path: Path, m_k_n: tuple[int, int, int], limits: tuple
) -> None:
    m, k, n = m_k_n
    exported = exported_of(tmp_path, m, k, n)
    assert exported.LIMITS["bfloat16", False] == limits

    def core(m: int, k: int, n: int) -> str:
        return str(exported._forward_core((9, 0), "bfloat16", False, m, k, n, 2))

    assert core(m, k, n) == "hopper"
    assert core(17, 1024, 1024) == "portable"


def test_a_shape_without_any_product_of_our_own_is_refused(tmp_path: Path) -> None:
    problem = tmp_path / "problem.py"
    problem.write_text(EXAMPLE.read_text().replace("8192", "1023").replace("512", "341"))
    with pytest.raises(NoChainError, match="--gemm library can"):
        export(problem, "own")
    assert "FORWARD = {" not in export(problem, "library").text
    fallen_back = export(problem, "auto")
    assert fallen_back.text == export(problem, "library").text
    assert fallen_back.remarks[0].startswith("there is no product of our own for this shape")


def test_strategy_and_gemm() -> None:
    assert chosen_gemm("auto", None) == "auto"
    assert chosen_gemm("auto", "own") == "own"
    assert chosen_gemm("single", None) == "own"
    assert chosen_gemm("epilogue", None) == "library"
    assert chosen_gemm("auto", "library") == "library"
    with pytest.raises(ValueError, match="contradict"):
        chosen_gemm("single", "library")
    with pytest.raises(ValueError, match="contradict"):
        chosen_gemm("epilogue", "own")


def test_any_group_size_has_a_tile(tmp_path: Path) -> None:
    path = tmp_path / "model_new.py"
    path.write_text(export(ZOO / "problem.py", "library").text)
    exported = load(path, "exported")
    for itemsize in (2, 4, 8):
        for channels in (1, 2, 3, 7, 16, 96, 1000, 4096, 4104, 16384):
            vector, lanes, vectors, *_ = exported._any_tile(channels, itemsize)
            assert channels % vector == 0
            assert lanes * vectors * vector >= channels
            assert lanes <= 1024
            assert lanes & (lanes - 1) == 0


def test_constants_come_from_the_constructor(tmp_path: Path) -> None:
    problem, path = tmp_path / "problem.py", tmp_path / "model_new.py"
    problem.write_text(LAYER_NORM)
    path.write_text(export(problem).text)
    exported = load(path, "exported")
    seen = []
    exported._linear_norm = lambda *args, **kwargs: seen.append(kwargs["constants"])
    exported.ModelNew(96, 320, high=0.75)(None, None)
    assert seen == [(1e-3, -0.5, 0.75)]
    with pytest.raises(ValueError, match=r"exported for self.factor = 3.0, got 5.0"):
        exported.ModelNew(96, 320, factor=5.0)(None, None)
    assert exported._number(float("-inf")) == "-HUGE_VAL"


REFUSED = {
    "no chain": (
        "return self.fc(x).relu()",
        "Model holds no chain that can be fused",
    ),
    "goes on": (
        "return self.gn(self.fc(x)).sum(1)",
        "its forward goes on after the chain group_norm",
    ),
    "goes before": (
        "return self.gn(self.fc(x.sin()))",
        "computed before the linear layer, outside the chain",
    ),
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


def test_third_party_imports_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "problem.py"
    path.write_text("import pytest\n" + (ZOO / "problem.py").read_text())
    with pytest.raises(ProblemError, match="imports pytest"):
        export(path)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "new.py"
    run = CliRunner().invoke
    result = run(app, ["export", str(ZOO / "problem.py"), "-o", str(out), "--gemm", "library"])
    assert result.exit_code == 0, result.output
    assert "wrote" in result.stdout
    assert "PyTorch's (F.linear, torch.mm)" in result.stdout
    assert out.read_text() == export(ZOO / "problem.py", "library").text
    assert run(app, ["export", str(tmp_path / "none.py"), "-o", str(out)]).exit_code == 2
    wrong = ["export", str(ZOO / "problem.py"), "-o", str(out), "--strategy", "cpu"]
    assert run(app, wrong).exit_code == 2


def test_the_text_is_the_same_each_time() -> None:
    first, second = (export(ZOO / "problem.py") for _ in range(2))
    assert dataclasses.asdict(first) == dataclasses.asdict(second)
