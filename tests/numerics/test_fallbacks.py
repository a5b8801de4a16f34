"""What no one graph holds: children that are called whole, and models that run layer by layer.  As eager, bit for bit,
with one warning that says what and why."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from twins import KEEP, alike, squeezed, twins

import megatrain
from megatrain.calls import CaptureError

IDS = [torch.randint(0, 50, size, generator=torch.Generator().manual_seed(1)) for size in ((2, 8), (2, 8), (3, 11))]


class Experts(nn.Module):
    """A loop over experts, each of which is given the rows that are routed to it, or is not called."""

    def __init__(self, width: int = 16, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1).topk(1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, k = torch.where(chosen == i)
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * shares[rows, k, None])
        return out.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.mix, self.inner = nn.LayerNorm(16), nn.Linear(16, 16), inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).tanh()
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    calls: Tensor

    def __init__(self, inner: Callable[[], nn.Module] = Experts, until: float | None = None) -> None:
        super().__init__()
        self.until = until
        self.embed = nn.Embedding(50, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("calls", torch.zeros(()))
        self.layers = nn.ModuleList(Block(inner) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
            if self.until is not None and x.abs().mean() > self.until:
                break
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def trained(model: Any) -> list[Tensor]:
    """The losses of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for ids in IDS:
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "megatrain" and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("how", ["recompute", "keep", "squeezed"])
def test_a_loop_over_experts_is_called_whole_in_a_captured_model(how: str, caplog: pytest.LogCaptureFixture) -> None:
    passes = {"recompute": megatrain.DEFAULT_PASSES, "keep": KEEP, "squeezed": squeezed(megatrain.DEFAULT_PASSES)}[how]
    eager, ours = twins(Net, passes=passes)
    alike(eager, ours, trained)
    (line,) = warnings_of(caplog)
    assert line.startswith("megatrain: layers.0.inner (Experts) and 2 more of its kind cannot be captured")
    found = megatrain.schedule(ours)
    assert [t.name for t in found.templates] == ["prologue", "layer", "epilogue"]
    assert next(op.label for op in found.backward if op.verb == "offload") == "grad_epilogue"
    assert megatrain.stats(ours).device_peak <= megatrain.stats(ours).planned_peak


def test_evaluation_of_a_model_with_an_opaque_child() -> None:
    eager, ours = twins(Net)
    for model in (eager, ours):
        model.eval()
    with torch.no_grad():
        alike(eager, ours, lambda m: m(IDS[0]))
    alike(eager, ours, trained)


def test_opaque_children_that_differ_in_an_attribute_share_no_template() -> None:
    class Scaled(nn.Module):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Scaled.made += 1
            self.linear, self.by = nn.Linear(16, 16), Scaled.made

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (self.by if x.sum() > 0 else -self.by)

    eager, ours = twins(lambda: Net(Scaled))
    alike(eager, ours, trained)
    assert len(megatrain.schedule(ours).templates) == 5
    for model in (eager, ours):
        model.layers[1].inner.by = 7
    alike(eager, ours, trained)


class Selecting(nn.Module):
    """Its result's size depends on the data; its caller's does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > 0]


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.select, self.linear = Selecting(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.select(x).sum()


def test_what_is_around_a_child_of_unknown_size_is_called_whole(caplog: pytest.LogCaptureFixture) -> None:
    eager, ours = twins(lambda: Net(Sums))
    alike(eager, ours, trained)
    lines = warnings_of(caplog)
    assert any("layers.0.inner (Sums) and 2 more" in line for line in lines)
    assert megatrain.schedule(ours).backward


def test_sizes_that_follow_from_arguments() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], int]:
            y = self.linear(x) if x.sum() > 0 else x
            return y.flatten(0, 1), {"first": y[:1], "half": y[..., :8]}, 3

    class Unfolds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.folded = Folded()

        def forward(self, x: Tensor) -> Tensor:
            flat, parts, times = self.folded(x)
            return flat.view(x.shape) * times + parts["first"] + parts["half"].repeat(1, 1, 2)

    eager, ours = twins(lambda: Net(Unfolds))
    alike(eager, ours, trained)
    assert len(megatrain.schedule(ours).templates) == 3


def test_a_result_of_another_size_than_before_raises() -> None:
    class Turns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.abs().sum() < 1e6 else x[:, :1]

    _, ours = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Turns(), nn.Linear(4, 4))))
    ours(torch.randn(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"1\.0 \(Turns\) is called whole .* returns a tensor \[2, 1, 4\]"):
        ours(torch.full((2, 3, 4), 1e9))


@pytest.mark.parametrize("optimizer", ["torch", "megatrain"])
@pytest.mark.parametrize("memory", [None, "40KiB"])
def test_a_branch_between_layers_runs_layer_by_layer(
    optimizer: str, memory: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    eager, ours = twins(lambda: Net(lambda: nn.Linear(16, 16), until=1.0), memory=memory)

    def several(model: Any) -> list[Tensor]:
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimizer == "megatrain" and model is ours:
            opt = megatrain.SGD(model.parameters(), lr=0.1)
        losses: list[Tensor] = []
        for ids in (*IDS, *IDS):
            opt.zero_grad()
            loss = model(ids) + model(ids.flip(0))
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        return losses

    if optimizer == "torch":
        alike(eager, ours, several)
        alike(eager, ours, trained)
    else:
        torch.testing.assert_close(several(eager), several(ours))
        return
    with torch.no_grad():
        alike(eager, ours, lambda m: m(IDS[2]))
    (line,) = warnings_of(caplog)
    assert line.startswith("megatrain: Net runs layer by layer, each a graph of its own where it can be")
    assert "if self.until is not None and x.abs().mean() > self.until:" in line


def test_layer_by_layer_needs_gradients_that_stay() -> None:
    _, ours = twins(lambda: Net(lambda: nn.Linear(16, 16), until=1.0))
    optimizer = megatrain.SGD(ours.parameters(), lr=0.1, update="in-backward")
    with pytest.raises(CaptureError, match=r"with update='in-backward' a model is one graph"):
        ours(IDS[0])
    del optimizer


def test_layer_by_layer_computes_with_the_parameters() -> None:
    _, ours = twins(lambda: Net(lambda: nn.Linear(16, 16), until=1.0), compute_dtype=torch.bfloat16)
    with pytest.raises(CaptureError, match=r"with compute_dtype= a model is one graph: use torch\.autocast"):
        ours(IDS[0])


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore
        return grads[0] * 3


def own_function(self: Any, x: Tensor) -> Tensor:
    return Rounded.apply(self[0](x))


def tensor_hook(self: Any, x: Tensor) -> Tensor:
    y = self[0](x)
    y.register_hook(lambda g: g * 3)
    return y * 2


def reentrant(self: Any, x: Tensor) -> Tensor:
    return self[0](torch.utils.checkpoint.checkpoint(self[0], x, use_reentrant=True))


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self[0](x) * self.calls


def remembers(self: Any, x: Tensor) -> Tensor:
    self.last = self[0](x)
    return self.last * 2


def pythons_random(self: Any, x: Tensor) -> Tensor:
    return self[0](x) * random.random()


def selects(self: Any, x: Tensor) -> Tensor:
    return self[0](x)[x[:, 0] > 0]


@pytest.mark.parametrize(
    "forward",
    [own_function, tensor_hook, reentrant, counts, remembers, pythons_random, selects],
    ids=lambda f: f.__name__,
)
def test_what_a_graph_would_lose_runs_as_it_is(forward: Any, caplog: pytest.LogCaptureFixture) -> None:
    eager, ours = twins(lambda: type("Losing", (nn.Sequential,), {"forward": forward})(nn.Linear(4, 4)))

    def twice(model: Any) -> tuple[Any, ...]:
        random.seed(3)
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        for _ in range(2):
            model(x).square().sum().backward()
        return x.grad, getattr(model, "calls", None)

    alike(eager, ours, twice)
    (line,) = warnings_of(caplog)
    assert re.match(r"megatrain: Losing runs layer by layer, .*: cannot capture Losing\.forward: ", line)


class Once(nn.Module):
    """A plain object that its first forward sets, one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.state = kind, nn.Linear(4, 4), SimpleNamespace(first=True, rows=None, scale=None)

    def forward(self, x: Tensor) -> Tensor:
        s, y = self.state, self.linear(x)
        if self.kind == "flag":
            first, s.first = s.first, False
            return y * 0 if first else y
        if self.kind == "size":
            s.rows = s.rows or x.shape[0]
            return y * s.rows
        s.scale = x.detach().abs().max() if s.scale is None else s.scale
        return y / s.scale


@pytest.mark.parametrize("kind", ["flag", "size", "tensor"])
def test_a_plain_object_that_the_first_forward_sets(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    eager, ours = twins(lambda: Once(kind))
    for rows in (3, 5, 4):
        alike(eager, ours, lambda m, rows=rows: (m(torch.ones(rows, 4)).sum().backward(), m.state.rows, m.state.first))
    assert len(warnings_of(caplog)) == 1  # the second call is a graph
    assert megatrain.schedule(ours).backward and ours.__dict__["_megatrain"].whole.captures


def test_sparse_gradients() -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    for model in (eager, ours):
        model(torch.arange(4)).sum().backward()
    assert ours[0].weight.grad.is_sparse
    assert torch.equal(eager[0].weight.grad.to_dense(), ours[0].weight.grad.to_dense())
    assert torch.equal(eager[1].weight.grad, ours[1].weight.grad)


def test_generation_runs_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")

    def llama() -> Any:
        config = transformers.LlamaConfig(
            vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    eager, ours = twins(llama)
    ids = torch.randint(3, 99, (2, 7))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=8)
    for how in (dict(do_sample=False), dict(do_sample=True), dict(num_beams=2, do_sample=False)):
        alike(eager, ours, lambda m, how=how: m.generate(ids, **options, **how))
    (line,) = warnings_of(caplog)
    assert line.startswith("megatrain: LlamaForCausalLM runs layer by layer") and "is a DynamicCache" in line
    eager.train()
    ours.train()
    alike(eager, ours, lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss.backward())
