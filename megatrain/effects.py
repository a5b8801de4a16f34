"""What an fx node does beside computing: which tensors it writes into, which it may alias, whether it draws random
numbers.  Read off the schemas of ATen's operators."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from megatrain import ops
from megatrain.opaque import Opaque

DROPOUTS = ("aten.dropout", "aten.feature_dropout", "aten.alpha_dropout", "aten.feature_alpha_dropout")
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
