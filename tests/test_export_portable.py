"""The portable part of exported files: what a machine without a GPU can say about it."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.portable_product import choose_tile as choose_product_tile
from epinorm.backends.cuda.plan.portable_tile import product_shared_bytes, shared_bytes
from epinorm.chain import Chain
from epinorm.problem import Problem
from epinorm.tools.export.export import export, forbidden_words
from epinorm.tools.export.portable import GPUS
from epinorm.tools.export.text import MODES as PRECISIONS
from epinorm.tools.kernelbench.protocol import NoChainError

sys.path.insert(0, str(Path(__file__).parent))

from export_case import EXAMPLE, MODES, SHARED_BYTES, check_kernels, exported_of, load

CAPABILITIES = tuple(SHARED_BYTES)
M_K_N = (1024, 8192, 8192)


@pytest.fixture(scope="module")
def kb62(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The example itself, exported for every GPU."""
    return exported_of(tmp_path_factory.mktemp("kb62"), *M_K_N)


def problem_of(mode: str, keep: bool) -> Problem:
    dtype, precision = PRECISIONS[mode]
    chain = Chain.parse("group_norm(512)|leaky_relu(0.01)|scale(2)")
    flags = (True, True, True, keep)
    return Problem(chain, *M_K_N, dtype, dtype, dtype, *flags, torch.device("cuda"), precision)


# ---- the kernels ----


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_forward_compiles_with_the_tile_of_the_plan(
    kb62: ModuleType, mode: str, capability: tuple[int, int]
) -> None:
    keep = (MODES.index(mode) + CAPABILITIES.index(capability)) % 2 == 0
    gpu = GPUS.get(capability, GPUS[None])
    problem = problem_of(mode, keep)
    tile = portable_plan.choose_tile(problem, gpu)
    assert tile is not None
    size = shared_bytes(portable_plan.instance_for(problem, tile))
    source = kb62._forward_source("portable", mode, keep, capability, 8, 8)
    assert f"#define STARTS_EARLY {int(capability >= (9, 0))}\n" in source[0]
    kernels = check_kernels(*source, capability, {"multiply::kSharedBytes": size})
    assert kernels == (3 if "float32" in mode else 1)


BACKWARD = [(mode, capability) for mode in MODES[::2] for capability in CAPABILITIES]
BACKWARD += [("float32 high", (8, 6)), ("float32 high", (10, 0)), ("float16", (8, 0))]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "capability"), BACKWARD, ids=str)
def test_backward_compiles(kb62: ModuleType, mode: str, capability: tuple[int, int]) -> None:
    planes = 2 if mode == "float32 highest" else 1
    tile = choose_product_tile(planes, GPUS.get(capability, GPUS[None]))
    size = product_shared_bytes(tile, planes)
    source = kb62._backward_source("portable", mode, capability, 8, 8)
    names = {f"product_{of}::kSharedBytes": size for of in ("dx", "dw")}
    assert check_kernels(*source, capability, names) == (6 if "float32" in mode else 2)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_norm_kernels_compile(kb62: ModuleType, capability: tuple[int, int]) -> None:
    """Forward, backward and the sum of its parts; dz of fp32 is split afterwards."""
    for dtype, split_dz in ((torch.float32, True), (torch.bfloat16, False)):
        constants = (1e-5, 0.01)
        definitions = kb62._definitions(dtype, dtype, 16, (1, 1, 1), constants, split_dz)
        assert check_kernels(definitions, kb62.CUDA, capability) == 3


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("multiples", [(1, 1), (2, 4)], ids=str)
def test_odd_rows_compile(
    kb62: ModuleType, multiples: tuple[int, int], capability: tuple[int, int]
) -> None:
    for source in (
        kb62._forward_source("portable", "bfloat16", True, capability, *multiples),
        kb62._backward_source("portable", "bfloat16", capability, *multiples),
        kb62._forward_source("portable", "float32 high", False, capability, *multiples),
    ):
        check_kernels(*source, capability)


@pytest.mark.slow
def test_odd_rows_of_planes_compile(kb62: ModuleType) -> None:
    source = kb62._backward_source("portable", "float32 highest", (8, 9), 1, 8)
    assert "#define COPY_BYTES 16\n" in source[0]
    assert check_kernels(*source, (8, 9)) == 6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("capability", [(8, 0), (12, 0), (13, 7)], ids=str)
@pytest.mark.parametrize("mode", ["float32 highest", "bfloat16"])
def test_launches_compile(
    kb62: ModuleType, mode: str, capability: tuple[int, int], tmp_path: Path
) -> None:
    """With and without launches that begin early; the last GPU is one that nvcc does not know."""
    sources = [
        kb62._forward_source("portable", mode, True, capability, 8, 8),
        kb62._backward_source("portable", mode, capability, 8, 8),
    ]
    for index, source in enumerate(sources):
        path = tmp_path / f"{index}.cu"
        path.write_text("".join(source))
        flags = ["-std=c++17", "-O1", *kb62._flags(capability), "-Werror", "all-warnings"]
        quiet = ["-diag-suppress", "177"]  # a header's constants that one kernel does not need
        command = ["nvcc", *flags, *quiet, "-c", "-o", str(path.with_suffix(".o")), str(path)]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


# ---- what is built, for which GPU ----


def test_kernels_are_compiled_for_the_gpu_at_hand(
    kb62: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(capability: tuple[int, int], cuda: tuple[int, int]) -> tuple[str, int]:
        monkeypatch.setattr(kb62, "CUDA_VERSION", cuda)
        (flags,) = kb62._flags(capability)
        return flags.removeprefix("-gencode="), kb62._numbers(capability, 8, 8)["STARTS_EARLY"]

    ptx = "arch=compute_80,code=compute_80"
    assert built((8, 0), (11, 6)) == ("arch=compute_80,code=sm_80", 0)
    assert built((8, 9), (11, 8)) == ("arch=compute_89,code=sm_89", 0)
    assert built((8, 9), (11, 7)) == (ptx, 0)
    assert built((9, 0), (11, 8)) == ("arch=compute_90,code=sm_90", 1)
    assert built((9, 0), (12, 0)) == ("arch=compute_90a,code=sm_90a", 1)
    assert built((10, 0), (12, 8)) == ("arch=compute_100,code=sm_100", 1)
    # PTX of 8.0 does not wait for the kernel before it, so it must not begin early.
    assert built((12, 0), (12, 6)) == (ptx, 0)
    assert built((13, 7), (13, 0)) == (ptx, 0)


def test_how_wide_memory_is_accessed(kb62: ModuleType) -> None:
    def numbers(which: str, mode: str, *multiples: int) -> tuple[int, int, int]:
        keep = (True,) if which == "forward" else ()
        source = getattr(kb62, f"_{which}_source")
        definitions, _ = source("portable", mode, *keep, (8, 0), *multiples)
        macros = dict(line.split(maxsplit=2)[1:] for line in definitions.splitlines())
        return tuple(int(macros[name]) for name in ("COPY_BYTES", "ALIGNED_ROWS", "K_ALIGNED"))

    assert numbers("forward", "bfloat16", 8, 8) == (16, 1, 1)
    assert numbers("forward", "bfloat16", 4, 8) == (4, 1, 1)  # rows of x and W on 8 bytes
    assert numbers("forward", "bfloat16", 1, 4) == (2, 0, 0)
    assert numbers("forward", "float32 high", 1, 4) == (16, 1, 0)  # planes are padded
    assert numbers("forward", "float32 high", 4, 2) == (16, 0, 1)
    assert numbers("backward", "float16", 8, 4) == (4, 1, 1)  # reads dz, writes rows of K
    assert numbers("backward", "float16", 4, 8) == (4, 0, 1)
    assert numbers("backward", "float32 highest", 2, 8) == (16, 0, 0)


def test_every_gpu_has_a_tile(kb62: ModuleType) -> None:
    for key, tiles in kb62.PORTABLE_TILES.items():
        assert set(tiles) == set(GPUS), key
        assert all(len(tile) == len(kb62.TILE_FIELDS) for tile in tiles.values())


@pytest.mark.parametrize(
    ("capability", "mode", "k_n", "core"),
    [
        ((9, 0), "float32 highest", (1024, 1024), "hopper"),
        ((9, 0), "float32 highest", (1023, 1024), "portable"),
        ((9, 0), "bfloat16", (1024, 1022), "portable"),
        ((8, 6), "float32 high", (1023, 1024), "portable"),
        ((8, 6), "float32 high", (1024, 1022), None),
        ((8, 6), "float16", (1023, 1022), "portable"),
        ((9, 0), None, (1024, 1024), None),
    ],
)
def test_who_multiplies_in_backward(
    kb62: ModuleType, capability: tuple, mode: str, k_n: tuple, core: str | None
) -> None:
    assert kb62._backward_core(capability, mode, *k_n) == core


# ---- the file, and what it says ----


def text_of(folder: Path, n: int = 1024, groups: int = 64, k: int = 1024, gemm: str = "own") -> str:
    problem = folder / "problem.py"
    text = EXAMPLE.read_text().replace("input_size = 8192", f"input_size = {k}")
    text = text.replace("hidden_size = 8192", f"hidden_size = {n}")
    problem.write_text(text.replace("512", str(groups)))
    exported = export(problem, gemm).text  # type: ignore[arg-type]
    path = folder / "model_new.py"
    path.write_text(exported)
    assert forbidden_words(exported) == []
    return exported


def header(text: str) -> str:
    return " ".join(text.split('"""')[1].split())


ON_HOPPER = "On Hopper (compute capability 9.0, CUDA 12 or newer), for {}, forward is one product"
ON_OTHERS = (
    "On every other GPU since Ampere (compute capability 8.0), for {}, forward is one product"
)
ON_ALL = "On every GPU since Ampere (compute capability 8.0), for {}, forward is one product"
ALL_MODES = ", ".join(MODES)


@pytest.fixture
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EPINORM_CORE", request.param)
    return str(request.param)


@pytest.mark.parametrize("core", ["auto"], indirect=True)
@pytest.mark.usefixtures("core")
def test_the_header_of_a_file_for_all(tmp_path: Path) -> None:
    said = header(text_of(tmp_path))
    assert ON_HOPPER.format(ALL_MODES) in said
    assert ON_OTHERS.format(ALL_MODES) in said
    assert "Hopper takes that one too for rows that are no multiple of 16 bytes" in said
    assert "Elsewhere (float64, autocast, other channels" in said
    assert "other GPUs" not in said


@pytest.mark.parametrize("core", ["portable"], indirect=True)
@pytest.mark.usefixtures("core")
def test_the_portable_core_can_be_forced(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    said = header(text)
    assert ON_ALL.format(ALL_MODES) in said
    assert "On Hopper" not in said
    exported = load(tmp_path / "model_new.py", "forced")
    exported.CUDA_VERSION = (13, 0)
    assert {key[0] for key in exported.FORWARD} == {"portable"}
    assert exported._forward_core((9, 0), "bfloat16", True, 1024, 1024, 1024, 2) == "portable"
    assert exported._backward_core((9, 0), "bfloat16", 1024, 1024) == "portable"
    assert "gemm/hopper/hopper_linear_norm.cu" not in exported.KERNELS
    assert all(f"@CHAIN {i}@" in text for i in range(len(exported.CHAINS)))
    assert "wgmma.mma_async" not in text
    assert "EPINORM_CORE" not in text


@pytest.mark.parametrize("core", ["hopper"], indirect=True)
@pytest.mark.usefixtures("core")
def test_the_header_of_a_file_for_hopper_alone(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    said = header(text)
    assert ON_HOPPER.format(ALL_MODES) in said
    assert "mma.sync" not in said
    assert "Elsewhere (other GPUs, float64, autocast" in said
    exported = load(tmp_path / "model_new.py", "hopper_alone")
    exported.CUDA_VERSION = (13, 0)
    assert exported._forward_core((8, 0), "bfloat16", True, 1024, 1024, 1024, 2) is None
    assert exported._backward_core((8, 0), "bfloat16", 1024, 1024) is None
    assert "gemm/portable/portable_linear_norm.cu" not in exported.KERNELS


@pytest.mark.parametrize("core", ["auto"], indirect=True)
@pytest.mark.usefixtures("core")
def test_shapes_that_one_core_alone_serves(tmp_path: Path) -> None:
    # The copy engine cannot read rows of 1023 numbers.
    said = header(text_of(tmp_path, k=1023))
    assert ON_ALL.format(ALL_MODES) in said
    assert "On Hopper" not in said
    # Hopper spreads a group over blocks; the warps of one block share at most 512 channels.
    said = header(text_of(tmp_path, n=2048, groups=2))
    assert ON_HOPPER.format("bfloat16, float16") in said
    assert "Elsewhere (other GPUs" in said
    assert "Float32 highest has no product of our own" in said
    # Rows of dz's planes.
    said = header(text_of(tmp_path, n=36, groups=9))
    assert "Backward in float32 high has no products of the portable kernels: 36 output" in said


@pytest.mark.parametrize("core", ["portable"], indirect=True)
@pytest.mark.usefixtures("core")
def test_library_means_library(tmp_path: Path) -> None:
    text = text_of(tmp_path, gemm="library")
    assert "are PyTorch's (F.linear, torch.mm)" in header(text)
    assert "FORWARD = {" not in text
    with pytest.raises(NoChainError, match="portable: a group of 1024 channels does not fit"):
        text_of(tmp_path, n=2048, groups=2)
