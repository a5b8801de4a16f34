"""partition: the graph becomes layers, and layers with equal code share a template."""

from __future__ import annotations

import operator
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import sympy
import torch
from torch import fx, ops

from megatrain.effects import draws, graded, out_of_order, roots, runs_hooks, touched, writes_into
from megatrain.graphs import size_of, text_of
from megatrain.pipeline import Pass
from megatrain.program import Layer, Program, TemplateGraph
from megatrain.structure import SLOT_NAME, unique

ATEN: Any = ops.aten


@dataclass(frozen=True)
class Partition(Pass):
    """Children of repeated containers become layers, found by `nn_module_stack`; what comes before, between and after
    becomes `prologue`, `mid1`, ... and `epilogue`.  A model without such containers is cut at its narrowest places
    into at most `pieces` pieces of similar weight."""

    name, needs, gives = "partition", "hoisted", "partitioned"
    pieces: int = 8

    def apply(self, program: Program) -> Program:
        assert program.graph is not None
        graph = fx.Graph()
        result = graph.graph_copy(program.graph.graph, {})
        graph.output(result)
        weights = {i.name for i in program.inputs if i.kind == "weight"}
        ordered = graded(program, graph) if program.backend == "eager" else set[fx.Node]()
        segment, owner = _by_module(graph, program.layer_of, weights, ordered)
        if not owner:
            segment = _by_width(graph, self.pieces)
        segment = _untangled(graph, segment)
        return _built(program, graph, segment, owner)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that belong to a layer: calls that make tensors."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and size_of(n) is None]


def _by_module(
    graph: fx.Graph, layer_of: Mapping[str, str], weights: Container[str], ordered: Container[fx.Node]
) -> tuple[dict[fx.Node, int], dict[int, str]]:
    """Segment of each node, and the layer path of each odd segment.  Layers get odd numbers in order of their
    calls, what lies between them even ones; a node outside the layers comes after all it reads and after the last
    random draw; so does what writes, after all that has read its memory, and what reads, after all that has written.
    Nodes in `ordered` stay in the order of the graph, in which autograd adds gradients, last use first."""
    segment: dict[fx.Node, int] = {}
    made_of = roots(graph)
    read: dict[fx.Node, int] = {}
    written: dict[fx.Node, int] = {}
    latest: dict[str, int] = {}
    owner: dict[int, str] = {}
    calls: dict[str, int] = {}
    last_draw = last_ordered = 0
    for node in _calls(graph):
        sources, targets = touched(node, made_of)
        need = max((segment.get(a, 0) for a in node.all_input_nodes), default=0)
        need = max([need, *(written.get(r, 0) for r in sources), *(read.get(r, 0) for r in targets)])
        if node.target is operator.getitem:
            segment[node] = need
            continue
        key = _layer_call(node, layer_of)
        if key is None:
            at = max(need, last_draw if draws(node) else 0, last_ordered if node in ordered else 0)
            segment[node] = at + at % 2
        else:
            call, path = key
            layer = layer_of[path]
            if call not in calls:
                calls[call] = latest[layer] if path != layer and layer in latest else 2 * len(owner) + 1
                owner[calls[call]] = layer
            segment[node] = latest[layer] = calls[call]
        if draws(node):
            last_draw = max(last_draw, segment[node])
        if node in ordered:
            last_ordered = max(last_ordered, segment[node])
        read.update((r, max(read.get(r, 0), segment[node])) for r in sources)
        written.update((r, max(written.get(r, 0), segment[node])) for r in targets)
    if owner:
        _sink(graph, segment, ordered)
        _absorb(segment, weights, max(owner))
    return segment, owner


def _layer_call(node: fx.Node, layer_of: Mapping[str, str]) -> tuple[str, str] | None:
    """(which call of a module, its path) for the call of a layer or of what belongs to one, or None outside the
    layers.  A module called twice is two layers."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        plain = re.sub(r"@\d+", "", re.sub(r"^L\['self'\]\.?", "", path))
        if plain in layer_of:
            return f"{key}|{path}", plain
    return None


def _sink(graph: fx.Graph, segment: dict[fx.Node, int], ordered: Container[fx.Node]) -> None:
    """Moves what only a later stretch between layers needs (shifted labels, say) to where it is needed."""
    made_of = roots(graph)
    written = {r for n in graph.nodes for a in writes_into(n) for r in made_of[a]}
    for node in reversed(_calls(graph)):
        fixed = node in ordered or draws(node) or any(made_of[a] & written for a in (node, *node.all_input_nodes))
        if segment[node] % 2 or fixed or node.target is operator.getitem:
            continue
        users = [segment[u] for u in node.users if u in segment]
        if len(users) == len(node.users) and users and min(users) % 2 == 0:
            segment[node] = max(segment[node], min(users))


def _absorb(segment: dict[fx.Node, int], weights: Container[str], last: int) -> None:
    """Joins a stretch between two layers that has no weights (an activation, a reshape) to the layer before it."""
    own = {segment[n] for n in segment if any(a.name in weights for a in n.all_input_nodes)}
    for node, k in segment.items():
        if 0 < k < last and k % 2 == 0 and k not in own:
            segment[node] = k - 1


def _by_width(graph: fx.Graph, pieces: int) -> dict[fx.Node, int]:
    """Cuts the calls, in order, where few bytes cross, into stretches of similar weight bytes: the cheapest path
    through the candidate cuts, by Dijkstra."""
    calls = _calls(graph)
    index = {n: i for i, n in enumerate(calls)}
    weights = [n for n in graph.find_nodes(op="placeholder") if n.users]
    crossing = [0] * (len(calls) + 1)
    for n in calls:
        last = max((index[u] if u in index else len(calls) - 1 for u in n.users), default=index[n])
        for i in range(index[n] + 1, last + 1):
            crossing[i] += _bytes(n)
    weight = [0] * len(calls)
    for w in weights:
        weight[min((index[u] for u in w.users if u in index), default=0)] += _bytes(w)
    total = sum(weight)
    if not calls or not total:
        return dict.fromkeys(calls, 0)
    before = [0]
    for w in weight:
        before.append(before[-1] + w)
    target = max(total / pieces, max(weight))
    ends = [0, *(i for i in range(1, len(calls)) if calls[i].target is not operator.getitem and weight[i]), len(calls)]
    chain = nx.DiGraph()
    for a in range(len(ends)):
        for b in range(a + 1, len(ends)):
            i, j = ends[a], ends[b]
            held = before[j] - before[i]
            if held > 2 * target and b > a + 1:
                break
            excess = max(0.0, held / target - 1)
            chain.add_edge(i, j, weight=1 + 20 * excess + crossing[j] / (1 + max(crossing)))
    path: list[int] = nx.dijkstra_path(chain, 0, len(calls))
    return {n: sum(i >= cut for cut in path[1:-1]) for n, i in index.items()}


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [s.node.hint or 64 if isinstance(s, torch.SymInt) else s for s in value.shape]
    return int(sympy.prod(sizes)) * value.element_size()


def _untangled(graph: fx.Graph, segment: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Segments numbered from 0 without gaps, such that every node reads only its own and earlier segments and
    nothing is written across a border: offending ranges become one segment, a written value that nobody else reads
    is cloned."""
    calls = _calls(graph)
    joined = {s: s for s in segment.values()}

    def join(first: int, last: int) -> None:
        for s in joined:
            if first <= joined[s] <= last:
                joined[s] = first

    place = {n: i for i, n in enumerate(graph.nodes)}
    made_of = roots(graph)
    for node in calls:
        for a in node.all_input_nodes:
            if a in segment and joined[segment[a]] > joined[segment[node]]:
                join(joined[segment[node]], joined[segment[a]])
    for first, last in out_of_order(calls, segment, made_of):
        if joined[first] > joined[last]:
            join(joined[last], joined[first])
    for node in calls:
        for written in writes_into(node):
            here = joined[segment[node]]
            far = [r for r in made_of[written] if r in segment and joined[segment[r]] < here]
            if not far:
                continue
            family = [n for n in graph.nodes if made_of.get(n, frozenset()) & made_of[written] and n is not written]
            later = [
                n for n in family
                if joined.get(segment.get(n, -1), here) != here and any(place[u] > place[node] for u in n.users)
            ]  # fmt: skip
            if later or joined[segment[written]] == here:
                join(min(joined[segment[r]] for r in far), here)
                continue
            first = min(
                (u for u in written.users if u in segment and joined[segment[u]] == here), key=place.__getitem__
            )
            with graph.inserting_before(first):
                clone = graph.call_function(ATEN.clone.default, (written,))
            clone.meta.update(written.meta)
            segment[clone], place[clone] = segment[node], place[first]
            made_of[clone] = frozenset([clone])
            written.replace_all_uses_with(
                clone,
                lambda u, clone=clone, start=place[first]: u is not clone and (u not in place or place[u] >= start),
            )
            return _untangled(graph, {n: joined[s] for n, s in segment.items()})
    order = {s: i for i, s in enumerate(sorted(set(joined.values())))}
    return {n: order[joined[s]] for n, s in segment.items()}


def _built(program: Program, graph: fx.Graph, segment: dict[fx.Node, int], owner: dict[int, str]) -> Program:
    inputs = {i.name: i for i in program.inputs}
    at = {name: (plane, k) for plane, names in program.planes.items() for k, name in enumerate(names)}
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    count = max(segment.values(), default=0) + 1
    paths = _paths(graph, segment, program.layer_of, count)
    names = _value_names(graph, segment, results, program, paths)
    templates: dict[str, TemplateGraph] = {}
    layers: list[Layer] = []
    taken: dict[str, int] = {}
    for k in range(count):
        nodes = [n for n in _calls(graph) if segment[n] == k]
        code, reads, weights, sizes, writes = _extracted(graph, nodes, segment, inputs, results)
        planes = tuple(dict.fromkeys(at[inputs[w.name].target][0] for w in weights))
        places = tuple((planes.index(p), e) for p, e in (at[inputs[w.name].target] for w in weights))
        key = f"{text_of(code)}\n{places}\n{sizes}"
        path, label = paths[k]
        if key not in templates:
            base = _template_name(path, label, taken)
            flags = any(map(draws, nodes)), any(map(runs_hooks, nodes))
            templates[key] = TemplateGraph(base, code, len(reads), places, len(sizes), *flags)
        layers.append(
            Layer(
                name=path,
                label=label,
                template=templates[key].name,
                reads=tuple(names[n] for n in reads),
                writes=tuple(names[n] for n in writes),
                planes=planes,
                ints=tuple(sizes),
            )
        )
    renamed = tuple(names[n] for n in results)
    return program.replace(templates=tuple(templates.values()), layers=tuple(layers), outputs=renamed)


def _extracted(
    graph: fx.Graph,
    nodes: list[fx.Node],
    segment: dict[fx.Node, int],
    inputs: Any,
    results: list[fx.Node],
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node], list[sympy.Expr], list[fx.Node]]:
    """(code, values it reads, weights it reads, sizes it is given, values it makes for others) of one segment."""
    own = set(nodes)
    reads: list[fx.Node] = []
    weights: list[fx.Node] = []
    sizes: list[sympy.Expr] = []
    for n in nodes:
        for a in n.all_input_nodes:
            if (expr := size_of(a)) is not None:
                if not expr.is_number and expr not in sizes:
                    sizes.append(expr)
            elif a not in own:
                kept = weights if a.name in inputs and inputs[a.name].kind == "weight" else reads
                if a not in kept:
                    kept.append(a)
    code = fx.Graph()
    env: dict[Any, Any] = {}
    for a in [*reads, *weights]:
        env[a] = code.placeholder(f"v_{a.name}")
        env[a].meta["val"] = a.meta.get("val")
    for i, expr in enumerate(sizes):
        env[expr] = code.placeholder(f"n{i}")

    def load(a: fx.Node) -> Any:
        expr = size_of(a)
        if expr is None:
            return env[a]
        if expr.is_number:
            return bool(expr) if expr in (sympy.true, sympy.false) else int(expr) if expr.is_Integer else float(expr)
        return env[expr]

    for n in nodes:
        env[n] = code.create_node(
            n.op,
            n.target,
            fx.map_arg(n.args, load),
            fx.map_arg(n.kwargs, load),
            name=n.name,  # type: ignore[arg-type]
        )
        env[n].meta["val"] = n.meta.get("val")
    shared = [n for n in nodes if n in results or any(segment.get(u, segment[n]) != segment[n] for u in n.users)]
    code.output(tuple(_owned(code, [env[n] for n in shared])))
    return fx.GraphModule(torch.nn.Module(), code), reads, weights, sizes, shared


def _owned(code: fx.Graph, results: list[fx.Node]) -> list[fx.Node]:
    """The results, cloned where they share memory with a placeholder: that may lie in a slot, which is used again."""
    made_of = roots(code)
    owned: list[fx.Node] = []
    for n in results:
        if any(r.op == "placeholder" for r in made_of[n]):
            clone = code.call_function(ATEN.clone.default, (n,))
            clone.meta["val"] = n.meta.get("val")
            n = clone
        owned.append(n)
    return owned


def _paths(
    graph: fx.Graph, segment: dict[fx.Node, int], layer_of: Mapping[str, str], count: int
) -> list[tuple[str, str]]:
    """(name, label) of each segment: the layer's path and its number, or what stands between layers."""
    order = list(dict.fromkeys(layer_of.values()))
    layers: dict[int, set[str]] = {}
    for n, k in segment.items():
        if (call := _layer_call(n, layer_of)) is not None:
            layers.setdefault(k, set()).add(layer_of[call[1]])
    found = [min(layers[k], key=order.index) if k in layers else "" for k in range(count)]
    if not any(found):
        return [(f"piece{k}", str(k)) for k in range(count)]
    number = mids = 0
    out: list[tuple[str, str]] = []
    for k, path in enumerate(found):
        if path:
            out.append((path, str(number)))
            number += 1
        elif not any(found[:k]):
            out.append(("prologue", "prologue"))
        elif not any(found[k:]):
            out.append(("epilogue", "epilogue"))
        else:
            mids += 1
            out.append((f"mid{mids}", f"mid{mids}"))
    return list(zip(unique([p for p, _ in out]), [label for _, label in out], strict=True))


def _template_name(path: str, label: str, taken: dict[str, int]) -> str:
    """`prologue`, `epilogue`, ... or for layers the container's name in the singular: `layers.3` -> `layer`."""
    parts = [p for p in path.split(".") if not p.split("_")[0].isdigit()]
    base = label if not label.isdigit() else re.sub(r"\W", "_", parts[-1] if parts else "layer")
    base = base[:-1] if label.isdigit() and base.endswith("s") and len(base) > 2 else base
    base = base.rstrip("0123456789") or base if path.startswith("piece") else base
    n = taken[base] = taken.get(base, 0) + 1
    return base if n == 1 else f"{base}{n}"


def _value_names(
    graph: fx.Graph, segment: dict[fx.Node, int], results: list[fx.Node], program: Program, paths: list[tuple[str, str]]
) -> dict[fx.Node, str]:
    """A name for each value that crosses a border: arguments and results by their own names, the value that goes
    from one layer to the next `x` and the reader's number, anything else by its node's name."""
    names: dict[fx.Node, str] = {}
    taken: list[str] = []

    def give(node: fx.Node, name: str) -> None:
        if node not in names:
            wanted = f"{name}_" if SLOT_NAME.fullmatch(name) else name
            names[node] = unique([*taken, wanted])[-1]
            taken.append(names[node])

    for i in program.inputs:
        if i.kind != "weight":
            node = next(n for n in graph.find_nodes(op="placeholder") if n.name == i.name)
            give(node, i.name)
    for node, name in zip(results, program.outputs, strict=True):
        give(node, name)
    for node in _calls(graph):
        readers = sorted({segment[u] for u in node.users if segment.get(u, segment[node]) != segment[node]})
        if not readers or node in names:
            continue
        value = node.meta.get("val")
        floating = not isinstance(value, torch.Tensor) or value.is_floating_point()
        label = paths[readers[0]][1]
        give(node, f"x{label}" if floating and len(readers) == 1 and readers[0] == segment[node] + 1 else node.name)
    return names
