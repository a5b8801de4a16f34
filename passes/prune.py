"""prune: ops whose results nobody reads go."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.order import place_waits
from megatrain.pipeline import Pass
from megatrain.program import Program
from megatrain.schedule import LASTING, Op, Schedule


@dataclass(frozen=True)
class Prune(Pass):
    """Drops what nobody reads: fetches of what a slot holds already, computes and copies without a reader.  The caller
    reads the schedule's outputs, input gradients and gradient planes (`.dw`), and what is resident stays.  A body that
    draws random numbers stays, because later draws depend on it; slots that no op touches go too."""

    name, needs, gives = "prune", "scheduled", "scheduled"

    def apply(self, program: Program) -> Program:
        schedule = program.schedule
        random = {name for name, spec in program.bodies.items() if program.template(spec.template).random}
        halves = {half: _fresh(ops) for half, ops in schedule.halves()}
        halves = _read(schedule.replace(**halves), random)
        pruned = schedule.replace(**halves)
        touched = {n for op in pruned.ops for n in op.touches}
        slots = tuple(s for s in schedule.slots if s.name in touched or s.role in LASTING)
        return program.replace(schedule=place_waits(pruned.replace(slots=slots)))


def _fresh(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Without prefetches of a plane into a slot that holds it already."""
    holds: dict[str, str] = {}
    out: list[Op] = []
    for op in ops:
        if op.verb == "prefetch" and holds.get(op.writes[0]) == op.reads[0]:
            continue
        for name in op.writes:
            holds.pop(name, None)
            holds = {slot: plane for slot, plane in holds.items() if plane != name}
        if op.verb == "prefetch":
            holds[op.writes[0]] = op.reads[0]
        out.append(op)
    return tuple(out)


def _read(schedule: Schedule, random: set[str]) -> dict[str, tuple[Op, ...]]:
    """The ops of each half that somebody reads."""
    slots = {s.name for s in schedule.slots}
    resident = {s.name for s in schedule.slots if s.role == "resident"}
    wanted = set(schedule.outputs) | set(schedule.input_grads)
    kept: dict[str, list[Op]] = {}
    for half in ("update", "backward", "forward"):
        kept[half] = []
        for op in reversed(getattr(schedule, half)):
            gradient = any(n.endswith(".dw") or op.verb == "update" or n in resident for n in op.writes)
            if not (gradient or op.call in random or wanted.intersection(op.writes)):
                continue
            wanted.difference_update(n for n in op.writes if n in slots and n not in op.reads)
            wanted.update(op.reads)
            kept[half].append(op)
    return {half: tuple(reversed(ops)) for half, ops in kept.items()}
