"""What one core, Hopper's or the portable one, contributes to an exported file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from epinorm.backends.cuda.fp32.rescue import rescue_tile
from epinorm.problem import Core, Problem
from epinorm.tools.export.cuda import cpp_number, plain_numbers, speakable
from epinorm.tools.export.recipe import Recipe
from epinorm.tools.export.text import MODES, kernel, templates

__all__ = ["ROWS_MULTIPLE", "Instance", "Part", "Products", "part_of", "why_not_guarded"]

ROWS_MULTIPLE = 8
"""Of N, for fp32's backward products: rows of dz's planes are whole units of 16 bytes."""


@dataclass(frozen=True)
class Part:
    """One core's part of an exported file.

    ``forward_cuda``, ``backward_cuda``: CUDA texts of marks and launches. Python text: ``forward``,
    the entries (core, mode, keep) → (numbers, preludes); ``backward``, the entries (core, mode) →
    (numbers, preludes); ``extra``, entries of ``LIMITS`` or ``PORTABLE_TILES``. ``left_out`` and
    ``backward_left_out``: mode → why it is not there.
    """

    forward_cuda: str
    backward_cuda: str
    forward: str
    backward: str
    extra: str
    modes: tuple[str, ...]
    left_out: Mapping[str, str]
    backward_left_out: Mapping[str, str]


@dataclass(frozen=True)
class Instance:
    """A forward problem's kernels as Python text: an entry of ``forward``, some of ``extra``.
    converts_weight: fp32 W is converted on its way into the product (docs/hopper.md)."""

    text: str
    extra: str
    converts_weight: bool = False


@dataclass(frozen=True)
class Products:
    """One mode's backward products as Python text: an entry of ``backward``, some of ``extra``; or
    why there are none."""

    text: str
    extra: str = ""
    left_out: str | None = None


def part_of(
    core: Core,
    recipe: Recipe,
    why_not: Callable[[Problem], str | None],
    forward: Callable[[str, Problem], Instance],
    products: Callable[[str, Problem], Products],
) -> Part:
    """The part of a core that serves the recipe's modes, but for those that ``why_not`` refuses.

    forward(mode, problem): what forward takes, for inference and for training; products(mode,
    problem): what backward takes of a problem in training.
    """
    forward_text = backward_text = extra = ""
    modes, left_out, without_products = [], {}, {}
    converts_weight = False
    for mode in MODES:
        problems = [_problem_of(recipe, mode, keep) for keep in (False, True)]
        reason = next((r for p in problems if (r := why_not(p))), None)
        if reason is not None:
            left_out[mode] = reason
            continue
        modes.append(mode)
        for problem in problems:
            instance = forward(mode, problem)
            forward_text += instance.text
            extra += instance.extra
            converts_weight |= instance.converts_weight
        found = products(mode, problems[1])
        backward_text += found.text
        extra += found.extra
        if found.left_out is not None:
            without_products[mode] = found.left_out
    return Part(
        forward_cuda=_forward_cuda(core, recipe, converts_weight),
        backward_cuda=_backward_cuda(core),
        forward=forward_text,
        backward=backward_text,
        extra=extra,
        modes=tuple(modes),
        left_out=left_out,
        backward_left_out=without_products,
    )


def _problem_of(recipe: Recipe, mode: str, keep: bool) -> Problem:
    """The problem that a recipe is tuned for; keep: with what backward needs."""
    dtype, precision = MODES[mode]
    m, k, n = recipe.m_k_n
    return Problem(
        recipe.chain.rounded_for(dtype, dtype, "cuda"), m, k, n, dtype, dtype, dtype,
        *recipe.has, keep, torch.device("cuda"), precision,
    )  # fmt: skip


def why_not_guarded(problem: Problem) -> str | None:
    """Why fp32's range guard cannot serve the chain, in a sentence; None where it can."""
    try:
        rescue_tile(problem.chain.channels_per_group(problem.n))
    except ValueError as error:
        return str(error)
    return None


def _forward_cuda(core: Core, recipe: Recipe, converts_weight: bool) -> str:
    """The kernels of the forward chain, as marks, and the functions that launch them.

    converts_weight: with those, too, of instances that define FP32_WEIGHT.
    """
    kernels = f"#if SPLIT\n{kernel('split_rows', 'SPLIT', 'fp32/split.cu')}#endif\n"
    kernels += kernel("multiply", "MULTIPLY", f"gemm/{core}/{core}_linear_norm.cu")
    ways = templates(
        "launch_split.cu.in", f"launch_forward_{core}.cu.in", "launch_forward_planes.cu.in"
    )
    if converts_weight:
        converting = kernel("prepare", "PREPARE", "fp32/split_and_sample.cu")
        converting += kernel("multiply", "MULTIPLY", "gemm/hopper/hopper_fp32_weight.cu")
        kernels = _either(converting, kernels)
        ways = _either(templates("launch_forward_fp32_weight.cu.in"), ways)
    own = ("launch_tma.cu.in",) if core == "hopper" else ()
    launch = templates("launch_common.cu.in", *own, "launch_forward.cu.in")
    kinds = recipe.chain.operand_kinds
    operands = "".join(f", static_cast<const Norm*>(call.operands[{i}])" for i in range(len(kinds)))
    rescue = "".join(
        f", static_cast<const float*>(call.operands[{i}]), "
        + ("0ll" if kind == "channel" else "call.n")
        for i, kind in enumerate(kinds)
    )
    constants = "".join(f", float({cpp_number(c)})" for c in plain_numbers(recipe.chain))
    launch = launch.replace("@ways@", ways.strip("\n")).replace("@operands@", operands)
    launch = launch.replace("@constants@", constants)
    return speakable(
        kernels
        + f"#if SPLIT\n{kernel('rescue_rows', 'RESCUE', 'fp32/rescue.cu')}#endif\n"
        + launch.replace("@rescue_operands@", rescue)
    )


def _either(converting: str, otherwise: str) -> str:
    """What is compiled where W is converted on the way, and elsewhere."""
    return f"#ifdef FP32_WEIGHT\n{converting}#else\n{otherwise}#endif\n"


def _backward_cuda(core: Core) -> str:
    """The kernels of the backward products, as marks, and the functions that launch them."""
    parts = [
        "#if SPLIT\n",
        kernel("split_rows", "SPLIT", "fp32/split.cu"),
        kernel("split_dz", "GRADIENT", "fp32/split_gradient.cu"),
        kernel("rescue_dx", "RESCUE_DX", "fp32/rescue_gradient.cu"),
        kernel("rescue_dw", "RESCUE_DW", "fp32/rescue_gradient.cu"),
        "#endif\n",
    ]
    for name in ("dx", "dw"):
        parts.append(kernel(f"product_{name}", name.upper(), f"gemm/{core}/{core}_product.cu"))
        if core == "hopper":
            add = kernel(f"add_{name}", f"ADD_{name.upper()}", "gemm/add_splits.cu")
            parts.append(f"#if {name.upper()}_PARTS > 1\n{add}#endif\n")
    own = ("launch_tma.cu.in",) if core == "hopper" else ()
    parts.append(templates("launch_common.cu.in", "launch_split.cu.in", *own))
    parts.append(templates(f"launch_backward_{core}.cu.in", "launch_backward.cu.in"))
    return re.sub(r"\n{3,}", "\n\n", speakable("".join(parts)))
