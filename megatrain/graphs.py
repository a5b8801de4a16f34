"""Small operations on fx graphs that several passes need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a graph of its own and the same attributes."""
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    return fx.GraphModule(module, graph, module.__class__.__name__)


def size_of(node: Any) -> sympy.Expr | None:
    """The expression that a size node stands for (`sym_size`, arithmetic on sizes), None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    if isinstance(value, (bool, int, float)):
        return sympy.sympify(value)
    return None


def evaluated(expr: Any, sizes: Mapping[sympy.Symbol, int]) -> Any:
    """An expression or a guard at these sizes."""
    return expr.subs(dict(sizes))


def text_of(module: fx.GraphModule) -> str:
    """The graph as text with nodes numbered in order: equal for graphs that differ in names alone."""
    number: dict[fx.Node, int] = {}
    lines: list[str] = []

    def show(a: Any) -> Any:
        return _Name(f"%{number[a]}") if isinstance(a, fx.Node) else _Name(repr(a)) if a is not None else None

    for node in module.graph.nodes:
        args = map_aggregate(node.args, show)
        kwargs = map_aggregate(node.kwargs, show)
        kind = node.op if node.op in ("placeholder", "output") else node.target
        shape = shape_text(node) if node.op == "placeholder" else ""
        lines.append(f"{kind}{shape} {args} {kwargs}" if node.op != "placeholder" else f"{node.op} {shape}")
        number[node] = len(number)
    return "\n".join(lines)


def shape_text(node: fx.Node) -> str:
    """dtype and symbolic shape of what a node makes, or "" where it is not known."""
    value = node.meta.get("val")
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""


def number(expr: Any, sizes: Mapping[sympy.Symbol, int]) -> bool | int | float:
    """What an expression of sizes is at these sizes, as Python computes it."""
    value = sympy_interp(PythonReferenceAnalysis, dict(sizes), expr)
    if isinstance(value, sympy.logic.boolalg.Boolean):
        return bool(value)
    if isinstance(value, sympy.Basic):
        return int(value) if value.is_Integer else float(value)  # type: ignore[arg-type]
    return value


class _Name(str):
    """Text that shows without quotes."""

    __repr__ = str.__str__
