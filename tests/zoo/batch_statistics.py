import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: mean and variance over the batch as well."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        z = self.fc(x).view(
            x.shape[0], self.gn.num_groups, self.gn.num_channels // self.gn.num_groups
        )
        variance, mean = torch.var_mean(z, (0, 2), correction=0, keepdim=True)
        h = ((z - mean) * torch.rsqrt(variance + self.gn.eps)).flatten(1)
        return 2 * F.leaky_relu(h * self.gn.weight + self.gn.bias, self.slope)
