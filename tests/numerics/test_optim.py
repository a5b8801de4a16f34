"""Optimizers with host state: the same numbers as a reference in plain IEEE fp32, and nobody sees half an update."""

from __future__ import annotations

import copy
import io
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.deferred import quiet
from tests.numerics.twins import alike, same

F32 = np.float32
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


class Net(nn.Module):
    """A tied pair, an unused parameter, an odd size."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 19, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(5, 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def compiled(dtype: torch.dtype = torch.bfloat16, host_memory: int | str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return megatrain.compile(Net(**options).to(dtype), device="cpu", host_memory=host_memory)


def ids(i: int) -> Tensor:
    return torch.randint(0, 19, (4, 6), generator=torch.Generator().manual_seed(i))


def wide(t: Tensor) -> np.ndarray[Any, Any]:
    return t.detach().float().numpy().copy()


def master(opt: Any, p: nn.Parameter) -> np.ndarray[Any, Any]:
    """The fp32 master of a parameter: its bits and the remainder's."""
    if p.dtype == torch.float32 or p not in opt.state:
        return wide(p)
    bits = p.detach().view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << np.uint32(16)
    return (bits + opt.state[p]["remainder"].numpy().astype(np.int32).view(np.uint32)).view(F32)


def adamw(x: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    beta1, beta2, eps, decay = 0.9, 0.95, 1e-8, 0.1
    m, v = s.setdefault("m", np.zeros_like(x)), s.setdefault("v", np.zeros_like(x))
    x = x * F32(1 - lr * decay)
    m[:] = m + F32(1 - beta1) * (g - m)
    v[:] = v * F32(beta2) + (F32(1 - beta2) * g) * g
    denominator = np.sqrt(v) / F32(math.sqrt(1 - beta2**t)) + F32(eps)
    return x - F32(lr / (1 - beta1**t)) * (m / denominator)


def sgd(x: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    d = g + F32(0.1) * x
    m = s.setdefault("m", np.zeros_like(x))
    m[:] = m * F32(0.9) + (F32(1) if t == 1 else F32(1 - 0.2)) * d
    return x - F32(lr) * m


def lion(x: Any, g: Any, s: dict[str, Any], t: int, lr: float) -> Any:
    m = s.setdefault("m", np.zeros_like(x))
    sign = np.sign(m * F32(0.9) + F32(1 - 0.9) * g)
    m[:] = m * F32(0.99) + F32(1 - 0.99) * g
    return x * F32(1 - lr * 0.1) - F32(lr) * sign


RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (lambda ps, **k: megatrain.AdamW(ps, betas=(0.9, 0.95), weight_decay=0.1, **k), adamw),
    "sgd": (lambda ps, **k: megatrain.SGD(ps, momentum=0.9, dampening=0.2, weight_decay=0.1, **k), sgd),
    "lion": (lambda ps, **k: megatrain.Lion(ps, betas=(0.9, 0.99), weight_decay=0.1, **k), lion),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_bitwise_as_the_reference_over_200_steps(rule: str, dtype: torch.dtype) -> None:
    model = compiled(dtype)
    make, reference = RULES[rule]
    lr = {"adamw": 1e-3, "sgd": 1e-2, "lion": 1e-4}[rule]
    opt = make(model.parameters(), lr=lr, max_grad_norm=0.7)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 150)
    named = {n: p for n, p in model.named_parameters() if n != "unused.weight"}
    masters = {n: wide(p) for n, p in named.items()}
    states: dict[str, dict[str, Any]] = {n: {} for n in named}
    clipped = 0
    for t in range(1, 201):
        model(ids(t)).backward()
        gradients = {n: wide(p.grad) for n, p in named.items()}  # type: ignore[arg-type]
        rate = opt.param_groups[0]["lr"]
        opt.step()
        norm = F32(opt.grad_norm.item())
        exact = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
        assert norm == pytest.approx(exact, rel=1e-5)
        factor = F32(torch.clamp(0.7 / (opt.grad_norm + 1e-6), max=1.0).item())  # as torch's clip_grad_norm_
        clipped += factor < 1
        for n in named:
            masters[n] = reference(masters[n], gradients[n] * factor, states[n], t, rate)
        sched.step()
        opt.zero_grad()
    assert 0 < clipped < 200
    for n, p in named.items():
        assert np.array_equal(master(opt, p).view(np.uint32), masters[n].view(np.uint32)), n
        bits = masters[n].view(np.uint32)
        if dtype == torch.bfloat16:
            assert np.array_equal(p.detach().view(torch.int16).numpy().view(np.uint16), (bits + 0x8000) >> 16)
    assert model.unused.weight.grad is None and model.unused.weight not in opt.state


def test_as_torch_on_fp32() -> None:
    model = compiled(torch.float32)
    eager = copy.deepcopy(model)
    pairs: list[tuple[Any, Any, dict[str, Any]]] = [
        (megatrain.AdamW, torch.optim.AdamW, dict(lr=1e-3, weight_decay=0.1)),
        (megatrain.SGD, torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)),
        (megatrain.SGD, torch.optim.SGD, dict(lr=1e-2)),
    ]
    for ours, theirs, options in pairs:
        a, b = ours(model.parameters(), **options), theirs(eager.parameters(), foreach=False, **options)
        for t in range(60):
            norms: list[float] = []
            for m, o, clip in ((model, a, megatrain.clip_grad_norm_), (eager, b, nn.utils.clip_grad_norm_)):
                m(ids(t)).backward()
                norms.append(clip(m.parameters(), 0.5).item())
                o.step()
                o.zero_grad()
            assert norms[0] == pytest.approx(norms[1], rel=1e-3)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-5, atol=1e-6)


def slow(model: Any, seconds: Callable[[], float] = lambda: 0.02) -> Any:
    """Updates take their time."""
    lanes = model.__dict__["_megatrain"].runtime.lanes
    lanes.delay = lambda label: seconds() if label.startswith("upd") else 0.0
    return model


def stepped(model: Any, opt: Any, t: int = 0) -> None:
    model(ids(t)).backward()
    opt.step()
    opt.zero_grad()


ACCESSES: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "value": lambda m, p: p.detach().clone(),
    "data": lambda m, p: p.data.clone(),
    "numpy": lambda m, p: torch.from_numpy(p.detach().float().numpy().copy()),
    "arithmetic": lambda m, p: (p * 1.0).detach(),
    "foreach": lambda m, p: torch._foreach_mul([p.detach()], 1.0)[0],
    "list": lambda m, p: torch.stack([p, p])[0].detach(),
    "state_dict": lambda m, p: m.state_dict()["layers.1.weight"].clone(),
    "deepcopy of the model": lambda m, p: copy.deepcopy(m).layers[1].weight.detach(),
    "deepcopy": lambda m, p: copy.deepcopy(p).detach(),
    "save": lambda m, p: saved(p),
    "ema": lambda m, p: torch.zeros_like(p).lerp_(p.detach(), 1.0),
    "call of a child": lambda m, p: m.layers[1].weight.detach().clone(),
    "print": lambda m, p: (repr(p), p.detach().clone())[1],
    "format of a norm": lambda m, p: (f"{p.norm():.3f}", p.detach().clone())[1],
}


def saved(p: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["p"].detach()


@pytest.mark.parametrize("access", ACCESSES)
def test_whoever_looks_waits(access: str) -> None:
    expected, model = compiled(), slow(compiled())
    pairs = [(m, megatrain.AdamW(m.parameters(), lr=0.1)) for m in (expected, model)]
    for m, opt in pairs:
        stepped(m, opt)
    p = model.layers[1].weight
    assert type(p).__name__ == "Guarded" and p.shape == (24, 24) and type(p).__name__ == "Guarded"
    found = ACCESSES[access](model, p)
    megatrain.synchronize(expected)
    assert torch.equal(found.float(), expected.layers[1].weight.detach().float())
    assert type(p) is nn.Parameter


def test_aliases_from_before_are_up_to_date_after_the_step() -> None:
    model = slow(compiled())
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    held = model.state_dict()
    view = model.layers[2].weight.detach().view(torch.int16).numpy()
    before = view.copy()
    stepped(model, opt)
    assert type(model.layers[2].weight) is nn.Parameter
    assert not np.array_equal(view, before)
    after = {n: t.clone() for n, t in held.items()}
    megatrain.synchronize(model)
    assert all(torch.equal(t, after[n]) for n, t in model.state_dict().items())


def test_moments_are_waited_for_too() -> None:
    model = slow(compiled())
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    stepped(model, opt)
    p = model.layers[0].weight
    moment = opt.state[p]["exp_avg"]
    first = moment.clone()
    assert first.any()
    stepped(model, opt, 1)
    second = moment.clone()
    assert not torch.equal(first, second)
    time.sleep(0.3)
    assert torch.equal(second, moment)
    held = opt.state_dict()["state"]
    stepped(model, opt, 2)
    third = held[0]["exp_avg"].clone()
    megatrain.synchronize(model)
    assert torch.equal(third, held[0]["exp_avg"])


@pytest.mark.parametrize("seed", range(3))
def test_read_at_random_moments(seed: int) -> None:
    """With delays in the update lane, whoever reads sees a parameter from before or after a whole update."""
    expected = compiled(depth=5)
    opt = megatrain.AdamW(expected.parameters(), lr=0.1)
    history: list[dict[str, Tensor]] = []
    for t in range(6):
        stepped(expected, opt, t)
        history.append({n: q.clone() for n, q in expected.state_dict().items()})
    rng = random.Random(seed)
    model = slow(compiled(depth=5), lambda: rng.random() * 0.01)
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    named = dict(model.named_parameters())
    for t in range(6):
        stepped(model, opt, t)
        for _ in range(rng.randrange(4)):
            time.sleep(rng.random() * 0.01)
            name = rng.choice([n for n in named if n != "unused.weight"])
            assert same(named[name].detach(), history[t][name])
    assert all(same(q, history[-1][n]) for n, q in model.state_dict().items())


def test_a_fork_waits() -> None:
    import os

    model = slow(compiled())
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    stepped(model, opt)
    read, write = os.pipe()
    if not (child := os.fork()):
        with quiet():
            value = model.layers[2].weight.detach().view(torch.int16).numpy().tobytes()
        os.write(write, value)
        os._exit(0)
    os.close(write)
    found = b""
    while part := os.read(read, 1 << 16):
        found += part
    os.waitpid(child, 0)
    assert found == model.layers[2].weight.detach().view(torch.int16).numpy().tobytes()


def test_a_failure_is_raised_at_the_next_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    opt = megatrain.AdamW(model.parameters(), lr=0.1)

    def broken(*_: Any) -> None:
        raise MemoryError("no more")

    broken.__name__ = "adamw"
    with monkeypatch.context() as m:
        m.setattr("megatrain.kernels.adamw", broken)
        model(ids(0)).backward()
        opt.step()
    with pytest.raises(MemoryError, match="no more") as caught:
        model.layers[0].weight.sum()
    assert any("update    adamw(" in note for note in caught.value.__notes__)
    stepped(model, opt, 1)
    megatrain.synchronize(model)


def test_a_step_between_forward_and_backward_raises() -> None:
    model = compiled()
    opt = megatrain.AdamW(model.parameters(), lr=0.1)
    model(ids(0)).backward()
    loss = model(ids(1))
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_can_be_looked_at_and_changed() -> None:
    eager: Any = Net()
    model = compiled(torch.float32)
    eager.load_state_dict(model.state_dict())
    optimizers = torch.optim.SGD(eager.parameters(), lr=0.5), megatrain.SGD(slow(model).parameters(), lr=0.5)
    for t in range(3):
        for m, opt in zip((eager, model), optimizers, strict=True):
            m(ids(t)).backward()
            m(ids(t + 10)).backward()
            m.layers[0].weight.grad.mul_(3)
            opt.step()
            m.layers[1].weight.grad.zero_()  # after the step, which has read it
            opt.step()  # twice for one backward, as torch does
            opt.zero_grad(set_to_none=t != 1)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


def test_state_dicts_go_to_and_from_torch() -> None:
    model = compiled(torch.float32)
    twin = copy.deepcopy(model)
    ours, theirs = megatrain.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    stepped(model, ours)
    stepped(twin, theirs)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    twin.load_state_dict(model.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for t in range(1, 4):
        stepped(model, ours, t)
        stepped(twin, theirs, t)
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"^this state_dict has no exp_avg for embed.weight: it is another optimizer's$"
    ):
        ours.load_state_dict({**ours.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(19, 24)}}})


def test_resuming_is_exact() -> None:
    straight = compiled()
    opt = megatrain.AdamW(straight.parameters(), lr=1e-2)
    for t in range(3):
        stepped(straight, opt, t)
    file = io.BytesIO()
    torch.save((straight.state_dict(), opt.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    resumed = compiled()
    again = megatrain.AdamW(resumed.parameters(), lr=1)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(3, 6):
        stepped(straight, opt, t)
        stepped(resumed, again, t)
    assert all(same(p, q) for p, q in zip(straight.parameters(), resumed.parameters(), strict=True))
    assert all(np.array_equal(master(opt, p), master(again, q)) for p, q in zip(opt.held, again.held, strict=True))


def test_writing_a_weight_makes_its_master() -> None:
    model = compiled()
    opt = megatrain.SGD(model.parameters(), lr=1e-3)
    for t in range(3):
        stepped(model, opt, t)
    p = model.layers[0].weight
    assert opt.state[p]["remainder"].any()
    with torch.no_grad():
        p.fill_(2.0)
    model(ids(9)).backward()
    gradient = wide(p.grad)
    opt.step()
    assert np.array_equal(master(opt, p), F32(2) - F32(1e-3) * gradient)


def test_groups_schedules_and_late_parameters() -> None:
    model = compiled(torch.float32)
    eager = copy.deepcopy(model)
    pairs: list[tuple[Any, Any]] = []
    for m, cls in ((eager, torch.optim.AdamW), (model, megatrain.AdamW)):
        decayed = [p for p in m.parameters() if p.dim() > 1]
        m.layers[2].requires_grad_(False)
        opt = cls([{"params": decayed, "weight_decay": 0.3}], lr=1e-2)
        opt.add_param_group({"params": [p for p in m.parameters() if p.dim() == 1], "lr": 3e-3, "betas": (0.8, 0.9)})
        pairs.append((m, opt))
    for t in range(8):
        for m, opt in pairs:
            if t == 3:
                m.layers[2].requires_grad_(True)
            if t == 5:
                opt.param_groups[0]["lr"], opt.param_groups[1]["weight_decay"] = 5e-3, 0.5
            stepped(m, opt, t)
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    assert [s["step"].item() for s in pairs[0][1].state.values()] == [
        s["step"].item() for s in pairs[1][1].state.values()
    ]


def test_a_closure_and_a_cleared_state() -> None:
    model = compiled(torch.float32)
    opt: Any = megatrain.AdamW(model.parameters(), lr=1e-2)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(ids(0))
        loss.backward()
        return loss

    assert opt.step(closure).item() > 0
    first = opt.state_dict()["state"][0]["exp_avg"].clone()
    opt.state.clear()
    opt.step(closure)
    assert opt.state[next(iter(opt.held))]["step"] == 1
    assert not torch.equal(first, opt.state_dict()["state"][0]["exp_avg"])


def test_the_update_half_can_be_read() -> None:
    model = compiled()
    opt = megatrain.AdamW(model.parameters())
    stepped(model, opt)
    s = megatrain.schedule(model)
    megatrain.verify(s)
    assert [op.label for op in s.update] == ["upd_prologue", "upd0", "upd1", "upd2"] and s.update[0].call == "adamw"
    assert megatrain.parse(str(s)) == s


def test_what_there_is_not() -> None:
    model = compiled()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: megatrain.AdamW(nn.Linear(2, 2).parameters()), r"^parameter 0 of group 0 \[2, 2\] is not a parameter"),
        (lambda: megatrain.AdamW(model.parameters(), amsgrad=True), r"^amsgrad=True is not supported by megatrain"),
        (lambda: megatrain.SGD(model.parameters(), maximize=True), r"^maximize=True is not supported by megatrain.SGD"),
        (lambda: megatrain.AdamW(model.parameters(), lr=-1), r"^lr=-1: give 0 or more$"),
        (lambda: megatrain.AdamW(model.parameters(), betas=(1.0, 0.9)), r"^betas=\(1.0, 0.9\): give two numbers"),
        (lambda: megatrain.AdamW(model.parameters(), max_grad_norm=0), r"^max_grad_norm=0: give a positive number"),
        (lambda: megatrain.SGD(model.parameters(), nesterov=True), r"^nesterov=True needs momentum and no dampening$"),
        (lambda: megatrain.AdamW(megatrain.compile(nn.Linear(2, 2).half(), device="cpu").parameters()),
         r"^weight is torch.float16: megatrain.AdamW steps bf16 and fp32 parameters$"),
    ]  # fmt: skip
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()


def test_a_host_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed and for what, before it is taken."""
    message = (
        r"^megatrain.AdamW needs \S+ KiB of host memory \(\S+ KiB for fp32 exp_avg, fp32 exp_avg_sq, the rest of the "
        r"fp32 master, \S+ KiB for gradients\), and \S+ K?i?B are free"
    )
    with pytest.raises(ValueError, match=message):
        megatrain.AdamW(compiled(host_memory="40KiB").parameters(), update="host")
    with pytest.raises(ValueError, match=r"^host_memory='1KiB' is too small: the model alone takes \S+ KiB"):
        compiled(host_memory="1KiB")
    model = compiled()
    monkeypatch.setattr("megatrain.rooms.available", lambda: 1000)
    with pytest.raises(ValueError, match=message):
        megatrain.AdamW(model.parameters(), update="host")


def test_other_optimizers_still_work() -> None:
    eager, ours = Net(), compiled(torch.float32)
    eager.load_state_dict(ours.state_dict())
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (eager, ours)]
    for t in range(3):
        for m, opt in pairs:
            stepped(m, opt, t)
    alike(eager, ours, lambda m: m(ids(7)).backward())
