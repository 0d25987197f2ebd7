import os

import torch.nn.functional as F
from torch import nn

from epinorm.tools.judge import wire

_send = wire.send


def send(file, tensors, most):
    header = _send(file, tensors, most)
    os.ftruncate(file, 2**40)
    return header


wire.send = send


class ModelNew(nn.Module):
    """Wrong: its answer is a file of a terabyte."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def right(self, x):
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)

    def forward(self, x):
        return self.right(x)
