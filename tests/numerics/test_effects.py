"""In-place writes, no_grad and random draws in the order of eager: values, gradients, buffers, the random stream."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain


class Layers(nn.Module):
    """Two layers, with `between` after each."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("ema", torch.zeros(8, 8))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        if self.between is sunk:
            x = x * 2
            total = x.sum()
            x.mul_(0.5)
        else:
            total = torch.zeros(())
        for layer in self.layers:
            x = self.between(self, torch.tanh(layer(x)))
        return x.square().mean() + total


def average(self: Any, x: Tensor) -> Tensor:
    """A buffer that nobody reads is written under no_grad."""
    with torch.no_grad():
        self.ema.lerp_(self.layers[0].weight, 0.1)
    return x


def draw(self: Any, x: Tensor) -> Tensor:
    """A draw under no_grad that nobody reads moves the random stream on."""
    with torch.no_grad():
        nn.functional.dropout(x, 0.5)
    return nn.functional.dropout(x, 0.5)


def read_then_write(self: Any, x: Tensor) -> Tensor:
    """What is read before the write is of the value before."""
    h = x * 2
    total = h.sum()
    h.mul_(0.5)
    return h + total


def view_then_write(self: Any, x: Tensor) -> Tensor:
    h = x * 2
    first = h[:1]
    later = first + 1
    h.add_(3)
    return h * later


def written_with_a_gradient(self: Any, x: Tensor) -> Tensor:
    """Memory that carries a gradient only since something was written into it, read under no_grad."""
    z = torch.zeros(x.shape)
    view = z[:, :4]
    view.copy_(x[:, :4])
    with torch.no_grad():
        scale = z * 2 + 1
    return x * scale + z


def sunk(self: Any, x: Tensor) -> Tensor:
    """What was read before a write ahead of the layers is used behind them."""
    return x


class Weights(nn.Module):
    """Each layer gives its parameter, as it is, past an operator whose schema does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self.layers:
            x = layer(x)
            found.append(torch.atleast_1d(layer.bias))
        return [x, *found]


def scaled_by_sizes(self: Any, x: Tensor) -> Tensor:
    """A number that is computed from sizes is no integer."""
    return x * (x.shape[0] * 0.125) + x.shape[0] / 3


CASES = [
    sunk, average, draw, read_then_write, view_then_write, written_with_a_gradient, scaled_by_sizes,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_in_eager(case: Any) -> None:
    torch.manual_seed(0)
    eager = Layers(case)
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(4, 8)
    losses: list[Tensor] = []
    for m in (eager, ours):
        torch.manual_seed(1)
        loss = m(x) + m(x)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
    assert torch.equal(eager.ema, ours.ema)  # type: ignore[arg-type]


class Late(nn.Module):
    """The input's memory is written into after the layers have read it, through a view made before."""

    def __init__(self, view: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        part = self.view(x)
        y = x.sin()
        for layer in self.layers:
            y = layer(x.cos()) + y
        part *= 0.5
        return y + x


VIEWS = {
    "slice": lambda x: x[..., ::2],
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x)[0],
    "type_as": lambda x: x.type_as(x),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "atleast_2d": lambda x: torch.atleast_2d(x),
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
}
"""The schema of all but the first does not say that it is a view."""


class Sizes(nn.Module):
    """Results that are numbers computed from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        n = x.shape[0]
        return {"y": self.layer(x) * n**-0.5, "half": n * 0.5, "root": n**-0.5, "more": n > 3, "n": n + 1}


@pytest.mark.parametrize("view", VIEWS)
def test_writes_after_the_layers(view: str) -> None:
    torch.manual_seed(0)
    eager = Late(VIEWS[view])
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(4, 8)
    assert torch.equal(eager(x), ours(x))


def test_weights_as_results() -> None:
    torch.manual_seed(0)
    eager = Weights()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(4, 8)
    assert all(map(torch.equal, eager(x), ours(x)))


def test_numbers_computed_from_sizes() -> None:
    torch.manual_seed(0)
    eager = Sizes()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    for size in (5, 2):
        x = torch.randn(size, 8)
        expected, found = eager(x), ours(x)
        assert torch.equal(expected.pop("y"), found.pop("y"))
        assert expected == found and [*map(type, expected.values())] == [*map(type, found.values())]


def test_kernels_chosen_by_requires_grad() -> None:
    """Under no_grad a parameter still requires a gradient, and matmul looks at that."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(7, 7))
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    x = torch.randn(6, 5, 7).transpose(0, 1)
    with torch.no_grad():
        assert torch.equal(eager(x), ours(x))
