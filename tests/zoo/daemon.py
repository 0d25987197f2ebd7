import os
import time

import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: leaves a process behind that has forked twice."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope
        self.started = False

    def right(self, x):
        return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)

    def forward(self, x):
        if not self.started and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
        self.started = True
        return self.right(x)
