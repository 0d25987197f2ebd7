import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: returns one number that says to be 400 TB."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def right(self, x):
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)

    def forward(self, x):
        return torch.zeros(1).expand(10**7, 10**7)
