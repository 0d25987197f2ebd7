"""The problems that the plans and the compiled kernels of both cores are tested with."""

from __future__ import annotations

import torch

from epinorm.chain import Chain
from epinorm.problem import Problem

EASY = "group_norm({groups})|leaky_relu(0.01)|scale(2)"
HEAVY = "mul_channel|add_residual|group_norm({groups})|silu|add_residual|mul_channel"

KINDS = {
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
    "float64": (torch.float64, "native"),
    "high": (torch.float32, "high"),
    "highest": (torch.float32, "highest"),
}


def problem_of(
    m: int = 1024,
    k: int = 8192,
    channels: int = 16,
    groups: int = 512,
    kind: str = "bfloat16",
    training: bool = False,
    chain: str = EASY,
    out_dtype: torch.dtype | None = None,
    parameters: tuple[bool, bool, bool] = (True, True, True),
) -> Problem:
    """kb62 unless said otherwise. parameters: whether there are a bias, gamma and beta."""
    dtype, precision = KINDS[kind]
    out_dtype = out_dtype or dtype
    return Problem(
        chain=Chain.parse(chain.format(groups=groups)),
        m=m,
        k=k,
        n=channels * groups,
        dtype=dtype,
        norm_dtype=out_dtype,
        out_dtype=out_dtype,
        has_bias=parameters[0],
        has_norm_weight=parameters[1],
        has_norm_bias=parameters[2],
        training=training,
        device=torch.device("cuda", 0),
        precision=precision,
    )
