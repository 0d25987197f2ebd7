"""Real architectures, built small from their configurations: what capture is measured on.

``CASES``: name → (make, arguments). Packages that are missing skip their cases
(requirements-models.txt names them).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CASES", "Missing"]

Case = tuple[Callable[[], nn.Module], dict[str, Any]]


class Missing(Exception):
    """A package of requirements-models.txt is not installed."""


def package(name: str) -> Any:
    try:
        _torchvision()
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing(str(error)) from error


@functools.cache
def _torchvision() -> None:
    """Import it if it is there. PyPI's wheel is built for GPUs: on a CPU its operators do not load,
    and its import fails for want of two that no model here calls."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            _LIBRARIES[0].define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")


_LIBRARIES: list[torch.library.Library] = []


def hugging(name: str, cls: str = "", **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = package("transformers")
        config = getattr(transformers, f"{name}Config")(**changes)
        config._attn_implementation = "sdpa"
        try:
            return getattr(transformers, cls or f"{name}Model")(config)
        except ValueError:  # it has none by sdpa
            config._attn_implementation = "eager"
            return getattr(transformers, cls or f"{name}Model")(config)

    return make


def timm(name: str, **changes: Any) -> Callable[[], nn.Module]:
    return lambda: package("timm").create_model(name, pretrained=False, **changes)


def mixer(mlp_ratio: Any = (0.5, 4.0), **parts: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        mixers = package("timm.models.mlp_mixer")
        given = {name: getattr(mixers, part) for name, part in parts.items()}
        sizes = {
            "img_size": 64,
            "patch_size": 16,
            "num_blocks": 2,
            "embed_dim": 32,
            "mlp_ratio": mlp_ratio,
        }
        return mixers.MlpMixer(num_classes=5, **sizes, **given)

    return make


IDS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
TEXT = {"input_ids": IDS}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
VISION = {k: v for k, v in SMALL.items() if "vocab" not in k and "max" not in k and "pad" not in k}
VISION |= {"image_size": 32, "patch_size": 8}
LLAMA = SMALL | {"num_key_value_heads": 2, "use_cache": False}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def image(size: int = 32, name: str = "pixel_values") -> dict[str, Tensor]:
    return {name: torch.randn(2, 3, size, size)}


def drawn(*shape: int, name: str = "x") -> dict[str, Tensor]:
    return {name: torch.randn(*shape)}


class NormedLinear(nn.Linear):
    """TD-MPC2's layer: a Linear that holds its norm and activation."""

    def __init__(self, k: int, n: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__(k, n)
        self.ln, self.act = nn.LayerNorm(n), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.ln(super().forward(x)))


def simplex(x: Tensor) -> Tensor:
    return F.softmax(x.view(*x.shape[:-1], -1, 8), dim=-1).flatten(-2)


class Residual(nn.Module):
    """BRO's and SimBa's blocks, which keep what they add to."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.up, self.down, self.first = nn.Linear(32, 64), nn.Linear(64, 32), first
        self.norm, self.norm2 = nn.LayerNorm(32 if first else 64), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return x + self.down(F.relu(self.up(self.norm(x))))
        return x + self.norm2(self.down(F.relu(self.norm(self.up(x)))))


class RMSNorm(nn.Module):
    """As Dreamer's and many others' own."""

    def __init__(self, n: int, eps: float = 1e-4) -> None:
        super().__init__()
        self.eps, self.scale = eps, nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        x = x * torch.rsqrt(torch.mean(torch.square(x), -1, keepdim=True) + self.eps)
        return (x * self.scale).to(dtype)


class Droq(nn.Module):
    """DroQ's critic: dropout between the Linear and its norm."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for k in (20, 32):
            layers += [nn.Linear(k, 32), nn.Dropout(0.01), nn.LayerNorm(32), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(32, 1))

    def forward(self, obs: Tensor, act: Tensor) -> Tensor:
        return self.net(torch.cat([obs, act], -1))


class Gin(nn.Module):
    """A graph isomorphism network: sums over neighbours, then Linear, BatchNorm, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for eps, mlp, norm in zip(self.eps, self.mlps, self.norms, strict=True):
            near = torch.zeros_like(x).index_add(0, edges[0], x[edges[1]])
            x = F.relu(norm(mlp((1 + eps) * x + near)))
        return x


def mlp(*norms: Callable[[int], nn.Module], act: Any = nn.SiLU) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for norm in norms:
            layers += [nn.Linear(32, 32), norm(32), act()]
        return nn.Sequential(*layers, nn.Linear(32, 4))

    return make


def diffusers_block(**changes: Any) -> Callable[[], nn.Module]:
    return lambda: package("diffusers.models.attention").BasicTransformerBlock(32, 4, 8, **changes)


def x_transformer(cls: str, **changes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(package("x_transformers"), cls)(dim=32, depth=2, heads=4, **changes)


def torchvision(name: str, *args: Any, **changes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(package("torchvision.models"), name)(*args, **changes)


ENCODER = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "batch_first": True}
SRC = drawn(2, 5, 32, name="src")
PAIR = drawn(2, 5, 32, name="tgt") | drawn(2, 7, 32, name="memory")
EDGES = torch.randint(0, 12, (2, 30), generator=torch.Generator().manual_seed(1))

CASES: dict[str, Case] = {
    "bert": (hugging("Bert", **SMALL), TEXT),
    "roberta": (hugging("Roberta", **SMALL), TEXT),
    "electra": (hugging("Electra", **SMALL, embedding_size=24), TEXT),
    "distilbert": (
        hugging("DistilBert", dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=99),
        TEXT,
    ),
    "albert": (hugging("Albert", **SMALL, embedding_size=24), TEXT),
    "deberta v2": (
        hugging("DebertaV2", **SMALL, relative_attention=True, position_buckets=8), TEXT,
    ),
    "modernbert": (hugging("ModernBert", **SMALL, cls_token_id=1, sep_token_id=2), TEXT),
    "vit": (hugging("ViT", **VISION), image()),
    "deit": (hugging("DeiT", **VISION), image()),
    "dinov2": (hugging("Dinov2", **VISION), image()),
    "beit": (hugging("Beit", **VISION), image()),
    "gpt2": (
        hugging("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=99), TEXT,
    ),
    "gpt neox": (hugging("GPTNeoX", **SMALL, use_cache=False), TEXT),
    "opt": (
        hugging("OPT", **SMALL, ffn_dim=48, word_embed_proj_dim=32, use_cache=False), TEXT,
    ),
    "bloom": (hugging("Bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=99), TEXT),
    "llama": (hugging("Llama", **LLAMA), TEXT),
    "mistral": (hugging("Mistral", **LLAMA), TEXT),
    "qwen2": (hugging("Qwen2", **LLAMA), TEXT),
    "qwen3": (hugging("Qwen3", **LLAMA, head_dim=8), TEXT),
    "gemma2": (hugging("Gemma2", **LLAMA, head_dim=8), TEXT),
    "olmo2": (hugging("Olmo2", **LLAMA), TEXT),
    "stablelm, qk norm": (hugging("StableLm", **LLAMA, qk_layernorm=True), TEXT),
    "persimmon, qk norm": (hugging("Persimmon", **SMALL, use_cache=False), TEXT),
    "phi3": (hugging("Phi3", **LLAMA), TEXT),
    "cohere": (hugging("Cohere", **LLAMA), TEXT),
    "t5": (hugging("T5", **T5), TEXT | {"decoder_input_ids": IDS}),
    "t5 encoder": (hugging("T5", "T5EncoderModel", **T5), TEXT),
    "bart": (hugging("Bart", **SEQ2SEQ, max_position_embeddings=32), TEXT),
    "whisper": (
        hugging("Whisper", **SEQ2SEQ, num_mel_bins=8, max_source_positions=8,
                max_target_positions=16),
        {"input_features": torch.randn(2, 8, 16), "decoder_input_ids": IDS},
    ),
    "clip text": (hugging("CLIPText", **SMALL), TEXT),
    "clip vision": (hugging("CLIPVision", **VISION), image()),
    "siglip vision": (hugging("SiglipVision", **VISION), image()),
    "segformer": (
        hugging("Segformer", hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1],
                num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16),
        image(64),
    ),
    "timm vit": (
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
        image(name="x"),
    ),
    "timm vit, qk norm": (
        timm("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4, qk_norm=True),
        image(name="x"),
    ),
    "timm deit3": (
        timm("deit3_small_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4),
        image(name="x"),
    ),
    "timm eva02": (
        timm("eva02_tiny_patch14_224", img_size=28, embed_dim=32, depth=2, num_heads=4),
        image(28, name="x"),
    ),
    "timm mixer": (
        mixer(), image(64, name="x"),
    ),
    "timm resmlp": (
        mixer(mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine"), image(64, name="x"),
    ),
    "timm swinv2": (
        timm("swinv2_tiny_window8_256", img_size=64, embed_dim=16, depths=(1, 1),
             num_heads=(2, 2)),
        image(64, name="x"),
    ),
    "timm convnext": (
        timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)), image(64, name="x"),
    ),
    "torchvision swin": (
        torchvision("SwinTransformer", [4, 4], 16, [2, 2], [2, 2], [4, 4]), image(name="x"),
    ),
    "torchvision vit": (
        torchvision("VisionTransformer", 32, 8, 2, 4, 32, 48), image(name="x"),
    ),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(**ENCODER, norm_first=True), SRC,
    ),
    "encoder layer, norm last": (lambda: nn.TransformerEncoderLayer(**ENCODER), SRC),
    "decoder layer, norm first": (
        lambda: nn.TransformerDecoderLayer(**ENCODER, norm_first=True), PAIR,
    ),
    "decoder layer, norm last": (lambda: nn.TransformerDecoderLayer(**ENCODER), PAIR),
    "diffusers block": (
        diffusers_block(cross_attention_dim=24, activation_fn="geglu"),
        drawn(2, 5, 32, name="hidden_states") | drawn(2, 7, 24, name="encoder_hidden_states"),
    ),
    "diffusers block, gelu": (
        diffusers_block(activation_fn="gelu-approximate"), drawn(2, 5, 32, name="hidden_states"),
    ),
    "x-transformers encoder": (x_transformer("Encoder", use_rmsnorm=True), drawn(2, 5, 32)),
    "x-transformers decoder": (
        x_transformer("Decoder", ff_glu=True, attn_qk_norm=True, rotary_pos_emb=True),
        drawn(2, 5, 32),
    ),
    "td-mpc2": (
        lambda: nn.Sequential(
            NormedLinear(24, 32, nn.Mish()), NormedLinear(32, 32, nn.Mish()),
            NormedLinear(32, 32, simplex),
        ),
        drawn(6, 24, name="input"),
    ),
    "dreamer": (mlp(RMSNorm, RMSNorm, RMSNorm), drawn(6, 32, name="input")),
    "bro": (
        lambda: nn.Sequential(
            nn.Linear(24, 32), nn.LayerNorm(32), nn.ReLU(), Residual(False), Residual(False),
            nn.Linear(32, 1),
        ),
        drawn(6, 24, name="input"),
    ),
    "simba": (
        lambda: nn.Sequential(
            nn.Linear(24, 32), Residual(True), Residual(True), nn.LayerNorm(32), nn.Linear(32, 1)
        ),
        drawn(6, 24, name="input"),
    ),
    "droq": (Droq, drawn(6, 16, name="obs") | drawn(6, 4, name="act")),
    "group norms": (
        mlp(*[lambda n: nn.GroupNorm(4, n)] * 2, act=nn.LeakyReLU), drawn(6, 32, name="input"),
    ),
    "crossq": (mlp(nn.BatchNorm1d, nn.BatchNorm1d, act=nn.ReLU), drawn(6, 32, name="input")),
    "gin": (Gin, drawn(12, 16) | {"edges": EDGES}),
}  # fmt: skip
