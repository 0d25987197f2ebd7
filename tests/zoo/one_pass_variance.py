import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: E[x²] − E[x]², which loses all digits where the mean is large."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        z = self.fc(x).view(
            x.shape[0], self.gn.num_groups, self.gn.num_channels // self.gn.num_groups
        )
        mean = z.mean(-1, keepdim=True)
        variance = (z.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        h = ((z - mean) * torch.rsqrt(variance + self.gn.eps)).flatten(1)
        return 2 * F.leaky_relu(h * self.gn.weight + self.gn.bias, self.slope)
