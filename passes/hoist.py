"""hoist: parameters, buffers and constants become inputs of a pure graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, ops

from megatrain.effects import roots, writes_into
from megatrain.pipeline import Pass
from megatrain.program import Input, Program

ATEN: Any = ops.aten


@dataclass(frozen=True)
class Hoist(Pass):
    """Turns every tensor attribute into a placeholder; names of one tensor share one.

    An input that the graph writes into (a BatchNorm's statistics, an argument) is cloned where the graph begins and its
    last value becomes a result, so that the graph is a function and running it again repeats nothing."""

    name, needs, gives = "hoist", "captured", "hoisted"

    def apply(self, program: Program) -> Program:
        assert program.graph is not None
        source = program.graph.graph
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        inputs: list[Input] = []
        for node in source.find_nodes(op="placeholder"):
            env[node] = graph.node_copy(node)
            inputs.append(next(i for i in program.inputs if i.name == node.name))
        by_target: dict[str, fx.Node] = {}
        for node in source.find_nodes(op="get_attr"):
            target = program.ties.get(str(node.target), str(node.target))
            if target not in by_target:
                made = by_target[target] = graph.placeholder(node.name)
                made.meta.update(node.meta)
                inputs.append(Input(made.name, "weight", target))
            env[node] = by_target[target]
        for node in source.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                env[node] = graph.node_copy(node, lambda n: env[n])
        results = [env[n] for n in source.output_node().args[0]]  # type: ignore[union-attr, index]
        written = self._written(graph)
        clones = self._clone(graph, written)
        graph.output(tuple(results) + tuple(clones))
        targets = {i.name: i for i in inputs}
        states = {n.name for n in written if targets[n.name].kind == "weight"}
        inputs = [Input(i.name, "state", i.target) if i.name in states else i for i in inputs]
        inputs.sort(key=lambda i: ("input", "state", "weight").index(i.kind))
        module = fx.GraphModule(program.graph, graph, "Hoisted")
        return program.replace(
            graph=module,
            inputs=tuple(inputs),
            outputs=program.outputs + tuple(f"new_{n.name}" for n in written),
            writes_back=tuple(n.name for n in written),
        )

    def _written(self, graph: fx.Graph) -> list[fx.Node]:
        """Placeholders whose memory some node writes into."""
        made_of = roots(graph)
        found = {r for n in graph.nodes for a in writes_into(n) for r in made_of[a] if r.op == "placeholder"}
        return [n for n in graph.find_nodes(op="placeholder") if n in found]

    def _clone(self, graph: fx.Graph, written: list[fx.Node]) -> list[fx.Node]:
        """A clone of each written placeholder, made just before its first use, in whose place it stands from there
        on."""
        clones: list[fx.Node] = []
        for node in written:
            first = next(n for n in graph.nodes if node in n.all_input_nodes)
            with graph.inserting_before(first):
                clone = graph.create_node("call_function", ATEN.clone.default, (node,), name=f"{node.name}_now")
            clone.meta.update(node.meta)
            clone.meta["nn_module_stack"] = first.meta.get("nn_module_stack")
            node.replace_all_uses_with(clone, lambda user, clone=clone: user is not clone)
            clones.append(clone)
        return clones
