"""emit: from the plan to a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from megatrain.emission import emitted
from megatrain.pipeline import Pass
from megatrain.program import Program


@dataclass(frozen=True)
class Emit(Pass):
    """Writes down the plan as ops in the plain order of need, with exact waits."""

    name, needs, gives = "emit", "planned", "scheduled"

    def apply(self, program: Program) -> Program:
        schedule, bodies = emitted(program)
        return program.replace(schedule=schedule, bodies=MappingProxyType(bodies))
