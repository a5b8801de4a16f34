"""fp32 parameters computed with in bf16: as eager PyTorch with rounded weights, and as an fp32 master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call  # type: ignore[attr-defined]

import megatrain
from tests.numerics.test_optim import Net, ids
from tests.numerics.twins import same


def made(**options: Any) -> Any:
    torch.manual_seed(0)
    return megatrain.compile(Net(depth=4), device="cpu", compute_dtype=torch.bfloat16, **options)


def eager() -> Any:
    torch.manual_seed(0)
    return Net(depth=4)


def rounded(model: nn.Module, x: Tensor) -> Tensor:
    """The model's result with its parameters in bf16."""
    return functional_call(model, {n: p.bfloat16() for n, p in model.named_parameters()}, (x,))


@pytest.mark.parametrize("update", ["torch", "host", "device", "in-backward"])
def test_trains_as_eager_with_rounded_weights(update: str) -> None:
    ours, reference = made(), eager()
    opt: Any = torch.optim.SGD(ours.parameters(), lr=0.1)
    if update != "torch":
        opt = megatrain.SGD(ours.parameters(), lr=0.1, update=update)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=False)
    for t in range(5):
        losses = ours(ids(t)), rounded(reference, ids(t))
        assert torch.equal(*losses)
        for loss, o in zip(losses, (opt, other), strict=True):
            loss.backward()
            o.step()
            o.zero_grad()
        for (name, p), q in zip(ours.named_parameters(), reference.parameters(), strict=True):
            assert p.dtype == torch.float32
            tied = name.startswith("embed")  # eager adds its two gradients in bf16
            torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=2e-4 if tied else 1e-6)
        with torch.no_grad():  # so that the next losses are of the same weights
            for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
                p.copy_(q)


def test_gradients_are_fp32_and_follow_the_parameters() -> None:
    ours, reference = made(), eager()
    ours(ids(0)).backward()
    rounded(reference, ids(0)).backward()
    for layer, other in zip(ours.layers, reference.layers, strict=True):
        assert layer.weight.grad.dtype == torch.float32 and same(layer.weight.grad, other.weight.grad)
    with torch.no_grad():
        ours.layers[1].weight.mul_(1.5)
        reference.layers[1].weight.mul_(1.5)
    assert torch.equal(ours(ids(1)), rounded(reference, ids(1)))
    assert ours.state_dict()["layers.1.weight"].dtype == torch.float32


def test_what_goes_to_the_device_is_half_as_much() -> None:
    ours, whole = made(), megatrain.compile(eager(), device="cpu")
    for m in (ours, whole):
        m(ids(0))
    sizes = [{s.name: s.bytes for s in megatrain.schedule(m).slots}["w0"] for m in (ours, whole)]
    assert sizes[0] <= sizes[1]
    layers = [m.__dict__["_megatrain"].runtime for m in (ours, whole)]
    assert layers[0].transfers.layouts["layers.0.w"].entries[0].dtype == torch.bfloat16


def test_arguments_are_rounded_and_their_gradients_are_not() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).bfloat16()
    megatrain.compile(net, device="cpu", compute_dtype=torch.bfloat16)
    x, y = (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    a, b = net(x), other(y.bfloat16())
    assert a.dtype == torch.bfloat16 and torch.equal(a, b)
    for out in (a, b):
        out.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32 and same(x.grad, y.grad)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^compute_dtype=torch.float64: there is torch.bfloat16, torch.float16"):
        megatrain.compile(eager(), device="cpu", compute_dtype=torch.float64)
