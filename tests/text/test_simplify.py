"""What `simplify` makes one of, and what it leaves: programs before and after, as text.

UPDATE_GOLDEN=1 rewrites the files in tests/golden.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatrain import DEFAULT_PASSES, Program, show
from megatrain.offline import program_of
from megatrain.passes import Partition, Simplify

GOLDEN = Path(__file__).parents[1] / "golden"


class Block(nn.Module):
    """Each line twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        hidden, again = self.linear(x).tanh(), self.linear(x).tanh()  # gradients flow
        seen, visible = (ids > 3)[..., None], (ids > 3)[..., None]  # none does, and the next layer does the same
        hidden, again = nn.functional.dropout(hidden, 0.1), nn.functional.dropout(again, 0.1)
        counts = ids / 2
        flat = counts.view(-1)
        before, same = flat.sum(), flat.sum()
        counts.mul_(0.5)
        after, alike = flat.sum(), flat.sum()  # of other numbers
        return hidden * seen + again * visible + before + same + after + alike


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = layer(x, ids)
        return x.sum(), ids.abs(), ids.abs()  # the caller may write into either


def hoisted(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    """The program before `simplify`."""
    others = [p for p in DEFAULT_PASSES if p.name not in ("simplify", "causal", "fuse_loss")]
    return program_of(model, args, kwargs, passes=others, stage="hoisted")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_computed_twice(backend: str) -> None:
    before = hoisted(Twice(), torch.empty(2, 3, 4), torch.empty(2, 3, dtype=torch.int64))
    after = Simplify().apply(before.replace(backend=backend))
    texts = {"twice-hoist.txt": show(before), f"twice-simplify-{backend}.txt": show(after)}
    if os.environ.get("UPDATE_GOLDEN") == "1":
        for name, text in texts.items():
            (GOLDEN / name).write_text(text)
    assert texts == {name: (GOLDEN / name).read_text() for name in texts}
    assert len(Partition().apply(after).templates) == len(Partition().apply(before).templates)


def test_without_gradients_all_is_shared() -> None:
    with torch.no_grad():
        before = hoisted(Twice(), torch.empty(2, 3, 4), torch.empty(2, 3, dtype=torch.int64))
    made = [show(Simplify().apply(before.replace(backend=backend))) for backend in ("eager", "inductor")]
    assert made[0] == made[1] == (GOLDEN / "twice-simplify-inductor.txt").read_text()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2", "gemma3_text"])
def test_layers_stay_equal(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, use_cache=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    ids = torch.zeros(2, 33, dtype=torch.int64)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    before = hoisted(model, input_ids=ids, labels=ids)
    cuts = [[layer.template for layer in Partition().apply(before).layers]]
    for backend in ("eager", "inductor"):
        after = Simplify().apply(before.replace(backend=backend))
        assert show(after).count("\n") < show(before).count("\n")
        cuts.append([layer.template for layer in Partition().apply(after).layers])
    assert cuts[0] == cuts[1] == cuts[2] and len(set(cuts[0])) == 3
