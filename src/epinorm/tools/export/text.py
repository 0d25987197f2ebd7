"""Pieces of an exported file's text that its forward and backward kernels share.

An exported file holds each kernel file of the library once, includes and all (``KERNELS``), and a
prelude for each instance. Marks in both name what is put in their place when it builds:
@KERNEL name@ a file with its headers, @CHAIN i@ a chain, @PRODUCT ...@ the instruction wgmma,
@NAME@ the prelude NAME of the instance.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

import torch

from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.text.source import KERNEL_FOLDER, read_kernel
from epinorm.precision import Precision
from epinorm.tools.export.cuda import TEMPLATE_FOLDER, speakable

__all__ = [
    "ELEMENTS",
    "MODES",
    "SMS",
    "Chains",
    "entry",
    "kernel",
    "kernel_files",
    "prelude_of",
    "product_function",
    "templates",
]

MODES: Mapping[str, tuple[torch.dtype, Precision]] = {
    "float32 highest": (torch.float32, "highest"),
    "float32 high": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
}
"""dtype and precision by the name that an exported file has for them."""

SMS = 132
"""Of an H100 and an H200; the number of blocks is asked of the GPU itself."""

ELEMENTS = {
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}

_PRODUCT = re.compile(
    r"^__device__ __forceinline__ void wgmma\(.*?"
    r"m64n(?P<columns>\d+)k\d+\.f32\.(?P<kind>\w+)\..*? p, (?P<flags>[01, ]+); .*?^}\n",
    re.S | re.M,
)
_NOT_EXPORTED = "  # type: ignore[no-untyped-def]  # written into the exported file"
_CHAIN = re.compile(
    r"// What the generated text of a chain.*?^}  // namespace chain\n", re.S | re.M
)
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n?", re.M)
_INCLUDE = re.compile(r'^#include "(?P<name>[\w./]+)"[^\n]*$', re.M)
_MARK = re.compile(r"@KERNEL (?P<name>[\w./]+)@")


def prelude_of(source: KernelSource, file: str) -> str:
    """What a kernel's text has before the file's, with a mark for the product instruction."""
    body = read_kernel(file)
    assert source.text.endswith(body), f"{file} is not the end of its own text"
    return _PRODUCT.sub(_product_mark, source.text[: -len(body)])


def _product_mark(match: re.Match[str]) -> str:
    columns, kind, flags = int(match["columns"]), match["kind"], match["flags"]
    assert _product(columns, kind, flags) == match.group()
    return f"@PRODUCT {columns} {kind} {flags}@\n"


def _product(columns, kind, flags):  # type: ignore[no-untyped-def]  # written into the exported file
    """wgmma.mma_async.m64n<columns> with fp32 accumulators as a function."""
    count = columns // 2
    depth = 8 if kind == "tf32" else 16
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} "
        f'{{{registers}}}, %{count}, %{count + 1}, p, {flags}; }}"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(accumulate));\n}}\n'
    )


def product_function() -> str:
    """The Python text that makes the product instruction from its mark."""
    return inspect.getsource(_product).replace(_NOT_EXPORTED, "")


class Chains:
    """The texts of chains, each once: they are long, and preludes name them."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def shortened(self, prelude: str) -> str:
        """The prelude with a mark in the place of its chain."""

        def mark(match: re.Match[str]) -> str:
            if match.group() not in self._texts:
                self._texts.append(match.group())
            return f"@CHAIN {self._texts.index(match.group())}@\n"

        return _CHAIN.sub(mark, prelude)

    @property
    def text(self) -> str:
        """The items of a tuple, as Python text."""
        return "".join(f'    r"""\n{speakable(chain)}""",\n' for chain in self._texts)


def entry(key: str, numbers: Mapping[str, int | str], preludes: Mapping[str, str]) -> str:
    """An entry ``key: (numbers, preludes)`` of a dictionary, as Python text."""
    values = "".join(f"            {name!r}: {value!r},\n" for name, value in numbers.items())
    texts = "".join(f'            {name!r}: r"""\n{text}""",\n' for name, text in preludes.items())
    return speakable(
        f"    {key}: (\n        {{\n{values}        }},\n        {{\n{texts}        }},\n    ),\n"
    )


def kernel(namespace: str, prelude: str, file: str) -> str:
    """A kernel in a namespace of its own, as marks. Operands are macros that others define too."""
    return (
        f"namespace {namespace} {{\n@{prelude}@\n@KERNEL {file}@\n}}  // namespace {namespace}\n"
        "#undef CHAIN_PARAMETERS\n#undef OPERAND_LIST\n#undef STRIDE_LIST\n#undef CONSTANT_LIST\n"
        "#undef AFFINE_SCALE\n"
    )


def templates(*names: str) -> str:
    """The text of launch templates, one after the other."""
    return "".join((TEMPLATE_FOLDER / name).read_text(encoding="utf-8") for name in names)


def kernel_files(*texts: str) -> str:
    """The kernel files that texts have marks for, and all that these include, as the entries
    name → text of a dictionary, as Python text. Headers come before who includes them."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        if name in found:
            return
        text = (KERNEL_FOLDER / name).read_text(encoding="utf-8")
        for match in _INCLUDE.finditer(text):
            add(match["name"])
        # Under their C++ names, so that two namespaces can have one kernel each.
        text = text.replace('extern "C" __global__', "__global__")
        found[name] = speakable(_PRAGMA.sub("", text).strip("\n"))

    for text in texts:
        for match in _MARK.finditer(text):
            add(match["name"])
    return "".join(f'    "{name}": r"""\n{text}\n""",\n' for name, text in found.items())
