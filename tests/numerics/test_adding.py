"""Gradients of several backwards between two steps, added on the device and sent back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from tests.numerics.test_any_order import adding
from tests.numerics.test_optim import Net, ids

CLIPS = (nn.utils.clip_grad_norm_, megatrain.clip_grad_norm_)


def pair(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = Net(depth=3)
    return eager, adding(megatrain.compile(copy.deepcopy(eager), device="cpu", **options))


def lines(model: Any) -> list[str]:
    return [line.split()[0] for line in str(megatrain.schedule(model)).splitlines() if line.startswith("add")]


def same(models: tuple[Any, Any]) -> None:
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad)


def test_the_bits_of_eager_in_the_memory_of_the_first() -> None:
    """A loss of one part: the sum is the one that autograd makes, in the same memory."""
    models = pair()
    places: list[list[int]] = []
    for t in range(3):
        for m in models:
            m(ids(t)).backward()
        same(models)
        assert lines(models[1]) == (["add2", "add1", "add0"] if t else [])
        places.append([p.grad.data_ptr() for p in models[1].layers.parameters()])
    assert places[0] == places[1] == places[2]
    norm = [clip(m.parameters(), 0.1) for clip, m in zip(CLIPS, models, strict=True)]
    torch.testing.assert_close(norm[1], norm[0])


def test_parameters_that_had_none_begin_with_theirs() -> None:
    """Of a layer that was partly frozen."""
    models = pair()
    for m in models:
        m.layers[1].bias.requires_grad_(False)
        m(ids(0)).backward()
        m.layers[1].bias.requires_grad_(True)
        m(ids(1)).backward()
    same(models)
    for m in models:
        m(ids(2)).backward()
    same(models)


@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_hooks_hear_what_they_would(kind: str) -> None:
    """A layer with one adds through autograd."""
    models = pair()
    heard: list[list[float]] = [[], []]
    for m, said in zip(models, heard, strict=True):
        p = m.layers[1].weight
        if kind == "tensor":
            p.register_hook(lambda g, said=said: said.append(float(g.sum())))
        else:
            p.register_post_accumulate_grad_hook(lambda p, said=said: said.append(float(p.grad.sum())))
        for t in range(3):
            m(ids(t)).backward()
    assert heard[0] == heard[1] and len(heard[0]) == 3
    assert lines(models[1]) == ["add2", "add0"]
    same(models)


def test_gradients_that_lie_elsewhere_are_autograds() -> None:
    models = pair()
    for m in models:
        m(ids(0)).backward()
        m.layers[0].weight.grad = m.layers[0].weight.grad * 2
        m.zero_grad(set_to_none=False)
        m.layers[2].weight.grad.add_(1)
        m(ids(1)).backward()
    same(models)
    assert lines(models[1]) == ["add2", "add1"]


def test_two_forwards_before_their_backwards() -> None:
    """The tied weight is added up call by call, one rounding apart."""
    models = pair()
    for m in models:
        m(ids(0)).backward()
        one, two = m(ids(1)), m(ids(2))
        (one + two).backward()
        if m is models[1]:
            assert not lines(m)
        m(ids(3)).backward()
    for p, q in zip(*(m.layers.parameters() for m in models), strict=True):
        assert torch.equal(p.grad, q.grad)
    torch.testing.assert_close(models[1].embed.weight.grad, models[0].embed.weight.grad)
