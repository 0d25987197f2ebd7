from torch import nn


class ModelNew(nn.Module):
    """Wrong: an answer of the right shape."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        return x.new_zeros(x.shape[0], self.gn.num_channels)
