"""The architectures of `models.py`: tiny ones of transformers, with random weights, and a few written here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Any]

VOCABULARY = 99
IMAGE = VOCABULARY - 1
"""The token that stands for a patch of an image."""


class Family(NamedTuple):
    """How one architecture is made (under a seed that the caller sets), and a batch for it, of a size: its sequence
    length, or the number of images or graphs where there is no sequence.  Batches come in fp32."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sizes: tuple[int, ...] = (16, 21, 16)
    """Of the batches of the steps."""


# -- transformers -----------------------------------------------------------------------------------------------------


SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2, head_dim=8)
SLIDING = dict(sliding_window=8)
ROUTED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)  # fmt: skip
"""A gated delta rule in two layers of three."""
MIXED = dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"])


def config(kind: str, **options: Any) -> Any:
    """A transformers configuration: SHAPE and the options, less those that are None."""
    from transformers import AutoConfig

    chosen = {k: v for k, v in (SHAPE | options).items() if v is not None}
    return AutoConfig.for_model(kind, **chosen)


def causal(kind: str, *groups: Mapping[str, Any], **options: Any) -> Family:
    """A causal language model."""

    def make() -> nn.Module:
        from transformers import AutoModelForCausalLM

        merged = {k: v for group in groups for k, v in group.items()} | options
        return AutoModelForCausalLM.from_config(config(kind, **merged))

    return Family(make, tokens)


def hugging(name: str, kind: str, batch: Callable[[int], Batch], sizes: tuple[int, ...], **options: Any) -> Family:
    """A model of any class of transformers."""

    def make() -> nn.Module:
        import transformers

        return cast(nn.Module, getattr(transformers, name)(config(kind, **options)))

    return Family(make, batch, sizes)


def tokens(length: int) -> Batch:
    ids = torch.randint(3, IMAGE, (2, length))
    return dict(input_ids=ids, labels=ids.clone())


def masked(length: int) -> Batch:
    """Padded to the right, a few tokens to be guessed."""
    ids = torch.randint(3, IMAGE, (2, length))
    mask = (torch.arange(length) < torch.tensor([[length], [length - 5]])).long()
    labels = torch.where((torch.rand(2, length) < 0.3) & (mask == 1), ids, -100)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def translation(length: int) -> Batch:
    return dict(input_ids=torch.randint(3, IMAGE, (2, length)), labels=torch.randint(3, IMAGE, (2, length // 2)))


def speech(length: int) -> Batch:
    """Whisper takes sound of one length only: 80 mel bins, 64 frames."""
    return dict(input_features=torch.randn(2, 80, 64), labels=torch.randint(3, IMAGE, (2, length)))


def pictures(count: int) -> Batch:
    return dict(pixel_values=torch.randn(count, 3, 32, 32), labels=torch.randint(10, (count,)))


def captions(length: int) -> Batch:
    """Three pictures with a text each, which ends at its largest token."""
    ids = torch.randint(3, IMAGE, (3, length))
    ids[:, -1] = IMAGE
    mask = torch.ones_like(ids)
    return dict(input_ids=ids, pixel_values=torch.randn(3, 3, 32, 32), attention_mask=mask, return_loss=True)


def dialogues(length: int) -> Batch:
    """A picture of 16 patches in each text."""
    ids = torch.randint(3, IMAGE, (2, length))
    ids[:, 1:17] = IMAGE
    labels = torch.where(ids == IMAGE, -100, ids)
    return dict(
        input_ids=ids, pixel_values=torch.randn(2, 3, 32, 32), labels=labels, attention_mask=torch.ones_like(ids)
    )


VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8
)  # fmt: skip
TEXT = SHAPE | dict(eos_token_id=IMAGE)

HUGGING: dict[str, Family] = {
    "llama": causal("llama", GROUPED),
    "qwen2": causal("qwen2", GROUPED),
    "qwen3": causal("qwen3", GROUPED),
    "qwen3_moe": causal("qwen3_moe", GROUPED, ROUTED),
    "qwen3_moe/batched_mm": causal("qwen3_moe", GROUPED, ROUTED, experts_implementation="batched_mm"),
    "qwen3_next": causal("qwen3_next", GROUPED, ROUTED, DELTA, shared_expert_intermediate_size=16),
    "qwen3_5_text": causal("qwen3_5_text", GROUPED, DELTA),
    "mistral": causal("mistral", GROUPED, SLIDING),
    "mixtral": causal("mixtral", GROUPED, num_local_experts=4),
    "mixtral/batched_mm": causal("mixtral", GROUPED, num_local_experts=4, experts_implementation="batched_mm"),
    "mixtral/eager": causal("mixtral", GROUPED, num_local_experts=4, experts_implementation="eager"),
    "gemma2": causal("gemma2", GROUPED, SLIDING, query_pre_attn_scalar=8),
    "gemma3_text": causal("gemma3_text", GROUPED, SLIDING, MIXED, query_pre_attn_scalar=8),
    "phi3": causal("phi3", num_key_value_heads=2),
    "gpt2": causal("gpt2", intermediate_size=None, n_inner=48),
    "gpt_neox": causal("gpt_neox"),
    "opt": causal("opt", intermediate_size=None, ffn_dim=48, word_embed_proj_dim=32),
    "bloom": causal("bloom", num_hidden_layers=None, num_attention_heads=None, n_layer=3, n_head=4),
    "falcon": causal("falcon"),
    "olmo2": causal("olmo2", num_key_value_heads=2),
    "granite": causal("granite", num_key_value_heads=2),
    "glm4": causal("glm4", GROUPED),
    "cohere2": causal("cohere2", GROUPED, SLIDING, MIXED),
    "starcoder2": causal("starcoder2", num_key_value_heads=2),
    "smollm3": causal("smollm3", num_key_value_heads=2),
    "deepseek_v3": causal(
        "deepseek_v3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=16,
    ),
    "gpt_oss": causal("gpt_oss", GROUPED, SLIDING, MIXED, num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": causal(
        "llama4_text", GROUPED, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=8,
    ),
    "mamba2": causal(
        "mamba2", intermediate_size=None, num_attention_heads=None, num_heads=8, head_dim=8, state_size=8, n_groups=2,
        chunk_size=8,
    ),
    "bert": hugging("BertForMaskedLM", "bert", masked, (16, 21, 16)),
    "modernbert": hugging("ModernBertForMaskedLM", "modernbert", masked, (16, 21, 16), local_attention=8),
    "t5": hugging(
        "T5ForConditionalGeneration", "t5", translation, (16, 21, 16), d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, decoder_start_token_id=0, hidden_size=None, num_hidden_layers=None, num_attention_heads=None,
    ),
    "whisper": hugging(
        "WhisperForConditionalGeneration", "whisper", speech, (16, 21, 16), d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=32, max_target_positions=64, decoder_start_token_id=1, num_mel_bins=80, hidden_size=None,
        num_hidden_layers=None, num_attention_heads=None,
    ),
    "vit": hugging("ViTForImageClassification", "vit", pictures, (2, 3, 2), num_labels=10, **VISION),
    "clip": hugging(
        "CLIPModel", "clip", captions, (16, 21, 16), projection_dim=16, text_config=TEXT, vision_config=VISION
    ),
    "llava": hugging(
        "LlavaForConditionalGeneration", "llava", dialogues, (24, 30, 24), image_token_index=IMAGE,
        text_config=SHAPE | dict(model_type="llama"), vision_config=VISION | dict(model_type="clip_vision_model"),
    ),
}  # fmt: skip


# -- written here -----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A basic block of torchvision's, with a strided one's projection where the width changes."""

    def __init__(self, width: int, out: int):
        super().__init__()
        stride = 1 if width == out else 2
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        strided = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.downsample = None if stride == 1 else strided

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Three stages of two blocks, as torchvision lays them out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(16, 16), Residual(16, 16))
        self.layer2 = nn.Sequential(Residual(16, 32), Residual(32, 32))
        self.layer3 = nn.Sequential(Residual(32, 64), Residual(64, 64))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(pixel_values))))
        logits = self.fc(torch.flatten(self.avgpool(self.layer3(self.layer2(self.layer1(x)))), 1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def convolved(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU())


class UNet(nn.Module):
    """Down and up again, each level joined to its own on the way down; it guesses the noise in a picture."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.stem = convolved(3, 8)
        self.downs = nn.ModuleList(convolved(w, w) for w in widths)
        self.pools = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in ((8, 16), (16, 32), (32, 32)))
        self.middle = convolved(32, 32)
        self.lifts = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((32, 32), (32, 16), (16, 8)))
        self.ups = nn.ModuleList(convolved(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        y = self.stem(x + noise)
        skips: list[Tensor] = []
        for down, pool in zip(self.downs, self.pools, strict=True):
            skips.append(down(y))
            y = pool(skips[-1])
        y = self.middle(y)
        for lift, up in zip(self.lifts, self.ups, strict=True):
            y = up(torch.cat([lift(y), skips.pop()], 1))
        return {"loss": F.mse_loss(self.head(y), noise)}


class GraphNet(nn.Module):
    """Messages along a dense adjacency matrix, normalized by degree, and a label for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        self.layers = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))

    def forward(self, nodes: Tensor, adjacency: Tensor, labels: Tensor) -> dict[str, Tensor]:
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        x = self.embed(nodes)
        for layer in self.layers:
            x = x + F.dropout(F.relu(layer(torch.cat([x, adjacency @ x / degree], -1))), 0.1, self.training)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class LSTMClassifier(nn.Module):
    """A bidirectional LSTM, whose last states are classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, dropout=0.1, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        _, (last, _) = self.lstm(self.embed(input_ids))
        logits = self.head(torch.cat([last[-2], last[-1]], -1))
        return {"loss": F.cross_entropy(logits, labels[:, 0] % 5), "logits": logits}


class Experts(nn.Module):
    """Each token goes to two of four experts, looked up in a Python loop over those that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), Experts()) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class EarlyExit(nn.Module):
    """Leaves its stack of layers as soon as what comes out of one has a positive mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
            if x.mean() > 0:
                break
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def noisy(count: int) -> Batch:
    return dict(x=torch.randn(count, 3, 16, 16), noise=torch.randn(count, 3, 16, 16))


def graphs(nodes: int) -> Batch:
    adjacency = (torch.rand(3, nodes, nodes) < 0.3).float()
    return dict(nodes=torch.randn(3, nodes, 8), adjacency=adjacency, labels=torch.randint(5, (3, nodes)))


OWN: dict[str, Family] = {
    "resnet": Family(ResNet, pictures, (4, 6, 4)),
    "unet": Family(UNet, noisy, (2, 3, 2)),
    "graph_network": Family(GraphNet, graphs),
    "lstm": Family(LSTMClassifier, tokens),
    "experts_loop": Family(Mixture, tokens),
    "early_exit": Family(EarlyExit, tokens),
}

FAMILIES: dict[str, Family] = HUGGING | OWN
