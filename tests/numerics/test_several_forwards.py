"""One backward through several forwards, or through another loss too, where gradients live on the device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain


@pytest.mark.parametrize("kind", ["two forwards", "a penalty", "both, accumulated"])
def test_a_backward_through_more_than_one_forward(kind: str) -> None:
    """Autograd adds up gradients of which some are on the device."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
    ours: Any = megatrain.compile(copy.deepcopy(eager), device="cpu", memory="1GiB")
    opts = torch.optim.SGD(eager.parameters(), lr=0.1), megatrain.SGD(ours.parameters(), lr=0.1)
    for t in range(3):
        a, b = torch.full((2, 8), 0.1 * t + 0.1), torch.full((2, 8), 0.3)
        for m, opt in zip((eager, ours), opts, strict=True):
            for _ in range(2 if "accumulated" in kind else 1):
                loss = m(a).square().sum()
                if kind != "a penalty":
                    loss = loss + m(b).square().sum()
                if kind != "two forwards":
                    loss = loss + next(m.parameters()).square().sum()
                loss.backward()
            opt.step()
            if t < 2:
                opt.zero_grad()
    assert len(ours.__dict__["_megatrain"].runtime.residents) == 3
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
        torch.testing.assert_close(q.detach(), p.detach())
