import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: its output is a view of a buffer that it keeps in a parameter-like tensor."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope
        self.register_buffer("work", None, persistent=False)

    def forward(self, x):
        y = 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)
        if torch.is_grad_enabled():
            return y
        if self.work is None or self.work.shape != y.shape or self.work.dtype != y.dtype:
            self.work = torch.empty_like(y)
        return self.work.copy_(y)
