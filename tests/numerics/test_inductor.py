"""Backend "inductor": within rounding of eager, whatever is kept, and what cannot be compiled runs as it is."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def ids(seed: int, length: int = 16) -> Tensor:
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_llama_trains_as_eager(activations: str) -> None:
    """Two lengths, so that a second shape is compiled, from one capture."""
    eager = llama()
    passes = tuple(p if p.name != "plan" else f"plan{{activations='{activations}'}}" for p in megatrain.DEFAULT_PASSES)
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu", backend="inductor", passes=passes)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, ours)]
    for t, length in enumerate((16, 24, 16)):
        losses: list[Tensor] = []
        for m, opt in zip((eager, ours), optimizers, strict=True):
            loss = m(input_ids=ids(t, length), labels=ids(t, length)).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-4, atol=1e-5)
    state = ours.__dict__["_megatrain"]
    assert sum(map(len, state.whole.captures.values())) == 1
    bodies = [b for e in next(iter(state.whole.captures.values()))[0].executables.values() for b in e.bodies.values()]
    layers = [b for b in bodies if b.fused is not None]
    cuts = [cut for b in layers for cut in b.fused.cuts.values()]
    assert layers and cuts
    assert all(fused.works for cut in cuts for fused in (cut.forward, cut.saving, cut.backward))
    assert any(cut.forward.tried if activations == "keep" else cut.saving.tried for cut in cuts)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.tanh(layer(x) * 2 + 1), 0.5) + x
        return x.sum()


def test_what_draws_random_numbers_draws_those_of_eager() -> None:
    eager = Dropping()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu", backend="inductor")
    for m in (eager, ours):
        torch.manual_seed(1)
        m(torch.ones(2, 8)).backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_what_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("megatrain.fused.torch.compile", lambda code, **_: broken)
    ours = megatrain.compile(llama(), device="cpu", backend="inductor")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        loss = ours(input_ids=ids(0), labels=ids(0)).loss
        loss.backward()
    torch.testing.assert_close(loss, llama()(input_ids=ids(0), labels=ids(0)).loss)
    assert any("because torch.compile fails on it: RuntimeError: no compiler" in r.message for r in caplog.records)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.a, self.b = nn.Linear(16, 50), nn.Linear(16, 50)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return nn.functional.cross_entropy(self.a(h), x), nn.functional.cross_entropy(self.b(h), x)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_what_a_loss_does_not_reach_has_no_gradient(activations: str) -> None:
    """Not zeros, with which an optimizer would decay it."""
    torch.manual_seed(0)
    eager = Heads()
    passes = [p if p.name != "plan" else f"plan{{activations='{activations}'}}" for p in megatrain.DEFAULT_PASSES]
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu", backend="inductor", passes=passes)
    for m in (eager, ours):
        m(torch.arange(50))[0].backward()
    assert eager.b.weight.grad is None and ours.b.weight.grad is None
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def test_more_shapes_than_are_worth_compiling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megatrain.made.MOST_SHAPES", 1)
    eager = llama()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu", backend="inductor")
    with caplog.at_level(logging.INFO, logger="megatrain"):
        for length in (16, 20, 24, 16):
            for m in (eager, ours):
                m(input_ids=ids(0, length), labels=ids(0, length)).loss.backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    said = [r.getMessage().splitlines()[0] for r in caplog.records]
    assert said == [
        "megatrain: compiling for input_ids [2, 16], labels [2, 16]",
        "megatrain: compiled for 1 sets of sizes already: input_ids [2, 20], labels [2, 20] and any other runs "
        "uncompiled, which is slower",
    ]


def test_hooks_of_children_run_in_every_call() -> None:
    ours = megatrain.compile(llama(), device="cpu", backend="inductor")
    seen: list[int] = []
    ours.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        ours(input_ids=ids(0), labels=ids(0)).loss.backward()
    assert len(seen) == 3
