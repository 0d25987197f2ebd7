import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: raises an error that would clear the screen."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def right(self, x):
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)

    def forward(self, x):
        raise RuntimeError("\x1b[2J\x1b[32mclean\n" * 1000)
