"""The work of graphs as expressions, and steps as they would run."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.costs import work_of
from megatrain.graphs import evaluated
from megatrain.offline import program_of
from megatrain.program import Program
from megatrain.rates import Rates, rates_of
from megatrain.schedule import Op, Schedule, Slot
from megatrain.simulate import simulated


def partitioned(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    return program_of(model, args, kwargs, stage="partitioned")


def test_a_llama_layer_in_the_sizes_of_the_call() -> None:
    """Projections and the gated MLP by token, attention by token and token, half of it since it is causal."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    program = partitioned(LlamaForCausalLM(config), input_ids=torch.zeros(2, 16, dtype=torch.int64))
    work = work_of(program.template("layer").graph)
    batch, length = (s for s, name, _ in program.symbols if name == "input_ids")
    sizes: Any = {batch: 2, length: 16}
    attention = 4 * 64 * batch * length**2 / 2
    products = 2 * batch * length * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    assert sympy.expand(work.flops - attention - products) == 0 and work.backward == sympy.expand(2 * work.flops)
    assert evaluated(work.bytes, sizes) > 0 and work.dtype == "f32"


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(8, 6), nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.a(x) @ x.transpose(0, 1)[:6]).sum() + self.c(y).sum()


def test_products_and_convolutions() -> None:
    program = partitioned(Products(), torch.zeros(8, 8), torch.zeros(2, 3, 10, 12))
    sizes: Any = {s: {"x": (8, 8), "y": (2, 3, 10, 12)}[name][dim] for s, name, dim in program.symbols}
    flops = sum(evaluated(work_of(t.graph).flops, sizes) for t in program.templates)
    assert flops == 2 * 8 * 8 * 6 + 2 * 8 * 6 * 8 + 2 * (2 * 5 * 10 * 12) * (3 * 9)


def test_seconds_are_those_of_the_larger_of_operations_and_bytes() -> None:
    work = work_of(partitioned(nn.Linear(512, 512), torch.zeros(4, 512)).templates[0].graph)
    slow, fast = Rates(flops={"f32": 1e9}), Rates(flops={"f32": 1e18})
    sizes: dict[Any, int] = dict.fromkeys(work.flops.free_symbols, 4)
    assert work.seconds(slow, sizes)["fwd"] == pytest.approx(2 * 4 * 512 * 512 / 1e9)
    times = work.seconds(fast, sizes)
    assert times["fwd"] == pytest.approx(float(evaluated(work.bytes, sizes)) / fast.memory)
    assert times["bwd"] == pytest.approx(times["fwd"] + times["bwd.keep"])


def test_on_the_cpu_rates_are_nominal() -> None:
    assert rates_of(torch.device("cpu")) == Rates()


def step() -> Schedule:
    """Two layers streamed through one slot, and an update of the first."""
    forward = (
        Op("fetch0", "prefetch", ("layers.0.w",), ("w",), after=("prev(layers.0.w)", "prev(w)")),
        Op("fwd0", "compute", ("x0", "w"), ("x1",), "t.fwd", ("fetch0",)),
        Op("fetch1", "prefetch", ("layers.1.w",), ("w",), after=("fwd0",)),
        Op("fwd1", "compute", ("x1", "w"), ("x2",), "t.fwd", ("fetch1",)),
    )
    update = (Op("upd", "update", ("layers.0.dw",), ("layers.0.w",), "adamw"),)
    return Schedule(slots=(Slot("w", "weights", 4096),), forward=forward, update=update)


def test_lanes_and_waits() -> None:
    """One slot: nothing overlaps but the update, which the next fetch of its layer waits for."""
    took = {"fetch0": 1.0, "fwd0": 2.0, "fetch1": 1.0, "fwd1": 3.0, "upd": 0.0}
    timing = simulated(step(), lambda op: took[op.label])
    assert timing.step == pytest.approx(7.0) and timing.busy == {"h2d": 2.0, "compute": 5.0, "host": 0.0}
    assert timing.bound == "compute"
    took["upd"] = 4.0
    timing = simulated(step(), lambda op: took[op.label])
    assert timing.step == pytest.approx(11.0) and timing.busy["host"] == 4.0
    assert simulated(step(), lambda op: took[op.label], issue=1.0).step > 11.0
