import ctypes

import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: its process dies by a signal."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        if x.shape[0] == 32:
            ctypes.string_at(0)
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)
