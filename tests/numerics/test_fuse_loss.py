"""The last linear layer and the loss as one operator: against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain import losses
from megatrain.losses import linear_cross_entropy
from tests.numerics.test_inductor import ids, llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own

STEPS: dict[str, Any] = {
    "": lambda y: y,
    "float": lambda y: y.float(),
    "float; div 30.0; tanh; mul 30.0": lambda y: torch.tanh(y.float() / 30.0) * 30.0,
    "mul 0.25; float": lambda y: (y * 0.25).float(),
}


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("steps", STEPS)
def test_loss_logits_and_gradients(steps: str, mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of 128 rows, with rows that are left out, and a gradient for the logits too."""
    monkeypatch.setattr(losses, "LOSS_CHUNK", 0)
    torch.manual_seed(0)
    x, w = torch.randn(3, 100, 16, dtype=torch.float64), torch.randn(50, 16, dtype=torch.float64)
    target = torch.randint(0, 50, (300,))
    target[::7] = -100
    leaves = [[t.float().requires_grad_() for t in (x, w)] for _ in range(2)]
    loss, logits, _, _ = linear_cross_entropy(*leaves[0], target, steps, mean, -100, True, True)
    plain = nn.functional.linear(*leaves[1])
    reduction = "mean" if mean else "sum"
    expected = nn.functional.cross_entropy(STEPS[steps](plain).view(300, 50), target, reduction=reduction)
    torch.testing.assert_close((loss, logits), (expected, plain))
    direction = torch.randn_like(plain)
    for a, b, (p, q) in ((loss, logits, leaves[0]), (expected, plain, leaves[1])):
        (a * 3 + (b * direction).sum() * 0.1).backward()
        assert p.grad is not None and q.grad is not None
    for p, q in zip(*leaves, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_the_graph_says_so_and_the_logits_stay() -> None:
    eager = llama()
    ours = megatrain.compile(llama(), device="cpu", backend="inductor")
    one, two = (m(input_ids=ids(0), labels=ids(0)) for m in (eager, ours))
    torch.testing.assert_close((two.loss, two.logits), (one.loss, one.logits), rtol=1e-5, atol=1e-5)
    state = ours.__dict__["_megatrain"]
    (made,) = next(iter(state.whole.captures.values()))
    assert "megatrain.linear_cross_entropy" in str(made.program.templates[-1].graph.graph)
    for result in (one, two):
        (result.loss + result.logits.square().mean()).backward()  # through the logits too, which is seldom
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_logits_that_nobody_wants_are_not_made(backend: str) -> None:
    eager = llama()
    ours = megatrain.compile(llama(), device="cpu", backend=backend, skip_logits=True)
    one, two = (m(input_ids=ids(0), labels=ids(0)) for m in (eager, ours))
    torch.testing.assert_close(two.loss, one.loss, rtol=1e-5, atol=1e-5)
    assert two.logits is None and megatrain.schedule(ours).outputs == ("loss",)
    for result in (one, two):
        result.loss.backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # without labels there is no loss
        torch.testing.assert_close(ours(input_ids=ids(1)).logits, eager(input_ids=ids(1)).logits)


def test_skipping_logits_needs_the_pass() -> None:
    rest = [p for p in megatrain.DEFAULT_PASSES if p.name != "fuse_loss"]
    with pytest.raises(ValueError, match="skip_logits=True: the pass that drops them, fuse_loss, is not among"):
        megatrain.compile(llama(), device="cpu", passes=rest, skip_logits=True)


class Capped(nn.Module):
    """A soft cap, labels that are not counted, a label shift, logits that are not returned."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.both = both
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits = torch.tanh(self.head(x).float() / 5) * 5
        labels = nn.functional.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
        loss = nn.functional.cross_entropy(logits.view(-1, 40), labels.view(-1), ignore_index=-100)
        return (loss, logits) if self.both else loss


def test_a_cap_and_a_shift() -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Capped())
    megatrain.compile(models[1], device="cpu", backend="inductor")
    values = [m(ids(0) % 40) for m in models]
    torch.testing.assert_close(*values)
    for v in values:
        v.backward()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
    (made,) = next(iter(models[1].__dict__["_megatrain"].whole.captures.values()))
    assert "div 5.0; tanh; mul 5.0" in str(made.program.templates[-1].graph.graph)


def test_capped_logits_stay_results() -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Capped(both=True))
    megatrain.compile(models[1], device="cpu", backend="inductor")
    values = [m(ids(0) % 40) for m in models]
    torch.testing.assert_close(values[1], values[0])
    (made,) = next(iter(models[1].__dict__["_megatrain"].whole.captures.values()))
    assert "linear_cross_entropy" in str(made.program.templates[-1].graph.graph)
    for loss, logits in values:
        (loss + logits.square().mean()).backward()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


def cross(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


LEFT: dict[str, Any] = {
    "a rounded division": (lambda y, t: cross(torch.div(y, 0.5, rounding_mode="floor"), t), torch.float32, torch.int64),
    "a cap of nothing": (lambda y, t: cross(torch.tanh(y) * 0, t), torch.float32, torch.int64),
    "fp16": (lambda y, t: cross(y.float(), t), torch.float16, torch.int64),
    "smoothing": (lambda y, t: nn.functional.cross_entropy(y, t, label_smoothing=0.1), torch.float32, torch.int64),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name: str) -> None:
    loss, dtype, labels = LEFT[name]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return loss(self.head(self.embed(x)).view(-1, 50), y.view(-1))

    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Head().to(dtype))
    megatrain.compile(models[1], device="cpu", backend="inductor")
    x = torch.randint(0, 50, (3, 7))
    values = [m(x, x.to(labels)) for m in models]
    (made,) = next(iter(models[1].__dict__["_megatrain"].whole.captures.values()))
    assert not any("linear_cross_entropy" in str(t.graph.graph) for t in made.program.templates)
    torch.testing.assert_close(*values)
    for v in values:
        v.backward()
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=tolerance, atol=tolerance)


def test_under_autocast_the_dtypes_are_those_of_eager() -> None:
    eager = llama()
    ours = megatrain.compile(llama(), device="cpu", backend="inductor")
    found: list[Any] = []
    for m in (eager, ours):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(m(input_ids=ids(0), labels=ids(0)))
    assert found[0].logits.dtype == found[1].logits.dtype == torch.bfloat16
    torch.testing.assert_close(found[1].loss, found[0].loss, rtol=2e-2, atol=2e-2)
