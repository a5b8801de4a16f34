"""The schedule: what happens, in which order, on which lane.  Pure data; everything else in megatrain meets here.

A schedule is a list of ops in three halves (forward, backward, update).  The verb of an op fixes its lane; its `after`
names what it waits for.  Names tell where a thing is: a dotted name (`layers.3.w`) is a host plane, a bare one (`w1`,
`x3`) is on the device, and a bare one that the schedule declares as a slot is a buffer that outlives the op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

LANES = {"prefetch": "h2d", "compute": "compute", "offload": "d2h", "update": "host"}
"""Verb -> the lane that owns it.  There are no other verbs and no other lanes."""

HALVES = ("forward", "backward", "update")

PAGE = 4096
"""Bytes; planes and slots are whole pages, so that no two planes share one and each can be registered by itself."""

LASTING = frozenset({"resident", "updates"})
"""Roles of slots that are in use outside the halves too: what lives on the device, and where updates go through."""

STAGING = ("t0", "t1")
"""The slots through which updates of host planes go on the device."""

ITEMSIZE = {
    "f64": 8, "f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1, "c64": 8, "c128": 16,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by the short name a dump uses for a dtype."""


@dataclass(frozen=True)
class TensorType:
    """What a dump says of a device tensor: `f32[8,1024]`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEMSIZE[self.dtype] * prod(self.shape)


Type = TensorType | int
"""The type of a body's operand or result: a tensor, or so many bytes (a packed plane, or a kept autograd graph)."""


def nbytes(t: Type) -> int:
    return t if isinstance(t, int) else t.nbytes


@dataclass(frozen=True)
class Op:
    """One line: `label verb call(reads) -> writes after after`.

    `call` names the body of a compute op (`block.fwd`) or the rule of an update (`adamw`), and is empty for the copies.
    `after` holds labels of earlier ops of the same half, and `prev(name)`: the last users of a slot or a plane in
    whatever half ran before, whichever schedule that was.
    """

    label: str
    verb: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    call: str = ""
    after: tuple[str, ...] = ()

    @property
    def lane(self) -> str:
        return LANES[self.verb]

    @property
    def touches(self) -> tuple[str, ...]:
        """Names read or written, each once, in order of appearance."""
        return tuple(dict.fromkeys(self.reads + self.writes))


@dataclass(frozen=True)
class Slot:
    """A device buffer of `bytes` bytes, allocated once.  `role` is weights, gradients, activations, resident or
    updates."""

    name: str
    role: str
    bytes: int


@dataclass(frozen=True)
class Body:
    """The signature of a compute op's body: types of operands and results, and the device bytes it needs beside
    them."""

    name: str
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    workspace: int = 0


@dataclass(frozen=True)
class Template:
    """Stateless code shared by `layers`, with the bodies it is run through (`fwd`, `bwd`, `fwd.keep`, `bwd.keep`)."""

    name: str
    layers: tuple[str, ...]
    bodies: tuple[Body, ...] = ()


@dataclass(frozen=True)
class Value:
    """A device tensor that is there when the half starts (a batch input) or that the caller receives (`results`)."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Schedule:
    """A step.  `inputs` are the values bound before the forward half; `grads` those bound before the backward half (the
    gradients of outputs); `outputs` and `input_grads` name the values that the caller receives after each half."""

    templates: tuple[Template, ...] = ()
    slots: tuple[Slot, ...] = ()
    inputs: tuple[Value, ...] = ()
    outputs: tuple[str, ...] = ()
    grads: tuple[Value, ...] = ()
    input_grads: tuple[str, ...] = ()
    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    update: tuple[Op, ...] = ()
    budget: int = 0
    """Bytes allowed on the device; 0 says that none was set."""

    def __str__(self) -> str:
        from megatrain.text import show_schedule

        return show_schedule(self)

    def replace(self, **changes: object) -> Schedule:
        return replace(self, **changes)  # type: ignore[arg-type]

    def halves(self) -> Iterator[tuple[str, tuple[Op, ...]]]:
        """(name, ops) of each half that has ops."""
        for half in HALVES:
            if ops := getattr(self, half):
                yield half, ops

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.forward + self.backward + self.update

    @property
    def bodies(self) -> dict[str, Body]:
        """Body by the name a compute op calls it: `block.fwd`."""
        return {f"{t.name}.{b.name}": b for t in self.templates for b in t.bodies}

    @property
    def slot_bytes(self) -> dict[str, int]:
        return {s.name: s.bytes for s in self.slots}


def on_host(name: str) -> bool:
    """A dotted name is on the host."""
    return "." in name


def prev(name: str) -> str:
    """The wait for the last users of `name` before this half began."""
    return f"prev({name})"


def prev_of(wait: str) -> str:
    """The name inside `prev(name)`, or "" for the label of an op."""
    return wait[5:-1] if wait.startswith("prev(") and wait.endswith(")") else ""
