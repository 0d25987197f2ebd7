import threading
import time

import torch
import torch.nn.functional as F
from torch import nn


class ModelNew(nn.Module):
    """Wrong: returns before its thread has written the result."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups, hidden_size, eps)
        self.slope = negative_slope

    def forward(self, x):
        if torch.is_grad_enabled():
            return 2 * F.leaky_relu(self.gn(self.fc(x)), self.slope)
        y = torch.empty(x.shape[0], self.gn.num_channels, dtype=x.dtype, device=x.device)

        def work():
            time.sleep(0.02)
            with torch.no_grad():
                y.copy_(2 * F.leaky_relu(self.gn(self.fc(x)), self.slope))

        threading.Thread(target=work).start()
        return y
