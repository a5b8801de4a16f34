"""A schedule with what it runs, and what is known of each op before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatrain.bodies import Body
from megatrain.fused import pair_of
from megatrain.host import Layout
from megatrain.liveness import last_uses
from megatrain.offline import grad_layout
from megatrain.program import Plan, Program
from megatrain.residence import Slots
from megatrain.schedule import Schedule, TensorType, nbytes
from megatrain.text import show_op


@dataclass(frozen=True, eq=False)
class Executable:
    """A schedule with what it runs: its bodies, and the layouts of weight planes (`layers.3.w`) and gradients."""

    schedule: Schedule
    bodies: Mapping[str, Body]
    weights: Mapping[str, tuple[tuple[int, int], ...]]
    """Template -> (plane, entry) of each weight."""
    layouts: Mapping[str, Layout]
    grad_layouts: Mapping[str, Layout]
    """By the name of the weight plane."""
    plan: Plan = field(default_factory=Plan)
    residents: Mapping[str, Slots] = field(default_factory=dict)
    """Slots of weight planes that live on the device."""
    steps: Mapping[str, Step] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _steps(self))


def executable_of(
    program: Program, device: torch.device, layouts: Mapping[str, Layout], tensors: Mapping[str, Tensor]
) -> Executable:
    """A scheduled program with its bodies; `layouts` are those of the planes that go to the device, `tensors` the
    model's by dotted name."""
    templates = {t.name: t for t in program.templates}
    bodies: dict[str, Body] = {}
    for name, spec in program.bodies.items():
        t, d = templates[spec.template], program.derivatives[spec.template]
        needs = d.needs or (False,) * t.values
        trains = d.trains or (False,) * len(t.weights)
        planes = tuple(p for p, _ in t.weights)
        pair = pair_of(t, program.backend, d.through)
        bodies[name] = Body(spec, t.graph, needs, trains, planes, device, program.autocast, pair)
    return Executable(
        schedule=program.schedule,
        bodies=bodies,
        weights={t.name: t.weights for t in program.templates},
        layouts=layouts,
        grad_layouts={p: grad_layout(names, tensors) for p, names in program.planes.items()},
        plan=program.plan,
        residents={p: (f"r{i}", f"h{i}", f"o{i}") for i, p in enumerate(program.plan.resident)},
    )


@dataclass(frozen=True)
class Step:
    """What is known of an op before it runs.  `planes` names the weight planes that a compute op's slots hold, `types`
    the tensors in the activation slots it touches, `size` the bytes of a copy, `dies` the values that it uses last."""

    line: str
    planes: tuple[str, ...] = ()
    types: Mapping[str, TensorType] = field(default_factory=dict)
    size: int = 0
    dies: tuple[str, ...] = ()


def _steps(e: Executable) -> dict[str, Step]:
    s = e.schedule
    slots = s.slot_bytes
    dies = last_uses(s)
    received = dict.fromkeys((op.label for op in s.forward), s.outputs)
    bodies = s.bodies
    held: dict[str, Any] = {slots[0]: plane for plane, slots in e.residents.items()}
    types: dict[str, TensorType] = {}
    out: dict[str, Step] = {}
    for op in s.ops:
        planes: list[str] = []
        known: dict[str, TensorType] = {}
        size = 0
        if op.verb == "prefetch":
            source = op.reads[0]
            plane = f"{source.removesuffix('.dw')}.w" if source.endswith(".dw") else source
            if source in types:  # a layer's input
                held[op.writes[0]], size = types[source], nbytes(types[source])
            else:
                held[op.writes[0]], size = plane, (e.layouts if plane == source else e.grad_layouts)[plane].bytes
        elif op.verb == "offload":
            target, source = op.writes[0], held[op.reads[0]]
            if isinstance(source, str):  # the plane whose gradients they are
                size, held[target] = e.grad_layouts[source].bytes, source
            else:
                types[target], size = source, nbytes(source)
        elif op.verb == "update":
            planes = [op.writes[0]]
        elif op.verb == "compute" and "." not in op.call:
            planes = [held[op.reads[0]]]
        elif op.verb == "compute":
            count = len(dict.fromkeys(p for p, _ in e.weights[op.call.partition(".")[0]]))
            spec = e.bodies[op.call].spec
            at = (1 if spec.keep and not spec.forward else 0) + len(e.bodies[op.call].needs)
            planes = [held[n] for n in op.reads[at : at + count]]
            known = {n: held[n] for n in op.reads[:at] if n in slots}
            if not spec.forward:
                held |= {slot: planes[p] for p, slot in zip(spec.trains, op.writes[len(spec.wants) :], strict=True)}
            for name, t in zip(op.writes, bodies[op.call].outputs, strict=True):
                if name in slots and isinstance(t, TensorType):
                    held[name] = known[name] = t
        out[op.label] = Step(
            line=show_op(op),
            planes=tuple(planes),
            types=known,
            size=size,
            dies=tuple(n for n in dies[op.label] if n not in received.get(op.label, s.input_grads)),
        )
    return out
