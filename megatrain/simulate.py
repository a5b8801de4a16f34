"""When each op of a step would run: lanes in order, waits as the schedule has them, seconds from rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatrain.emission import emitted, update_ops, used_planes
from megatrain.program import Program
from megatrain.rates import Rates
from megatrain.schedule import HALVES, Op, Schedule, prev_of


@dataclass(frozen=True)
class Timing:
    """Seconds from the start of a step to the start of the next in steady state, and for which each lane is busy."""

    step: float
    busy: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The lane that is busy longest."""
        return max(self.busy, key=lambda lane: self.busy[lane])


def simulated(schedule: Schedule, seconds: Callable[[Op], float], issue: float = 0.0) -> Timing:
    """Three steps one after the other, of which the last counts; issuing an op takes `issue` seconds.

    A half begins when the half before has issued its last op and its copies have ended; the update half, which must
    know the norm of all gradients, when computing has ended too.  Updates on the host go on behind the next forward."""
    lanes: dict[str, float] = {}
    users: dict[str, dict[str, float]] = {}
    ends: dict[str, float] = {}
    took = {op.label: seconds(op) for op in schedule.ops}
    now = last = step = 0.0
    for _ in range(3):
        for half in HALVES:
            if half == "update":
                now = max(now, lanes.get("compute", 0.0))
            for op in getattr(schedule, half):
                now += issue
                start = max(now, lanes.get(op.lane, 0.0))
                for wait in op.after:
                    if name := prev_of(wait):
                        start = max([start, *(t for lane, t in users.get(name, {}).items() if lane != op.lane)])
                    else:
                        start = max(start, ends[wait])
                end = ends[op.label] = lanes[op.lane] = start + took[op.label]
                for name in op.touches:
                    users.setdefault(name, {})[op.lane] = end
            now = max([now, *(t for lane, t in lanes.items() if lane in ("h2d", "d2h"))])
        now = max(now, lanes.get("compute", 0.0))
        step, last = now - last, now
    busy: dict[str, float] = {}
    for op in schedule.ops:
        busy[op.lane] = busy.get(op.lane, 0.0) + took[op.label]
    return Timing(step, busy)


def timing_of(program: Program) -> Timing:
    """The steady state of a planned program's steps, with the updates of planes that an optimizer here holds."""
    rates = program.rates or Rates()
    schedule, specs = emitted(program)
    resident = {p: (f"r{i}", f"h{i}", f"o{i}") for i, p in enumerate(program.plan.resident)}
    held = [p for p in used_planes(program) if p in program.state_bytes]
    if held and not program.update and program.training:
        schedule = schedule.replace(update=update_ops(schedule, held, "update", resident))
    sizes = schedule.slot_bytes

    def seconds(op: Op) -> float:
        if op.call in specs:
            spec = specs[op.call]
            kind = ("fwd" if spec.forward else "bwd") + (".keep" if spec.keep else "")
            return program.derivatives[spec.template].seconds.get(kind, 0.0)
        if op.verb == "compute":
            return sum(sizes[n] for n in (*op.reads, *op.writes)) / rates.memory
        if op.verb == "prefetch":
            return program.plane_bytes.get(op.reads[0], sizes[op.writes[0]]) / rates.h2d
        if op.verb == "offload":
            return sizes[op.reads[0]] / rates.d2h
        plane = op.writes[0]
        state = program.state_bytes.get(plane, 4 * program.plane_bytes[plane])
        moved = 2 * program.plane_bytes[plane] + program.grad_bytes[plane] + 2 * state
        return moved / rates.update

    return simulated(schedule, seconds, rates.launch)
