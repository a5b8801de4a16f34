"""On a GPU: the runtime equals the simulation, whatever the delays; the planned peak bounds the measured one."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

import megatrain
from megatrain.lanes import InlineLanes
from megatrain.passes import Plan

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 512, depth: int = 6, words: int = 1000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def passes(activations: str = "recompute") -> list[megatrain.Pass]:
    return [Plan(activations=activations) if p.name == "plan" else p for p in megatrain.DEFAULT_PASSES]


def trained(model: nn.Module, device: str, steps: int = 4) -> list[torch.Tensor]:
    """Losses and then parameters after `steps` steps, each of two micro-steps, with SGD on the host."""
    torch.manual_seed(5)
    torch.cuda.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(6)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        for _ in range(2):
            ids = torch.randint(0, 1000, (8, 128), generator=generator).to(device)
            loss = model(ids, ids)
            loss.backward()
            losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [p.detach().cpu().clone() for p in model.parameters()]


def inline(model: nn.Module) -> nn.Module:
    """The same schedules, run in order: the simulation."""
    model.__dict__["_megatrain"].runtime.lanes = InlineLanes()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("memory", [None, "tight"])
def test_bitwise_equal_to_the_simulation_and_to_eager(
    dtype: torch.dtype, activations: str, memory: str | None, monkeypatch: pytest.MonkeyPatch
):
    torch.use_deterministic_algorithms(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.manual_seed(0)
        model = Net().to(dtype)
        budget = None
        if memory:
            probe = megatrain.compile(copy.deepcopy(model), device="cuda", backend="eager")
            ids = torch.zeros(8, 128, dtype=torch.long)
            probe(ids, ids).backward()
            budget = megatrain.stats(probe).planned_peak - 2 * 8 * 128 * 512 * dtype.itemsize
        eager, simulated = copy.deepcopy(model), copy.deepcopy(model)
        megatrain.compile(model, device="cuda", backend="eager", memory=budget, passes=passes(activations))
        inline(megatrain.compile(simulated, device="cuda", backend="eager", memory=budget, passes=passes(activations)))
        model.__dict__["_megatrain"].adds = True  # on the device; the simulation and eager have autograd add: one sum
        runtime = model.__dict__["_megatrain"].runtime
        chance = random.Random(7)
        runtime.lanes.delay = lambda label: chance.choice([0.0, 0.0, 0.002])
        found = trained(model, "cuda")
        expected = trained(simulated, "cuda")
        assert all(map(torch.equal, found, expected))
        schedule = megatrain.schedule(model)
        assert (memory is None) or any(op.label.startswith("spill") for op in schedule.ops) or activations == "keep"
        eager.cuda()
        # the optimizer of a compiled model runs on the host: compare the first step's losses, which precede any update
        assert all(map(torch.equal, trained(eager, "cuda", steps=1)[:2], found[:2]))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_the_planned_peak_bounds_the_measured_one(activations: str):
    torch.manual_seed(0)
    model = megatrain.compile(Net(1024, 8).bfloat16(), device="cuda", backend="eager", passes=passes(activations))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(8, 512, dtype=torch.long)
    for _ in range(3):
        model(ids, ids).backward()
        model.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    planned = megatrain.stats(model).planned_peak
    print(f"planned {planned / 2**20:.1f} MiB, measured {measured / 2**20:.1f} MiB")
    assert measured <= planned


def test_gradients_are_complete_and_pinned_planes_adopted():
    model = megatrain.compile(Net(), device="cuda", backend="eager")
    ids = torch.zeros(8, 128, dtype=torch.long)
    model(ids, ids).backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in model.parameters())
    assert next(model.parameters()).is_pinned()


def test_inputs_anywhere_outputs_on_the_device():
    model = megatrain.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), device="cuda", backend="eager")
    x = torch.randn(3, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert (y.device.type, x.grad is not None and x.grad.device.type) == ("cuda", "cpu")
    assert model.to("cuda") is model and model.cuda() is model
    with pytest.raises(ValueError, match="cannot move to meta"):
        model.to("meta")


def test_a_failing_op_surfaces_and_the_next_step_is_right():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = megatrain.compile(Fails(), device="cuda", backend="eager")
    x = torch.randn(4, 8)
    expected = model(x).detach().cpu()
    runtime = model.__dict__["_megatrain"].runtime
    perform = runtime.perform

    def broken(op, step, frame):  # type: ignore[no-untyped-def]
        if op.label == "fwd1":
            raise RuntimeError("injected")
        perform(op, step, frame)

    runtime.perform = broken
    with pytest.raises(RuntimeError, match="injected") as caught:
        model(x)
    assert any("fwd1" in note for note in caught.value.__notes__)
    runtime.perform = perform
    assert torch.equal(model(x).detach().cpu(), expected)
