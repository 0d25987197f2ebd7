"""What the norm kernels' text begins with: types, the tile, the chain and its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.plan.norm_tile import NormTile
from epinorm.backends.cuda.text.chain_text import (
    CUDA_TYPES,
    ChainArguments,
    begins_at_result,
    chain_text,
    constant_list,
    statistics_text,
    stored_type,
)
from epinorm.backends.cuda.text.source import constants, read_kernel
from epinorm.problem import Problem

OPERAND_SIGNATURE = "pl"
"""The launch arguments of one operand: its address and its row stride."""


def chain_signature(problem: Problem) -> str:
    """The launch arguments of the chain's operands and, behind them, of its constants."""
    operands = OPERAND_SIGNATURE * len(problem.chain.operand_kinds)
    return operands + ChainArguments(problem.chain, problem.stats_dtype).signature


def types_text(problem: Problem, backward: bool) -> str:
    """The definitions that norm_types.cuh needs."""
    types = {
        "EPINORM_Z": problem.dtype,
        "EPINORM_P": problem.norm_dtype,
        "EPINORM_Y": problem.out_dtype,
        "EPINORM_S": problem.saved_dtype if backward else problem.sum_dtype,
        "EPINORM_T": problem.stats_dtype,
    }
    return "".join(f"#define {name} {CUDA_TYPES[dtype]}\n" for name, dtype in types.items())


def norm_text(
    kernel: str, problem: Problem, tile: NormTile, more: Mapping[str, int], extra: str = ""
) -> str:
    """The whole text of ``<kernel>.cu`` for this problem and tile.

    ``more`` are the kernel's own integer constants, ``extra`` text of its own. The text depends on
    the channels in a group, not on M or the number of groups.
    """
    z_lacks_bias = not problem.bias_in_z and not begins_at_result(problem.chain)
    numbers = {
        "kChannels": problem.n // problem.groups,
        "kVector": tile.vector,
        "kLanes": tile.lanes,
        "kVectors": tile.vectors,
        "kRows": tile.rows,
        "kWarpsX": tile.warps_x,
        "kWarpsY": tile.warps_y,
        "kCacheAffine": tile.keep,
        "kMinBlocksPerSm": tile.resident,
        "kPrefetch": tile.prefetch,
        "kAddsBias": problem.has_bias and z_lacks_bias,
        "kHasGamma": problem.has_norm_weight,
        "kHasBeta": problem.has_norm_bias,
        **more,
    }
    prelude = constants({name: int(value) for name, value in numbers.items()})
    prelude += _operands_text(problem) + extra
    backward = "backward" in kernel
    before = types_text(problem, backward) + "#define EPINORM_BACKWARD\n" * backward
    before += statistics_text(problem.chain, problem.out_dtype)
    before += chain_text(problem.chain, stored_type(problem))
    return before + prelude + read_kernel(f"{kernel}.cu")


def parameters_at(
    bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None
) -> tuple[int, int, int]:
    """The addresses of the parameters, 0 for what is not there."""
    return (
        0 if bias is None else bias.data_ptr(),
        0 if gamma is None else gamma.data_ptr(),
        0 if beta is None else beta.data_ptr(),
    )


def matrix_arguments(matrices: Sequence[Tensor]) -> tuple[list[Any], int]:
    """Each matrix's address and row stride in values; and what must be aligned, in bytes, or-ed.

    A channel operand (N,) has a stride too, which is not read. A seed, and one value a row, are
    read by themselves.
    """
    arguments: list[Any] = []
    aligned = 0
    for t in matrices:
        address, stride = t.data_ptr(), t.stride(0)
        arguments += (address, stride)
        if t.dtype == torch.int64 or t.shape[1:] == (1,):
            continue
        aligned |= address
        if t.dim() == 2:
            aligned |= stride * t.element_size()
    return arguments, aligned


def _operands_text(problem: Problem) -> str:
    count = len(problem.chain.operand_kinds)
    parameters = "".join(f", const P* operand{i}, i64 stride{i}" for i in range(count))
    pointers = ", ".join(f"operand{i}" for i in range(count)) or "nullptr"
    strides = ", ".join(f"stride{i}" for i in range(count)) or "0"
    arguments = ChainArguments(problem.chain, problem.stats_dtype)
    return (
        f"#define EPINORM_CHAIN_PARAMETERS {parameters}{arguments.parameters}\n"
        f"#define EPINORM_OPERAND_POINTERS {{{pointers}}}\n"
        f"#define EPINORM_OPERAND_STRIDES {{{strides}}}\n"
        f"#define EPINORM_CONSTANTS {constant_list(arguments.names)}\n"
    )
