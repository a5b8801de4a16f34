"""What a template's work is, from its graph: floating-point operations and bytes as expressions in the call's sizes.

Counted are the operations of matrix products, attention (half of it where it is causal, as its kernels do) and
convolutions: a multiplication and an addition for each pair, as `torch.utils.flop_counter` counts them.  Bytes are what
each node reads and writes, views aside; compiled code, which fuses, moves less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from megatrain.effects import may_alias, operation
from megatrain.graphs import evaluated
from megatrain.program import DTYPES
from megatrain.rates import Rates

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d")
ZERO = sympy.Integer(0)

Shape = tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Work:
    """Operations and bytes of a forward, and operations of its backward, in the symbols of `Program.symbols`; `dtype`
    is that of the products."""

    flops: sympy.Expr = ZERO
    backward: sympy.Expr = ZERO
    bytes: sympy.Expr = ZERO
    dtype: str = "f32"

    def seconds(self, rates: Rates, sizes: Mapping[sympy.Symbol, int]) -> dict[str, float]:
        """The least time of each kind of body at these sizes: what its operations take or its bytes, whichever is more.
        A backward moves twice what a forward does; one that recomputes does a forward first."""
        ahead, back, moved = (float(evaluated(e, sizes)) for e in (self.flops, self.backward, self.bytes))
        rate = rates.flops_of(self.dtype)
        forward, backward = max(ahead / rate, moved / rates.memory), max(back / rate, 2 * moved / rates.memory)
        return {"fwd": forward, "fwd.keep": forward, "bwd": forward + backward, "bwd.keep": backward}


def work_of(code: fx.GraphModule) -> Work:
    """The work of a template's graph, for the sizes of the first layer that uses it."""
    flops: dict[str, sympy.Expr] = {}
    back: sympy.Expr = ZERO
    moved: sympy.Expr = ZERO
    for node in code.graph.nodes:
        results = values_of(node) if node.op == "call_function" and not may_alias(node) else []
        if not results:
            continue
        read = [v for a in node.all_input_nodes for v in values_of(a)]
        moved += sum((bytes_of(t) for t in [*read, *results]), ZERO)
        kind = DTYPES.get(results[0].dtype, "f32")
        found = flops_of(node)
        flops[kind] = flops.get(kind, ZERO) + found
        back += ZERO if "linear_cross_entropy" in str(node.target) else 2 * found
    dtype = max(flops, key=lambda k: (flops[k] != 0, k in ("bf16", "f16")), default="f32")
    return Work(sympy.expand(sum(flops.values(), ZERO)), sympy.expand(back), sympy.expand(moved), dtype)


def flops_of(node: fx.Node) -> sympy.Expr:
    """Operations of a call; 0 for what is no product, attention or convolution."""
    target, args = operation(node)
    name = str(target).partition(".")[2].partition(".")[0]
    shapes = [next(map(shape_of, values_of(a)), Shape()) if isinstance(a, fx.Node) else Shape() for a in args]
    results = values_of(node)
    if not results:
        return ZERO
    made = count(shape_of(results[0]))
    if name in PRODUCTS:
        inner = shapes[1] if name in ("addmm", "baddbmm") else shapes[0]
        return 2 * made * inner[-1]
    if name == "scaled_dot_product_attention":
        query, key, value = shapes[:3]
        pairs = count(query[:-1]) * key[-2] / (2 if attends_causally(node) else 1)
        return 2 * pairs * (query[-1] + value[-1])
    if name in CONVOLUTIONS:
        return 2 * (count(shapes[0]) if name == "conv_transpose2d" else made) * count(shapes[1][1:])
    if name == "linear_cross_entropy":  # the logits, and both gradients where they are made
        return 2 * count(shapes[0]) * shapes[1][0] * (3 if args[7] else 1)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        held = [count(shape_of(w.meta["val"])) for w in args[2]]
        return 2 * count(shapes[0][:-1]) * sum(held, ZERO)
    return ZERO


def attends_causally(node: fx.Node) -> bool:
    _, args = operation(node)
    return bool(args[5] if len(args) > 5 else node.kwargs.get("is_causal", False))


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node makes."""
    value: Any = node.meta.get("val")
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]


def shape_of(t: torch.Tensor) -> Shape:
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in t.shape)


def count(shape: Shape) -> sympy.Expr:
    return prod(shape, start=sympy.Integer(1))


def bytes_of(t: torch.Tensor) -> sympy.Expr:
    return count(shape_of(t)) * t.element_size()
