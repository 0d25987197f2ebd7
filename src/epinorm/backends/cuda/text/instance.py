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
    stored_type,
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
    """What one compiled kernel is specialised for: of the problem all but m, k and how many groups
    there are; its core's tile; and whether fp32 is multiplied as scaled planes."""

    problem: Problem
    tile: T
    scaled: bool

    @property
    def operand_dtype(self) -> torch.dtype:
        return torch.float16 if self.scaled else self.problem.dtype


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
    problem = instance.problem
    flags = (problem.has_bias, problem.has_norm_weight, problem.has_norm_bias, instance.scaled)
    return sum(flags) + problem.chain.operand_kinds.count("channel")


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


def _function_type(problem: Problem) -> str | None:
    """The type whose functions the chain takes. At ``high`` products are off by 2^-11 anyway, and
    bf16's functions, which have all of fp32's range, by 2^-18."""
    return "bf16" if problem.precision == "high" else stored_type(problem)


def epilogue_prelude(instance: Instance[T]) -> str:
    """The constants, types and chain that `norm_epilogue.cuh` needs.

    Where gamma and beta carry a scale, it is the last argument, and none of the text's constants.
    """
    problem = instance.problem
    chain, arguments = problem.chain, ChainArguments(problem.chain, torch.float32)
    if problem.has_norm_weight and problem.has_norm_bias:
        chain = _without_scale(chain)
    scaled = chain is not problem.chain
    kinds = chain.operand_kinds
    numbers = constants(
        {
            "kGroupColumns": columns_of(problem),
            "kHasBias": problem.has_bias,
            "kHasGamma": problem.has_norm_weight,
            "kHasBeta": problem.has_norm_bias,
            "kScaled": instance.scaled,
            "kSaveForBackward": problem.matrix_dtype is not None,
            "kKeepsSum": chain.returns_sum,
            "kKeepStatistics": problem.keeps_statistics,
            "kAffineScaled": scaled,
            "kBiasInZ": problem.bias_in_z,
            "kChannelOperands": kinds.count("channel"),
        }
    )
    names = [f"operand{i}" for i in range(len(kinds))]
    parameters = "".join(f", const typename NormType::Storage* {name}" for name in names)
    types = (
        f"#define OutType {TYPES[problem.out_dtype]}\n"
        f"#define LinearType {TYPES[problem.dtype]}\n"
        f"#define KeptType {TYPES[problem.matrix_dtype or problem.dtype]}\n"
        f"#define NormType {TYPES[problem.norm_dtype]}\n"
        f"#define CHAIN_PARAMETERS {parameters}{arguments.parameters}\n"
        f"#define OPERAND_LIST {{{', '.join(names) or 'nullptr'}}}\n"
        f"#define CONSTANT_LIST {constant_list(arguments.names[: len(chain.arguments)])}\n"
        f"#define AFFINE_SCALE {arguments.names[-1] if scaled else '1.0f'}\n"
    )
    if chain.rounding == "eager":
        numbers += f"#define EPINORM_Z {CUDA_TYPES[problem.dtype]}\n"
        numbers += f"#define EPINORM_Y {CUDA_TYPES[problem.out_dtype]}\n"
        numbers += statistics_text(chain, problem.out_dtype)
    return numbers + chain_text(chain, _function_type(problem)) + types
