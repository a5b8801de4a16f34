"""Models of odd shapes: what they return, write into, share and switch off, compared with eager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from twins import MODES, alike, check, same, twins


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


def draws_noise(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x) + torch.randn_like(x) * torch.rand(()) + torch.bernoulli(torch.full_like(x, 0.5))
    return x


def detaches_its_result(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.body(F.dropout(x, 0.3)), 0.3).detach()


def writes_into_a_buffer_in_every_layer(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        with torch.no_grad():
            self.table[i] = x.mean(0)
            self.count += 1
        x = x + layer(x).tanh()
    return x + self.table.mean(0) * self.count


def assigns_a_buffer(self: Any, x: Tensor) -> Tensor:
    y = self.body(x)
    self.count = self.count + y.detach().mean()
    return y + self.count


def returns_one_result_under_several_names(self: Any, x: Tensor) -> Any:
    y = self.body(x)
    return {"a": y, "b": y, "rows": y[:2], "flat": y.view(-1), "kept": [None, 3, (y > 0)]}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "forward",
    [
        draws_noise, detaches_its_result,
        writes_into_a_buffer_in_every_layer, assigns_a_buffer, returns_one_result_under_several_names,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_is_as_eager_too(forward: Any, mode: str) -> None:
    eager, ours = twins(case(forward), mode)

    def steps(model: nn.Module) -> Any:
        out = model(torch.randn(5, 8))
        if (value := total(out)).requires_grad:
            value.backward()
        return torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)

    for seed in range(2):
        alike(eager, ours, steps, seed)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights(kind: str) -> None:
    wrap = getattr(nn.utils.parametrizations, kind)
    if kind == "orthogonal":
        wrap = lambda m: nn.utils.parametrizations.orthogonal(m, orthogonal_map="cayley")  # noqa: E731
    eager, ours = twins(lambda: nn.Sequential(*(wrap(nn.Linear(8, 8)) for _ in range(3))))
    for seed in range(2):
        alike(eager, ours, lambda m: m(torch.randn(5, 8)).square().sum().backward(), seed)


def test_ties_between_layers() -> None:
    class Tied(Base):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].weight = self.layers[0].weight
            self.layers.append(self.layers[1])

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    eager, ours = twins(Tied)
    alike(eager, ours, lambda m: m(torch.randn(5, 8)).sum().backward())


def test_parameters_of_every_kind() -> None:
    class Odd(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.empty(0))
            self.turned = nn.Parameter(torch.randn(8, 8).t())
            self.several = nn.ParameterList([torch.randn(8).double(), torch.randn(8, dtype=torch.cfloat)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x) @ self.turned * self.scale + self.nothing.sum()
            return y + self.several[0].float() + self.several[1].abs()

    eager, ours = twins(Odd)
    alike(eager, ours, lambda m: m(torch.randn(5, 8)).sum().backward())
    assert ours.turned.grad.stride() == eager.turned.grad.stride()


@pytest.mark.parametrize("mode", MODES)
def test_channels_last(mode: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Conv2d(4, 4, 3)).to(  # pyright: ignore
            memory_format=torch.channels_last
        )

    eager, ours = twins(make, mode)

    def steps(model: nn.Module) -> list[tuple[int, ...]]:
        y = model(torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last))
        y.square().sum().backward()
        return [y.stride(), *(p.grad.stride() for p in model.parameters() if p.grad is not None)]

    alike(eager, ours, steps)


def private(self: Any, x: Tensor) -> Tensor:
    return self.body(x) * getattr(self, "_scale", 1.0)


def listed(self: Any, x: Tensor) -> Tensor:
    return self.body(x) * sum(getattr(self, "scales", [1.0]))


def tabled(self: Any, x: Tensor) -> Tensor:
    return self.body(x) * getattr(self, "options", {"scale": 1.0})["scale"]


@pytest.mark.parametrize(
    ("forward", "name", "value"),
    [(private, "_scale", 3.0), (listed, "scales", [2.0, 3.0]), (tabled, "options", {"scale": 4.0})],
)
def test_attributes_of_every_kind_are_part_of_the_key(forward: Any, name: str, value: Any) -> None:
    eager, ours = twins(case(forward))
    alike(eager, ours, lambda m: m(torch.randn(5, 8)).sum().backward())
    for model in (eager, ours):
        setattr(model, name, value)
    alike(eager, ours, lambda m: m(torch.randn(5, 8)).sum().backward())


def test_a_layer_used_several_times_under_autocast() -> None:
    """Eager casts a weight once and adds the gradients of its uses in bf16; here they are added in fp32."""
    eager, ours = twins(case(calls_a_layer_several_times))
    for model in (eager, ours):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.randn(5, 8))
        y.float().sum().backward()
    for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=2**-6, atol=2**-6 * p.grad.abs().max().item())


def test_inputs_of_every_layout() -> None:
    eager, ours = twins(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    base = torch.randn(10, 16)
    for x in (base.t()[:8, :5].t(), base[::2, ::2], torch.randn(1, 8).expand(5, 8), base[:0, :8]):
        alike(eager, ours, lambda m, x=x: [m(x)][0].square().sum().backward())


@pytest.mark.parametrize("mode", MODES)
def test_a_call_within_a_checkpoint(mode: str) -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)), mode)

    def steps(model: nn.Module, reentrant: bool) -> Tensor | None:
        x = torch.randn(4, 8, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        return x.grad

    for reentrant in (False, True):
        alike(eager, ours, lambda m, r=reentrant: steps(m, r))


def test_two_compiled_models_in_a_row() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    pairs = list(zip(twins(make), twins(make), strict=True))
    for first, second in pairs:
        torch.manual_seed(0)
        second(first(torch.randn(4, 8)).sin()).square().sum().backward()
    for eager, ours in zip(*pairs, strict=True):
        check(eager, ours)


class Names(nn.Module):
    """Results whose names are those that gradients could have: of `y` with a layer's part, of `y` as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a = self.layers[0](x * y)
        b = self.layers[1](a * y)
        return {"y_0": a, "y_1": b, "y_given": a * 2, "y": b * y}


def test_names_of_gradients() -> None:
    eager, ours = twins(Names)
    x, y = torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)

    def do(model: nn.Module) -> Tensor:
        y.grad = None
        sum(model(x, y).values()).sum().backward()  # type: ignore[union-attr]
        assert y.grad is not None
        return y.grad.clone()

    alike(eager, ours, do)
