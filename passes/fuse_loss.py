"""fuse_loss: the last linear layer and the cross entropy of its results become one operator."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megatrain.effects import family, sweep
from megatrain.graphs import copied
from megatrain.losses import linear_cross_entropy, shape_of
from megatrain.pipeline import Pass
from megatrain.program import Program

SHAPES = ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.contiguous")
CASTS = ("aten.to", "aten._to_copy")


@dataclass(frozen=True)
class FuseLoss(Pass):
    """`cross_entropy(steps(linear(x, w)))` becomes `megatrain.linear_cross_entropy`, which makes the loss and its
    gradients in one pass over chunks of rows.  The steps between may be a cast to fp32, a scale and a soft cap.  Logits
    that the caller gets stay results, unless `skip_logits` drops those that a loss is made of: then nobody holds them.

    It adds up in another order than PyTorch's kernels do, so that backend "eager" leaves the loss as it is."""

    name, needs, gives = "fuse_loss", "hoisted", "hoisted"
    skip_logits: bool = False

    def apply(self, program: Program) -> Program:
        assert program.graph is not None
        module = copied(program.graph)
        graph = module.graph
        losses = graph.find_nodes(op="call_function", target=torch.ops.aten.cross_entropy_loss.default)
        if self.skip_logits:
            program = without_logits(program, graph, losses)
        if program.backend != "eager" and not program.autocast:  # which would choose the dtype of the product
            for node in graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
                if len(node.args) == 2 and not node.kwargs and node.meta["val"].dtype == node.args[0].meta["val"].dtype:
                    node.replace_all_uses_with(node.args[0])  # gives the tensor itself
                    graph.erase_node(node)
            for node in losses:
                found = matched(node)
                if found is not None and fusible(node, found[0]):
                    fuse(node, *found, program.training)
        elif not self.skip_logits:
            return program
        sweep(graph)
        module.recompile()
        return program.replace(graph=module)


def without_logits(program: Program, graph: fx.Graph, losses: Sequence[fx.Node]) -> Program:
    """Drops results that the losses are made of, back to the linear layer."""
    output = graph.output_node()
    results: Any = output.args[0]
    own = len(results) - len(program.writes_back)
    logits: set[fx.Node] = set()
    for loss in losses:
        node: Any = loss.args[0]
        seen: set[fx.Node] = set()
        while isinstance(node, fx.Node) and family(node) != "aten.linear" and step_of(node) is not None:
            seen.add(node)
            node = node.args[0]
        if isinstance(node, fx.Node) and family(node) == "aten.linear":
            logits |= seen | {node}
    gone = tuple(i for i in range(own) if results[i] in logits)
    output.args = (tuple(r for i, r in enumerate(results) if i not in gone),)
    outputs = tuple(n for i, n in enumerate(program.outputs) if i not in gone)
    return program.replace(outputs=outputs, skipped=gone)


def fusible(loss: fx.Node, linear: fx.Node) -> bool:
    """Whether all that is read of the logits and the steps between, beside the loss, is read by the caller."""
    chain = chain_of(loss, linear)
    users = {u for n in (linear, *(chain - {loss})) for u in n.users} - chain
    return users <= {loss.graph.output_node()}


def matched(loss: fx.Node) -> tuple[fx.Node, str] | None:
    """(the linear layer whose results the loss is of, the steps between), or None where that is not all there is."""
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Any] = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    if given.get("weight") is not None or given.get("label_smoothing") or given.get("reduction", 1) not in (1, 2):
        return None
    node: Any = given["input"]
    steps: list[str] = []
    if not isinstance(node, fx.Node) or node.meta["val"].dim() != 2 or given["target"].meta["val"].dim() != 1:
        return None
    while family(node) != "aten.linear":
        if (step := step_of(node)) is None:
            return None
        steps.insert(0, step)
        node = node.args[0]
        if not isinstance(node, fx.Node):
            return None
    assert isinstance(node, fx.Node)
    if node.target is not torch.ops.aten.linear.default or (len(node.args) > 2 and node.args[2] is not None):
        return None
    operands: Any = node.args[:2]
    x, weight = (a.meta["val"] for a in operands)
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float32):
        return None  # in fp16 gradients underflow that are not scaled yet
    if given["target"].meta["val"].dtype != torch.int64:
        return None
    if node.meta["val"].shape[-1] != given["input"].meta["val"].shape[-1]:
        return None
    text = "; ".join(s for s in steps if s)
    right = shape_of(text) is not None and (x.dtype == torch.float32 or "float" in text)
    return (node, text) if right else None


def step_of(node: fx.Node) -> str | None:
    """What a node does to logits, as `losses.shape_of` reads it; empty for a new shape, None for anything else."""
    kind = family(node) if isinstance(node.target, torch._ops.OpOverload) else ""
    if kind in SHAPES:
        return ""
    if kind in CASTS:
        return "float" if node.meta["val"].dtype == torch.float32 else None
    number = node.args[1] if len(node.args) > 1 else None
    if (
        kind in ("aten.mul", "aten.div")
        and isinstance(number, (int, float))
        and not node.kwargs
        and len(node.args) == 2
    ):
        return f"{kind.removeprefix('aten.')} {float(number)!r}"
    return "tanh" if kind == "aten.tanh" else None


def chain_of(loss: fx.Node, linear: fx.Node) -> set[fx.Node]:
    """The loss and the steps between it and the linear layer."""
    chain: set[fx.Node] = set()
    node: Any = loss
    while node is not linear:
        chain.add(node)
        node = node.args[0]
    return chain


def fuse(loss: fx.Node, linear: fx.Node, steps: str, training: bool) -> None:
    graph = loss.graph
    target = loss.args[1]
    given: dict[str, Any] = dict(zip(("reduction", "ignore_index"), loss.args[3:5], strict=False)) | loss.kwargs
    chain = chain_of(loss, linear)
    read = [n for n in graph.nodes if n in chain - {loss} and any(u not in chain for u in n.users)]
    wanted = bool(read) or any(u not in chain for u in linear.users)
    mean, ignore = given.get("reduction", 1) == 1, given.get("ignore_index", -100)
    args: tuple[Any, ...] = (*linear.args[:2], target, steps, mean, ignore, wanted, training)
    with graph.inserting_before(loss):
        made = graph.call_function(torch.ops.megatrain.linear_cross_entropy.default, args)
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(2)]
    values = linear_cross_entropy(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    for n, value in ((made, values), (results[0], values[0]), (results[1], values[1])):
        n.meta = {**loss.meta, "val": value}
    loss.replace_all_uses_with(results[0])
    if wanted:  # the steps again, from the logits that the operator gives
        with graph.inserting_before(loss):
            again: dict[fx.Node, fx.Node] = {linear: results[1]}
            for n in [n for n in graph.nodes if n in chain - {loss}] if read else []:
                again[n] = graph.node_copy(n, lambda a: again.get(a, a))
        output = graph.output_node()
        for n, other in again.items():
            output.replace_input_with(n, other)
