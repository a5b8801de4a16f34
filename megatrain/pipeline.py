"""Passes, and the tuple of them that is the compiler.

A pass is a frozen dataclass with options for fields.  It holds no logging and no clock: observers, called between any
two passes with (pass, program), do the verifying, dumping and timing.
"""

from __future__ import annotations

import inspect
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, ClassVar

from torch import fx

from megatrain.program import STAGES, Program

Observer = Callable[["Pass", Program], None]


@dataclass(frozen=True)
class Pass:
    """A rewrite of a program.  `needs` is the stage it takes, `gives` the stage it returns; subclasses set the three
    class variables and `apply`.  `str(p)` is `name{option=value,...}` with the options that are not at their default,
    and `parse_pass` reads it back."""

    name: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    gives: ClassVar[str] = ""

    def apply(self, program: Program) -> Program:
        raise NotImplementedError(f"{type(self).__name__} has no apply(program)")

    def __str__(self) -> str:
        options = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}{{{','.join(options)}}}" if options else self.name


@dataclass(frozen=True)
class GraphPass(Pass):
    """A plain `fn(GraphModule) -> GraphModule`, run on the captured graph."""

    needs, gives = "captured", "captured"
    function: Callable[[fx.GraphModule], fx.GraphModule] = lambda module: module

    @property
    def name(self) -> str:  # type: ignore[override]
        return getattr(self.function, "__name__", "graph-pass").strip("<>")

    def apply(self, program: Program) -> Program:
        from megatrain.graphs import copied

        assert program.graph is not None
        module = self.function(copied(program.graph))
        if not isinstance(module, fx.GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"pass {self.name} returned {type(module).__name__}: return a torch.fx.GraphModule")
        module.graph.lint()
        return program.replace(graph=module)

    def __str__(self) -> str:
        return self.name


@cache
def registered() -> dict[str, type[Pass]]:
    """Passes by name: the project's own, and those installed under the entry point `megatrain.passes`."""
    import megatrain.passes as own

    found: dict[str, type[Pass]] = {p.name: p for p in own.ALL}
    for point in entry_points(group="megatrain.passes"):
        made = point.load()
        if not (inspect.isclass(made) and issubclass(made, Pass)):
            raise ValueError(f"entry point {point.name} = {point.value} is not a megatrain.Pass: name a subclass of it")
        if found.get(made.name, made) is not made:
            raise ValueError(f"two passes are named {made.name!r}: {found[made.name].__module__} and {made.__module__}")
        found[made.name] = made
    return found


def parse_pass(text: str) -> Pass:
    """The pass that `str(p)` printed.  Raises ValueError for a name nobody registered or an option it does not have."""
    match = re.fullmatch(r"([\w.-]+)(?:\{(.*)\})?", text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a pass: write it as name or name{{option=value,...}}")
    known = registered()
    if match[1] not in known:
        raise ValueError(f"no pass is named {match[1]!r}; there are {', '.join(sorted(known))}")
    made = known[match[1]]
    options: dict[str, Any] = {}
    for part in re.split(r",(?![^(\[]*[)\]])", match[2] or ""):
        if part.strip():
            key, _, value = part.partition("=")
            options[key.strip()] = literal_eval(value.strip())
    allowed = {f.name for f in fields(made)}
    if wrong := sorted(options.keys() - allowed):
        raise ValueError(
            f"pass {match[1]} has no option {', '.join(wrong)}; it has {', '.join(sorted(allowed)) or 'none'}"
        )
    return made(**options)


def pipeline(passes: Iterable[Pass | str | Callable[[fx.GraphModule], fx.GraphModule]]) -> tuple[Pass, ...]:
    """The passes as given, names parsed and plain functions wrapped, checked: each one's `needs` is reached by those
    before it, the last stage is "scheduled", and no name occurs twice.  Raises ValueError."""
    made: list[Pass] = []
    for p in passes:
        made.append(p if isinstance(p, Pass) else parse_pass(p) if isinstance(p, str) else GraphPass(p))
    graph = [p for p in made if isinstance(p, GraphPass)]
    made = graph + [p for p in made if not isinstance(p, GraphPass)]
    stage = STAGES[0]
    for i, p in enumerate(made):
        if any(q.name == p.name for q in made[:i]):
            raise ValueError(f"pass {p.name} is in the pipeline twice: {', '.join(q.name for q in made)}\nremove one")
        if p.needs != stage:
            raise ValueError(
                f"pass {p.name} needs a {p.needs} program, but the passes before it "
                f"({', '.join(q.name for q in made[:i]) or 'none'}) give a {stage} one\n"
                f"put it behind a pass that gives {p.needs}, or start from (*megatrain.DEFAULT_PASSES, ...)"
            )
        stage = p.gives
    if stage != STAGES[-1]:
        raise ValueError(
            f"the pipeline ends with a {stage} program; add the missing passes of megatrain.DEFAULT_PASSES"
        )
    return tuple(made)


def split(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes that are run once a capture, and those that are run for each set of sizes."""
    first = next(i for i, p in enumerate(passes) if STAGES.index(p.gives) > STAGES.index("partitioned"))
    return tuple(passes[:first]), tuple(passes[first:])


def run(program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> Program:
    """The program after all passes; each observer is called after each pass."""
    for p in passes:
        program = p.apply(program).replace(stage=p.gives)
        for observer in observers:
            observer(p, program)
    return program
