"""prefetch: copies to the device are issued as early as the slots allow."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.order import place_waits
from megatrain.pipeline import Pass
from megatrain.program import Program
from megatrain.schedule import Op


@dataclass(frozen=True)
class Prefetch(Pass):
    """Moves each prefetch up to just behind the last op that touches its slot or makes its plane, prefetches staying in
    their order: what is needed first is fetched first."""

    name, needs, gives = "prefetch", "scheduled", "scheduled"

    def apply(self, program: Program) -> Program:
        schedule = program.schedule
        halves = {half: _hoisted(ops) for half, ops in schedule.halves()}
        return program.replace(schedule=place_waits(schedule.replace(**halves)))


def _hoisted(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    out: list[Op] = []
    behind = 0
    for op in ops:
        if op.verb != "prefetch":
            out.append(op)
            continue
        touching = [i for i, o in enumerate(out) if set(o.touches) & set(op.writes) or set(o.writes) & set(op.reads)]
        behind = max(behind, max(touching, default=-1) + 1)
        out.insert(behind, op)
        behind += 1
    return tuple(out)
