"""Real architectures, built small from their configurations: `make test ARGS="-m models"`.

Each is called fused as eager is: outputs, a training step's gradients, state_dict; and every place
where a Linear's result reaches a norm is named, fused or with its reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import epinorm

pytestmark = pytest.mark.models

IDS = torch.randint(0, 90, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 32,
}


def hugging(name: str, cls: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**changes)
        config._attn_implementation = "sdpa"
        return getattr(transformers, cls)(config)

    return make


def image_model(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, pretrained=False, **changes)


def image(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


VISION = {**{k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")}}
VISION |= {"image_size": 32, "patch_size": 8}
LLAMA = SMALL | {"num_key_value_heads": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}

# name: how to make it, its arguments, and how many chains are fused in eval mode
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "bert": (hugging("Bert", "BertModel", **SMALL), {"input_ids": IDS}, 4),
    "roberta": (hugging("Roberta", "RobertaModel", **SMALL), {"input_ids": IDS}, 4),
    "vit": (hugging("ViT", "ViTModel", **VISION), image(), 4),
    "dinov2": (hugging("Dinov2", "Dinov2Model", **VISION), image(), 3),
    "gpt2": (
        hugging("GPT2", "GPT2Model", n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=99),
        {"input_ids": IDS},
        0,
    ),
    "llama": (hugging("Llama", "LlamaModel", **LLAMA), {"input_ids": IDS}, 4),
    "qwen3": (hugging("Qwen3", "Qwen3Model", **LLAMA, head_dim=8), {"input_ids": IDS}, 4),
    "olmo2": (hugging("Olmo2", "Olmo2Model", **LLAMA), {"input_ids": IDS}, 8),
    "t5 encoder": (hugging("T5", "T5EncoderModel", **T5), {"input_ids": IDS}, 4),
    "clip text": (hugging("CLIPText", "CLIPTextModel", **SMALL), {"input_ids": IDS}, 4),
    "clip vision": (hugging("CLIPVision", "CLIPVisionModel", **VISION), image(), 3),
    "whisper": (
        hugging(
            "Whisper",
            "WhisperModel",
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            vocab_size=99,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": IDS},
        5,
    ),
    "timm vit": (
        image_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
        {"x": torch.randn(2, 3, 32, 32)},
        0,
    ),
    "timm mixer": (
        image_model("mixer_s32_224", img_size=64, embed_dim=32, num_blocks=2),
        {"x": torch.randn(2, 3, 64, 64)},
        0,
    ),
    "timm swinv2": (
        image_model(
            "swinv2_tiny_window8_256", img_size=64, embed_dim=16, depths=(1, 1), num_heads=(2, 2)
        ),
        {"x": torch.randn(2, 3, 64, 64)},
        3,
    ),
    "timm convnext": (
        image_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)),
        {"x": torch.randn(2, 3, 64, 64)},
        0,
    ),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(32, 4, 48, norm_first=True, batch_first=True),
        {"src": torch.randn(2, 5, 32)},
        0,
    ),
    "encoder layer, norm last": (
        lambda: nn.TransformerEncoderLayer(32, 4, 48, batch_first=True),
        {"src": torch.randn(2, 5, 32)},
        1,
    ),
    "decoder layer, norm last": (
        lambda: nn.TransformerDecoderLayer(32, 4, 48, batch_first=True),
        {"tgt": torch.randn(2, 5, 32), "memory": torch.randn(2, 7, 32)},
        1,
    ),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made(name: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    make, kwargs, _ = CASES[name]
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # gammas and betas prove nothing as they start
            nn.init.normal_(parameter, 0.5, 0.3)
    return model, epinorm.fuse(copy.deepcopy(model), strategy="reference"), kwargs


def outputs(model: nn.Module, kwargs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    return [t for t in pytree.tree_leaves(dict(y=model(**kwargs))) if isinstance(t, Tensor)]


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_what_it_computes(name: str) -> None:
    model, fused, kwargs = made(name)
    for m in (model, fused):
        m.eval()
    for a, b in zip(outputs(fused, kwargs), outputs(model, kwargs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    explained = epinorm.explain(fused)
    assert explained.fused == CASES[name][2], str(explained)
    assert all(row.reason for row in explained.rows)


@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_it_trains(name: str) -> None:
    model, fused, kwargs = made(name)
    assert list(fused.state_dict()) == list(model.state_dict())
    losses = []
    for m in (model.train(), fused.train()):
        found = outputs(m, kwargs)
        loss = sum(t.square().mean() for t in found if t.is_floating_point() and t.requires_grad)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    for (path, a), b in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), path
        if a.grad is not None:
            scale = float(b.grad.abs().max())
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3 * scale + 1e-7)
