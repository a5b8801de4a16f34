"""Happens-before: which waits a schedule needs, and the proof that they suffice.

Two ops conflict if they touch the same slot or host plane from different lanes and at least one writes.  Bare names
that are not slots are values: they belong to the compute lane alone and never conflict.  Op a happens before op b if a
path of lane order (ops of one lane run in order of text) and `after` leads from a to b.

Sets of ops are Python ints: bit i stands for the i-th op of the half.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatrain.schedule import Op, Schedule, on_host, prev, prev_of


@dataclass(frozen=True)
class Race:
    """`later` may overtake `earlier` on `name`.  `earlier` is what to add to `later.after`: a label or `prev(name)`."""

    half: str
    name: str
    earlier: str
    later: str


def shared(op: Op, slots: Container[str]) -> Iterator[str]:
    """The slots and planes that `op` touches, each once."""
    return (name for name in op.touches if name in slots or on_host(name))


def conflicts(a: Op, b: Op, slots: Container[str]) -> tuple[str, ...]:
    """The slots and planes on which `a` and `b` conflict."""
    if a.lane == b.lane:
        return ()
    return tuple(n for n in shared(a, slots) if n in b.touches and (n in a.writes or n in b.writes))


def nearest_conflicts(ops: Sequence[Op], slots: Container[str]) -> list[dict[int, str]]:
    """For each op, the earlier ops it conflicts with (index -> name) that no other conflict puts before it already.

    Of the ops touching a name these are the last writer and, for a write, also the last reader of each lane since.  If
    all of these are ordered then all conflicts are, by induction along the text.
    """
    writer: dict[str, int] = {}
    readers: dict[str, dict[str, int]] = {}
    found: list[dict[int, str]] = []
    for i, op in enumerate(ops):
        rivals: dict[int, str] = {}
        for name in shared(op, slots):
            users = [writer[name]] if name in writer else []
            if name in op.writes:
                users += readers.pop(name, {}).values()
                writer[name] = i
            else:
                readers.setdefault(name, {})[op.lane] = i
            rivals |= {j: name for j in users if ops[j].lane != op.lane}
        found.append(rivals)
    return found


def happens_before(ops: Sequence[Op]) -> list[int]:
    """For each op of one half, the set of ops that end before it starts.  Waits for anything but earlier labels count
    for nothing."""
    index: dict[str, int] = {}
    lanes: dict[str, int] = {}
    before: list[int] = []
    for i, op in enumerate(ops):
        direct = [index[wait] for wait in op.after if wait in index]
        if op.lane in lanes:
            direct.append(lanes[op.lane])
        before.append(_closed(before, direct))
        index[op.label] = lanes[op.lane] = i
    return before


def _closed(before: Sequence[int], direct: Iterable[int]) -> int:
    bits = 0
    for j in direct:
        bits |= before[j] | 1 << j
    return bits


def first_touches(ops: Sequence[Op], before: Sequence[int], slots: Container[str]) -> Iterator[tuple[int, str]]:
    """(index, name) of every op that touches a slot or plane and that no other op touching it happens before."""
    touched: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in shared(op, slots):
            if not before[i] & touched.get(name, 0):
                yield i, name
            touched[name] = touched.get(name, 0) | 1 << i


def place_waits(schedule: Schedule) -> Schedule:
    """The schedule with every `after` computed anew, each half by `place_waits_ops`."""
    slots = schedule.slot_bytes
    return schedule.replace(**{half: place_waits_ops(ops, slots) for half, ops in schedule.halves()})


def place_waits_ops(ops: Sequence[Op], slots: Container[str]) -> tuple[Op, ...]:
    """One half with the fewest waits that order it: dropping any one is a race.

    Labels come first, in order of text: the cross-lane edges of the transitive reduction of lane order plus conflicts.
    Then `prev(name)`, slots before planes, for each slot or plane that the op is among the first to touch.  (Late in a
    half the order of the lanes may imply a `prev` already.  It stays: whoever moves ops need look at one name only.)
    """
    lanes: dict[str, int] = {}
    before: list[int] = []
    labels: list[list[str]] = []
    for i, rivals in enumerate(nearest_conflicts(ops, slots)):
        lane = ops[i].lane
        bits = _closed(before, [lanes[lane]] if lane in lanes else [])
        waits: list[int] = []
        for j in sorted(rivals, reverse=True):  # a path from j to i through another rival passes a later one
            if not bits >> j & 1:
                waits.append(j)
                bits |= before[j] | 1 << j
        before.append(bits)
        labels.append([ops[j].label for j in reversed(waits)])
        lanes[lane] = i
    prevs: list[list[str]] = [[] for _ in ops]
    for i, name in first_touches(ops, before, slots):
        prevs[i].append(name)
    return tuple(
        replace(op, after=(*labels[i], *(prev(name) for name in sorted(prevs[i], key=on_host))))
        for i, op in enumerate(ops)
    )


def races(schedule: Schedule) -> list[Race]:
    """What the waits leave unordered, whatever ran before; [] is a proof, half by half, that nothing is.

    Within a half every conflict is ordered.  Between halves every op that touches a slot or plane is, or happens after,
    an op that waits for `prev` of it: since `prev(name)` is the last user of `name` on every lane, all earlier users,
    of whichever halves and schedules, end before any op here touches it.  Waits that nothing needs are no error.
    """
    slots = schedule.slot_bytes
    return [race for half, ops in schedule.halves() for race in _half_races(half, ops, slots)]


def _half_races(half: str, ops: Sequence[Op], slots: Container[str]) -> Iterator[Race]:
    before = happens_before(ops)
    for i, rivals in enumerate(nearest_conflicts(ops, slots)):
        for j, name in sorted(rivals.items()):
            if not before[i] >> j & 1:
                yield Race(half, name, ops[j].label, ops[i].label)
    carriers: dict[str, int] = {}
    for i, op in enumerate(ops):
        for name in filter(None, map(prev_of, op.after)):
            carriers[name] = carriers.get(name, 0) | 1 << i
    for i, name in first_touches(ops, before, slots):
        if not carriers.get(name, 0) & (before[i] | 1 << i):
            yield Race(half, name, prev(name), ops[i].label)


def unroll(sequence: Sequence[tuple[Schedule, str]]) -> tuple[Op, ...]:
    """The halves (schedule, half name) run one after another, as one list of ops.

    Labels get their half's position (`2:fwd0`), each `prev(name)` becomes the last users of `name` in all earlier
    halves, one a lane, and values, which no other lane sees, are left out.
    """
    users: dict[str, dict[str, str]] = {}
    ops: list[Op] = []
    for at, (schedule, half) in enumerate(sequence):
        slots = schedule.slot_bytes
        resolved: list[Op] = []
        for op in getattr(schedule, half):
            waits = [[*users.get(prev_of(w), {}).values()] if prev_of(w) else [f"{at}:{w}"] for w in op.after]
            kept = frozenset(shared(op, slots))
            resolved.append(
                replace(
                    op,
                    label=f"{at}:{op.label}",
                    reads=tuple(n for n in op.reads if n in kept),
                    writes=tuple(n for n in op.writes if n in kept),
                    after=tuple(label for labels in waits for label in labels),
                )
            )
        for op in resolved:
            for name in op.touches:
                users.setdefault(name, {})[op.lane] = op.label
        ops += resolved
    return tuple(ops)


def unrolled_races(sequence: Sequence[tuple[Schedule, str]]) -> list[Race]:
    """Every conflicting pair, near or far, that is unordered when these halves (schedule, half name) run one after
    another.  Brute force, quadratic in the ops: the check on `races` and `place_waits` for tests."""
    ops = unroll(sequence)
    before = happens_before(ops)
    names = {name for op in ops for name in op.touches}
    return [
        Race(sequence[int(b.label.split(":")[0])][1], name, a.label, b.label)
        for i, b in enumerate(ops)
        for j, a in enumerate(ops[:i])
        if not before[i] >> j & 1
        for name in conflicts(a, b, names)
    ]
