import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: gamma and beta as they are at the start, one and zero."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        h = F.group_norm(self.fc(x), self.gn.num_groups, None, None, self.gn.eps)
        return 2 * F.leaky_relu(h, self.slope)
