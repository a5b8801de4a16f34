"""causal: placeholder."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.pipeline import Pass
from megatrain.program import Program


@dataclass(frozen=True)
class Causal(Pass):
    """."""

    name, needs, gives = "causal", "hoisted", "hoisted"

    def apply(self, program: Program) -> Program:
        return program
