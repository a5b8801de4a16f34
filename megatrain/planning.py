"""`plan`: what is where, in bytes, for a compiled model and the optimizers of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from megatrain.compiled import Compiled
from megatrain.deferred import quiet
from megatrain.lanes import ALL
from megatrain.liveness import peak
from megatrain.program import Choice
from megatrain.rates import rates_of
from megatrain.stepping import HostOptimizer
from megatrain.text import show_about

CLASSES = ("weights", "gradients", "master", "moments", "activations", "updates", "values")
"""Weights, and their copies in the compute dtype; gradients; what an fp32 master has beyond its bf16 weight; the
optimizer's moments; inputs of layers between forward and backward; slots that updates go through; what bodies make and
need."""


@dataclass(frozen=True)
class Residency:
    """Bytes by class on the device, at the planned peak of the last schedule, and on the host, as taken so far."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    parameters: int
    peak: int
    budget: int
    """Bytes allowed on the device; 0: no limit."""
    resident: tuple[str, ...]
    """Host planes that live on the device."""
    layers: int
    keep: int
    """How many of the layers keep their graph from forward to backward."""
    choices: tuple[Choice, ...] = ()
    """The plans that were compared, the one that was taken first."""
    rates: str = ""
    """What they were compared by."""

    def __str__(self) -> str:
        lines = [f"{'':<12} {'device':>11} {'host':>11} {'host, bytes a parameter':>24}"]
        rows = [(c, self.device.get(c, 0), self.host.get(c, 0)) for c in CLASSES]
        rows = [row for row in rows if any(row[1:])]
        for name, there, here in [*rows, ("in all", self.peak, sum(self.host.values()))]:
            lines.append(
                f"{name:<12} {show_about(there):>11} {show_about(here):>11} {here / max(1, self.parameters):>24.2f}"
            )
        allowed = f" of {show_about(self.budget)}" if self.budget else ""
        lines.append(
            f"device peak {show_about(self.peak)}{allowed}; {len(self.resident)} planes live on the device, "
            f"{self.keep} of {self.layers} layers keep their graph"
        )
        return "\n".join([*lines, *self.compared()])

    def compared(self) -> Iterator[str]:
        """The plans that were compared, a line each, the one that was taken first."""
        if not self.choices:
            return
        yield f"\nplans compared, by {self.rates}"
        yield (
            f"{'planes on the device':>20} {'layers kept':>12} {'inputs on the host':>19} {'peak':>10} {'step ms':>10}"
            + "".join(f"{lane:>9}" for lane in ALL)
        )
        for c in self.choices:
            busy = "".join(f"{1000 * c.busy.get(lane, 0.0):>9.2f}" for lane in ALL)
            yield f"{c.resident:>20} {c.keep:>12} {c.spill:>19} {show_about(c.peak):>10} {1000 * c.step:>10.2f}{busy}"


def residency(compiled: Compiled) -> Residency:
    """What is where at the last training schedule, or the last evaluation."""
    runtime = compiled.runtime
    found = compiled.schedules.get("train") or compiled.schedules.get("eval")
    if found is None:
        raise ValueError("nothing is planned yet: call the model once, or compile it with example=")
    device: Counter[str] = Counter()
    host: Counter[str] = Counter()
    places = {names[i]: (plane, i) for plane, names in runtime.resident_slots.items() for i in range(3)}
    for slot in found.slots:
        if slot.name in places:
            plane, kind = places[slot.name]
            if kind < 2:
                device["weights" if kind == 0 else "gradients"] += slot.bytes
                continue
            master = sum(held.get(plane, Counter())["master"] for held in holdings(compiled))
            device["master"] += min(master, slot.bytes)
            device["moments"] += slot.bytes - min(master, slot.bytes)
        else:
            device[slot.role] += slot.bytes
    device["values"] = max(0, peak(found) - sum(device.values()))
    host["weights"] = sum(buffer.bytes for buffer in runtime.store.planes.values())
    host["weights"] += sum(b.bytes for b in runtime.transfers.buffers.values()) if runtime.transfers else 0
    host["gradients"] = runtime.gradients.bytes + sum(b.bytes for b in runtime.rings.values())
    host["activations"] = sum(b.bytes for bs in runtime.free.values() for b in bs)
    host["activations"] += sum(b.bytes for frame in runtime.frames for b in frame.spilled.values())
    for held in holdings(compiled):
        for plane, sizes in held.items():
            if plane not in runtime.residents:
                host += sizes
    with quiet():
        count = sum(t.numel() for t in compiled.tensors.values() if isinstance(t, torch.nn.Parameter))
    forward = [op.call for op in found.forward if op.verb == "compute"]
    keep = sum(".fwd.keep" in call for call in forward)
    living = tuple(runtime.residents)
    plan = compiled.plans["train" if "train" in compiled.schedules else "eval"]
    rates = str(rates_of(compiled.device))
    made = Residency(dict(device), dict(host), count, peak(found), found.budget, living, len(forward), keep)
    return replace(made, choices=plan.choices, rates=rates)


def holdings(compiled: Compiled) -> list[dict[str, Counter[str]]]:
    """What each optimizer holds, by plane and class."""
    out: list[dict[str, Counter[str]]] = []
    for opt in compiled.updates.holders:
        assert isinstance(opt, HostOptimizer)
        found: dict[str, Counter[str]] = {}
        for held in opt.held.values():
            if held.home.updates() is compiled.updates:
                sizes = found.setdefault(held.home.plane, Counter())
                sizes["moments"] += sum(m.numel() * 4 for m in held.moments)
                sizes["master"] += 0 if held.remainder is None else held.remainder.numel() * 2
        out.append(found)
    return out
