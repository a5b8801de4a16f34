"""A model that computes everything twice trains as eager does, with what `simplify` leaves of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twins import KEEP, differing, squeezed, state, twins

import megatrain


class Block(nn.Module):
    """Equal calls with gradients, without, before and after a write, of random draws."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = dropout
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.steps += 1
        hidden, again = self.linear(x).tanh(), self.linear(x).tanh()
        seen, visible = (ids > 3).to(x.dtype)[..., None], (ids > 3).to(x.dtype)[..., None]
        if self.dropout:
            hidden, again = F.dropout(hidden, self.dropout), F.dropout(again, self.dropout)
            seen, visible = F.dropout(seen, self.dropout), F.dropout(visible, self.dropout)
        counts = ids / 61
        flat = counts.view(-1)
        weight = flat.mean() + flat.mean()
        counts.mul_(0.5)
        weight = weight + flat.mean() + flat.mean() + self.steps
        held = torch.zeros_like(x)
        row = held[:, 0]
        before, same = row.exp(), row.exp()
        held.copy_(hidden)
        after, alike = row.exp(), row.exp()
        gates = F.softplus(again) + F.softplus(again) * visible
        return x + hidden * seen * weight + gates + (before + same + after + alike)[:, None]


class Twice(nn.Module):
    def __init__(self, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(3))
        self.head = nn.Linear(width, 61)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten()), (ids > 3).sum(), (ids > 3).sum()


def trained(model: nn.Module) -> list[Any]:
    """Losses, the other results, and all parameters, gradients and buffers, of three steps and then at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    seen: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss, *others = model(torch.randint(61, (4, 16)))
        others[0].add_(1)  # the other one stays what it was
        loss.backward()
        seen.append({"loss": loss.detach(), "other0": others[0], "other1": others[1], **state(model)})
        optimizer.step()
    return [*seen, state(model)]


PASSES = {"recompute": squeezed(megatrain.DEFAULT_PASSES), "keep": KEEP}


@pytest.mark.parametrize("mode", PASSES)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_eager_bit_for_bit(dropout: float, mode: str) -> None:
    eager, ours = twins(lambda: Twice(dropout), backend="eager", passes=PASSES[mode])
    for expected, found in zip(trained(eager), trained(ours), strict=True):
        assert differing(expected, found) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_inductor_within_rounding(dropout: float) -> None:
    """A layer with dropout runs uncompiled, one without is compiled."""
    eager, ours = twins(lambda: Twice(dropout).double(), backend="inductor")
    for expected, found in zip(trained(eager), trained(ours), strict=True):
        torch.testing.assert_close(found, expected)
