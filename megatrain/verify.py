"""The rules of each stage, run between any two passes.

A rule takes a program and yields a message for each fault: what is wrong, the lines it is in, the cure.  Its name is
put before the message.  Rules run in order and the first that finds faults ends the run, so a rule may rely on those
above it.  A stage's rules are a row of `RULES`; those of the scheduled stage take the schedule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from megatrain import text
from megatrain.liveness import device_bytes, handed, value_types, values
from megatrain.order import races
from megatrain.schedule import ITEMSIZE, LANES, Body, Op, Schedule, TensorType, nbytes, on_host, prev_of

Rule = Callable[[Any], Iterator[str]]
"""Takes a Program, anything with an attribute `schedule`."""

ScheduleRule = Callable[[Schedule], Iterator[str]]

FAULTS_SHOWN = 4


class VerifyError(ValueError):
    """A program breaks `rule`."""

    def __init__(self, rule: str, faults: Sequence[str]):
        shown = [f"{rule}: {fault}" for fault in faults[:FAULTS_SHOWN]]
        if more := len(faults) - len(shown):
            shown.append(f"and {more} more of the rule '{rule}'")
        super().__init__("\n\n".join(shown))
        self.rule = rule
        self.faults = tuple(faults)


def verify(program: Any, stage: str) -> None:
    """Run the rules of `stage`.  VerifyError holds the faults of the first one broken."""
    _run(RULES.get(stage, ()), program)


def verify_schedule(schedule: Schedule) -> None:
    """Run the rules of the scheduled stage on a schedule alone.  VerifyError as for `verify`."""
    _run(SCHEDULE_RULES, schedule)


def _run(rules: Sequence[Rule], subject: Any) -> None:
    for rule in rules:
        if faults := list(rule(subject)):
            raise VerifyError(rule.__name__, faults)


def on_schedule(rule: ScheduleRule) -> Rule:
    """The rule for a program that holds the schedule."""

    @wraps(rule)
    def of_program(program: Any) -> Iterator[str]:
        return rule(program.schedule)

    return of_program


def fault(what: str, ops: Sequence[Op], cure: str) -> str:
    """A message: what is wrong, the lines of `ops`, the cure."""
    return "\n".join([what, *(f"  {line}" for line in text.show_ops(ops)), cure])


def verb(schedule: Schedule) -> Iterator[str]:
    """Every verb is known: it gives the op its lane."""
    for op in schedule.ops:
        if op.verb not in LANES:
            yield fault(f"{op.label} has no known verb", [op], f"write one of {', '.join(LANES)}")


def name(schedule: Schedule) -> Iterator[str]:
    """Every name can be printed and read back."""
    for op in schedule.ops:
        bad = [] if text.is_label(op.label) else [op.label]
        bad += [n for n in op.touches if not text.is_operand(n)]
        bad += [n for n in map(prev_of, op.after) if n and not text.is_operand(n)]
        bad += [op.call] if op.call and not text.is_path(op.call) else []
        for n in bad:
            yield fault(f"{n!r} cannot be read back", [op], "write an identifier, or a dotted path for the host")
    bare = [t.name for t in schedule.templates] + [n for s in schedule.slots for n in (s.name, s.role)]
    bare += [v.name for v in schedule.inputs + schedule.grads] + [*schedule.outputs, *schedule.input_grads]
    paths = [n for t in schedule.templates for n in (*t.layers, *(body.name for body in t.bodies))]
    types = [t for body in schedule.bodies.values() for t in body.inputs + body.outputs]
    types += [v.type for v in schedule.inputs + schedule.grads]
    for n in bare:
        if not text.is_bare(n):
            yield fault(f"the declared name {n!r} cannot be read back", [], "write an identifier")
    for n in paths:
        if not text.is_path(n):
            yield fault(f"the declared name {n!r} cannot be read back", [], "write words joined by dots")
    for t in types:
        if isinstance(t, TensorType) and t.dtype not in ITEMSIZE:
            yield fault(f"the declared type {text.show_type(t)} is unknown", [], f"write one of {', '.join(ITEMSIZE)}")


def declared(schedule: Schedule) -> Iterator[str]:
    """Slots and values given from outside have different names, and so have templates and bodies."""
    given = [s.name for s in schedule.slots] + [v.name for v in schedule.inputs + schedule.grads]
    bodies = [f"{t.name}.{b.name}" for t in schedule.templates for b in t.bodies]
    for names in (given, [t.name for t in schedule.templates], bodies):
        for n in dict.fromkeys(n for n in names if names.count(n) > 1):
            yield fault(f"{n} is declared {names.count(n)} times", [], "give each slot, value and body its own name")


def label(schedule: Schedule) -> Iterator[str]:
    """A label is one op's."""
    seen: dict[str, Op] = {}
    for op in schedule.ops:
        if op.label in seen:
            yield fault(f"two ops are called {op.label}", [seen[op.label], op], "give one of them another label")
        seen[op.label] = op


def operand(schedule: Schedule) -> Iterator[str]:
    """Each verb moves between the places it is for: prefetch one plane to one slot, offload one slot to one plane,
    compute on the device, update on the host."""
    slots = schedule.slot_bytes
    for op in schedule.ops:
        sides = {"prefetch": (op.reads, op.writes), "offload": (op.writes, op.reads)}.get(op.verb)
        if sides:
            host, device = sides
            if len(host) != 1 or len(device) != 1 or not on_host(host[0]) or on_host(device[0]):
                form = "layers.0.w -> w0" if op.verb == "prefetch" else "g0 -> layers.0.dw"
                yield fault(f"{op.label} is no copy between host and device", [op], f"write '{op.verb} {form}'")
            elif device[0] not in slots:
                cure = f"declare {device[0]} as a slot, or name one of: {', '.join(slots) or 'none is declared'}"
                yield fault(f"{op.label} copies {device[0]}, which is no slot", [op], cure)
        for n in op.touches if not sides else ():
            if on_host(n) != (op.verb == "update"):
                here, there = ("host", "device") if on_host(n) else ("device", "host")
                cure = f"copy {n} to the {there} first, or use the verb that works on the {here}"
                yield fault(f"{op.label} runs on the {there} and {n} is on the {here}", [op], cure)


def wait(schedule: Schedule) -> Iterator[str]:
    """An op waits for earlier ops of its half, or for the last users of a slot or plane."""
    slots = schedule.slot_bytes
    for half, ops in schedule.halves():
        index = {op.label: i for i, op in enumerate(ops)}
        for i, op in enumerate(ops):
            for w in op.after:
                n = prev_of(w)
                if n and n not in slots and not on_host(n):
                    cure = f"drop it, or declare {n} as a slot"
                    yield fault(f"{op.label} waits for {w}, and {n} is no slot and no plane", [op], cure)
                elif not n and w not in index:
                    cure = f"drop it, or wait for the last users of a name with prev({(op.touches or ('NAME',))[0]})"
                    yield fault(f"{op.label} waits for {w}, which is no op of the {half} half", [op], cure)
                elif not n and index[w] >= i:
                    cure = f"move {w} above {op.label}, or drop the wait" if index[w] > i else "drop the wait"
                    late = [op, ops[index[w]]][: 1 + (index[w] > i)]
                    yield fault(f"{op.label} waits for {w}, which is not issued before it", late, cure)


def body(schedule: Schedule) -> Iterator[str]:
    """A compute op calls a declared body with as many operands and results as that has.  A name without a dot is the
    rule of an update that runs on the device, on slots alone; a copy calls nothing, an update on the host a rule."""
    bodies = schedule.bodies
    for op in schedule.ops:
        known = bodies.get(op.call)
        if op.verb in ("prefetch", "offload"):
            if op.call:
                yield fault(f"{op.label} is a copy and calls {op.call}", [op], f"drop {op.call}, or compute it")
        elif not op.call:
            yield fault(f"{op.label} calls nothing", [op], "write what it calls: block.fwd(x0, w0)")
        elif op.verb == "update":
            continue
        elif known:
            yield from _counts(op, known)
        elif "." in op.call:
            cure = f"declare it, or call one of: {', '.join(bodies) or 'none is declared'}"
            yield fault(f"{op.label} calls {op.call}, which no template has", [op], cure)
        elif loose := values(schedule, op.touches):
            cure = f"put {', '.join(loose)} in slots, or call a body: TEMPLATE.{op.call}"
            yield fault(f"{op.label} updates on the device what is in no slot", [op], cure)


def _counts(op: Op, known: Body) -> Iterator[str]:
    sides = (("operands", op.reads, known.inputs), ("results", op.writes, known.outputs))
    for side, names, types in sides:
        if len(names) != len(types):
            cure = f"{op.call} has {len(types)} {side}: {', '.join(map(text.show_type, types)) or 'none'}"
            yield fault(f"{op.label} has {len(names)} {side}", [op], cure)


def once(schedule: Schedule) -> Iterator[str]:
    """A value is made once; only slots and planes are written again."""
    makers: dict[str, list[Op]] = {v.name: [] for v in schedule.inputs + schedule.grads}
    for op in schedule.ops:
        for n in values(schedule, op.writes):
            if n in makers:
                what = f"{op.label} makes {n} again" if makers[n] else f"{op.label} makes {n}, which is given"
                yield fault(what, [*makers[n], op], f"give the result of {op.label} another name")
            makers[n] = [op]


def made(schedule: Schedule) -> Iterator[str]:
    """A value is read after it was made: by the caller, earlier in the half, or for the backward half in the forward
    half.  What the caller receives is made in its half or was there when it began."""
    there = {v.name for v in schedule.inputs}
    for half in ("forward", "backward", "update"):
        there |= {v.name for v in schedule.grads} if half == "backward" else set()
        there = set[str]() if half == "update" else there
        for op in getattr(schedule, half):
            for n in values(schedule, op.reads):
                if n not in there:
                    makers = [o for o in schedule.ops if n in o.writes]
                    cure = f"move {makers[0].label} above it" if makers else f"make {n} first, or declare it an input"
                    yield fault(f"{op.label} reads {n}, which is not made yet", [op, *makers], cure)
            there |= set(values(schedule, op.writes))
        for n in handed(schedule, half):
            if n not in there:
                cure = f"make it in the {half} half, or do not return it"
                yield fault(f"the caller receives {n} after the {half} half, which does not make it", [], cure)


def stale(schedule: Schedule) -> Iterator[str]:
    """A slot is read after it was filled in the same half: between two halves any other half may fill it anew.  What is
    resident stays."""
    resident = {s.name for s in schedule.slots if s.role == "resident"}
    for half, ops in schedule.halves():
        filled = set(resident)
        for op in ops:
            for n in op.reads:
                if n in schedule.slot_bytes and n not in filled:
                    cure = f"fill {n} earlier in the {half} half"
                    yield fault(f"{op.label} reads {n}, which the {half} half has not filled", [op], cure)
            filled |= set(op.writes)


def fit(schedule: Schedule) -> Iterator[str]:
    """Operands have the types that the body expects, and slots hold what is put in them."""
    slots = schedule.slot_bytes
    types = value_types(schedule)
    bodies = schedule.bodies
    for op in schedule.ops:
        known = bodies.get(op.call, Body(op.call, (), ()))
        for n, t in dict.fromkeys(zip(op.reads + op.writes, known.inputs + known.outputs, strict=False)):
            wanted = text.show_type(t)
            if n in slots and nbytes(t) > slots[n]:
                cure = f"make {n} at least {text.show_bytes(nbytes(t))}"
                yield fault(f"{wanted} does not fit {n} of {text.show_bytes(slots[n])}", [op], cure)
            elif n in types and types[n] != t:
                cure = f"{op.call} expects {wanted}: pass that, or call a body for {text.show_type(types[n])}"
                yield fault(f"{n} is {text.show_type(types[n])}", [op], cure)


def budget(schedule: Schedule) -> Iterator[str]:
    """The peak is within the budget, if there is one."""
    held = device_bytes(schedule)
    if not schedule.budget or not held:
        return
    top = max(schedule.ops, key=lambda op: held[op.label])
    if held[top.label] > schedule.budget:
        what = f"{top.label} needs {text.show_about(held[top.label])}, the budget is {text.show_about(schedule.budget)}"
        yield fault(what, [top], f"allow {text.show_bytes(held[top.label])}, or keep less on the device")


def race(schedule: Schedule) -> Iterator[str]:
    """Waits order every conflict, whatever ran before."""
    ops = {op.label: op for op in schedule.ops}
    for r in races(schedule):
        rival = f"the last users of {n}" if (n := prev_of(r.earlier)) else r.earlier
        lines = [ops[label] for label in (r.earlier, r.later) if label in ops]
        yield fault(f"{r.later} may overtake {rival}", lines, f"add 'after {r.earlier}' to {r.later}")


SCHEDULE_RULES: tuple[ScheduleRule, ...] = (
    verb, name, declared, label, operand, wait, body, once, made, stale, fit, budget, race,
)  # fmt: skip

RULES: dict[str, tuple[Rule, ...]] = {"scheduled": tuple(map(on_schedule, SCHEDULE_RULES))}
"""Stage -> its rules, in the order they run."""
