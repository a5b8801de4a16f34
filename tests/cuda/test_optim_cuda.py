"""Host updates beside CUDA streams: the same bits however long each lane takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatrain
from megatrain import device
from tests.numerics.test_optim import Net, ids
from tests.numerics.twins import same

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def trained(seed: int, **options: Any) -> tuple[list[float], Any]:
    """(losses, model) of ten steps, with random delays on every lane unless `seed` is 0."""
    torch.manual_seed(0)
    model: Any = megatrain.compile(Net(width=256, depth=6).bfloat16(), device="cuda", backend="eager")
    opt = megatrain.AdamW(model.parameters(), lr=1e-2, **options)
    rng = random.Random(seed)
    model.__dict__["_megatrain"].runtime.lanes.delay = (lambda label: rng.random() * 0.003) if seed else None
    losses: list[float] = []
    for t in range(10):
        loss = model(ids(t))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    megatrain.synchronize(model)
    return losses, model


OPTIONS: list[dict[str, Any]] = [
    {"update": "host"}, {"update": "host", "max_grad_norm": 0.1}, {"update": "in-backward"}, {"max_grad_norm": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_delays_change_nothing(options: dict[str, Any]) -> None:
    expected, model = trained(0, **options)
    for seed in (1, 2, 3):
        losses, other = trained(seed, **options)
        assert losses == expected
        assert all(same(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_in_the_backward_as_after_it() -> None:
    (a, one), (b, two) = trained(0, update="host"), trained(4, update="in-backward")
    assert a == b and all(same(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_on_the_device_as_on_the_host() -> None:
    (a, one), (b, two) = trained(0, update="host"), trained(0)
    assert len(two.__dict__["_megatrain"].runtime.residents) == 7
    assert a == b and all(same(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_norms_are_torchs() -> None:
    torch.manual_seed(0)
    model: Any = megatrain.compile(Net(width=256, depth=6).bfloat16(), device="cuda", backend="eager")
    model(ids(0)).backward()
    exact = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(megatrain.clip_grad_norm_(model.parameters(), 1e9).double(), exact, rtol=1e-5, atol=0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CONSTANTS: dict[str, list[float]] = {
    "adamw": [0.9999, 0.1, 0.999, 0.001, 1e-3, 0.5, 1e-8, 0.7],
    "sgd": [1e-3, 0.1, 0.7],
    "momentum": [1e-3, 0.1, 0.9, 1.0, 0.9, 1.0, 0.7],
    "lion": [1e-3, 0.999, 0.9, 0.1, 0.99, 0.01, 0.7],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", CONSTANTS)
def test_an_update_on_the_device_has_the_bits_of_one_on_the_host(rule: str, dtype: torch.dtype) -> None:
    """From denormals to infinities."""
    torch.manual_seed(0)
    n, halves = 300_001, dtype == torch.bfloat16
    weight = torch.randn(n).to(dtype)
    grad = (torch.randn(n) * torch.logspace(-40, 38, n)).to(dtype)
    remainder = torch.randint(-(2**15), 2**15, (n,)).to(torch.int16) if halves else None
    moments = [torch.randn(n) * torch.logspace(-42, 2, n), torch.rand(n) * torch.logspace(-44, 2, n)]
    moments = moments[: {"adamw": 2, "sgd": 0}.get(rule, 1)]
    constants = np.array(CONSTANTS[rule], np.float32)
    host = [weight, remainder, grad, moments]
    there = [None if t is None else t.cuda() for t in (weight, remainder, grad)]
    moved = [m.cuda() for m in moments]
    for _ in range(3):
        device.update(rule, *host, constants)  # type: ignore[arg-type]
        device.update(rule, *there, moved, constants)  # type: ignore[arg-type]
    for a, b in zip([weight, remainder, *moments], [there[0], there[1], *moved], strict=True):
        if a is not None and b is not None:
            assert same_bits(a, b.cpu())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for which NaN it is."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())
