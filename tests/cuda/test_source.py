"""One text out of a kernel's file and its headers."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from epinorm.backends.cuda.runtime.jit import KernelSource, compile_cubin
from epinorm.backends.cuda.text import source


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of kernels in place of the package's own."""
    monkeypatch.setattr(source, "KERNEL_FOLDER", tmp_path)
    source.read_kernel.cache_clear()
    yield tmp_path
    source.read_kernel.cache_clear()


def test_each_header_is_put_in_once_before_its_first_use(folder: Path) -> None:
    (folder / "base.cuh").write_text("#pragma once\nstruct Base {};")
    (folder / "left.cuh").write_text('#pragma once\n#include "base.cuh"\nstruct Left : Base {};\n')
    (folder / "right.cuh").write_text('#include  "base.cuh"  // why\nstruct Right : Base {};\n')
    (folder / "k.cu").write_text('  #include "left.cuh"\n# include "right.cuh"\nLeft l; Right r;\n')
    assert source.read_kernel("k.cu").split("\n") == [
        "struct Base {};",
        "struct Left : Base {};",
        "struct Right : Base {};",
        "Left l; Right r;",
        "",
    ]


def test_headers_that_include_each_other_end(folder: Path) -> None:
    (folder / "a.cuh").write_text('#include "b.cuh"\nint a;\n')
    (folder / "b.cuh").write_text('#include "a.cuh"\nint b;\n')
    assert source.read_kernel("a.cuh") == "int b;\nint a;\n"


def test_a_missing_header_is_named_with_the_file_that_wants_it(folder: Path) -> None:
    (folder / "k.cu").write_text('#include "absent.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"absent\.cuh, included from k\.cu"):
        source.read_kernel("k.cu")


def test_a_header_from_elsewhere_is_refused(folder: Path) -> None:
    (folder / "k.cu").write_text("#include <cuda_fp16.h>\n")
    with pytest.raises(ValueError, match=r"only our own headers.*<cuda_fp16\.h>"):
        source.read_kernel("k.cu")


def test_definitions_stand_before_the_text(folder: Path) -> None:
    (folder / "k.cu").write_text("int x;\n")
    text = source.kernel_text(
        "k.cu", {"N": 5, "NEGATIVE": -3, "LONG": 2**40, "FLAG": True, "T": "float", "EPS": 0.5}
    )
    assert text.split("\n") == [
        "#define N 5",
        "#define NEGATIVE (-3)",
        "#define LONG 1099511627776LL",
        "#define FLAG 1",
        "#define T float",
        "#define EPS 0x1.0000000000000p-1f",
        "int x;",
        "",
    ]
    assert source.kernel_text("k.cu", "int y;") == "int y;\nint x;\n"


@pytest.mark.parametrize(
    "defines, words",
    [
        ({"2N": 1}, "not a C identifier"),
        ({"N": "1\n#undef N"}, "one line"),
        ({"EPS": float("nan")}, "must be finite"),
        ({"EPS": 1e39}, "does not fit a float"),
    ],
)
def test_what_cannot_be_defined_is_refused(
    folder: Path, defines: dict[str, str | int | float], words: str
) -> None:
    (folder / "k.cu").write_text("")
    with pytest.raises(ValueError, match=words):
        source.kernel_text("k.cu", defines)


@pytest.mark.parametrize("value", [1e-5, -0.01, 3.4028234663852886e38, 1e-45, 0.0, 1 / 3])
def test_float_literals_are_exact(value: float) -> None:
    """The compiler itself says whether each literal has the bits that the value has."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    double_bits = struct.unpack("<Q", struct.pack("<d", value))[0]
    text = f"""
        static_assert(__builtin_bit_cast(unsigned, {source.float_literal(value)}) == {bits}u, "");
        static_assert(__builtin_bit_cast(unsigned long long, {source.double_literal(value)})
                      == {double_bits}ull, "");
        extern "C" __global__ void k() {{}}"""
    compile_cubin(KernelSource("k", text, "sm_80"))
