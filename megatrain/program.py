"""Everything known about a step: the graph, its templates and layers, the plan, the schedule.

A `Program` is a value: a pass takes one and returns another.  Fields that a stage has not filled yet are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from megatrain.rates import Rates
from megatrain.schedule import Schedule, TensorType

STAGES = ("captured", "hoisted", "partitioned", "differentiated", "planned", "scheduled")

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.complex64: "c64", torch.complex128: "c128",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.bool: "bool",
}  # fmt: skip
"""The short name that a dump uses for a dtype."""


Strided = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def type_of(t: torch.Tensor) -> TensorType:
    """The type of a tensor with concrete sizes."""
    return TensorType(DTYPES[t.dtype], tuple(int(s) for s in t.shape))


@dataclass(frozen=True)
class Input:
    """An input of the graph.  `kind` is "input" (an argument of the model), "state" (a buffer that the step changes),
    "weight" (a parameter, an unchanging buffer or a constant, streamed).  `target` is the argument's path or the dotted
    name of the tensor; `name` is the placeholder's."""

    name: str
    kind: str
    target: str


@dataclass(frozen=True)
class TemplateGraph:
    """Stateless code of one or more layers.  Placeholders of `graph` are, in order: `values` tensors that other layers
    made or the caller gave, one for each of `weights`, then `ints` sizes.

    `weights` holds, for each weight, (index of the plane among the layer's planes, index of the entry in the plane)."""

    name: str
    graph: fx.GraphModule
    values: int
    weights: tuple[tuple[int, int], ...]
    ints: int
    random: bool
    """It draws random numbers, so a recomputing body starts from the recorded generator state."""
    once: bool = False
    """It runs hooks of the user's, so its layers are kept, never recomputed."""


@dataclass(frozen=True)
class Layer:
    """One use of a template.  `reads` and `writes` are value names, `planes` the host planes of its weights, `ints` the
    sizes it is given, as expressions in the symbols of `Program.symbols`."""

    name: str
    label: str
    template: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    planes: tuple[str, ...]
    ints: tuple[sympy.Expr, ...] = ()


@dataclass(frozen=True)
class Derivative:
    """What differentiate finds out about a template at given sizes.

    `needs` tells which value operands get a gradient, `trains` which weights do, `differentiable` which results carry
    one.  Byte counts are on the device: `kept` for an autograd graph beside the operands, workspaces for the bodies
    fwd, fwd.keep, bwd and bwd.keep."""

    reads: tuple[TensorType, ...]
    writes: tuple[TensorType, ...]
    needs: tuple[bool, ...] = ()
    trains: tuple[bool, ...] = ()
    differentiable: tuple[bool, ...] = ()
    dense: tuple[bool, ...] = ()
    """Which results are contiguous, so that a slot can hold them."""
    seldom: tuple[int, ...] = ()
    """Results that the caller gets beside a loss, such as logits: differentiable, and seldom differentiated."""
    kept: int = 0
    workspace: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    seconds: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """What the bodies take: measured where they are compiled on a device, else by the work in the graph."""

    @property
    def through(self) -> tuple[int, ...]:
        """The results that gradients come through as a rule."""
        return tuple(i for i, f in enumerate(self.differentiable) if f and i not in self.seldom)


@dataclass(frozen=True)
class BodySpec:
    """What one body of a template is called with, beside its name in the schedule.

    Operands are, in order: the kept graph (a backward with `keep`), the template's values, its planes, the generator
    state (a backward with `state`), the gradients of the results in `grads`, the sums so far of the gradients of the
    values in `adds`, the gradient slots of the planes in `sums` and `into` (added into).  Results are: the template's
    results and then the generator state or the kept graph (forward), or the gradients of the values in `wants` and the
    gradient slots of the planes in `trains` (backward)."""

    template: str
    forward: bool
    keep: bool = False
    grads: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    into: tuple[int, ...] = ()
    """Planes whose gradients live on the device, or have been fetched: what this backward makes is added to them."""
    wants: tuple[int, ...] = ()
    trains: tuple[int, ...] = ()
    state: bool = False
    """A forward gives the generator state that it began with, a recomputing backward starts from it."""


@dataclass(frozen=True)
class Plan:
    """What lives where.  `keep` and `spill` hold layer names: a layer in `keep` keeps its autograd graph from
    forward to backward, any other is recomputed; the inputs of a layer in `spill` wait on the host.  `slots` is the
    number of weight slots, `peak` the planned device bytes."""

    slots: int = 2
    keep: frozenset[str] = frozenset()
    spill: frozenset[str] = frozenset()
    peak: int = 0
    resident: tuple[str, ...] = ()
    """Host planes that live on the device: weights, gradients and optimizer state."""
    deferred: tuple[str, ...] = ()
    """Host planes whose update in the backward half waits for its end, gradients in a buffer of their own."""
    choices: tuple[Choice, ...] = ()
    """What the planner compared, the one that it took first."""


@dataclass(frozen=True)
class Choice:
    """A plan as it was compared: how many planes live on the device, how many layers keep, inputs of how many layers go
    to the host; device bytes at its peak, and seconds of a simulated step and of each lane in it."""

    resident: int
    keep: int
    spill: int
    peak: int
    step: float
    busy: Mapping[str, float]


@dataclass(frozen=True)
class Program:
    """See the module.  `needs` tells which graph inputs want a gradient (argument inputs and weights, by target)."""

    stage: str = "captured"
    graph: fx.GraphModule | None = None
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()
    """Names of the graph's results: first the caller's, then one for each input in `writes_back`."""
    skipped: tuple[int, ...] = ()
    """Which of the caller's results a pass has dropped: the caller gets None for them."""
    writes_back: tuple[str, ...] = ()
    """Names of the inputs (state, or an argument the model writes into) whose new value is a result."""
    guards: tuple[sympy.Basic, ...] = ()
    ones: tuple[str, ...] = ()
    """Names of inputs that are all ones: after `causal`, those for which the program holds only then."""
    symbols: tuple[tuple[sympy.Symbol, str, int], ...] = ()
    """(symbol, input name, dimension) for each size that may vary."""
    ties: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Dotted name -> the name under which its tensor is known, for tensors with more than one name."""
    training: bool = True
    """Gradients are wanted: the schedule has a backward half."""
    needs: frozenset[str] = frozenset()
    tracked: frozenset[str] = frozenset()
    """Weights that require a gradient, also where none is wanted: kernels are chosen by that."""
    wanted: tuple[bool, ...] = ()
    """Which of the caller's results have a gradient in the backward half; empty: every one that can."""
    adding: frozenset[str] = frozenset()
    """Host planes whose gradients are there already, from backwards before: the backward half fetches them, adds its
    own and sends the sum back."""
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    """Autocast as it was around the call: (device type, dtype)."""
    templates: tuple[TemplateGraph, ...] = ()
    layers: tuple[Layer, ...] = ()
    layer_of: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Dotted path of a module -> the path of the layer it belongs to, in order; see `planes.layer_of`."""
    planes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Host plane -> dotted names of the tensors in it."""
    plane_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of each host plane, and so of its copy in a slot."""
    grad_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of each plane's gradients: those of its parameters that require them."""
    weights: Mapping[str, Strided] = field(default_factory=lambda: MappingProxyType({}))
    """(shape, stride, dtype) of every parameter, buffer and constant by dotted name."""
    arguments: Mapping[str, Strided] = field(default_factory=lambda: MappingProxyType({}))
    """(shape, stride, dtype) of the arguments of this call, by input name."""
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=lambda: MappingProxyType({}))
    device: str = "cpu"
    backend: str = "eager"
    """How templates run: by PyTorch's own kernels (`eager`), or compiled (`inductor`)."""
    budget: int = 0
    """Bytes allowed on the device; 0 means unlimited."""
    derivatives: Mapping[str, Derivative] = field(default_factory=lambda: MappingProxyType({}))
    bodies: Mapping[str, BodySpec] = field(default_factory=lambda: MappingProxyType({}))
    plan: Plan = field(default_factory=Plan)
    schedule: Schedule = field(default_factory=Schedule)
    update: str = ""
    """The rule of updates in the backward half (`adamw`), for which gradients wait in a ring; empty: there are none."""
    staging: int = 0
    """Bytes of each of two slots through which updates of host planes go on the device; 0: none does."""
    gradient_room: int = 0
    """Host bytes for gradients whose update waits until the backward has ended."""
    spare: int = 0
    """Host bytes for inputs of layers that go there although the device has room for them."""
    candidates: tuple[str, ...] = ()
    """Host planes that may live on the device, the first ones first."""
    state_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Bytes of the optimizer's state of planes, where one of megatrain's own holds it."""
    rates: Rates | None = None
    """What the machine does in a second; None: nominal rates."""
    extra: bool = False
    """Another forward is outstanding: this one may leave nothing but its shared values on the device."""

    def replace(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def template(self, name: str) -> TemplateGraph:
        return next(t for t in self.templates if t.name == name)
