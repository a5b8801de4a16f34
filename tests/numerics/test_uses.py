"""What people do with a model: losses of their own, masks and packed sequences, mixed precision, adapters.  As eager,
bit for bit, over three steps."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megatrain

transformers = pytest.importorskip("transformers")

SHAPE = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
SLIDING = dict(sliding_window=4)
IDS = [torch.randint(3, 99, (2, 10 + s), generator=torch.Generator().manual_seed(s)) for s in range(3)]

Loss = Callable[[Any, int], Tensor]


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | options))
    return transformers.AutoModelForCausalLM.from_config(config)


def step(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def compare(eager: Any, ours: Any, loss_of: Loss, take: Callable[[Tensor, Any], object] = step) -> None:
    found: list[list[Tensor]] = []
    for model in (eager, ours):
        parameters = [p for p in model.parameters() if p.requires_grad]
        half = any(p.dtype == torch.float16 for p in parameters)  # in which AdamW's epsilon is zero
        optimizer = torch.optim.SGD(parameters, lr=0.1) if half else torch.optim.AdamW(parameters, lr=1e-2)
        losses: list[Tensor] = []
        for s in range(len(IDS)):
            torch.manual_seed(s)
            loss = loss_of(model, s)
            take(loss, optimizer)
            losses.append(loss.detach().clone())
        found.append([*losses, *(p.detach().clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))


def twin(model: Any) -> tuple[Any, Any]:
    return model, megatrain.compile(copy.deepcopy(model), device="cpu")


# -- losses -----------------------------------------------------------------------------------------------------------


def log_probability(model: Any, ids: Tensor) -> Tensor:
    scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def outside(model: Any, s: int) -> Tensor:
    logits = model(input_ids=IDS[s]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), IDS[s][:, 1:].flatten(), label_smoothing=0.1)


def distilled(model: Any, s: int) -> Tensor:
    with torch.no_grad():
        wanted = F.softmax(made("llama").eval()(input_ids=IDS[s]).logits / 2, -1)
    return F.kl_div(F.log_softmax(model(input_ids=IDS[s]).logits / 2, -1), wanted, reduction="batchmean")


def preferred(model: Any, s: int) -> Tensor:
    """Direct preference optimisation: two forwards before the backward, and two of a reference."""
    chosen, rejected = IDS[s], IDS[s].flip(1)
    with torch.no_grad():
        reference = made("llama").eval()
        gap = log_probability(reference, chosen) - log_probability(reference, rejected)
    return -F.logsigmoid(0.1 * (log_probability(model, chosen) - log_probability(model, rejected) - gap)).mean()


def hidden(model: Any, s: int) -> Tensor:
    states = model(input_ids=IDS[s], output_hidden_states=True).hidden_states
    assert len(states) == 3
    return torch.stack([h.square().mean() for h in states]).sum()


def scored(model: Any, s: int) -> Tensor:
    return model(input_ids=IDS[s], labels=IDS[s]).loss


@pytest.mark.parametrize("loss", [outside, distilled, preferred, hidden])
def test_losses(loss: Loss) -> None:
    compare(*twin(made("llama")), loss)


def test_a_loss_of_the_router() -> None:
    experts = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    compare(*twin(made("mixtral", **experts)), scored)


def test_gradients_of_embeddings_that_are_given() -> None:
    gradients: list[Tensor] = []
    for model in twin(made("llama")):
        given = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
        model(inputs_embeds=given, labels=IDS[0]).loss.backward()
        assert given.grad is not None
        gradients.append(given.grad)
    assert torch.equal(*gradients)


# -- masks ------------------------------------------------------------------------------------------------------------


def padded(left: bool) -> Loss:
    def loss(model: Any, s: int) -> Tensor:
        mask = torch.ones_like(IDS[s])
        mask[0, slice(0, 3) if left else slice(-3, None)] = 0
        return model(input_ids=IDS[s], attention_mask=mask, labels=IDS[s].masked_fill(mask == 0, -100)).loss

    return loss


def packed(model: Any, s: int) -> Tensor:
    positions = torch.cat([torch.arange(6), torch.arange(4 + s)])[None].repeat(2, 1)
    return model(input_ids=IDS[s], position_ids=positions, labels=IDS[s]).loss


FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": dict(SLIDING),
    "gemma2": dict(SLIDING, query_pre_attn_scalar=8),
    "gpt_oss": dict(SLIDING, num_local_experts=4),
}
MASKS: dict[str, Loss] = {"right": padded(False), "left": padded(True), "packed": packed}
EACH = list(zip(FAMILIES, MASKS, strict=True))
CASES = list(itertools.product(FAMILIES, MASKS)) if os.environ.get("MEGATRAIN_TEST_FULL") else EACH


@pytest.mark.parametrize(("kind", "mask"), CASES)
def test_masks_with_windows_caps_and_sinks(kind: str, mask: str) -> None:
    compare(*twin(made(kind, **FAMILIES[kind])), MASKS[mask])


# -- precision --------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer that asks for fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 99)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        with torch.autocast("cpu", enabled=False):
            x = self.norm(x.float())
        return F.cross_entropy(self.head(x.to(self.head.weight.dtype)).flatten(0, 1), ids.flatten())


def under(dtype: torch.dtype, loss: Loss = scored) -> Loss:
    def cast(model: Any, s: int) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss(model, s)

    return cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    compare(*twin(made("llama").to(dtype)), scored)
    compare(*twin(made("llama")), under(dtype))


@pytest.mark.parametrize("cast", [False, True])
def test_a_layer_that_asks_for_fp32(cast: bool) -> None:
    torch.manual_seed(0)
    model = Mixed() if cast else Mixed().bfloat16()
    model.norm.float()
    compare(*twin(model), under(torch.bfloat16, lambda m, s: m(IDS[s])) if cast else lambda m, s: m(IDS[s]))


@pytest.mark.parametrize("optimizer", ["torch", "megatrain"])
def test_fp16_with_a_gradient_scaler(optimizer: str) -> None:
    """The first scale overflows: the step is left out, and the scale is lowered."""
    losses: list[list[Tensor]] = []
    for model in twin(made("llama")):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)  # pyright: ignore
        kinds = megatrain if optimizer == "megatrain" and model.__dict__.get("_megatrain") else torch.optim
        opt: Any = kinds.SGD(model.parameters(), lr=0.1)
        found: list[Tensor] = []
        for s in (0, 0, 1, 2, 1):
            with torch.autocast("cpu", torch.float16):
                loss = scored(model, s)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            found += [loss.detach(), torch.tensor(scaler.get_scale())]
        losses.append(found)
    assert losses[0][1] < 2.0**24
    if optimizer == "torch":
        assert all(map(torch.equal, *losses))
    torch.testing.assert_close(losses[1], losses[0])


# -- adapters ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of low rank, in the manner of LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_adapters_put_on_before_or_after_compile(late: bool) -> None:
    eager, ours = twin(made("llama")) if late else twin(adapted(made("llama")))
    if late:
        eager, ours = adapted(eager), adapted(ours)
    compare(eager, ours, scored)
    assert all((p.grad is None) == (not p.requires_grad) or p.grad is None for p in ours.parameters())
    schedule = megatrain.schedule(ours)
    offloads = [op for op in schedule.backward if op.verb == "offload"]
    assert [op.writes[0] for op in offloads] == [f"model.layers.{i}.dw" for i in (1, 0)]
    base = sum(p.nbytes for p in ours.parameters() if not p.requires_grad)
    made_of = ours.__dict__["_megatrain"].runtime.gradients.bytes
    assert made_of < base / 4  # frozen weights have no gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_peft(late: bool) -> None:
    peft = pytest.importorskip("peft")

    def wrapped(model: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = peft.get_peft_model(model, config)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return model

    eager, ours = made("llama"), made("llama")
    if late:
        eager, ours = wrapped(eager), wrapped(megatrain.compile(ours, device="cpu"))
    else:
        eager, ours = wrapped(eager), megatrain.compile(wrapped(ours), device="cpu")
    compare(eager, ours, scored)
    with eager.disable_adapter(), ours.disable_adapter(), torch.no_grad():
        assert torch.equal(eager(input_ids=IDS[0]).logits, ours(input_ids=IDS[0]).logits)
    merged = [m.merge_and_unload()(input_ids=IDS[0]).logits for m in (eager, ours)]
    assert torch.equal(*merged)
