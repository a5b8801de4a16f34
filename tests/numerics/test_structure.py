"""Models of odd shapes: what they return, write into, share and switch off, compared with eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from twins import MODES, alike, same, twins


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Result:
    logits: Tensor
    name: str
    extra: Tensor | None = None


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("table", torch.linspace(0, 1, 64).reshape(8, 8))
        self.register_buffer("count", torch.zeros(()))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def total(value: Any) -> Tensor:
    found = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
    return sum((t.square().sum() for t in found), torch.zeros(()))


def case(forward: Any) -> Any:
    """A class of models with this forward."""
    return type(forward.__name__, (Base,), {"forward": forward})


def returns_a_tuple(self: Any, x: Tensor) -> Any:
    y = self.body(x)
    return y, x.shape[0], None, "text", (y * 2, [y.sum()])


def returns_a_named_tuple(self: Any, x: Tensor) -> Any:
    return Pair(self.body(x), {"a": x.mean(), "b": {"c": x.argmax()}})


def returns_its_input_and_a_weight(self: Any, x: Tensor) -> Any:
    return x, self.layers[0].weight, self.body(x)


def in_place_at_the_start_of_a_layer(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    for layer in self.layers:
        x = layer(x.relu_())
        x += 1
        x[:, 0] = 0
        x.masked_fill_(x > 2, 0.5)
    return x


def no_grad_inside(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.layers[2].weight.abs().mean() + x.mean()
    return self.body(x) * scale + x.detach()


def counts_its_calls(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.count += 1
    return self.body(x) * self.count


def calls_a_layer_several_times(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = self.layers[0](x).tanh() + x
        x = self.layers[1](x).tanh()
    return self.body(x)


def uses_a_value_everywhere(self: Any, x: Tensor) -> Tensor:
    memory = self.layers[0](x).tanh()
    for layer in self.layers[1:]:
        x = layer(x) * memory + memory @ memory.T @ x * 0.1
    return x + memory


def parallel_blocks(self: Any, x: Tensor) -> Tensor:
    return sum((layer(x).tanh() for layer in self.layers), x)


def views_of_buffers_and_weights_cross_layers(self: Any, x: Tensor) -> Tensor:
    rows, column = self.table[: x.shape[0]], self.layers[3].weight[:, 0]
    for layer in self.layers:
        x = layer(x) * rows + column
    return x


def checkpoints_inside(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = torch.utils.checkpoint.checkpoint(lambda t, f=layer: f(t).tanh(), x, use_reentrant=False)
    return x


def switches_autocast_off(self: Any, x: Tensor) -> Tensor:
    x = self.layers[0](x)
    with torch.autocast("cpu", enabled=False):
        x = self.layers[1](x.float())
    return self.layers[2](x).float()


def detaches_a_part(self: Any, x: Tensor) -> Any:
    y = self.body(x)
    return y.detach(), self.layers[0](y)


CASES = [
    returns_a_tuple, returns_a_named_tuple, returns_its_input_and_a_weight, in_place_at_the_start_of_a_layer,
    no_grad_inside, counts_its_calls, calls_a_layer_several_times, uses_a_value_everywhere, parallel_blocks,
    views_of_buffers_and_weights_cross_layers, checkpoints_inside, switches_autocast_off, detaches_a_part,
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("forward", CASES, ids=lambda f: f.__name__)
def test_is_as_eager(forward: Any, mode: str) -> None:
    eager, ours = twins(case(forward), mode)

    def steps(model: nn.Module) -> Any:
        out = model(torch.randn(5, 8))
        total(out).backward()
        return torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)

    for _ in range(2):
        alike(eager, ours, steps)


def test_the_very_input_and_weight_are_returned() -> None:
    _, ours = twins(case(returns_its_input_and_a_weight))
    x = torch.randn(5, 8)
    out = ours(x)
    assert out[0] is x and out[1] is ours.layers[0].weight


def test_dataclasses() -> None:
    def forward(self: Any, x: Tensor) -> Result:
        return Result(self.body(x), "named")

    eager, ours = twins(case(forward))
    x = torch.randn(5, 8)
    a, b = eager(x), ours(x)
    assert type(b) is Result and (b.name, b.extra) == ("named", None) and torch.equal(a.logits, b.logits)


def test_autocast_around_the_call() -> None:
    for make in (case(switches_autocast_off), case(parallel_blocks)):
        eager, ours = twins(make)

        def steps(model: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.randn(5, 8))
            y.float().sum().backward()
            return y.detach()

        alike(eager, ours, steps)
        alike(eager, ours, lambda m: m(torch.randn(5, 8)).sum().backward())


def test_arguments_of_every_kind() -> None:
    def forward(self: Any, x: Tensor, *rest: Tensor, scale: float = 1.0, **named: Any) -> Tensor:
        y = self.body(x)
        for r in rest:
            y = y + r
        for n, v in sorted(named.items()):
            y = y * v["t"] if n == "nested" else y + v
        return y * scale

    eager, ours = twins(case(forward))
    a, b = torch.randn(5, 8), torch.randn(5, 8)
    alike(eager, ours, lambda m: m(a).sum().backward())
    alike(eager, ours, lambda m: m(a, b, b, scale=2.0).sum().backward())
    alike(eager, ours, lambda m: m(a, scale=3.0, nested={"t": b, "s": "x"}, shift=b).sum().backward())
    alike(eager, ours, lambda m: m(x=a).sum().backward())


def test_an_argument_that_is_written_into() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.body(x)

    eager, ours = twins(case(forward))

    def steps(model: nn.Module) -> Tensor:
        x = torch.randn(5, 8)
        model(x).sum().backward()
        return x

    alike(eager, ours, steps)


def test_some_results_and_more_loss() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        hidden = []
        for layer in self.layers:
            x = layer(x).tanh()
            hidden.append(x)
        return {"loss": x.square().mean(), "logits": x, "hidden": hidden}

    eager, ours = twins(case(forward))
    x = torch.randn(5, 8)
    alike(eager, ours, lambda m: m(x)["loss"].backward())
    alike(eager, ours, lambda m: m(x)["hidden"][1].sum().backward())
    alike(eager, ours, lambda m: [m(x)][0]["logits"].exp().sum().backward())

    def both(model: nn.Module) -> None:
        out = model(x)
        (out["loss"] + out["logits"].sum() + out["hidden"][2].sin().sum()).backward()

    alike(eager, ours, both)
    assert same(dict(eager.named_buffers()), dict(ours.named_buffers()))


def test_a_plain_attribute_is_part_of_the_key() -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)))
    for p in (0.1, 0.7, 0.1):
        for model in (eager, ours):
            model[1].p = p
        alike(eager, ours, lambda m: m(torch.randn(16, 8)).sum().backward())
