import time

from torch import nn


class ModelNew(nn.Module):
    """Wrong: never ends."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        while True:
            time.sleep(0.01)
