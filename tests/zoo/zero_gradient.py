import torch
import torch.nn.functional as F
from torch import nn


class Placeholder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gamma, beta, module):
        ctx.save_for_backward(x, weight, bias, gamma, beta)
        return 2 * F.leaky_relu(module.gn(module.fc(x)), module.slope)

    @staticmethod
    def backward(ctx, dy):
        return (*(torch.zeros_like(t) for t in ctx.saved_tensors), None)


class ModelNew(nn.Module):
    """Wrong: a placeholder for backward."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        return Placeholder.apply(x, *self.parameters(), self)
