"""A linear layer, GroupNorm, LeakyReLU and a doubling: problem 62 of level 2 of KernelBench.

    epinorm bench examples/matmul_groupnorm_leakyrelu_sum.py --scale 8

The four sizes below are what --scale divides.
"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_groups: int,
        eps: float = 1e-5,
        negative_slope: float = 0.01,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps=eps)
        self.leaky_relu = nn.LeakyReLU(negative_slope)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        x = self.gn(x)
        x = self.leaky_relu(x)
        return x + x


batch_size = 1024
input_size = 8192
hidden_size = 8192
num_groups = 512


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, input_size)]


def get_init_inputs() -> list[int]:
    return [input_size, hidden_size, num_groups]
