"""causal: attention masks that only restate causality become a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from megatrain.effects import family, operation, sweep
from megatrain.graphs import copied, evaluated
from megatrain.indexed import Indexed, equals_causal, evaluate
from megatrain.pipeline import Pass
from megatrain.program import Program

ATTENTION = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Causal(Pass):
    """An attention mask that is computed from sizes alone and equals the causal mask becomes `is_causal=True`; one that
    hides nothing goes.  A repetition of key and value heads that was written out for the mask's sake folds back into
    `enable_gqa`.

    When it is traced, Hugging Face's code builds the mask that its eager code leaves out; the mask costs the flash
    kernels and other bits.  A sliding window no shorter than the sequence is the causal mask: the sizes for which
    that holds become a guard of the capture.  So does a padding mask, an argument, where it is all ones: that is looked
    at in every call (`Program.ones`)."""

    name, needs, gives = "causal", "hoisted", "hoisted"

    def apply(self, program: Program) -> Program:
        assert program.graph is not None
        module = copied(program.graph)
        known: dict[fx.Node, Indexed | None] = {}
        assumed = {n: _ones(n) for n in module.graph.find_nodes(op="placeholder") if n.name in program.ones}
        granted: dict[fx.Node, Indexed | None] = {**assumed}
        used: set[str] = set()
        verdicts: dict[fx.Node, Any] = {}
        hints = _hints(module.graph)
        guards: list[sympy.Basic] = []
        for node in list(module.graph.nodes):
            if family(node) != ATTENTION:
                continue
            mask = _argument(node, 3, "attn_mask")
            if not isinstance(mask, fx.Node) or _argument(node, 5, "is_causal"):
                continue
            if mask not in verdicts:
                verdicts[mask] = _verdict(mask, known)
                if verdicts[mask] is None and assumed:
                    verdicts[mask] = _verdict(mask, granted)
                    used |= _inputs(mask) if verdicts[mask] is not None else set()
            if verdicts[mask] is None:
                _unexpanded(mask, known)
                continue
            kind, conditions = verdicts[mask]
            if not all(evaluated(c, hints) in (True, sympy.true) for c in conditions):
                continue
            guards.extend(conditions)
            _replace(node, kind == "causal")
        sweep(module.graph)
        module.recompile()
        return program.replace(
            graph=module,
            guards=tuple(dict.fromkeys([*program.guards, *guards])),
            ones=tuple(n for n in program.ones if n in used),
        )


def _verdict(mask: fx.Node, known: dict[fx.Node, Indexed | None]) -> Any:
    found = evaluate(mask, known)
    return equals_causal(found) if found is not None else None


def _ones(node: fx.Node) -> Indexed:
    """An input of ones."""
    shape = node.meta["val"].shape
    sizes = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in shape)
    return Indexed(sizes, lambda i: sympy.Integer(1))


def _inputs(node: fx.Node) -> set[str]:
    """Names of the graph's inputs that a node is made of."""
    seen: set[fx.Node] = set()
    left = [node]
    while left:
        n = left.pop()
        if n not in seen:
            seen.add(n)
            left += n.all_input_nodes
    return {n.name for n in seen if n.op == "placeholder"}


def _unexpanded(mask: fx.Node, known: dict[fx.Node, Indexed | None]) -> None:
    """For a bias that is masked, `contiguous(where(seen, bias, lowest))`: a `seen` that hides nothing goes, one
    that was expanded over the batch is used as it was before, as eager code does; the sums over the batch in the
    backward are then the same ones."""
    where = operation(mask)[1][0] if family(mask) == "aten.contiguous" else mask
    if family(where) != "aten.where" or any(u is not mask for u in where.users if where is not mask):
        return
    if any(family(u) != ATTENTION for u in mask.users):
        return
    seen, bias, other = operation(where)[1]
    found = evaluate(seen, known) if isinstance(seen, fx.Node) else None
    if found is None or not isinstance(bias, fx.Node) or len(where.meta["val"].shape) != len(bias.meta["val"].shape):
        return
    if equals_causal(found) == ("full", ()):
        where.replace_all_uses_with(bias)
    elif family(seen) == "aten.expand":
        where.args = (operation(seen)[1][0], bias, other)


def _argument(node: fx.Node, position: int, name: str) -> Any:
    args = operation(node)[1]
    return args[position] if len(args) > position else node.kwargs.get(name)


def _replace(node: fx.Node, causal: bool) -> None:
    _, args = operation(node)
    skip = len(node.args) - len(args)
    query, key, value = args[:3]
    kwargs = {k: v for k, v in node.kwargs.items() if k != "attn_mask"}
    if dropout := _argument(node, 4, "dropout_p"):
        kwargs["dropout_p"] = dropout
    if causal:
        kwargs["is_causal"] = True
    folded = [_unrepeated(a) for a in (key, value)]
    if all(f is not None for f in folded) and _head(key) == _head(value) <= 256:
        key, value = folded
        kwargs["enable_gqa"] = True
    node.args = (*node.args[:skip], query, key, value)
    node.kwargs = kwargs


def _head(node: Any) -> int:
    return int(node.meta["val"].shape[-1])


def _unrepeated(node: Any) -> fx.Node | None:
    """What `reshape(expand(unsqueeze(x, 2)))` repeated each head of, [batch, heads, length, head size], or None."""
    if family(node) not in ("aten.reshape", "aten.view"):
        return None
    expanded = operation(node)[1][0]
    if family(expanded) != "aten.expand":
        return None
    inner = _unsliced(operation(expanded)[1][0])
    if family(inner) != "aten.unsqueeze" or operation(inner)[1][1] != 2:
        return None
    source = _unsliced(operation(inner)[1][0])
    shape, wide = source.meta["val"].shape, expanded.meta["val"].shape
    result = node.meta["val"].shape
    right = len(shape) == 4 and len(wide) == 5 and isinstance(wide[2], int)
    return source if right and result[1] == shape[1] * wide[2] and result[3] == shape[3] else None


def _unsliced(node: fx.Node) -> fx.Node:
    """`node` without slices that take everything."""
    while family(node) == "aten.slice":
        args = operation(node)[1]
        source = args[0]
        if len(args) > 2 and (args[2] != 0 or (len(args) > 3 and args[3] != 2**63 - 1) or len(args) > 4):
            break
        node = source
    return node


def _hints(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """The sizes that the graph was captured with."""
    found: dict[sympy.Symbol, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                found[size.node.expr] = size.node.hint
    return found
