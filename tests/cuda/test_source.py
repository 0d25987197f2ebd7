"""One text out of a kernel's file and its headers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_prelude_stands_before_the_text(folder: Path) -> None:
    (folder / "k.cu").write_text("int x;\n")
    assert source.kernel_text("k.cu", "int y;") == "int y;\nint x;\n"
