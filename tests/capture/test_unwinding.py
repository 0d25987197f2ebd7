"""What a model is within is left when an error ends a call, as by its own ``with``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import epinorm

Within = Callable[[], AbstractContextManager[Any]]
WITHIN: dict[str, Within] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "sdpa_kernel": lambda: sdpa_kernel([SDPBackend.MATH]),
    "sdpa_kernel, in order": lambda: sdpa_kernel([SDPBackend.MATH], set_priority=True),
    "record_function": lambda: torch.profiler.record_function("lookup"),
}


class Net(nn.Module):
    """A word that it does not know is an error, within what is given and what is in there."""

    def __init__(self, within: Within, inner: Within = torch.enable_grad) -> None:
        super().__init__()
        self.within, self.inner = within, inner
        self.words, self.fc, self.norm = nn.Embedding(5, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        with self.within(), self.inner():
            known = self.words(word).detach()
        return self.norm(self.fc(x)) + known.to(x.dtype).clone()


class Mapped(Net):
    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return self.norm(self.fc(x)) + torch.func.vmap(self.words)(word)


class Checkpointed(Net):
    def forward(self, x: Tensor, word: Tensor) -> Tensor:
        return checkpoint(super().forward, x, word, use_reentrant=False) * 2


def state() -> tuple[Any, ...]:
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), nested),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *(torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        *torch._C._get_sdp_priority_order()[:1],
        torch._C._functorch.peek_interpreter_stack(),
    )


CASES = {name: (Net, within) for name, within in WITHIN.items()}
CASES["vmap"] = (Mapped, torch.no_grad)
CASES["a checkpoint"] = (Checkpointed, torch.no_grad)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_an_error_leaves_what_the_model_was_within(case: str, gradients: bool) -> None:
    kind, within = CASES[case]
    gives_gradients = case != "inference_mode"
    model = kind(within, torch.enable_grad if gives_gradients else torch.no_grad)
    fused = epinorm.fuse(copy.deepcopy(model), strategy="reference")
    x, right, wrong = torch.randn(2, 6), torch.tensor([1, 2]), torch.tensor([1, 9])
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(fused(x, right), model(x, right))
        assert [row.fused for row in epinorm.explain(fused).rows] == [True]
        before = state()
        for word in (wrong, right, wrong, right):  # the second error is the model's own code's
            if word is wrong:
                with pytest.raises(IndexError):
                    fused(x, word)
            else:
                torch.testing.assert_close(fused(x, word), model(x, word))
            assert state() == before
