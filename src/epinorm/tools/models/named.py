"""The models that README gives times for, each with its inputs, and at a small size for a CPU.

Dropout is 0 but in ``bert_base_dropout``, so that what is timed is what is verified.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.kernelbench.problem import ProblemError

Made = tuple[nn.Module, tuple[Any, ...]]
"""A model and the inputs of its call."""


SMALL = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2)
LLAMA_LAYERS = dict(
    hidden_size=2048, intermediate_size=5504, num_attention_heads=16, num_hidden_layers=4
)


class LastHidden(nn.Module):
    """A transformer of Hugging Face, as the function from its input to the last layer's result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x).last_hidden_state


def _hugging_face(name: str, **values: Any) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ProblemError(f"{name} is Hugging Face's: pip install transformers") from None
    config = getattr(transformers, f"{name}Config")(attn_implementation="sdpa", **values)
    # The pooler's gradient would be missing: what is read is the last layer's result.
    pooler = {} if name == "Llama" else {"add_pooling_layer": False}
    return LastHidden(getattr(transformers, f"{name}Model")(config, **pooler))


def _bert(small: bool, dropout: float) -> Made:
    sizes = {**SMALL, "vocab_size": 99, "max_position_embeddings": 64} if small else {}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = _hugging_face("Bert", **dropouts, **sizes)
    return model, (torch.randint(0, 99 if small else 30522, (2, 32) if small else (16, 512)),)


def _vit(small: bool) -> Made:
    sizes = {**SMALL, "image_size": 32, "patch_size": 8} if small else {}
    model = _hugging_face("ViT", **sizes)
    return model, (torch.randn((2, 3, 32, 32) if small else (32, 3, 224, 224)),)


def _llama(small: bool) -> Made:
    words = 99 if small else 32000
    sizes = SMALL if small else LLAMA_LAYERS
    model = _hugging_face("Llama", **sizes, vocab_size=words, use_cache=False)
    return model, (torch.randint(0, words, (2, 32) if small else (8, 1024)),)


Layer = Callable[[int], tuple[nn.Module, ...]]


def _stack(small: bool, layers: int, width: int, rows: int, behind: Layer) -> Made:
    """``layers`` times Linear and what is ``behind`` it, all of one width."""
    if small:
        width, rows = width // 16, rows // 32
    modules = [m for _ in range(layers) for m in (nn.Linear(width, width), *behind(width))]
    return nn.Sequential(*modules), (torch.randn(rows, width),)


NAMED: Mapping[str, Callable[[bool], Made]] = {
    "bert_base": partial(_bert, dropout=0.0),
    "bert_base_dropout": partial(_bert, dropout=0.1),
    "vit_b": _vit,
    "llama_4": _llama,
    "mlp_2048": partial(_stack, layers=4, width=2048, rows=4096, behind=lambda _: (nn.ReLU(),)),
    "tdmpc2": partial(
        _stack, layers=4, width=512, rows=1280, behind=lambda n: (nn.LayerNorm(n), nn.Mish())
    ),
    "dreamer": partial(
        _stack, layers=5, width=1024, rows=1024, behind=lambda n: (nn.RMSNorm(n), nn.SiLU())
    ),
}
"""By name: from whether it is to be small to the model and its inputs, float32, on the CPU."""
