"""A pass of a package of its own: prefetches wait for the last moment, to show what issuing them early is worth."""

from dataclasses import dataclass

from megatrain import Op, Pass, Program, place_waits


@dataclass(frozen=True)
class PrefetchLater(Pass):
    """Issue each prefetch `ahead` ops before the first that touches what it touches, never sooner than it was."""

    name, needs, gives = "prefetch-later", "scheduled", "scheduled"
    ahead: int = 1

    def apply(self, program: Program) -> Program:
        later = {half: self.moved(ops) for half, ops in program.schedule.halves()}
        return program.replace(schedule=place_waits(program.schedule.replace(**later)))

    def moved(self, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        out = list(ops)
        for op in reversed([op for op in ops if op.verb == "prefetch"]):
            at = out.index(op)
            users = [i for i, o in enumerate(out) if i > at and set(o.touches) & set(op.touches)]
            out.insert(max(at, min(users, default=at + 1) - 1 - self.ahead), out.pop(at))
        return tuple(out)
