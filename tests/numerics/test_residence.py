"""Planes that live on the device: the same numbers as on the host, and everything that can be looked at is right."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from tests.numerics.test_optim import ACCESSES, DTYPES, Net, compiled, ids, stepped


def living(dtype: torch.dtype = torch.bfloat16, memory: str = "1GiB", **options: Any) -> Any:
    """A compiled model with room for all on its device."""
    torch.manual_seed(0)
    return megatrain.compile(Net(**options).to(dtype), device="cpu", memory=memory)


def residents(model: Any) -> int:
    return len(model.__dict__["_megatrain"].runtime.residents)


def close(a: nn.Module, b: nn.Module) -> None:
    for (n, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        tolerance = 2**-7 if p.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(p.detach(), q.detach(), rtol=tolerance, atol=1e-6, msg=n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [megatrain.AdamW, megatrain.SGD, megatrain.Lion])
def test_as_on_the_host(rule: Any, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    options |= {"momentum": 0.9, "dampening": 0.1} if rule is megatrain.SGD else {}
    models = compiled(dtype, depth=4), living(dtype, depth=4)
    optimizers = rule(models[0].parameters(), update="host", **options), rule(models[1].parameters(), **options)
    for t in range(12):
        for m, opt in zip(models, optimizers, strict=True):
            for k in range(1 + t % 3):  # accumulated on the device
                m(ids(3 * t + k)).backward()
            opt.step()
            opt.zero_grad()
        torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm, rtol=1e-3, atol=1e-6)
    assert residents(models[1]) == 5
    states = [o.state_dict()["state"] for o in optimizers]
    for i, s in states[0].items():
        assert s["step"] == states[1][i]["step"]
        for n in optimizers[0].moments:
            torch.testing.assert_close(s[n], states[1][i][n], rtol=1e-2, atol=1e-5)
    close(*models)


def test_the_schedule_shows_it() -> None:
    model = living(depth=4)
    opt = megatrain.AdamW(model.parameters())
    stepped(model, opt)
    s = megatrain.schedule(model)
    megatrain.verify(s)
    assert megatrain.parse(str(s)) == s
    assert not [op for op in s.ops if op.verb != "compute"]
    assert [op.label for op in s.update] == [f"upd_h{i}" for i in range(5)]
    assert {x.name for x in s.slots if x.role == "resident"} == {f"{k}{i}" for k in "rho" for i in range(5)}


@pytest.mark.parametrize("memory", ["40KiB", "68KiB", "80KiB", "100KiB"])
def test_as_many_as_fit(memory: str) -> None:
    models = compiled(depth=4), living(depth=4, memory=memory)
    optimizers = [megatrain.AdamW(m.parameters(), lr=1e-2) for m in models]
    for t in range(6):
        for m, opt in zip(models, optimizers, strict=True):
            stepped(m, opt, t)
            with torch.no_grad():
                m.eval()(ids(t))
            m.train()
    assert residents(models[1]) == {"40KiB": 0, "68KiB": 1, "80KiB": 2, "100KiB": 4}[memory]
    found = megatrain.stats(models[1])
    assert found.planned_peak <= found.budget
    megatrain.verify(megatrain.schedule(models[1]))
    close(*models)


@pytest.mark.parametrize("access", ACCESSES)
def test_weights_are_brought_back_when_somebody_looks(access: str) -> None:
    expected, model = compiled(torch.float32), living(torch.float32)
    for m in (expected, model):
        opt = megatrain.SGD(m.parameters(), lr=0.1)
        stepped(m, opt)
        stepped(m, opt, 1)
    p = model.layers[1].weight
    assert type(p).__name__ == "Guarded"
    found = ACCESSES[access](model, p)
    torch.testing.assert_close(found, expected.layers[1].weight.detach())
    assert type(p) is nn.Parameter


def test_a_weight_that_is_written_is_loaded() -> None:
    models = compiled(torch.float32), living(torch.float32)
    optimizers = [megatrain.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for t in range(4):
        for m, opt in zip(models, optimizers, strict=True):
            m(ids(t)).backward()
            if t == 1:
                with torch.no_grad():
                    m.layers[0].weight.mul_(0.5)
            opt.step()
            opt.zero_grad()
            if t == 2:
                m.load_state_dict({n: v * 0.9 for n, v in m.state_dict().items()})
    close(*models)


class Normed(nn.Module):
    """Running statistics, and a buffer that only the user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh()) for _ in range(4))
        for layer in self.layers:
            layer.register_buffer("scale", torch.ones(12))
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) * layer.scale * self.frozen  # type: ignore[operator]
        return x.square().mean()


def test_buffers_and_frozen_parameters() -> None:
    torch.manual_seed(0)
    eager = Normed()
    model = megatrain.compile(copy.deepcopy(eager), device="cpu", memory="1GiB")
    pairs: list[tuple[Any, Any]] = [
        (eager, torch.optim.SGD(eager.parameters(), lr=0.1)),
        (model, megatrain.SGD(model.parameters(), lr=0.1)),
    ]
    for t in range(8):
        x = torch.randn(6, 12, generator=torch.Generator().manual_seed(t))
        losses: list[Tensor] = []
        for m, opt in pairs:
            loss = m(x)
            loss.backward()
            with torch.no_grad():
                m.layers[1].scale.mul_(1.1)
                m.frozen.mul_(0.9)
            opt.step()
            with torch.no_grad():
                m.layers[2].scale.mul_(0.8)
                m.frozen.add_(0.05)
                m.eval()
                losses += [loss, m(x)]
                m.train()
            opt.zero_grad()
        torch.testing.assert_close(losses[:2], losses[2:])
    assert residents(model) == 4
    for (n, a), b in zip(eager.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, msg=n)


def test_held_aliases_follow() -> None:
    model = living()
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    stepped(model, opt)
    held = model.state_dict()
    for t in range(1, 3):
        stepped(model, opt, t)
        after = {n: v.clone() for n, v in held.items()}
        assert all(torch.equal(v, after[n]) for n, v in model.state_dict().items())


GRADIENTS: dict[str, Callable[[Any], list[Tensor]]] = {
    "grad": lambda m: (m(ids(0)).backward(), [p.grad for p in m.layers.parameters()])[1],
    "accumulated": lambda m: ([m(ids(t)).backward() for t in range(3)], [p.grad for p in m.layers.parameters()])[1],
    "looked at between": lambda m: looked(m),
    "autograd.grad": lambda m: list(torch.autograd.grad(m(ids(0)), [*m.layers.parameters()])),
    "autograd.grad twice": lambda m: twice(m),
    "some dropped": lambda m: dropped(m),
    "changed": lambda m: changed(m),
    "zeroed": lambda m: zeroed(m),
    "a hook on a parameter": lambda m: hooked(m),
    "clipped by torch": lambda m: (
        m(ids(0)).backward(), nn.utils.clip_grad_norm_(m.parameters(), 0.1), [p.grad for p in m.layers.parameters()]
    )[2],
    "clipped": lambda m: (
        m(ids(0)).backward(), megatrain.clip_grad_norm_(m.parameters(), 0.1), [p.grad for p in m.layers.parameters()]
    )[2],
}  # fmt: skip


def looked(m: Any) -> list[Tensor]:
    m(ids(0)).backward()
    m.layers[1].weight.grad.norm()
    m(ids(1)).backward()
    return [p.grad for p in m.layers.parameters()]


def twice(m: Any) -> list[Tensor]:
    ps = [*m.layers.parameters()]
    first = torch.autograd.grad(m(ids(0)), ps)
    second = torch.autograd.grad(m(ids(1)), ps)
    m(ids(2)).backward()
    return [*first, *second, *(p.grad for p in ps)]


def dropped(m: Any) -> list[Tensor]:
    m(ids(0)).backward()
    m.layers[0].weight.grad = None
    m(ids(1)).backward()
    m.layers[1].bias.grad = torch.ones_like(m.layers[1].bias)
    m(ids(2)).backward()
    return [p.grad for p in m.layers.parameters()]


def changed(m: Any) -> list[Tensor]:
    m(ids(0)).backward()
    m.layers[0].weight.grad.mul_(2)
    m(ids(1)).backward()
    return [p.grad for p in m.layers.parameters()]


def zeroed(m: Any) -> list[Tensor]:
    m(ids(0)).backward()
    m.zero_grad(set_to_none=False)
    m(ids(1)).backward()
    m.zero_grad()
    m(ids(2)).backward()
    return [p.grad for p in m.layers.parameters()]


def hooked(m: Any) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [
        m.layers[0].weight.register_hook(lambda g: seen.append(g.clone())),
        m.layers[1].weight.register_hook(lambda g: g * 2),
        m.layers[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    m(ids(0)).backward()
    m(ids(1)).backward()
    for h in handles:
        h.remove()
    return [*seen, *(p.grad for p in m.layers.parameters())]


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_there_when_somebody_looks(case: str) -> None:
    models = compiled(torch.float32), living(torch.float32)
    kept = megatrain.AdamW(models[1].parameters(), lr=1e-2)
    expected, found = (GRADIENTS[case](m) for m in models)
    assert residents(models[1]) == 4
    torch.testing.assert_close(found, expected)
    kept.step()


@pytest.mark.parametrize("case", GRADIENTS)
def test_steps_after_somebody_looked(case: str) -> None:
    models = compiled(torch.float32), living(torch.float32)
    optimizers = [megatrain.SGD(m.parameters(), lr=0.1) for m in models]
    for t in range(2):
        for m, opt in zip(models, optimizers, strict=True):
            GRADIENTS[case](m)
            opt.step()
            opt.zero_grad(set_to_none=t == 0)
    close(*models)


def test_resuming_between_host_and_device() -> None:
    models = compiled(), living()
    optimizers = [megatrain.AdamW(m.parameters(), lr=1e-2) for m in models]
    for t in range(3):
        stepped(models[0], optimizers[0], t)
    file = io.BytesIO()
    torch.save((models[0].state_dict(), optimizers[0].state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    stepped(models[1], optimizers[1], 9)
    models[1].load_state_dict(weights)
    optimizers[1].load_state_dict(state)
    for t in range(3, 6):
        for m, opt in zip(models, optimizers, strict=True):
            stepped(m, opt, t)
    close(*models)
    moment = optimizers[1].state[models[1].embed.weight]["exp_avg"]
    for t in range(6, 8):
        for m, opt in zip(models, optimizers, strict=True):
            stepped(m, opt, t)
    torch.testing.assert_close(moment, optimizers[0].state[models[0].embed.weight]["exp_avg"], rtol=1e-2, atol=1e-5)
    close(*models)


def test_back_to_the_host() -> None:
    """A larger batch needs the room; an optimizer that is gone needs none."""
    models = compiled(depth=4), living(depth=4, memory="112KiB")
    optimizers = [megatrain.AdamW(m.parameters(), lr=1e-2) for m in models]
    opt: Any
    for t in range(2):
        for m, opt in zip(models, optimizers, strict=True):
            stepped(m, opt, t)
    before = residents(models[1])
    for t in range(2, 4):
        for m, opt in zip(models, optimizers, strict=True):
            m(torch.cat([ids(t), ids(t + 7)])).backward()
            opt.step()
            opt.zero_grad()
    assert residents(models[1]) < before
    for t in range(4, 6):
        for m, opt in zip(models, optimizers, strict=True):
            stepped(m, opt, t)
    close(*models)
    states = [o.state_dict() for o in optimizers]
    del optimizers
    opt = None
    gc.collect()
    again = [megatrain.AdamW(m.parameters(), lr=1e-2, update="host") for m in models]
    for m, opt, state in zip(models, again, states, strict=True):
        opt.load_state_dict(copy.deepcopy(state))
        stepped(m, opt, 6)
    assert residents(models[1]) == 0
    close(*models)


def test_loading_between_backward_and_step() -> None:
    models = compiled(torch.float32), living(torch.float32)
    optimizers = [megatrain.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for m, opt in zip(models, optimizers, strict=True):
        stepped(m, opt)
        m(ids(1)).backward()
        m.load_state_dict({n: t * 0.5 for n, t in m.state_dict().items()})
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        opt.step()
        opt.step()
        stepped(m, opt, 2)
    close(*models)


def test_unfreezing_and_freezing() -> None:
    models = compiled(torch.float32), living(torch.float32)
    for m in models:
        m.layers[1].requires_grad_(False)
    optimizers = [megatrain.AdamW(m.parameters(), lr=1e-2) for m in models]
    for t in range(6):
        for m, opt in zip(models, optimizers, strict=True):
            if t == 2:
                m.layers[1].requires_grad_(True)
            if t == 4:
                m.layers[0].weight.requires_grad_(False)
            stepped(m, opt, t)
    close(*models)


@pytest.mark.parametrize("update", ["auto", "host"])
def test_two_optimizers_in_turn(update: str) -> None:
    models = compiled(torch.float32), living(torch.float32)
    first = [megatrain.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for m, opt in zip(models, first, strict=True):
        stepped(m, opt)
        m(ids(1)).backward()
    second = [megatrain.SGD(m.parameters(), lr=0.05, momentum=0.5, update=update) for m in models]
    for opt in second:
        opt.step()
    for t in range(2, 8):
        for m, opt in zip(models, first if t % 2 else second, strict=True):
            stepped(m, opt, t)
    close(*models)


def test_another_optimizer_sees_gradients() -> None:
    models = compiled(torch.float32), living(torch.float32)
    kept = megatrain.AdamW(models[1].parameters())
    for t in range(3):
        for m in models:
            opt = torch.optim.SGD(m.parameters(), lr=0.1)
            stepped(m, opt, t)
    assert residents(models[1]) == 4 and not kept.state
    close(*models)
