"""What an fx node does beside computing: which tensors it writes into, which it may alias, whether it draws random
numbers.  Read off the schemas of ATen's operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from megatrain import ops
from megatrain.opaque import Opaque
from megatrain.program import Program

DROPOUTS = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
UNMARKED = frozenset(
    f"aten.{name}"
    for name in (
        "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "cartesian_prod", "conj_physical", "einsum",
        "meshgrid", "sum_to_size", "type_as", "unsafe_chunk", "unsafe_split",
    )
)  # fmt: skip
"""Operators that may return their arguments' memory though their schema does not say so (found by running PyTorch's
own sample inputs, and type_as and einsum)."""

RNNS = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")


def operation(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """(operator, positional arguments) of a call, looking through `megatrain.ops`."""
    target, args = node.target, node.args
    while target in (ops.without_grad, ops.under_autocast):
        skip = 0 if target is ops.without_grad else 3
        target, args = args[skip], args[skip + 1 :]  # type: ignore[assignment]
    return target, args


def family(node: fx.Node) -> str:
    """The operator's name without its overload: `aten.dropout`."""
    target, _ = operation(node)
    return str(target).rpartition(".")[0] if isinstance(target, torch._ops.OpOverload) else ""


def writes_into(node: fx.Node) -> list[fx.Node]:
    """The arguments that the call changes in place."""
    target, args = operation(node)
    if isinstance(target, Opaque):
        first = len(target.names)
        return _nodes(args[0][first : first + len(target.buffer_names)])
    if not isinstance(target, torch._ops.OpOverload) or family(node) == "aten.detach_":  # writes no memory
        return []
    schema = target._schema.arguments
    found = [a for a, s in zip(args, schema, strict=False) if s.alias_info is not None and s.alias_info.is_write]
    found += [node.kwargs[s.name] for s in schema if s.alias_info and s.alias_info.is_write and s.name in node.kwargs]
    if family(node) in ("aten.batch_norm", "aten.instance_norm") and args[5]:
        found += [args[3], args[4]]
    return _nodes(found)


def may_alias(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a result of the call may share."""
    target, args = operation(node)
    if target is operator.getitem:
        return _nodes(args[:1])
    if not isinstance(target, torch._ops.OpOverload):
        return _nodes(args) if node.op == "call_function" else []
    if family(node) in DROPOUTS:
        return _nodes(args[:1])
    if family(node) in UNMARKED:
        return _nodes(args)
    if not any(r.alias_info is not None for r in target._schema.returns):
        return []
    return _nodes([a for a, s in zip(args, target._schema.arguments, strict=False) if s.alias_info is not None])


def roots(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """For each node the nodes that made the memory it may share."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        shared = [found[a] for a in may_alias(node)]
        found[node] = frozenset().union(*shared) if shared else frozenset([node])
    return found


def touched(node: fx.Node, made_of: Mapping[fx.Node, frozenset[fx.Node]]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that made the memory that a call reads, and the memory that it writes."""
    read = {r for a in node.all_input_nodes for r in made_of[a]}
    return read, {r for a in writes_into(node) for r in made_of[a]}


def out_of_order(
    calls: Iterable[fx.Node], segment: Mapping[fx.Node, int], made_of: Mapping[fx.Node, frozenset[fx.Node]]
) -> list[tuple[int, int]]:
    """(segment of a write and of what touches its memory afterwards, or of a read and of the write after it), where the
    first is the higher one."""
    found: list[tuple[int, int]] = []
    read: dict[fx.Node, int] = {}
    written: dict[fx.Node, int] = {}
    for node in calls:
        here = segment[node]
        sources, targets = touched(node, made_of)
        found += [(written[r], here) for r in sources if written.get(r, here) > here]
        found += [(read[r], here) for r in targets if read.get(r, here) > here]
        read.update((r, max(read.get(r, here), here)) for r in sources)
        written.update((r, max(written.get(r, here), here)) for r in targets)
    return found


def draws(node: fx.Node) -> bool:
    """Whether the call draws random numbers as it is written (a dropout in training, attention with dropout)."""
    target, args = operation(node)
    if isinstance(target, Opaque):
        return target.module.training
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if family(node) in DROPOUTS:
        return bool(args[2]) and args[1] != 0
    if family(node) == "aten.scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if family(node) in RNNS:
        floats = [a for a in args if isinstance(a, float)]
        return any(floats) and any(a is True for a in args)
    return True


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    out: list[fx.Node] = []
    for value in values:
        if isinstance(value, fx.Node):
            out.append(value)
        elif isinstance(value, (list, tuple)):
            out.extend(_nodes(value))
    return out


def runs_hooks(node: fx.Node) -> bool:
    """Whether the call runs a user's hooks, which must happen once."""
    target = operation(node)[0]
    return isinstance(target, Opaque) and target.hooked


def sweep(graph: fx.Graph) -> None:
    """Removes calls whose results nobody reads, unless they do something else too: write, draw, run hooks.  Of a call
    under no_grad fx would not know."""

    def stays(node: fx.Node) -> bool:
        does = node.op == "call_function" and (draws(node) or bool(writes_into(node)) or runs_hooks(node))
        return does or node.is_impure()

    graph.eliminate_dead_code(stays)


def graded(program: Program, graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose value may need a gradient: made with autograd on, floating, from a value that needs one or that
    such a value was written into.  An argument may need one if it is floating."""
    kinds = {i.name: i for i in program.inputs}
    made_of = roots(graph)
    found: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in graph.nodes if program.training else ():
        if node.op == "placeholder":
            i = kinds[node.name]
            if i.target in program.needs or (i.kind == "input" and floating(node.meta.get("val"))):
                found.add(node)
            continue
        if node.target is ops.without_grad or family(node) in ("aten.detach", "aten.detach_"):
            continue
        if any(a in found or made_of[a] & written for a in node.all_input_nodes):
            written |= {r for a in writes_into(node) for r in made_of[a]}
            found |= {node} if floating(node.meta.get("val")) else set()
    return found


def floating(value: object) -> bool:
    """Whether a value, or a tensor among several, is of a dtype that gradients have."""
    if isinstance(value, (tuple, list)):
        return any(map(floating, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
