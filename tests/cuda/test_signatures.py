"""What launches give a kernel is what its text takes: number, kind and order of the arguments."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from epinorm.backends.cuda.runtime import device, launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from imaginary import CASES, H200, KINDS, imaginary_h200, launches

A100 = device.Gpu((8, 0), 108, 166912, 167936)
NAMES = ("kb62", "decode_16", "ln256", "wide_sum", "residual_sum", "operands", "dropout_768")
NAMES += ("linear_gelu",)
LETTERS = {
    "TensorMap": "m", "i64": "l", "long long": "l", "int": "i", "unsigned": "u", "u32": "u",
    "float": "f", "double": "d",
}  # fmt: skip


def parameters(text: str, entry: str) -> list[str]:
    """The parameters of a kernel as its text declares them."""
    text = re.sub(r"//[^\n]*", "", text).replace("\\\n", " ")
    macros = dict(re.findall(r"^#define (\w+)[ \t]*(.*)$", text, re.M))
    (found,) = re.findall(rf"__global__[^;{{]*?\b{entry}\(([^{{]*)\)\s*{{", text)
    while any(word in macros for word in re.findall(r"\w+", found)):
        found = re.sub(r"\w+", lambda word: macros.get(word[0], word[0]), found)
    return [" ".join(one.split()) for one in found.split(",")]


def letter_of(parameter: str, text: str) -> str:
    """The letter of FIELDS that stands for it."""
    if "*" in parameter:
        return "p"
    type_ = re.sub(r"\bconst\b|__grid_constant__|__restrict__|\w+$", "", parameter).strip()
    while type_ not in LETTERS:
        (type_,) = re.findall(rf"using {re.escape(type_)} = ([\w ]+);", text)
    return LETTERS[type_]


def prepared(gpu: device.Gpu) -> dict[tuple[str, str], tuple[str, list[str]]]:
    """For each text and signature that a training step of the cases prepares a launch with:
    the kernel and its parameters."""
    found = {}
    prepare = launch.Kernel.prepare

    def noted(kernel: launch.Kernel, signature: str, *shape: Any, **more: Any) -> Any:
        text = kernel.compiled.cubin.decode()  # what stands in for machine code
        if (text, signature) not in found:
            found[text, signature] = kernel.entry, parameters(text, kernel.entry)
        return prepare(kernel, signature, *shape, **more)

    with imaginary_h200(gpu) as api, mock.patch.object(launch.Kernel, "prepare", noted):
        for name in NAMES:
            for dtype, precision in KINDS.values():
                torch.set_float32_matmul_precision(precision)
                launches(api, *CASES[name], dtype, True, whole_step=True)
                launches(api, *CASES[name], dtype, False)
    return found


@pytest.mark.parametrize("gpu, kernels", [(H200, 15), (A100, 9)], ids=["H200", "A100"])
def test_arguments_are_those_of_the_text(gpu, kernels):
    found = prepared(gpu)
    for (text, signature), (kernel, takes) in found.items():
        assert "".join(letter_of(one, text) for one in takes) == signature, (kernel, takes)
    assert len({kernel for kernel, _ in found.values()}) >= kernels
