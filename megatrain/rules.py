"""The rules of a program at each stage, run between any two passes.  Those of a schedule alone are in `verify`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from megatrain.effects import roots, writes_into
from megatrain.program import Program
from megatrain.verify import RULES, Rule, VerifyError


def graph(program: Program) -> Iterator[str]:
    """There is one graph, it is well formed, and it calls functions only."""
    if program.graph is None:
        yield "the program has no graph\nreturn program.replace(graph=...)"
        return
    try:
        program.graph.graph.lint()
    except (RuntimeError, ValueError) as e:
        yield f"the graph is malformed: {e}\ncall graph.lint() in the pass that made it"
    for node in program.graph.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{node.format_node()}\nis no call of a function: trace through it, or insert call_function nodes"


def named(program: Program) -> Iterator[str]:
    """Placeholders are the program's inputs, results its outputs."""
    assert program.graph is not None
    placeholders = [n.name for n in program.graph.graph.find_nodes(op="placeholder")]
    if missing := sorted(set(placeholders) ^ {i.name for i in program.inputs}):
        yield f"inputs and placeholders differ: {', '.join(missing)}\ngive each placeholder an Input and the reverse"
    results = _results(program.graph)
    if len(results) != len(program.outputs):
        yield f"{len(results)} results have {len(program.outputs)} names\nkeep results and outputs in step"


def pure(program: Program) -> Iterator[str]:
    """Nothing is an attribute, and no input is written into."""
    assert program.graph is not None
    made = roots(program.graph.graph)
    for node in program.graph.graph.nodes:
        if node.op == "get_attr":
            yield f"{node.format_node()}\nis an attribute in a pure graph: make {node.target} an input"
        for written in writes_into(node):
            for root in made[written]:
                if root.op == "placeholder":
                    yield f"{node.format_node()}\nwrites into the input {root.name}: clone it first"


def homed(program: Program) -> Iterator[str]:
    """Each weight has its place in a plane."""
    known = {n for names in program.planes.values() for n in names}
    for i in program.inputs:
        if i.kind == "weight" and i.target not in known:
            yield f"weight {i.target} is in no plane\nadd it to program.planes"


def joined(program: Program) -> Iterator[str]:
    """Layers read what the caller gave or an earlier layer made, and fit their templates; every result is made."""
    known = {t.name: t for t in program.templates}
    there = {i.name for i in program.inputs if i.kind != "weight"}
    symbols = {s for s, _, _ in program.symbols}
    for layer in program.layers:
        t = known.get(layer.template)
        if t is None:
            yield f"layer {layer.name} uses template {layer.template}, which is not there"
            continue
        for n in layer.reads:
            if n not in there:
                yield f"layer {layer.name} reads {n}, which no earlier layer makes\nmove its maker before it"
        placeholders = len(t.graph.graph.find_nodes(op="placeholder"))
        if placeholders != t.values + len(t.weights) + t.ints or len(layer.reads) != t.values:
            yield f"layer {layer.name} does not fit template {t.name}: {len(layer.reads)} values, {t.values} wanted"
        if len(layer.writes) != len(_results(t.graph)):
            yield f"layer {layer.name} names {len(layer.writes)} results of {len(_results(t.graph))}"
        for p, e in t.weights:
            if p >= len(layer.planes) or e >= len(program.planes[layer.planes[p]]):
                yield f"template {t.name} takes entry {e} of plane {p}, which layer {layer.name} does not have"
        if loose := {str(s) for e in layer.ints for s in e.free_symbols - symbols}:
            yield f"layer {layer.name} needs sizes that no argument has: {', '.join(sorted(loose))}"
        there |= set(layer.writes)
    for n in program.outputs:
        if n not in there:
            yield f"result {n} is made by no layer"


def owned(program: Program) -> Iterator[str]:
    """No result of a template shares memory with what it was given, which may lie in a slot that is used again."""
    for t in program.templates:
        made = roots(t.graph.graph)
        for n in _results(t.graph):
            if isinstance(n, fx.Node) and any(r.op == "placeholder" for r in made[n]):
                yield f"result {n} of template {t.name} shares memory with an operand\nreturn a clone of it"


def typed(program: Program) -> Iterator[str]:
    """Every template has a derivative, and a value has one type for its maker and its readers."""
    types = {}
    for layer in program.layers:
        d = program.derivatives.get(layer.template)
        if d is None:
            yield f"template {layer.template} was not differentiated"
            continue
        for n, t in zip(layer.reads, d.reads, strict=True):
            if types.get(n, t) != t:
                yield f"layer {layer.name} reads {n} as {t}, it was made as {types[n]}"
        types.update(zip(layer.writes, d.writes, strict=True))


def planned(program: Program) -> Iterator[str]:
    """The plan speaks of layers that are there, and its peak is within the budget."""
    layers = {layer.name for layer in program.layers}
    if strange := sorted((program.plan.keep | program.plan.spill) - layers):
        yield f"the plan speaks of {', '.join(strange)}, which are no layers"
    if program.plan.slots < 1:
        yield "the plan has no weight slot"
    if program.budget and program.plan.peak > program.budget:
        yield f"the plan's peak is {program.plan.peak} B, the budget {program.budget} B"


def _results(module: fx.GraphModule) -> tuple[object, ...]:
    return tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]


PROGRAM_RULES: dict[str, tuple[Rule, ...]] = {
    "captured": (graph, named),
    "hoisted": (graph, named, pure, homed),
    "partitioned": (joined, owned),
    "differentiated": (joined, typed),
    "planned": (typed, planned),
    **RULES,
}
"""Stage -> its rules, in the order they run."""


def verify_program(program: Program) -> None:
    """Runs the rules of the program's stage.  VerifyError holds the faults of the first one broken."""
    for rule in PROGRAM_RULES[program.stage]:
        if faults := list(rule(program)):
            raise VerifyError(rule.__name__, faults)
