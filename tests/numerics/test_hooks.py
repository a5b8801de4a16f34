"""Hooks run as in eager: on parameters, on the root, and on children, once a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import MODES, alike, twins

from megatrain.calls import CaptureError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"out": x + self.drop(self.norm(self.inner(x))) * scale}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=2.0)["out"]
        return x


def step(model: nn.Module) -> Tensor:
    y = model(torch.randn(6, 8, requires_grad=True))
    y.square().sum().backward()
    return y.detach()


def test_hooks_on_parameters() -> None:
    eager, ours = twins(Net)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    for i, model in enumerate((eager, ours)):
        weight = model.layers[1].inner.weight
        weight.register_hook(lambda g: g * 3)
        weight.register_hook(lambda g, i=i: seen[i].append(g.clone()))
        weight.register_post_accumulate_grad_hook(lambda p, i=i: seen[i].append(p.grad.clone()))
    for _ in range(2):
        alike(eager, ours, step)
    assert len(seen[0]) == 4 and all(map(torch.equal, seen[0], seen[1]))


def test_hooks_on_the_root() -> None:
    eager, ours = twins(Net)
    seen: list[str] = []
    for model in (eager, ours):
        model.register_forward_pre_hook(lambda m, args: (seen.append("pre"), (args[0] * 2,))[1])
        model.register_forward_hook(lambda m, args, out: (seen.append("post"), out + 1)[1])
        model.register_full_backward_hook(lambda m, g, h: seen.append("backward"))
        model.register_full_backward_pre_hook(lambda m, g: seen.append("backward-pre"))
    alike(eager, ours, step)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :] and "backward-pre" in seen


@pytest.mark.parametrize("mode", MODES)
def test_forward_hooks_on_children_run_once_and_may_change_results(mode: str) -> None:
    eager, ours = twins(Net, mode)
    seen: list[tuple[str, str]] = []

    def post(module: nn.Module, args: Any, out: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(("post", type(out["out"]).__name__))
        return {"out": out["out"] * 1.5}

    for model in (eager, ours):
        model.layers[2].register_forward_hook(post)
        model.layers[1].inner.register_forward_pre_hook(lambda m, args: (seen.append(("pre", "")), (args[0] + 1,))[1])
    for _ in range(2):
        alike(eager, ours, step)
    assert seen == [("pre", ""), ("post", "Tensor")] * 4


def test_a_hook_that_comes_and_goes() -> None:
    eager, ours = twins(Net)
    alike(eager, ours, step)
    handles = [m.layers[0].register_forward_hook(lambda m, a, o: {"out": o["out"] * 2}) for m in (eager, ours)]
    alike(eager, ours, step)
    for handle in handles:
        handle.remove()
    alike(eager, ours, step)


def test_backward_hooks_on_children_are_refused() -> None:
    _, ours = twins(Net)
    ours.layers[1].register_full_backward_hook(lambda m, g, h: None)
    with pytest.raises(CaptureError) as caught:
        ours(torch.randn(6, 8))
    assert str(caught.value) == (
        "layers.1 (Block) has a backward hook, which a captured child cannot call\n"
        "put the hook on the compiled model itself or on a parameter, or remove it before the call"
    )


def keeps_a_copy(model: Any) -> Any:
    seen: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda m, a, o: seen.append(o["out"].detach().clone()))
    return step(model), seen, handle.remove()


def takes_keywords(model: Any) -> Any:
    seen: list[Any] = []
    handles = [
        model.layers[1].register_forward_hook(lambda m, a, k, o: seen.append((len(a), dict(k))), with_kwargs=True),
        model.layers[2].register_forward_pre_hook(lambda m, a, k: ((a[0] + 1,), {"scale": 3.0}), with_kwargs=True),
    ]
    return step(model), seen, [h.remove() for h in handles]


def watches_the_gradient_of_a_child(model: Any) -> Any:
    seen: list[Tensor] = []

    def watch(module: nn.Module, args: Any, out: dict[str, Tensor]) -> None:
        out["out"].register_hook(lambda g: seen.append(g.clone()))

    handle = model.layers[1].register_forward_hook(watch)
    return step(model), seen, handle.remove()


def steps_in_hooks(model: Any) -> Any:
    """One optimizer a parameter, stepped as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    return [step(model) for _ in range(2)], [h.remove() for h in handles]


def evaluates_in_a_parameter_hook(model: Any) -> Any:
    seen: list[Tensor] = []

    @torch.no_grad()
    def evaluate(_: Tensor) -> None:
        seen.append(model(torch.ones(6, 8)))

    handle = model.layers[0].inner.weight.register_hook(evaluate)
    return step(model), seen, handle.remove()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "how",
    [
        keeps_a_copy, takes_keywords, watches_the_gradient_of_a_child, steps_in_hooks, evaluates_in_a_parameter_hook,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_hook_that(how: Any, mode: str) -> None:
    eager, ours = twins(Net, mode)
    alike(eager, ours, how)


@pytest.mark.parametrize("error", [KeyError("from a hook"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_a_hook_that_raises(error: BaseException) -> None:
    eager, ours = twins(Net)

    def fail(*_: Any) -> None:
        raise error

    handle = ours.layers[2].register_forward_hook(fail)
    with pytest.raises(type(error)) as caught:
        ours(torch.randn(6, 8))
    assert caught.value is error
    assert " ".join(error.__notes__[-1].split()).startswith("in fwd2 compute layer2.fwd")
    handle.remove()
    alike(eager, ours, step)


def test_a_child_with_hooks_called_several_times() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    eager, ours = twins(Twice)
    for model in (eager, ours):
        model.layers[1].register_forward_hook(lambda m, a, o: {"out": o["out"] * 1.5})
    alike(eager, ours, step)


def test_children_called_directly() -> None:
    eager, ours = twins(Net)
    alike(eager, ours, step)
    alike(eager, ours, lambda m: m.layers[0](torch.randn(6, 8))["out"].sum().backward())


def test_hooks_on_all_modules_are_refused() -> None:
    _, ours = twins(Net)
    step(ours)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: None)
    try:
        with pytest.raises(CaptureError, match=r"^there is a hook on all modules"):
            step(ours)
    finally:
        handle.remove()


@pytest.mark.parametrize("path", ["layers.1", "layers.3"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_of_what_a_hook_has_kept_raises(path: str, alone: bool) -> None:
    _, ours = twins(Net)
    kept: list[Tensor] = []
    ours.get_submodule(path).register_forward_hook(lambda m, a, o: kept.append(o["out"]))
    y = ours(torch.randn(6, 8)).sum()
    loss = kept[0].square().sum() + (0 if alone else y)
    with pytest.raises(RuntimeError, match=rf"a loss was made of a tensor that a hook of {path} \(Block\) has kept"):
        loss.backward()
