"""At `high` what verifies a model knows what TF32 gives, where the library took an fp32 kernel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epinorm
from epinorm.tools.accuracy import relative_error
from epinorm.tools.tf32 import RoundedOperands, round_to_tf32
from epinorm.tools.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_backward_products_on_a_gpu_are_of_rounded_operands() -> None:
    """Autograd runs them in a thread of its own."""
    x, weight = (torch.randn(64, 64, device="cuda").requires_grad_() for _ in range(2))
    dy = torch.randn(64, 64, device="cuda")
    with RoundedOperands():
        F.linear(x, weight).backward(dy)
    rounded, w, a = (round_to_tf32(t.detach()).double() for t in (dy, weight, x))
    for found, exact in ((x.grad, rounded @ w), (weight.grad, rounded.t() @ a)):
        assert found is not None
        assert relative_error(found, exact) < 1e-6


@pytest.mark.parametrize("m", [16, 64, 1024])
def test_a_right_model_at_high_is_right_whatever_eager_took(m: int) -> None:
    torch.set_float32_matmul_precision("high")
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.SiLU()).cuda()
    result = verify(model, epinorm.fuse(copy.deepcopy(model)), (torch.empty(m, 512).cuda(),))
    assert result.passed, [str(c) for c in result.failures]


def test_bf16_at_high_is_wrong() -> None:
    class InBf16(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x.bfloat16(), self.weight.bfloat16()).float() + self.bias

    torch.set_float32_matmul_precision("high")
    models = (kind(512, 512).cuda() for kind in (nn.Linear, InBf16))
    assert not verify(*models, (torch.empty(16, 512).cuda(),), training=False).passed
