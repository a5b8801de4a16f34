"""fp32 gradients of bf16 parameters: as eager PyTorch with `grad_dtype`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from tests.numerics.twins import same


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.float().square().mean()


def made(memory: str | None = None) -> Any:
    torch.manual_seed(0)
    return megatrain.compile(Deep().bfloat16(), device="cpu", grad_dtype=torch.float32, memory=memory)


def eager() -> Any:
    torch.manual_seed(0)
    model = Deep().bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32  # type: ignore[attr-defined]
    return model


def x(seed: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_accumulated_as_in_eager(memory: str | None) -> None:
    """Also where gradients live on the device."""
    model, reference = made(memory=memory), eager()
    opt = megatrain.AdamW(model.parameters(), max_grad_norm=1.0)
    for step in range(3):
        for seed in range(4):
            for m in (model, reference):
                m(x(4 * step + seed)).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and p.grad.dtype == torch.float32 and same(p.grad, q.grad)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        opt.step()
        torch.testing.assert_close(opt.grad_norm, norm, rtol=1e-5, atol=0)
        opt.zero_grad()
        reference.zero_grad()
        reference.load_state_dict(model.state_dict())


@pytest.mark.parametrize("update", ["host", "device", "in-backward"])
def test_every_place_of_an_update_gives_the_same(update: str) -> None:
    models = made(memory="1GiB"), made()
    optimizers = [megatrain.AdamW(m.parameters(), update=u) for m, u in zip(models, ("auto", update), strict=True)]
    for t in range(4):
        for m, opt in zip(models, optimizers, strict=True):
            m(x(t)).backward()
            opt.step()
            opt.zero_grad()
    assert all(same(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


def test_a_weight_that_several_layers_use() -> None:
    class Tied(Deep):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers:
                layer.weight = self.layers[0].weight

    torch.manual_seed(0)
    model: Any = megatrain.compile(Tied().bfloat16(), device="cpu", grad_dtype=torch.float32)
    torch.manual_seed(0)
    exact: Any = Tied().bfloat16().double()
    for m, value in ((model, x(0)), (exact, x(0).double())):
        m(value).backward()
    ours, theirs = model.layers[0].weight.grad, exact.layers[0].weight.grad
    assert ours.dtype == torch.float32 and (ours - theirs).norm() < 0.02 * theirs.norm()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^grad_dtype=torch.float16: there is torch.float32, or None"):
        megatrain.compile(Deep(), device="cpu", grad_dtype=torch.float16)


def test_a_capture_while_there_are_gradients() -> None:
    model = made()
    model(x(0)).backward()
    before = model.layers[0].weight.grad.clone()
    with torch.no_grad():
        model(x(1))
    assert torch.equal(model.layers[0].weight.grad, before)
