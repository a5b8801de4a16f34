"""Updates that run as gradients land: the same numbers as after the backward, and no gradient to look at."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from tests.numerics.test_optim import Net, compiled, ids, slow, stepped
from tests.numerics.twins import same


def adamw(model: nn.Module, **options: Any) -> Any:
    return megatrain.AdamW(model.parameters(), lr=1e-2, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_as_after_the_backward(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    models = compiled(dtype, depth=5), slow(compiled(dtype, depth=5), lambda: rng.random() * 0.005)
    optimizers = adamw(models[0]), adamw(models[1], update="in-backward")
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    for t in range(8):
        losses: list[Tensor] = []
        for m, opt, sched in zip(models, optimizers, schedulers, strict=True):
            loss = m(ids(t))
            loss.backward()
            assert opt is optimizers[0] or all(p.grad is None for p in m.parameters())
            opt.step()
            sched.step()
            opt.zero_grad()
            losses.append(loss)
        assert torch.equal(*losses)
    assert all(same(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    states = [o.state_dict()["state"] for o in optimizers]
    assert all(torch.equal(s[n], states[1][i][n]) for i, s in states[0].items() for n in s)


def test_the_schedule_shows_them() -> None:
    model = compiled(depth=4)
    opt = adamw(model, update="in-backward")
    stepped(model, opt)
    s = megatrain.schedule(model)
    megatrain.verify(s)
    assert megatrain.parse(str(s)) == s and not s.update
    lines = [str(op.label) for op in s.backward if op.verb in ("offload", "update")]
    assert lines == [f"{verb}{n}" for n in (*"3210", "_prologue") for verb in ("grad", "upd")]
    rings = {op.writes[0] for op in s.backward if op.verb == "offload"}
    assert rings == {"ring.0.g", "ring.1.g", "ring.own.g"}


def test_every_second_update_waits_where_the_host_has_room() -> None:
    """In the backward's order those that do not wait, then the others in the order of the next forward."""
    few, more = compiled(depth=4), compiled(depth=4, host_memory="1MiB")
    optimizers = [adamw(m, update="in-backward") for m in (few, more)]
    for t in range(3):
        for m, o in zip((few, more), optimizers, strict=True):
            stepped(m, o, t)
    s = megatrain.schedule(more)
    megatrain.verify(s)
    assert [op.label for op in s.backward if op.verb == "update"] == ["upd2", "upd0", "upd_prologue", "upd1", "upd3"]
    rings = [op.writes[0] for op in s.backward if op.verb == "offload"]
    assert rings == ["ring.4.g", "ring.0.g", "ring.3.g", "ring.1.g", "ring.2.g"]
    assert all(same(p, q) for p, q in zip(few.parameters(), more.parameters(), strict=True))


def test_parameters_without_a_gradient_stay() -> None:
    model = compiled()
    opt = adamw(model, update="in-backward")
    before = model.unused.weight.detach().clone()
    stepped(model, opt)
    assert same(model.unused.weight.detach(), before) and model.unused.weight not in opt.state
    assert opt.state[model.embed.weight]["step"] == 1


def test_what_cannot_be() -> None:
    model = compiled()
    with pytest.raises(
        ValueError, match=r"^max_grad_norm with update='in-backward': the norm of all gradients is known"
    ):
        adamw(model, update="in-backward", max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"^update='later': there is 'auto', 'host', 'device', 'in-backward'$"):
        adamw(model, update="later")
    opt = adamw(model, update="in-backward")
    with pytest.raises(ValueError, match=r"^this model has an optimizer with update='in-backward' already"):
        adamw(model, update="in-backward")
    model(ids(0)).backward()
    with pytest.raises(
        RuntimeError, match=r"^a second backward before step\(\): with update='in-backward' each backward"
    ):
        model(ids(1)).backward()
    opt.step()
    with pytest.raises(RuntimeError, match=r"^clipping with update='in-backward': there are no gradients left to clip"):
        megatrain.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=r"^torch\.autograd\.grad or backward\(inputs=\.\.\.\) with update='in-back"):
        torch.autograd.grad(model(ids(1)), [model.layers[0].weight])
    handle = model.layers[1].weight.register_hook(lambda g: g)
    with pytest.raises(RuntimeError, match=r"^layers\.1\.weight has a hook on its gradient: with update='in-backward'"):
        model(ids(1)).backward()
    handle.remove()
    stepped(model, opt, 1)


def test_every_trained_parameter_is_the_optimizers() -> None:
    model = compiled()
    opt = megatrain.AdamW(model.layers.parameters(), update="in-backward")
    with pytest.raises(RuntimeError, match=r"^embed\.weight requires a gradient and is not among the optimizer's"):
        model(ids(0)).backward()
    model.embed.requires_grad_(False)
    stepped(model, opt)


def test_gradients_are_back_when_the_optimizer_is_gone() -> None:
    model = compiled()
    opt = adamw(model, update="in-backward")
    stepped(model, opt)
    del opt
    gc.collect()
    model(ids(1)).backward()
    assert model.layers[0].weight.grad is not None


def test_beside_an_optimizer_whose_state_lives_on_the_device() -> None:
    models = [compiled(torch.float32), megatrain.compile(Net(), device="cpu", memory="1GiB")]
    models[1].load_state_dict(models[0].state_dict())
    for m in models:
        first = megatrain.SGD(m.parameters(), lr=0.1)
        stepped(m, first)
        second = megatrain.SGD(m.parameters(), lr=0.05, update="in-backward" if m is models[1] else "host")
        for t in range(1, 4):
            stepped(m, second, t)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


def test_a_backward_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    opt = adamw(model, update="in-backward")
    weights, state = {n: t.clone() for n, t in model.state_dict().items()}, opt.state_dict()
    stepped(model, opt)
    runtime = model.__dict__["_megatrain"].runtime
    offload = runtime.offload

    def failing(op: Any, *rest: Any) -> None:
        if op.label == "grad1":
            raise OSError("the link is down")
        offload(op, *rest)

    monkeypatch.setattr(runtime, "offload", failing)
    with pytest.raises(OSError, match="the link is down"):
        model(ids(1)).backward()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"^an earlier backward failed after it had updated some parameters"):
        model(ids(1)).backward()
    model.load_state_dict(weights)
    opt.load_state_dict(state)
    stepped(model, opt)
