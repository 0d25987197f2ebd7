"""Pieces of an exported file's text that its forward and backward Hopper kernels share."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from epinorm.cuda.jit import KernelSource
from epinorm.cuda.source import read_kernel
from epinorm.kernelbench.export_cuda import speakable

__all__ = ["ELEMENTS", "SMS", "entry", "prelude_of", "product_function", "without_c_names"]

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
    import inspect

    return inspect.getsource(_product).replace(_NOT_EXPORTED, "")


def entry(key: str, numbers: Mapping[str, int | str], preludes: Mapping[str, str]) -> str:
    """An entry ``key: (numbers, preludes)`` of a dictionary, as Python text."""
    values = "".join(f"            {name!r}: {value!r},\n" for name, value in numbers.items())
    texts = "".join(f'            {name!r}: r"""\n{text}""",\n' for name, text in preludes.items())
    return speakable(
        f"    {key}: (\n        {{\n{values}        }},\n        {{\n{texts}        }},\n    ),\n"
    )


def without_c_names(text: str) -> str:
    """Kernels under their C++ names, so that two namespaces can have one each."""
    return text.replace('extern "C" __global__', "__global__")
