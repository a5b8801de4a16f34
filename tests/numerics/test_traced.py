"""A forward that is traced does what it does in eager: it is not told that it is traced, and records what it is asked
for."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_models import VOCABULARY, causal
from torch import Tensor, nn
from twins import alike, same, twins

import megatrain


class Asking(nn.Module):
    """Has another formula for whoever traces it, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            return self.linear(x)
        return self.linear(x) * 2


def trained(x: Tensor) -> Any:
    def do(model: Any) -> Tensor:
        y = model(x)
        y.sum().backward()
        return y

    return do


def test_the_branches_are_those_of_eager() -> None:
    alike(*twins(Asking), trained(torch.randn(3, 4)))
    assert torch.compiler.is_exporting.__module__ == torch.compiler.is_compiling.__module__ == "torch.compiler"


def test_a_gated_delta_rule_has_the_bits_of_eager() -> None:
    delta = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    layers = ["linear_attention", "full_attention"]
    eager, ours = twins(lambda: causal("qwen3_5_text", num_hidden_layers=2, layer_types=layers, **delta))
    ids = torch.randint(3, VOCABULARY, (2, 16))
    alike(eager, ours, lambda m: backward(m(input_ids=ids, labels=ids).loss))


@pytest.mark.parametrize("before", [False, True], ids=["fresh", "run before"])
def test_hidden_states_and_router_logits_are_recorded(before: bool) -> None:
    model = causal("mixtral", num_local_experts=4)
    ids = torch.randint(3, VOCABULARY, (2, 16))
    asked: dict[str, Any] = dict(input_ids=ids, labels=ids, output_hidden_states=True, output_router_logits=True)
    if before:
        model(**asked)  # which puts hooks on its layers
    eager, ours = copy.deepcopy(model), megatrain.compile(model, device="cpu")
    expected, found = eager(**asked), ours(**asked)
    assert len(found.hidden_states) == 4 and len(found.router_logits) == 3
    for name in ("loss", "aux_loss", "logits", "hidden_states", "router_logits"):
        assert same(expected[name], found[name]), name
    backward(expected.loss)
    backward(found.loss)
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert same(p.grad, q.grad)
    assert eager(**asked).keys() == copy.deepcopy(ours)(**asked).keys()


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


class Settling(nn.Module):
    """Fills in its configuration in the first forward, as classifiers of transformers do, or counts its forwards."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(kind="", calls=0)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if not self.config.kind:
            self.config.kind = "regression"
        self.config.calls += self.counts
        return self.linear(x) if self.config.kind == "regression" else x


def test_what_the_first_forward_fills_in_stays() -> None:
    eager, ours = twins(lambda: Settling(False))
    for _ in range(2):
        alike(eager, ours, trained(torch.randn(3, 4)))
    assert ours.config == eager.config
    assert len(ours.__dict__["_megatrain"].whole.captures) == 1


@pytest.mark.parametrize("where", ["config", "module"])
def test_what_every_forward_sets(where: str) -> None:
    class Counting(nn.Sequential):
        calls = 0

        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
            self.calls += 1
            return self[0](x) * self.calls

    eager, ours = twins(Counting if where == "module" else lambda: Settling(True))
    for _ in range(4):
        alike(eager, ours, trained(torch.randn(3, 4)))
    assert (ours.calls == eager.calls == 4) if where == "module" else ours.config == eager.config
