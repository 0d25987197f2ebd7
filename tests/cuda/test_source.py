"""One text out of a kernel's file and its headers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.core import Program, ProgramOptions

from epinorm.backends.cuda.text import source

KERNELS = source.KERNEL_FOLDER
PRELUDES = sorted(KERNELS.rglob("*prelude.cuh"))
PARTS = {f"chain_{name}.cuh" for name in ("functions", "short", "rounded", "drops")}
"""Of namespace chain: chain_prelude.cuh has them."""


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


def test_a_prelude_stands_before_the_text(folder: Path) -> None:
    (folder / "k.cu").write_text("int x;\n")
    assert source.kernel_text("k.cu", "int y;") == "int y;\nint x;\n"


def test_what_a_file_needs_alone_is_in_no_text(folder: Path) -> None:
    (folder / "room").mkdir()
    (folder / "room" / "prelude.cuh").write_text("constexpr int kRows = 2;\n")
    (folder / "k.cu").write_text('#include "room/prelude.cuh"\nint x[kRows];\n')
    assert source.kernel_text("k.cu", "constexpr int kRows = 3;") == (
        "constexpr int kRows = 3;\nint x[kRows];\n"
    )


@pytest.mark.slow
def test_each_file_compiles_alone() -> None:
    """As an editor reads it, its includes found from the folder of kernels."""
    options = ProgramOptions(
        arch="sm_90a", std="c++17", include_path=[str(KERNELS)], fdevice_syntax_only=True
    )
    wrong = {}
    for path in sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]):
        if path in PRELUDES or path.name in PARTS:
            continue
        try:
            Program(path.read_text("utf-8"), "c++", options).compile("cubin")
        except Exception as error:
            said = re.findall("error: .*", str(error))
            if said:  # else there is no code, since nothing is made of the syntax
                wrong[path.name] = said
    assert not wrong


def test_no_pragma_stands_between_a_condition_and_its_loop() -> None:
    """Behind `if constexpr`, NVRTC 12.8 takes the loop and what follows for the condition's."""
    for path in (*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")):
        found = re.search(r"if constexpr \(.*\)\n *#pragma", path.read_text("utf-8"))
        assert found is None, f"{path.name}: {found[0]}"


@pytest.mark.parametrize("path", PRELUDES, ids=lambda path: path.parent.name + "/" + path.stem)
def test_an_example_has_what_the_texts_have(path: Path) -> None:
    """What it defines is written by Python, but for what the file that includes it says itself."""
    written = "".join([each.read_text("utf-8") for each in KERNELS.rglob("*.py")])
    example = path.read_text("utf-8").partition("#if __INCLUDE_LEVEL__")[0]
    names = re.findall(r"\b(k[A-Z]\w*) = |#define (\w+)", example)
    assert {a or b for a, b in names} <= set(re.findall(r"\w+", written))
