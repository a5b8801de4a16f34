"""Clipping of gradients, as `torch.nn.utils.clip_grad_norm_` does it."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import megatrain
from tests.numerics.test_optim import compiled, ids


def test_clipping_as_torch() -> None:
    model = compiled(torch.float32)
    twin = copy.deepcopy(model)
    for m in (twin, model):
        m(ids(0)).backward()
    norms = [
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1),
        megatrain.clip_grad_norm_((p for p in model.parameters()), 0.1),
    ]
    assert type(model.layers[0].weight).__name__ == "Guarded"
    torch.testing.assert_close(norms[0], norms[1])
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    megatrain.clip_grad_norm_(model.parameters(), 0.01)
    for m in (twin, model):
        m(ids(1)).backward()  # adds to gradients that are to be scaled still
    nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
    scaled = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert scaled.item() < 0.1 + 5
    assert megatrain.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf) > 0
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite(bad: float) -> None:
    model = compiled(torch.float32)
    twin = copy.deepcopy(model)
    optimizers = (
        torch.optim.SGD(twin.parameters(), lr=0.1),
        megatrain.SGD(model.parameters(), lr=0.1, max_grad_norm=1.0),
    )
    for m, opt in zip((twin, model), optimizers, strict=True):
        m(ids(0)).backward()
        m.layers[0].bias.grad[2] = bad
        with pytest.raises(RuntimeError, match="for gradients from `parameters` is non-finite"):
            clip = nn.utils.clip_grad_norm_ if m is twin else megatrain.clip_grad_norm_
            clip(m.parameters(), 1.0, error_if_nonfinite=True)
        if m is twin:
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        opt.step()
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), equal_nan=True)
