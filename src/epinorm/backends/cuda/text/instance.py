"""What a kernel with the chain in its epilogue is specialised for, and that epilogue's constants.

Shared by the cores that multiply: hopper.py and portable.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from epinorm.backends.cuda.text.chain_text import chain_text
from epinorm.backends.cuda.text.source import float_literal
from epinorm.chain import Chain
from epinorm.problem import Problem

__all__ = ["TYPES", "Instance", "constants", "epilogue_prelude", "instance_of", "vectors"]

TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "Bfloat16"}
"""The names that storage.cuh has for dtypes."""

T = TypeVar("T")


@dataclass(frozen=True)
class Instance(Generic[T]):
    """Everything that one compiled kernel is specialised for; ``tile`` is its core's."""

    chain: Chain
    tile: T
    group_columns: int
    planes: int
    scaled: bool
    operand_dtype: torch.dtype
    norm_dtype: torch.dtype
    kept_dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    has_gamma: bool
    has_beta: bool
    keep: bool


def instance_of(problem: Problem, tile: T, planes: int, scaled: bool) -> Instance[T]:
    """The kernel of this problem with this tile; scaled: fp32 is multiplied as scaled planes."""
    return Instance(
        chain=problem.chain,
        tile=tile,
        group_columns=problem.chain.channels_per_group(problem.n),
        planes=planes,
        scaled=scaled,
        operand_dtype=torch.float16 if scaled else problem.dtype,
        norm_dtype=problem.norm_dtype,
        kept_dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        has_bias=problem.has_bias,
        has_gamma=problem.has_norm_weight,
        has_beta=problem.has_norm_bias,
        keep=problem.training,
    )


def constants(values: dict[str, int | bool]) -> str:
    """Integers and bools as constexpr definitions."""
    lines = []
    for name, value in values.items():
        kind, text = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", value)
        lines.append(f"constexpr {kind} {name} = {text};\n")
    return "".join(lines)


def vectors(instance: Instance[T]) -> int:
    """How many vectors over the columns the epilogue keeps in shared memory."""
    flags = (instance.has_bias, instance.has_gamma, instance.has_beta, instance.scaled)
    return sum(flags) + instance.chain.operand_kinds.count("channel")


def _without_scale(chain: Chain) -> tuple[Chain, float]:
    """Take a last scale by a power of two out of post, where gamma and beta can carry it.

    f(c x) = c f(x) for c > 0 and the operations before it; a power of two leaves every bit alone.
    """
    if not chain.post or chain.post[-1].name != "scale":
        return chain, 1.0
    factor = chain.post[-1].constants[0]
    exact = factor > 0 and math.frexp(factor)[0] == 0.5
    if not exact or not all(op.definition.homogeneous for op in chain.post[:-1]):
        return chain, 1.0
    return dataclasses.replace(chain, post=chain.post[:-1]), factor


def epilogue_prelude(instance: Instance[T]) -> str:
    """The constants, types and chain that `norm_epilogue.cuh` needs."""
    chain, affine_scale = instance.chain, 1.0
    if instance.has_gamma and instance.has_beta:
        chain, affine_scale = _without_scale(chain)
    kinds = chain.operand_kinds
    numbers = constants(
        {
            "kGroupColumns": instance.group_columns,
            "kHasBias": instance.has_bias,
            "kHasGamma": instance.has_gamma,
            "kHasBeta": instance.has_beta,
            "kScaled": instance.scaled,
            "kKeep": instance.keep,
            "kChannelOperands": kinds.count("channel"),
        }
    )
    names = [f"operand{i}" for i in range(len(kinds))]
    parameters = "".join(f", const typename NormType::Storage* {name}" for name in names)
    types = (
        f"#define OutType {TYPES[instance.out_dtype]}\n"
        f"#define KeptType {TYPES[instance.kept_dtype]}\n"
        f"#define NormType {TYPES[instance.norm_dtype]}\n"
        f"#define OPERAND_PARAMETERS {parameters}\n"
        f"#define OPERAND_LIST {{{', '.join(names) or 'nullptr'}}}\n"
    )
    return (
        numbers
        + f"constexpr float kAffineScale = {float_literal(affine_scale)};\n"
        + chain_text(chain)
        + types
    )
