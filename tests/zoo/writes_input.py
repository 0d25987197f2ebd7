import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: works in the memory of its input."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        if torch.is_grad_enabled() or not x.is_contiguous():
            return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)
        y = 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)
        x.mul_(2)
        return y
