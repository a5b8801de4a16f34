"""A program as text: the graph while it is one graph, templates and layers once it is partitioned, then the
schedule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from megatrain.program import DTYPES, Program
from megatrain.schedule import Schedule
from megatrain.text import show_bytes, show_paths, show_schedule


def show(what: Program | Schedule) -> str:
    """The text of a schedule (which `parse` reads back), or of a program at its stage."""
    if isinstance(what, Schedule):
        return show_schedule(what)
    if what.stage == "scheduled":
        return show_schedule(what.schedule)
    lines = graph_lines(what) if what.stage in ("captured", "hoisted") else template_lines(what)
    return "\n".join([f"; {what.stage}", *size_lines(what), *lines]) + "\n"


def size_lines(program: Program) -> Iterator[str]:
    if program.symbols:
        named = [f"{s} = {name}.shape[{dim}]" for s, name, dim in program.symbols]
        yield f"; sizes {', '.join(named)}"
    for guard in program.guards:
        yield f"; guard {guard}"


def graph_lines(program: Program) -> Iterator[str]:
    assert program.graph is not None
    kinds = {i.name: i for i in program.inputs}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            i = kinds.get(node.name)
            kind = i.kind if i else "input"
            yield f"{kind} {node.name} {value_type(node)}{'  ; ' + i.target if i and i.target != node.name else ''}"
        elif node.op == "get_attr":
            yield f"weight {node.name} {value_type(node)}  ; {node.target}"
        elif node.op == "output":
            names = dict(zip(program.outputs, node.args[0], strict=True))
            yield "return " + ", ".join(f"{name}={n}" for name, n in names.items())
        else:
            yield node_line(node)


def template_lines(program: Program) -> Iterator[str]:
    users: dict[str, list[str]] = {}
    for layer in program.layers:
        users.setdefault(layer.template, []).append(layer.name)
    for t in program.templates:
        yield f"template {t.name}  {show_paths(tuple(users.get(t.name, [])))}{'  random' if t.random else ''}"
        for node in t.graph.graph.nodes:
            if node.op == "placeholder":
                yield f"  {node.name} {value_type(node)}"
            elif node.op == "output":
                yield f"  return {', '.join(map(str, node.args[0]))}"
            else:
                yield f"  {node_line(node)}"
        if d := program.derivatives.get(t.name):
            graded = f"{sum(d.differentiable)} of {len(d.writes)}"
            yield f"  ; carries a gradient: {graded} results; keeps {show_bytes(d.kept)}"
    if program.plan.peak:
        slots, peak = program.plan.slots, show_bytes(program.plan.peak)
        yield f"; plan: {slots} weight slot{'s' * (slots > 1)}, peak {peak}"
    for layer in program.layers:
        flags = "keep " * (layer.name in program.plan.keep) + "spill" * (layer.name in program.plan.spill)
        sizes = f" sizes {', '.join(map(str, layer.ints))}" if layer.ints else ""
        reads, writes = ", ".join(layer.reads), ", ".join(layer.writes)
        planes = " + ".join(
            f"{p} {show_bytes(program.plane_bytes[p])}" for p in layer.planes if p in program.plane_bytes
        )
        yield f"layer {layer.label} {layer.template}({reads}) -> {writes}  {planes}{sizes} {flags}".rstrip()


def node_line(node: fx.Node) -> str:
    args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
    target = getattr(node.target, "__name__", node.target) if callable(node.target) else node.target
    name = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else target
    return f"{node.name} = {name}({args}) {value_type(node)}".rstrip()


def value_type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{DTYPES.get(value.dtype, value.dtype)}[{','.join(map(str, value.shape))}]"
