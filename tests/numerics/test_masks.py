"""Padding masks that are all ones cost nothing, and the bits of eager; those that are not are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from tests.numerics.test_inductor import ids, llama


def graphs(model: Any) -> list[str]:
    """The graphs of each capture."""
    captures = [made for found in model.__dict__["_megatrain"].whole.captures.values() for made in found]
    return ["\n".join(str(t.graph.graph) for t in made.program.templates) for made in captures]


def padded(t: int) -> Tensor:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, -3 - t :] = 0
    return mask


@pytest.mark.parametrize("first", ["ones", "padded"])
def test_a_mask_of_ones_is_causal_and_looked_at_in_each_call(first: str) -> None:
    eager = llama()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu")
    masks = [torch.ones_like(padded(0)), padded(0), padded(1), torch.ones_like(padded(0))]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, ours)]
    for t, mask in enumerate(masks if first == "ones" else masks[1:] + masks[:1]):
        losses: list[Tensor] = []
        for m, opt in zip((eager, ours), optimizers, strict=True):
            labels = ids(t).masked_fill(mask == 0, -100)
            loss = m(input_ids=ids(t), attention_mask=mask, labels=labels).loss
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-7)
        if first == "ones" and not t:
            assert torch.equal(*losses)
    found = graphs(ours)
    if first == "ones":
        assert len(found) == 2 and "is_causal: True" in found[0] and "is_causal: True" not in found[1]
    else:  # one capture serves both
        assert len(found) == 1 and "is_causal: True" not in found[0]
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


def test_ones_that_no_mask_is_made_of_are_nothing_special() -> None:
    ours = megatrain.compile(llama(), device="cpu")
    for value in (1, 2, 1):
        tokens = torch.full((2, 16), value)
        ours(input_ids=tokens, labels=tokens).loss.backward()
    assert len(graphs(ours)) == 1
