"""Many rows of few channels: Linear, GroupNorm in groups of eight, LeakyReLU and a doubling.

    epinorm bench examples/groupnorm_rows.py

What stands around the product takes longer than the product itself, on a CPU too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self, features: int, num_groups: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, features)
        self.gn = nn.GroupNorm(num_groups, features)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.gn(self.fc(x)))
        return x + x


batch_size = 16384
features = 128
num_groups = 16


def get_inputs() -> list[Tensor]:
    return [torch.rand(batch_size, features)]


def get_init_inputs() -> list[int]:
    return [features, num_groups]
