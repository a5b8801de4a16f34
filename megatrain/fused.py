"""Templates compiled by inductor (backend "inductor"): one graph for one shape, through `torch.compile`.

The joint graph of a template (AOTAutograd's: forward and derivative) is cut in two by functorch's min-cut partitioner,
where the forward saves what is best to keep in `KEPT` of the memory that saving everything takes.  A layer that keeps
runs one half in the forward and the other in the backward.  A layer that is recomputed runs its forward for inference,
and both halves in the backward; then the first gives only what is saved, so that whatever only the results need goes:
the last product of a layer, say.
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
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.opaque import Opaque
from megatrain.program import TemplateGraph

LOG = logging.getLogger("megatrain")

KEPT = 0.6
"""The activation memory budget of a layer: two thirds of the bytes for 2 to 3% more time (measured for a layer of 3584
at 16 thousand tokens on an H200)."""

SMALL = 3
"""Calls of a graph that is left as it is: an embedding, say."""

MADE = -1
"""In `Cut.saved`: the forward made it; else the index of an operand."""


@dataclass(eq=False)
class Fused:
    """A graph without gradients that runs compiled, or as it is where compiling fails."""

    code: fx.GraphModule
    works: bool = True
    tried: bool = False

    def __post_init__(self) -> None:
        self.call = torch.compile(copy.deepcopy(self.code), dynamic=False, fullgraph=True)

    def __call__(self, *operands: Any) -> Sequence[Any]:
        with torch.no_grad():
            if self.tried:
                return (self.call if self.works else self.code)(*operands)
            try:
                results = self.call(*operands)
            except Exception as error:
                results = self.code(*operands)  # raises what is not the compiler's fault
                self.works = False
                LOG.warning(
                    "megatrain: a template runs uncompiled, because torch.compile fails on it: %s", brief(error)
                )
            self.tried = True
            return results


def brief(error: Exception) -> str:
    """The first line of an error, with its type; of what a backend raised."""
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@dataclass(frozen=True)
class Cut:
    """A template's forward and backward.  `forward` gives the results and then what it saves, `saving` only that;
    `backward` takes what `saved` names and the gradients of some results, and gives the gradient of each operand."""

    forward: Fused
    saving: Fused
    backward: Fused
    saved: tuple[int, ...]

    def gradients(
        self, operands: Sequence[Tensor], made: Sequence[Any] | None, given: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The gradient of each operand; None for one that has none.  `made` is what the forward saved beside operands;
        None: it is made again."""
        pieces = iter(self.saving(*operands) if made is None else made)
        return self.backward(*(next(pieces) if i == MADE else operands[i] for i in self.saved), *given)


@dataclass(frozen=True)
class Pair:
    """A template's code, as it is and compiled.  Gradients come, as a rule, `through` these results."""

    code: fx.GraphModule
    whole: Fused
    through: tuple[int, ...]
    budget: float
    cuts: dict[Any, Cut | None] = field(default_factory=dict)

    def cut(self, operands: Sequence[Tensor], flags: Sequence[bool], through: Sequence[int]) -> Cut | None:
        """The template cut for gradients that come through these results, where `flags` say which operands have one.
        None where there is no joint graph of it."""
        key = (tuple(flags), tuple(through))
        if key not in self.cuts:
            try:
                self.cuts[key] = cut_of(self.code, operands, *key, self.budget)
            except Exception as error:
                LOG.warning("megatrain: a template that trains runs uncompiled: %s", brief(error))
                self.cuts[key] = None
        return self.cuts[key]


def cut_of(
    code: fx.GraphModule, operands: Sequence[Tensor], flags: Sequence[bool], through: Sequence[int], budget: float
) -> Cut:
    """Compiles both sides of a template's joint graph.  Raises what AOTAutograd does where it makes none."""

    def results(*inputs: Tensor) -> tuple[Tensor, ...]:
        """The code's, apart in memory; those that no gradient comes through detached."""
        made = [t.clone() if i in shared else t for i, t in enumerate(code(*inputs))]
        return tuple(t if i in through else t.detach() for i, t in enumerate(made))

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t.detach()).requires_grad_(f) for t, f in zip(operands, flags, strict=True)]
    with mode, torch.enable_grad():
        seen = {t.untyped_storage()._cdata for t in fakes}
        plain = code(*fakes)
    shared: set[int] = set()
    for i, t in enumerate(plain):
        if t.untyped_storage()._cdata in seen:
            shared.add(i)
        seen.add(t.untyped_storage()._cdata)
    joint: Any = aot_export_joint_simple(results, tuple(fakes), trace_joint=True)
    count = len(plain)
    everything = list(range(len(operands)))
    with torch._functorch.config.patch(activation_memory_budget=budget):  # type: ignore[attr-defined]
        forward, backward = min_cut_rematerialization_partition(
            joint, (), num_fwd_outputs=count, static_lifetime_input_indices=everything
        )
    outputs: Any = forward.graph.output_node().args[0]
    places = {n: i for i, n in enumerate(forward.graph.find_nodes(op="placeholder"))}
    saved = tuple(places.get(n, MADE) for n in outputs[count:])
    made = [n for n in outputs[count:] if n not in places]
    names = [n.name for n in outputs[count:]]
    entering = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    if entering[: len(names)] != names or len(entering) != len(names) + len(through):
        raise ValueError(f"the backward takes {entering}, the forward saves {names}")
    return Cut(Fused(giving(forward, [*outputs[:count], *made])), Fused(giving(forward, made)), Fused(backward), saved)


def giving(module: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
    """A copy of the module that gives these of its nodes, without what only others need."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copied)
    graph.output(tuple(copied[n] for n in results))
    made = fx.GraphModule(module, graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


PAIRS: WeakKeyDictionary[fx.GraphModule, Pair] = WeakKeyDictionary()
"""What has been compiled, by the graph: measuring and running use the same."""


def pair_of(template: TemplateGraph, backend: str, through: Sequence[int]) -> Pair | None:
    """The template compiled, where the backend does that: not what draws random numbers, which would draw others, not
    what runs code of the user's, which would run once, and not what is too small to gain."""
    code = template.graph
    calls = [n.target for n in code.graph.nodes if n.op == "call_function"]
    own = template.once or any(isinstance(target, Opaque) for target in calls)
    if backend != "inductor" or template.random or own or len(calls) <= SMALL:
        return None
    if code not in PAIRS:
        loss = torch.ops.megatrain.linear_cross_entropy.default  # makes its gradients with its result: never run twice
        budget = 1.0 if loss in calls else KEPT
        PAIRS[code] = Pair(code, Fused(code), tuple(through), budget)
    return PAIRS[code]
