"""The launches of exported files, computed on the CPU.

`fake_cuda/` stands in for the runtime and the kernels: each is a plain function with the arguments
of the real one, so that a wrong address, stride, size or order of launches shows as a wrong result.
"""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from export_case import exported_of

FAKE_CUDA = Path(__file__).parent / "fake_cuda"
HOPPER = (9, 0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return exported_of(tmp_path_factory.mktemp("example"), 1024, 1024, 1024)


@pytest.fixture(scope="module")
def long_sums(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Exported for a shape whose dW is split over blocks on Hopper."""
    return exported_of(tmp_path_factory.mktemp("long"), 65536, 128, 128)


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """Exported for a shape whose W is converted on the way on Hopper."""
    return exported_of(tmp_path_factory.mktemp("few"), 1024, 8192, 8192)


class Library:
    """The host part of an exported CUDA text, with the stand-ins for its kernels."""

    def __init__(self, definitions: str, text: str, extra: str, names: str, folder: Path) -> None:
        host = text[text.index("// ---- launches") :]
        pointers = "".join(
            f'extern "C" void* {n}_at;\nvoid* {n}_at = (void*)&{n};\n' for n in names.split()
        )
        source = folder / "launches.cpp"
        source.write_text(f'{definitions}{extra}#include "kernels.h"\n{host}{pointers}')
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wno-unused", "-fsanitize=undefined"]
        command += ["-fno-sanitize-recover", "-shared", "-fPIC", f"-I{FAKE_CUDA}"]
        run = subprocess.run(
            [*command, "-o", str(folder / "launches.so"), str(source)],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        self.library = ctypes.CDLL(str(folder / "launches.so"))

    def function(self, name: str, result: type, *arguments: type) -> Callable:
        address = ctypes.c_void_p.in_dll(self.library, f"{name}_at").value
        assert address is not None
        return ctypes.CFUNCTYPE(result, *arguments)(address)

    def check(self) -> None:
        """Every launch was as its kernel expects it."""
        address = ctypes.c_void_p.in_dll(self.library, "failures_at").value
        assert address is not None
        assert ctypes.c_int.from_address(address).value == 0


P, I64, BOOL = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_bool

CASES = [
    ("hopper", "float32 highest", (40, 64, 48)),
    ("hopper", "float16", (40, 64, 48)),
    ("portable", "float32 highest", (40, 64, 48)),
    ("portable", "float32 high", (33, 13, 80)),
    ("portable", "float16", (33, 13, 80)),
]


def flagged_cases(*names: str) -> list[tuple]:
    """Each case with nothing flagged; those with planes, which 16 bit has not, with each flag."""
    return [
        (core, mode, sizes, name)
        for core, mode, sizes in CASES
        for name in ("nothing", *names)
        if name == "nothing" or "float32" in mode
    ]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: Tensor, truth: Tensor, mode: str) -> bool:
    limit = 1e-5 if mode == "float32 highest" else 2e-3
    error = (found.double() - truth).norm() / truth.norm()
    return bool(error <= limit)


def at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@pytest.mark.parametrize(("core", "mode", "sizes", "flagged"), flagged_cases("x", "w"), ids=str)
def test_forward(
    exported: ModuleType, core: str, mode: str, sizes: tuple, flagged: str, tmp_path: Path
) -> None:
    check_forward(exported, core, mode, sizes, flagged, tmp_path)


@pytest.mark.parametrize("flagged", ["nothing", "x", "w"])
@pytest.mark.parametrize("sizes", [(40, 64, 48), (130, 72, 400)], ids=str)
def test_w_converted_on_the_way(
    few_rows: ModuleType, sizes: tuple, flagged: str, tmp_path: Path
) -> None:
    """A tile; more of them than blocks, and rows of x's plane that are padded."""
    check_forward(few_rows, "hopper", "float32 high", sizes, flagged, tmp_path)


def check_forward(
    exported: ModuleType, core: str, mode: str, sizes: tuple, flagged: str, folder: Path
) -> None:
    m, k, n = sizes
    keep = flagged != "x"
    definitions, text = exported._forward_source(
        core, mode, keep, HOPPER, *exported._multiples(k, n)
    )
    name = "Float32" if "float32" in mode else "Float16"
    types = "".join(f"#define {kind}Type {name}\n" for kind in ("Out", "Kept", "Norm"))
    names = "launch_linear_norm planes_bytes failures"
    library = Library(definitions, text, types, names, folder)
    dtype = torch.float32 if "float32" in mode else torch.float16
    x, w = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype)
    if flagged == "x":
        x[7] *= 1e6  # beyond what planes hold: computed again, this row alone
    elif flagged == "w":
        w[-1] *= 1e7  # all rows
    bias, gamma, beta = (draw(n + i, dtype=dtype)[:n] for i in range(3))
    y, z = torch.empty(m, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    mean, rstd = torch.empty(m, n // 16), torch.empty(m, n // 16)
    size = library.function("planes_bytes", I64, I64, I64, I64)(m, n, k)
    buffer = torch.zeros(size, dtype=torch.uint8)
    kept = (z, mean, rstd) if keep else (None, None, None)
    launch = library.function("launch_linear_norm", ctypes.c_char_p, *[P] * 11, *[I64] * 3, P)
    tensors = (x, w, bias, gamma, beta)
    error = launch(*map(at, tensors), None, at(buffer), at(y), *map(at, kept), m, n, k, None)
    assert error is None
    library.check()
    product = x.double() @ w.double().t()
    truth = product + bias.double() + 10 * gamma.double() + 100 * beta.double()
    assert close(y, truth, mode)
    if keep:
        assert close(z, product, mode)
        assert torch.equal(mean, torch.arange(m)[:, None].expand_as(mean).float())
        assert torch.equal(rstd, torch.arange(n // 16)[None].expand_as(rstd).float())


@pytest.mark.parametrize(
    ("core", "mode", "sizes", "flagged"), flagged_cases("dz", "x", "w"), ids=str
)
def test_backward(
    exported: ModuleType, core: str, mode: str, sizes: tuple, flagged: str, tmp_path: Path
) -> None:
    check_backward(exported, core, mode, sizes, flagged, tmp_path)


@pytest.mark.parametrize("mode", ["float32 high", "float16"])
def test_sums_that_are_split_over_blocks(long_sums: ModuleType, mode: str, tmp_path: Path) -> None:
    assert long_sums.BACKWARD["hopper", mode][0]["DW_PARTS"] > 1
    check_backward(long_sums, "hopper", mode, (1000, 64, 48), "nothing", tmp_path)


def check_backward(
    exported: ModuleType, core: str, mode: str, sizes: tuple, flagged: str, folder: Path
) -> None:
    m, k, n = sizes
    definitions, text = exported._backward_source(core, mode, HOPPER, *exported._multiples(k, n))
    split = "float32" in mode
    names = "launch_products scratch_bytes failures "
    names += "planes_bytes launch_split" if split else ""
    library = Library(definitions, text, "", names, folder)
    dtype = torch.float32 if split else torch.float16
    x, w, dz = draw(m, k, dtype=dtype), draw(n, k, dtype=dtype), draw(m, n, dtype=dtype)
    if flagged == "dz":
        dz[5, 3] = 1e6
    elif flagged == "x":
        x[7] *= 1e6
    elif flagged == "w":
        w[-1] *= 1e7
    planes, found = torch.zeros(0, dtype=torch.uint8), ctypes.pointer((P * 4)())
    row_parts, column_parts = 3, 2
    rows = (100 + torch.arange(m, dtype=torch.int32))[:, None].repeat(1, row_parts).contiguous()
    columns = (200 + torch.arange(n, dtype=torch.int32)).repeat(column_parts, 1).contiguous()
    flags = [torch.zeros(size, dtype=torch.uint8) for size in (m, n)]
    if split:
        size = library.function("planes_bytes", I64, I64, I64, I64)(m, n, k)
        planes = torch.zeros(size, dtype=torch.uint8)
        launch_split = library.function("launch_split", ctypes.c_char_p, P, P, P, *[I64] * 3, P)
        assert launch_split(at(x), at(w), at(planes), m, n, k, None) is None
        found = (P * 4)(at(rows), at(columns), *map(at, flags))
    launch = library.function(
        "launch_products", ctypes.c_char_p, *[P] * 5, I64, I64, *[P] * 3, *[I64] * 3, P
    )
    scratch_bytes = library.function("scratch_bytes", I64, I64, I64, I64, BOOL, BOOL)
    dx_truth, dw_truth = dz.double() @ w.double(), dz.double().t() @ x.double()
    for want_dx, want_dw in ((True, True), (True, False), (False, True)):
        for each in flags:
            each.zero_()
        dx = torch.full((m, k), float("nan"), dtype=dtype) if want_dx else None
        dw = torch.full((n, k), float("nan"), dtype=dtype) if want_dw else None
        scratch = torch.zeros(scratch_bytes(m, n, k, want_dx, want_dw), dtype=torch.uint8)
        error = launch(
            at(dz), at(x), at(w), at(planes), ctypes.addressof(found), row_parts, column_parts,
            at(scratch), at(dx), at(dw), m, n, k, None,
        )  # fmt: skip
        assert error is None
        library.check()
        assert dx is None or close(dx, dx_truth, mode)
        assert dw is None or close(dw, dw_truth, mode)
