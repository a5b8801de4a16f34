"""Templates compiled by inductor (backend "inductor"): one graph for one shape, through `torch.compile`.

A layer that is recomputed keeps nothing of its forward, so that its forward is compiled for inference; its backward is
one graph, forward and derivative (AOTAutograd's joint graph), from which goes whatever no gradient needs: the last
product of a layer, say.  A layer that keeps its graph saves what is best to keep in `KEPT` of the memory that saving
everything takes: what AOTAutograd's min-cut partitioner finds.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.program import TemplateGraph

LOG = logging.getLogger("megatrain")

KEPT = 0.6
"""The activation memory budget of a layer that keeps its graph: two thirds of the bytes for 2 to 3% more time (measured
for a layer of 3584 at 16 thousand tokens on an H200)."""


SMALL = 3
"""Calls of a graph that is left as it is: an embedding, say."""


@dataclass(eq=False)
class Fused:
    """A graph that runs compiled, or as it is where compiling fails."""

    code: fx.GraphModule
    budget: float
    known: set[Any] = field(default_factory=set)
    """The grad modes it has been called in: there is one compilation for each."""
    works: bool = True

    def __post_init__(self) -> None:
        self.call = torch.compile(copy.deepcopy(self.code), dynamic=False, fullgraph=True)

    def __call__(self, *operands: Tensor) -> Sequence[Tensor]:
        if not self.works:
            return self.code(*operands)
        mode = (torch.is_grad_enabled(), tuple(t.requires_grad for t in operands))
        if mode in self.known:
            return self.call(*operands)
        try:
            with torch._functorch.config.patch(activation_memory_budget=self.budget):  # type: ignore[attr-defined]
                results = self.call(*operands)
        except Exception as error:
            results = self.code(*operands)  # raises what is not the compiler's fault
            self.works = False
            LOG.warning("megatrain: a template runs uncompiled, because torch.compile fails on it: %s", brief(error))
            return results
        self.known.add(mode)
        return results


def brief(error: Exception) -> str:
    """The first line of an error, with its type; of what a backend raised."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@dataclass(frozen=True)
class Pair:
    """A template's code, compiled for bodies that save nothing and for those that keep."""

    code: fx.GraphModule
    whole: Fused
    kept: Fused
    derived: dict[Any, Fused | None] = field(default_factory=dict)

    def derivative(
        self, operands: Sequence[Tensor], flags: Sequence[bool], through: Sequence[int], targets: Sequence[int]
    ) -> Fused | None:
        """What gives the gradients of the operands in `targets` (None where there is none), from the operands and the
        gradients of the results in `through`; operands have a gradient where `flags` say so.  None where AOTAutograd
        makes no joint graph of the code."""
        key = (tuple(flags), tuple(through), tuple(targets))
        if key not in self.derived:
            code = derivative_of(self.code, operands, *key)
            self.derived[key] = Fused(code, 1.0) if code else None
        return self.derived[key]


def derivative_of(
    code: fx.GraphModule,
    operands: Sequence[Tensor],
    flags: Sequence[bool],
    through: Sequence[int],
    targets: Sequence[int],
) -> fx.GraphModule | None:
    """See `Pair.derivative`: the joint graph, without what only the results need."""

    def chosen(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = code(*inputs)
        return tuple(results[i].clone() for i in through)  # no result may be an operand

    try:
        with FakeTensorMode() as mode, torch.enable_grad():
            fakes = [mode.from_tensor(t.detach()).requires_grad_(f) for t, f in zip(operands, flags, strict=True)]
        joint: Any = aot_export_joint_simple(chosen, tuple(fakes), trace_joint=True)
    except Exception as error:
        LOG.info("megatrain: a template is differentiated at each call: %s", brief(error))
        return None
    output = joint.graph.output_node()
    gradients = output.args[0][len(through) :]
    output.args = (tuple(gradients[i] for i in targets),)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


PAIRS: WeakKeyDictionary[fx.GraphModule, Pair] = WeakKeyDictionary()
"""What has been compiled, by the graph: measuring and running use the same."""


def pair_of(template: TemplateGraph, backend: str, seldom: Sequence[int]) -> Pair | None:
    """The template compiled, where the backend does that: not what draws random numbers, which would draw others, and
    not what is too small to gain.  Through results in `seldom` no gradient comes back."""
    code = template.graph
    calls = sum(n.op == "call_function" for n in code.graph.nodes)
    if backend != "inductor" or template.random or calls <= SMALL:
        return None
    if code not in PAIRS:
        cut = without_gradient(code, seldom)
        made = torch.ops.megatrain.linear_cross_entropy.default  # makes its gradients with its result: never run twice
        kept = 1.0 if any(n.target is made for n in code.graph.nodes) else KEPT
        PAIRS[code] = Pair(code, Fused(cut, 1.0), Fused(cut, kept))
    return PAIRS[code]


def without_gradient(code: fx.GraphModule, results: Sequence[int]) -> fx.GraphModule:
    """A copy that detaches these results: a compiled backward computes with zeros for a gradient that is not given."""
    made = copy.deepcopy(code)
    output = made.graph.output_node()
    found = list(output.args[0])  # type: ignore[arg-type]
    with made.graph.inserting_before(output):
        for i in results:
            found[i] = made.graph.call_function(torch.ops.aten.detach.default, (found[i],))  # type: ignore[arg-type]
    output.args = (tuple(found),)
    made.recompile()
    return made
