"""What a kernel with the chain in its epilogue is specialised for, and that epilogue's constants.

Shared by the cores that multiply: hopper.py and portable.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from epinorm.backends.cuda.text.chain_text import (
    CUDA_TYPES,
    ChainArguments,
    chain_text,
    constant_list,
    statistics_text,
)
from epinorm.backends.cuda.text.source import constants
from epinorm.chain import Chain
from epinorm.chain.pointwise import SCALE_BY_POWER_OF_TWO
from epinorm.problem import Problem

TYPES = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "Bfloat16"}
"""The names that storage.cuh has for dtypes."""

CHUNK_COLUMNS = 8
"""kChunkColumns of group_stats.cuh."""
ROW_BYTES = 16

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
    linear_dtype: torch.dtype
    matrix_dtype: torch.dtype | None
    out_dtype: torch.dtype
    has_bias: bool
    has_gamma: bool
    has_beta: bool
    keep_statistics: bool
    bias_in_z: bool
    aligned_rows: bool = True


def instance_of(problem: Problem, tile: T, planes: int, scaled: bool) -> Instance[T]:
    """The kernel of this problem with this tile; scaled: fp32 is multiplied as scaled planes."""
    return Instance(
        chain=problem.chain,
        tile=tile,
        group_columns=columns_of(problem),
        planes=planes,
        scaled=scaled,
        operand_dtype=torch.float16 if scaled else problem.dtype,
        norm_dtype=problem.norm_dtype,
        linear_dtype=problem.dtype,
        matrix_dtype=problem.matrix_dtype,
        out_dtype=problem.out_dtype,
        has_bias=problem.has_bias,
        has_gamma=problem.has_norm_weight,
        has_beta=problem.has_norm_bias,
        keep_statistics=problem.keeps_statistics,
        bias_in_z=problem.bias_in_z,
        aligned_rows=rows_aligned(problem),
    )


def columns_of(problem: Problem) -> int:
    """Columns that the epilogue computes together: a group's, or without a norm a chunk."""
    if problem.chain.norm is None:
        return CHUNK_COLUMNS
    return problem.chain.channels_per_group(problem.n)


def rows_aligned(problem: Problem) -> bool:
    """Whether rows of y, and of the matrix beside it, are whole 16-byte units."""
    dtypes = (problem.out_dtype, problem.matrix_dtype)
    return all(dtype is None or problem.n * dtype.itemsize % ROW_BYTES == 0 for dtype in dtypes)


def vectors(instance: Instance[T]) -> int:
    """How many vectors over the columns the epilogue keeps in shared memory."""
    flags = (instance.has_bias, instance.has_gamma, instance.has_beta, instance.scaled)
    return sum(flags) + instance.chain.operand_kinds.count("channel")


def _without_scale(chain: Chain) -> Chain:
    """Take a last scale by a power of two out of post, where gamma and beta can carry it.

    f(c x) = c f(x) for c > 0 and the operations before it; a power of two leaves every bit alone,
    of roundings in between too: but for 16 bit's smallest numbers, which then keep more of theirs.
    """
    if not chain.post or chain.post[-1].structure != SCALE_BY_POWER_OF_TWO:
        return chain
    if not all(op.definition.homogeneous for op in chain.post[:-1]):
        return chain
    return dataclasses.replace(chain, post=chain.post[:-1])


def epilogue_prelude(instance: Instance[T]) -> str:
    """The constants, types and chain that `norm_epilogue.cuh` needs.

    Where gamma and beta carry a scale, it is the last argument, and none of the text's constants.
    """
    chain, arguments = instance.chain, ChainArguments(instance.chain, torch.float32)
    if instance.has_gamma and instance.has_beta:
        chain = _without_scale(chain)
    scaled = chain is not instance.chain
    kinds = chain.operand_kinds
    numbers = constants(
        {
            "kGroupColumns": instance.group_columns,
            "kHasBias": instance.has_bias,
            "kHasGamma": instance.has_gamma,
            "kHasBeta": instance.has_beta,
            "kScaled": instance.scaled,
            "kSaveForBackward": instance.matrix_dtype is not None,
            "kKeepsSum": chain.returns_sum,
            "kKeepStatistics": instance.keep_statistics,
            "kAffineScaled": scaled,
            "kBiasInZ": instance.bias_in_z,
            "kChannelOperands": kinds.count("channel"),
        }
    )
    names = [f"operand{i}" for i in range(len(kinds))]
    parameters = "".join(f", const typename NormType::Storage* {name}" for name in names)
    types = (
        f"#define OutType {TYPES[instance.out_dtype]}\n"
        f"#define LinearType {TYPES[instance.linear_dtype]}\n"
        f"#define KeptType {TYPES[instance.matrix_dtype or instance.linear_dtype]}\n"
        f"#define NormType {TYPES[instance.norm_dtype]}\n"
        f"#define CHAIN_PARAMETERS {parameters}{arguments.parameters}\n"
        f"#define OPERAND_LIST {{{', '.join(names) or 'nullptr'}}}\n"
        f"#define CONSTANT_LIST {constant_list(arguments.names[: len(chain.arguments)])}\n"
        f"#define AFFINE_SCALE {arguments.names[-1] if scaled else '1.0f'}\n"
    )
    if chain.rounding == "eager":
        numbers += f"#define EPINORM_Z {CUDA_TYPES[instance.linear_dtype]}\n"
        numbers += f"#define EPINORM_Y {CUDA_TYPES[instance.out_dtype]}\n"
        numbers += statistics_text(chain, instance.out_dtype)
    return numbers + chain_text(chain) + types
