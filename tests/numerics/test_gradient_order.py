"""Gradients of a value with several uses are added in the order of eager PyTorch, wherever the uses are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain


class Layers(nn.Module):
    """Three layers whose input has several uses, and what is done between and after them."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 3)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def block(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x.cumsum(0) + x).tanh() * x


def losses_of_layers(self: Any, x: Tensor) -> Tensor:
    """A part of the loss from each layer, added up: used at the end, made where it stands."""
    total = torch.zeros(())
    for layer in self.layers:
        x = block(layer, x)
        total = total + x.mean()
    return x + total


def used_after_the_layers(self: Any, x: Tensor) -> Tensor:
    """What is made before the layers and read by them, is read again after them."""
    first = x.sin() + self.head(x)
    y = first
    for layer in self.layers:
        y = block(layer, y)
    return y + first * first.exp() + self.head(first)


@pytest.mark.parametrize("forward", [losses_of_layers, used_after_the_layers], ids=lambda f: f.__name__)
def test_as_in_eager(forward: Any) -> None:
    torch.manual_seed(0)
    eager = Layers(forward)
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(6, 5, 3)
    for model in (eager, ours):
        y = model(x)
        (y * torch.cos(torch.arange(y.numel())).reshape(y.shape)).sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
