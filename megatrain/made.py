"""A capture, and what has been made of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import sympy

from megatrain.capture import Capture
from megatrain.executable import Executable
from megatrain.program import Program

LOG = logging.getLogger("megatrain")

MOST_SHAPES = 8
"""Sets of sizes for which a capture's templates are compiled."""


@dataclass(eq=False)
class Made:
    """A capture with its partitioned program and the executables made of it, by sizes and form."""

    capture: Capture
    program: Program
    part: bool = False
    """Of a part of the model, whose planes live on the host."""
    planned: dict[Any, Program] = field(default_factory=dict)
    executables: dict[Any, Executable] = field(default_factory=dict)
    sizes: dict[Any, dict[sympy.Symbol, int] | None] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    """Paths of the arguments that the forward writes into."""
    shapes: set[Any] = field(default_factory=set)
    """The sizes for which its templates are compiled."""
    ones: frozenset[str] = frozenset()
    """Paths of the arguments that are all ones in every call that it serves."""

    def compiles(self, shapes: Any, warned: set[str]) -> bool:
        """Whether templates are compiled for these sizes: for the first few, since each costs a compilation."""
        sizes = ", ".join(f"{name} {list(shape)}" for name, (shape, _, _) in shapes)
        if shapes not in self.shapes and len(self.shapes) < MOST_SHAPES:
            LOG.info("megatrain: compiling for %s", sizes)
            self.shapes.add(shapes)
        elif shapes not in self.shapes and "shapes" not in warned:
            warned.add("shapes")
            LOG.warning(
                "megatrain: compiled for %s sets of sizes already: %s and any other runs uncompiled, which is slower\n"
                "pad batches to a few lengths (a tokenizer's pad_to_multiple_of)", len(self.shapes), sizes,
            )  # fmt: skip
        return shapes in self.shapes
