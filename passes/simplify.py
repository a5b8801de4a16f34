"""simplify: equal calls become one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from megatrain.effects import draws, family, graded, may_alias, roots, writes_into
from megatrain.graphs import copied
from megatrain.pipeline import Pass
from megatrain.program import Program


@dataclass(frozen=True)
class Simplify(Pass):
    """Calls of ATen's operators with equal arguments become one, unless they draw random numbers, write, read memory
    that was written in between, or make memory that is written later (by the caller, for results).

    One call of a layer shares nothing with another, nor with what lies between layers: equal layers stay equal, and no
    value lives longer than it did.

    Two calls through which gradients flow have a backward each, whose results are added; of one call the gradients are
    added first, which rounds differently.  So backend "eager" keeps them apart.

    Nodes that nobody reads went with the capture, and go in `causal` if passes on the captured graph have left any."""

    name, needs, gives = "simplify", "hoisted", "hoisted"

    def apply(self, program: Program) -> Program:
        assert program.graph is not None
        module = copied(program.graph)
        merge(module.graph, program.layer_of, graded(program, module.graph) if program.backend == "eager" else set())
        module.recompile()
        return program.replace(graph=module)


def merge(graph: fx.Graph, layer_of: Mapping[str, str], apart: set[fx.Node]) -> None:
    """Replaces calls by the first equal one, but for those in `apart`."""
    made_of = roots(graph)
    last = {r: i for i, n in enumerate(graph.nodes) for a in changed(n) for r in made_of[a]}
    writes: Counter[fx.Node] = Counter()
    seen: dict[object, fx.Node] = {}
    for i, (node, place) in enumerate(list(places(graph, layer_of))):
        for root in {r for a in changed(node) for r in made_of[a]}:
            writes[root] += 1
        later = any(last.get(r, -1) > i for r in made_of[node])
        if node in apart or later or changed(node) or draws(node) or not mergeable(node):
            continue
        age = sum(writes[r] for a in node.all_input_nodes for r in made_of[a])
        key = (place, age, repr((node.target, node.args, node.kwargs)))
        if (first := seen.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def mergeable(node: fx.Node) -> bool:
    """Whether the call does nothing but make its results, for all one knows."""
    return node.op == "call_function" and (node.target is operator.getitem or family(node).startswith("aten."))


def changed(node: fx.Node) -> list[fx.Node]:
    """What is another tensor after the node than before: what it writes into or detaches in place, for results what
    the caller may write into."""
    if node.op == "output":
        return node.all_input_nodes
    return may_alias(node) if family(node) == "aten.detach_" else writes_into(node)


def places(graph: fx.Graph, layer_of: Mapping[str, str]) -> Iterator[tuple[fx.Node, tuple[str, ...]]]:
    """Each node with the call of a layer that it belongs to; between layers with the last such call and the calls of
    modules that it is in."""
    last = ""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        call = next((call for call, (path, _) in stack.items() if path in layer_of), "")
        last = call or last
        yield node, (call,) if call else (last, *stack)
