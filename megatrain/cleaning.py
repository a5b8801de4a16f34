"""Export's graph made plain: regions inlined, assertions gone, devices retargeted, opaque children in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.node import map_aggregate

from megatrain import ops
from megatrain.effects import may_alias, writes_into
from megatrain.opaque import OPERATOR, Opaque

ASSERTIONS = (
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)


class Copier:
    """Copies export's graph into a clean one, region by region."""

    def __init__(
        self,
        graph: fx.Graph,
        home: torch.device,
        device: torch.device,
        guards: list[sympy.Basic],
        opaque: Mapping[str, Opaque],
    ):
        self.graph, self.home, self.device, self.guards, self.opaque = graph, home, device, guards, opaque
        self.grad_ish: set[fx.Node] = set()
        self.made_of: dict[fx.Node, frozenset[fx.Node]] = {}
        """The nodes that made the memory that a node may share; a node that is not in it made its own."""
        self.grad_roots: set[fx.Node] = set()
        """Those of them into which something was written that a gradient may flow through."""

    def run(
        self, source: fx.GraphModule, env: dict[fx.Node, Any], wrap: tuple[Any, ...] = (), no_grad: bool = False
    ) -> list[Any]:
        for node in source.graph.nodes:
            if node.op == "output":
                found = node.args[0]
                return [env[n] if isinstance(n, fx.Node) else n for n in pytree.tree_leaves(found)]
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                env[node] = getattr(source, str(node.target))
                continue
            env[node] = self.node(source, node, env, wrap, no_grad)
        return []

    def node(self, source: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], wrap: Any, no_grad: bool) -> Any:
        target = node.target
        name = str(target)
        if name in ASSERTIONS:
            if name == "aten._assert_scalar.default":
                condition = node.args[0]
                value = condition.meta.get("val") if isinstance(condition, fx.Node) else None
                if isinstance(value, torch.SymBool):
                    self.guards.append(value.node.expr)
            return None
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *args = [self.load(a, env) for a in node.args]
            return self.region(inner, args, wrap, no_grad or not enabled)
        if name == "wrap_with_autocast":
            kind, dtype, enabled, _, inner, *args = [self.load(a, env) for a in node.args]
            ambient = torch.is_autocast_enabled(kind)
            same = enabled == ambient and (not enabled or dtype in (None, torch.get_autocast_dtype(kind)))
            return self.region(inner, args, wrap if same else (kind, dtype, enabled), no_grad)
        args = map_aggregate(node.args, lambda a: self.load(a, env))
        kwargs = map_aggregate(node.kwargs, lambda a: self.load(a, env))
        if getattr(target, "__name__", "") == "getitem" and isinstance(args[0], list):  # type: ignore[index]
            return args[0][args[1]]  # type: ignore[index]
        tracked = any(isinstance(a, fx.Node) and self.differentiable(a) for a in pytree.tree_leaves((args, kwargs)))
        if any(isinstance(a, fx.GraphModule) for a in pytree.tree_leaves((args, kwargs))):
            raise ValueError(f"{name} with a sub-graph of its own is not supported: write {node.name} without it")
        if name == OPERATOR:
            target, args = self.opaque[str(args[1])], args[:1]  # type: ignore[index]
        if wrap:
            target, args = ops.under_autocast, (*wrap, target, *args)  # type: ignore[misc]
        if no_grad and tracked:
            target, args = ops.without_grad, (target, *args)  # type: ignore[misc]
        made = self.graph.create_node(node.op, target, args, kwargs, name=node.name)  # type: ignore[arg-type]
        made.meta.update(node.meta)
        if shared := [self.roots(a) for a in may_alias(made)]:
            self.made_of[made] = frozenset().union(*shared)
        if tracked and not no_grad:
            self.grad_ish.add(made)
            self.grad_roots.update(*(self.roots(a) for a in writes_into(made)))
        return made

    def roots(self, node: fx.Node) -> frozenset[fx.Node]:
        return self.made_of.get(node, frozenset([node]))

    def region(self, inner: fx.GraphModule, args: list[Any], wrap: Any, no_grad: bool) -> list[Any]:
        placeholders = inner.graph.find_nodes(op="placeholder")
        return self.run(inner, dict(zip(placeholders, args, strict=True)), wrap, no_grad)

    def load(self, a: Any, env: dict[fx.Node, Any]) -> Any:
        if isinstance(a, fx.Node):
            return env[a]
        if isinstance(a, torch.device) and a.type == self.home.type:
            return self.device
        return a

    def differentiable(self, node: fx.Node) -> bool:
        """Whether a gradient may flow through `node`: it is made from a parameter or from a floating point argument, or
        such a value was written into its memory."""
        if self.roots(node) & self.grad_roots:
            return True
        if node.op not in ("placeholder", "get_attr"):
            return node in self.grad_ish
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.is_floating_point()
