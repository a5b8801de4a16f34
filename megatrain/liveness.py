"""When values die, and the device bytes that follow from it.  Derived facts: nothing here is stored in a schedule.

Values are the bare names that are not slots.  They live from the op that writes them (inputs and grads: from the start
of their half) to their last use, which may be in the backward half.  One that nobody uses dies after the op that made
it, or after the first op of its half.  Results that the caller receives live to the end of their half at least, and
their bytes count until the schedule ends, because the caller may hold them through the backward.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.schedule import Schedule, TensorType, Type, nbytes, on_host

BLOCK = 512
"""The granularity of CUDA's caching allocator, taken for the CPU too."""


def values(schedule: Schedule, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that are values: neither on the host nor slots."""
    slots = schedule.slot_bytes
    return tuple(name for name in names if name not in slots and not on_host(name))


def value_types(schedule: Schedule) -> dict[str, Type]:
    """Type of each value: as bound, or as the body that makes it says.  A value of unknown make is left out."""
    types: dict[str, Type] = {v.name: v.type for v in schedule.inputs + schedule.grads}
    bodies = schedule.bodies
    slots = schedule.slot_bytes
    for op in schedule.ops:
        if body := bodies.get(op.call):
            made = zip(op.writes, body.outputs, strict=False)
            types |= {name: t for name, t in made if name not in slots and not on_host(name)}
    return types


def bound(schedule: Schedule, half: str) -> tuple[str, ...]:
    """The values that are there when `half` starts, beside those of the half before."""
    start = {"forward": schedule.inputs, "backward": schedule.grads}
    return tuple(v.name for v in start.get(half, ()))


def handed(schedule: Schedule, half: str) -> tuple[str, ...]:
    """The values that the caller receives when `half` ends."""
    return {"forward": schedule.outputs, "backward": schedule.input_grads}.get(half, ())


def last_uses(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """For every label, the values that die after that op, in order of their making."""
    last: dict[str, str] = {}
    for half, ops in schedule.halves():
        last |= dict.fromkeys(bound(schedule, half), ops[0].label)
        for op in ops:
            last |= dict.fromkeys(values(schedule, op.touches), op.label)
        last |= dict.fromkeys(values(schedule, handed(schedule, half)), ops[-1].label)
    dying: dict[str, list[str]] = {op.label: [] for op in schedule.ops}
    for name, label in last.items():
        dying[label].append(name)
    return {label: tuple(names) for label, names in dying.items()}


def held_bytes(t: Type) -> int:
    """Bytes that a value occupies: device allocators hand out whole blocks of BLOCK bytes."""
    return -(-nbytes(t) // BLOCK) * BLOCK


def device_bytes(schedule: Schedule) -> dict[str, int]:
    """For every label, the bytes on the device while that op runs: all slots, the live values, those it makes and those
    that die after it included, and its body's workspace.

    Memory follows order of text, as in a caching allocator, whose blocks come and go in the order of issue.  A value of
    unknown type and an unknown body count nothing, so that a faulty schedule can still be shown.  A result that
    goes into an activation slot is made beside it first, and counts for that op.
    """
    bodies = schedule.bodies
    types = value_types(schedule)
    dying = last_uses(schedule)
    sizes = schedule.slot_bytes
    slots = sum(sizes.values())
    live: dict[str, int] = {}
    held: dict[str, int] = {}
    for half, ops in schedule.halves():
        live |= {name: held_bytes(types[name]) for name in bound(schedule, half)}
        for op in ops:
            live |= {name: held_bytes(types[name]) for name in op.writes if name in types}
            made = zip(op.writes, bodies[op.call].outputs, strict=False) if op.call in bodies else ()
            copied = sum(held_bytes(t) for n, t in made if n in sizes and isinstance(t, TensorType))
            workspace = bodies[op.call].workspace + copied if op.call in bodies else 0
            held[op.label] = slots + sum(live.values()) + workspace
            for name in dying[op.label]:
                if name not in schedule.outputs:
                    live.pop(name, None)
    return held


def peak(schedule: Schedule) -> int:
    """The most device bytes at any op; with no ops, the slots."""
    return max(device_bytes(schedule).values(), default=sum(slot.bytes for slot in schedule.slots))
