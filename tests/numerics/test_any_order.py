"""Whatever a user does between steps, in whatever order: as eager PyTorch with torch's optimizer."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from tests.numerics.test_optim import Net, ids

FIRST = int(os.environ.get("MEGATRAIN_TEST_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("MEGATRAIN_TEST_SEEDS", "6")))


class User:
    """A model and its optimizer, and what one may do with them.  `seen` is everything that was looked at."""

    def __init__(self, model: Any, opt: Any, ours: bool):
        self.model, self.opt, self.ours = model, opt, ours
        self.clip = megatrain.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
        self.seen: list[Tensor] = []
        self.held: dict[str, Tensor] = {}
        self.loss: Tensor | None = None

    def parameter(self, n: int) -> nn.Parameter:
        every = [*self.model.layers.parameters(), self.model.embed.weight]
        return every[n % len(every)]

    def look(self, t: Tensor | None) -> None:
        self.seen.append(torch.zeros(()) if t is None else t.detach().clone())

    def backward(self, n: int) -> None:
        loss = self.model(ids(n % 50))
        self.look(loss)
        if loss.requires_grad:
            loss.backward()

    def backward_of_two(self, n: int) -> None:
        loss = self.model(ids(n % 50)) + self.model(ids(n % 50 + 1))
        if loss.requires_grad:
            loss.backward()

    def backward_with_a_penalty(self, n: int) -> None:
        loss = self.model(ids(n % 50)) + 0.01 * self.parameter(n).square().sum()
        if loss.requires_grad:
            loss.backward()

    def step(self, n: int) -> None:
        self.opt.step()

    def zero(self, n: int) -> None:
        self.opt.zero_grad(set_to_none=bool(n % 3))

    def zero_by_the_model(self, n: int) -> None:
        self.model.zero_grad()

    def read(self, n: int) -> None:
        self.look(self.parameter(n))

    def read_gradient(self, n: int) -> None:
        self.look(self.parameter(n).grad)

    def write(self, n: int) -> None:
        with torch.no_grad():
            self.parameter(n).mul_(0.9)

    def write_data(self, n: int) -> None:
        p = self.parameter(n)
        p.data = p.data * 1.1
        self.held = {}  # the layer moves to another plane, and what is held of its other parameters stays behind

    def write_gradient(self, n: int) -> None:
        if (g := self.parameter(n).grad) is not None:
            g.mul_(0.5)

    def replace_gradient(self, n: int) -> None:
        p = self.parameter(n)
        p.grad = None if n % 2 else torch.full_like(p, 0.01)

    def evaluate(self, n: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self.look(self.model(ids(n % 50 + 50)))
        self.model.train()

    def hold(self, n: int) -> None:
        self.held = self.model.state_dict()

    def let_go(self, n: int) -> None:
        self.held = {}

    def look_at_held(self, n: int) -> None:
        for t in self.held.values():
            self.look(t)

    def clip_gradients(self, n: int) -> None:
        self.look(self.clip(self.model.parameters(), 0.2 + n % 3))

    def clip_by_torch(self, n: int) -> None:
        self.look(nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))

    def gradients(self, n: int) -> None:
        ps = [p for p in self.model.layers.parameters() if p.requires_grad]
        for g in torch.autograd.grad(self.model(ids(n % 50)), ps) if ps else ():
            self.look(g)

    def some_gradients(self, n: int) -> None:
        p = self.parameter(n)
        if p.requires_grad:
            self.model(ids(n % 50)).backward(inputs=[p])

    def change_options(self, n: int) -> None:
        self.opt.param_groups[0]["lr"] = 0.01 * (1 + n % 5)

    def freeze(self, n: int) -> None:
        layer = self.model.layers[n % len(self.model.layers)]
        layer.requires_grad_(not next(layer.parameters()).requires_grad)

    def save_and_load(self, n: int) -> None:
        state = copy.deepcopy((self.model.state_dict(), self.opt.state_dict()))
        self.model.load_state_dict(state[0])
        self.opt.load_state_dict(state[1])

    def look_at_state(self, n: int) -> None:
        p = self.parameter(n)
        if p in self.opt.state and self.opt.param_groups[0]["momentum"]:
            buffer = self.opt.state[p].get("momentum_buffer")
            self.look(buffer)

    def copy_of_the_model(self, n: int) -> None:
        self.look(copy.deepcopy(self.model)(ids(n % 50)))


OFTEN = {"backward": 8, "step": 8, "zero": 5}
ACTIONS: dict[str, int] = {
    n: OFTEN.get(n, 1) for n in vars(User) if not n.startswith("_") and n not in ("parameter", "look")
}

MODES: dict[str, Callable[[Any], Any]] = {
    "host": lambda m: megatrain.compile(m, device="cpu"),
    "device": lambda m: megatrain.compile(m, device="cpu", memory="1GiB"),
    "some": lambda m: megatrain.compile(m, device="cpu", memory="150KiB"),
    "streamed": lambda m: megatrain.compile(m, device="cpu"),
    "adding": lambda m: adding(megatrain.compile(m, device="cpu")),
}
"""Where state lives; `streamed`: on the host, and updates run on the device; `adding`: gradients are added there."""


def adding(model: Any) -> Any:
    """As backend "inductor" does."""
    model.__dict__["_megatrain"].adds = True
    return model


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_any_order(mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.compiled.MOST_CAPTURES", 100)
    rng = random.Random(seed)
    torch.manual_seed(0)
    eager = Net(depth=3)
    ours = MODES[mode](copy.deepcopy(eager))
    options = {"lr": 0.05, "momentum": 0.9 if seed % 2 else 0.0, "weight_decay": 0.01}
    update = "device" if mode == "streamed" else "auto"
    monkeypatch.setattr("megatrain.streamed.FEWEST", 16)
    users = [
        User(eager, torch.optim.SGD(eager.parameters(), foreach=False, **options), False),  # type: ignore[arg-type]
        User(ours, megatrain.SGD(ours.parameters(), update=update, **options), True),  # type: ignore[arg-type]
    ]
    delays = random.Random(seed)
    ours.__dict__["_megatrain"].runtime.lanes.delay = lambda label: delays.random() * 0.002
    done: list[str] = []
    for _ in range(40):
        action, n = rng.choices([*ACTIONS], [*ACTIONS.values()])[0], rng.randrange(1000)
        done.append(f"{action}({n})")
        for user in users:
            getattr(user, action)(n)
        for a, b in zip(*(u.seen for u in users), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m: f"{m}\n{done}")
        for u in users:
            u.seen.clear()
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-4, atol=1e-5, msg=lambda m: f"{m}\n{name} {done}")  # noqa: B023
