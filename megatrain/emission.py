"""From a plan to a schedule: which op in which slot, in the plain order of need.

The paper's schedule: each layer's planes are fetched into slots, the layer runs, its slots are used again; the backward
goes the other way, recomputing or taking up kept graphs, and each layer's gradients leave through gradient slots.
Prefetches stand just before their use here; the pass `prefetch` moves them up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatrain.order import place_waits
from megatrain.program import DTYPES, BodySpec, Layer, Program
from megatrain.schedule import PAGE, STAGING, Body, Op, Schedule, Slot, Template, TensorType, Type, Value
from megatrain.structure import fresh

RING = 2
"""Host buffers for gradients of layers when updates run in the backward; other modules have one of their own."""


@dataclass
class _Emitter:
    """The state of one emission."""

    program: Program
    slots: dict[str, Slot] = field(default_factory=dict)
    specs: dict[str, BodySpec] = field(default_factory=dict)
    bodies: dict[str, dict[str, Body]] = field(default_factory=dict)
    turn: Counter[str] = field(default_factory=Counter)
    types: dict[str, Type] = field(default_factory=dict)


def emitted(program: Program) -> tuple[Schedule, dict[str, BodySpec]]:
    """The schedule of a planned program, with exact waits, and what each body name in it stands for."""
    e = _Emitter(program)
    spilled = spilled_values(program)
    for name in STAGING if program.staging else ():
        _slot(e, name, "updates", program.staging)
    for i, plane in enumerate(program.plan.resident):
        sizes = {"r": program.plane_bytes[plane], "h": program.grad_bytes[plane], "o": program.state_bytes[plane]}
        for kind, size in sizes.items():
            _slot(e, f"{kind}{i}", "resident", size)
    for i in program.inputs:
        if i.kind != "weight":
            shape, _, dtype = program.weights[i.target] if i.kind == "state" else program.arguments[i.name]
            e.types[i.name] = TensorType(DTYPES[dtype], tuple(shape))
    inputs = tuple(Value(n, t) for n, t in e.types.items() if isinstance(t, TensorType))
    forward = _forward(e, spilled)
    backward, grads, input_grads = _backward(e, spilled) if program.training else ((), (), ())
    users: dict[str, list[str]] = {}
    for layer in program.layers:
        users.setdefault(layer.template, []).append(layer.name)
    templates = tuple(
        Template(t.name, tuple(users[t.name]), tuple(e.bodies.get(t.name, {}).values()))
        for t in program.templates
        if t.name in users
    )
    schedule = Schedule(
        templates=templates,
        slots=tuple(e.slots.values()),
        inputs=inputs,
        outputs=program.outputs,
        grads=grads,
        input_grads=input_grads,
        forward=forward,
        backward=backward,
        budget=program.budget,
    )
    return place_waits(schedule), e.specs


def update_ops(
    schedule: Schedule, planes: Sequence[str], rule: str, resident: Mapping[str, tuple[str, str, str]]
) -> tuple[Op, ...]:
    """The update half for these weight planes, in the order in which the forward uses them.  `resident` gives the slots
    (weights, gradients, state) of planes that live on the device: they are updated there, first."""
    fetches = [op for op in schedule.forward if op.verb == "prefetch"]
    fetched = {op.reads[0]: op.label.replace("fetch", "upd", 1) for op in reversed(fetches)}
    known = [p for p in dict.fromkeys(op.reads[0] for op in fetches) if p in planes]
    ops: list[Op] = []
    for plane in planes:
        if plane in resident:
            w, h, o = resident[plane]
            ops.append(Op(f"upd_{h}", "compute", (h, o, w), (o, w), rule))
    for plane in [*known, *(p for p in planes if p not in known and p not in resident)]:
        label = fetched.get(plane, f"upd_{plane.removesuffix('.w').replace('.', '_')}")
        ops.append(Op(label, "update", (f"{plane.removesuffix('.w')}.dw",), (plane,), rule))
    return place_waits(schedule.replace(forward=(), backward=(), update=tuple(ops))).update


def spilled_values(program: Program) -> dict[str, str]:
    """Value -> host plane (`layers.3.x`), for what waits on the host between forward and backward: the inputs of
    layers in `plan.spill` that the layer before makes and no other reads, that are contiguous and not the caller's."""
    if not program.training:
        return {}
    dense = {
        name: d
        for layer in program.layers
        for name, d in zip(layer.writes, program.derivatives[layer.template].dense, strict=True)
    }
    readers = Counter(n for layer in program.layers for n in layer.reads)
    found: dict[str, str] = {}
    for before, layer in pairwise(program.layers):
        if layer.name not in program.plan.spill or layer.name in program.plan.keep:
            continue
        near = [n for n in layer.reads if n in before.writes]  # others' slots would be written again before this reads
        values = [n for n in near if dense.get(n) and readers[n] == 1 and n not in program.outputs]
        for j, n in enumerate(values):
            found[n] = f"{layer.name}.x{j or ''}" if "." in layer.name else f"layers.{layer.name}.x{j or ''}"
    return found


def _slot(e: _Emitter, name: str, role: str, size: int) -> str:
    size = max(PAGE, -(-size // PAGE) * PAGE)
    e.slots[name] = Slot(name, role, max(size, e.slots[name].bytes if name in e.slots else 0))
    return name


def _ring(layer: Layer, program: Program) -> str:
    """The plane of a numbered layer that goes through the ring of weight slots: its largest."""
    sizes = [(program.plane_bytes[p], -i, p) for i, p in enumerate(layer.planes)]
    return max(sizes)[2] if sizes and layer.label.isdigit() else ""


def _by_size(sizes: Mapping[str, int], planes: Sequence[str], ring: str) -> list[str]:
    """The planes that go through slots of their own, the largest first: so that small ones share a small slot."""
    return sorted((p for p in planes if p != ring), key=lambda p: -sizes[p])


def _fetch(e: _Emitter, layer: Layer, prefix: str) -> tuple[list[Op], list[str]]:
    """Prefetches of a layer's planes, and the slots they go to, in the order of its planes."""
    ops: list[Op] = []
    slots: list[str] = []
    ring, others = _ring(layer, e.program), 0
    own = _by_size(e.program.plane_bytes, layer.planes, ring)
    for plane in layer.planes:
        if plane in e.program.plan.resident:
            slots.append(f"r{e.program.plan.resident.index(plane)}")
            others += plane != ring
            continue
        if plane == ring:
            slot, suffix = f"w{e.turn['w'] % e.program.plan.slots}", ""
            e.turn["w"] += 1
        else:
            slot, suffix = f"u{own.index(plane)}", f"_{others}" if ring or others else ""
            others += 1
        slots.append(_slot(e, slot, "weights", e.program.plane_bytes[plane]))
        ops.append(Op(_label(prefix, layer.label + suffix), "prefetch", (plane,), (slot,)))
    return ops, slots


def _label(prefix: str, label: str) -> str:
    return f"{prefix}{label}" if label[0].isdigit() else f"{prefix}_{label}"


def _forward(e: _Emitter, spilled: dict[str, str]) -> tuple[Op, ...]:
    ops: list[Op] = []
    place: dict[str, str] = {}
    width = max([1, *Counter(p.rpartition(".")[0] for p in spilled.values()).values()])
    for layer in e.program.layers:
        d = e.program.derivatives[layer.template]
        keep = e.program.training and layer.name in e.program.plan.keep and "bwd.keep" in d.workspace
        fetches, slots = _fetch(e, layer, "fetch")
        ops += fetches
        writes: list[str] = []
        results: list[Type] = list(d.writes)
        spills: list[Op] = []
        for name, t in zip(layer.writes, d.writes, strict=True):
            e.types[name] = t
            if name in spilled:
                place[name] = _slot(e, f"a{e.turn['a'] % (2 * width)}", "activations", t.nbytes)
                e.turn["a"] += 1
                reader = next(r for r in e.program.layers if name in r.reads)
                suffix = spilled[name].rpartition(".x")[2]
                spills.append(Op(_label("spill", reader.label + suffix), "offload", (place[name],), (spilled[name],)))
            writes.append(place.get(name, name))
        if keep:
            writes.append(f"k_{layer.label}")
            results.append(d.kept)
        state = e.program.training and not keep and _random(e.program, layer) and "bwd" in d.workspace
        if state:
            writes.append(f"rng_{layer.label}")
            results.append(0)
        spec = BodySpec(layer.template, forward=True, keep=keep, state=state)
        call = _body(e, layer, spec, "fwd.keep" if keep else "fwd", list(d.reads), results)
        reads = [place.get(n, n) for n in layer.reads] + slots
        ops.append(Op(_label("fwd", layer.label), "compute", tuple(reads), tuple(writes), call))
        ops += spills
    return tuple(ops)


def _random(program: Program, layer: Layer) -> bool:
    return program.template(layer.template).random


def _body(
    e: _Emitter,
    layer: Layer,
    spec: BodySpec,
    kind: str,
    inputs: list[Type],
    outputs: list[Type],
    after: Sequence[Type] = (),
) -> str:
    """The call name of a body, entered in the template's signature when it is new."""
    d = e.program.derivatives[layer.template]
    planes: list[Type] = [e.program.plane_bytes[p] for p in layer.planes]
    own = e.bodies.setdefault(layer.template, {})
    taken = [n for n in own if n == kind or (n.startswith(kind) and n[len(kind) :].isdigit())]
    body = Body("", (*inputs, *planes, *after), tuple(outputs), d.workspace.get(kind, 0))
    for name in taken:
        call = f"{layer.template}.{name}"
        if e.specs[call] == spec and own[name].inputs == body.inputs and own[name].outputs == body.outputs:
            return call
    name = kind if not taken else f"{kind}{len(taken) + 1}"
    own[name] = Body(name, body.inputs, body.outputs, body.workspace)
    e.specs[f"{layer.template}.{name}"] = spec
    return f"{layer.template}.{name}"


def _backward(e: _Emitter, spilled: dict[str, str]) -> tuple[tuple[Op, ...], tuple[Value, ...], tuple[str, ...]]:
    program, resident = e.program, e.program.plan.resident
    given = _given(program)
    active = _active(program, given)
    readers: dict[str, list[str]] = {}
    users: Counter[str] = Counter()
    for layer in program.layers:
        if layer.name in active:
            for n in dict.fromkeys(_wanted(program, layer)):
                readers.setdefault(n, []).append(layer.name)
            users.update(_trained(program, layer))
    have: dict[str, str] = {}
    grads: list[Value] = []
    for n in given:
        name = f"d{n}_given" if n in readers else f"d{n}"
        have[n] = name
        t = e.types[n]
        assert isinstance(t, TensorType)
        grads.append(Value(name, t))
    ops: list[Op] = []
    late: dict[str, Op] = {}
    summed: dict[str, str] = {}
    width = max([1, *Counter(p.rpartition(".")[0] for p in spilled.values()).values()])
    left = Counter(users)
    for layer in reversed(program.layers):
        if layer.name not in active:
            continue
        d = program.derivatives[layer.template]
        keep = layer.name in program.plan.keep
        fetches, slots = _fetch(e, layer, "refetch")
        place: dict[str, str] = {}
        for n in layer.reads:
            if n in spilled:
                t = e.types[n]
                assert isinstance(t, TensorType)
                place[n] = _slot(e, f"a{e.turn['a'] % (2 * width)}", "activations", t.nbytes)
                e.turn["a"] += 1
                suffix = spilled[n].rpartition(".x")[2]
                fetches.append(Op(_label("unspill", layer.label + suffix), "prefetch", (spilled[n],), (place[n],)))
        ops += fetches
        graded = tuple(i for i, n in enumerate(layer.writes) if n in have and d.differentiable[i])
        wants = _want_indices(program, layer)
        adds = tuple(i for i in wants if layer.reads[i] in have)
        before = [have[layer.reads[i]] for i in adds]
        upstream = [have[layer.writes[i]] for i in graded]
        results: list[str] = []
        for i in wants:
            n = layer.reads[i]
            have[n] = "d" + (n if readers[n][0] == layer.name else fresh(f"{n}_{layer.label}", e.types))
            results.append(have[n])
        trained = _trained(program, layer)
        again = [p for p in trained if p in summed]
        old = [summed[p] for p in again]
        into: list[str] = []
        gslots: list[str] = []
        leaving: list[Op] = []
        ring, others = _ring(layer, program), 0
        own = _by_size(program.grad_bytes, trained, ring)
        for p in trained:
            size = program.grad_bytes[p]
            if users[p] > 1:
                slot = summed.setdefault(p, f"s{len(summed)}")
            elif p in resident:
                into.append(p)
                slot = f"h{resident.index(p)}"
            elif p == ring:
                slot = f"g{e.turn['g'] % 2}"
                e.turn["g"] += 1
            else:
                slot = f"v{own.index(p)}"
            suffix = "" if p == ring or (not ring and not others) else f"_{others}"
            others += p != ring
            left[p] -= 1
            if p in into:
                gslots.append(slot)
                continue
            gslots.append(_slot(e, slot, "gradients", size))
            if p in program.adding and users[p] == 1:
                into.append(p)
                ops.append(
                    Op(_label("add", layer.label + suffix), "prefetch", (f"{p.removesuffix('.w')}.dw",), (slot,))
                )
            if not left[p] and p in resident:
                home = f"h{resident.index(p)}"
                leaving.append(Op(_label("acc", layer.label + suffix), "compute", (slot, home), (home,), "gradients"))
            elif not left[p]:
                plane = _landing(e, p, p == ring)
                leaving.append(Op(_label("grad", layer.label + suffix), "offload", (slot,), (plane,)))
                if program.update:
                    update = Op(_label("upd", layer.label + suffix), "update", (plane,), (p,), program.update)
                    if p in program.plan.deferred:
                        late[p] = update
                    else:
                        leaving.append(update)
        inputs: list[Type] = ([d.kept] if keep else []) + list(d.reads)
        state = not keep and _random(program, layer)
        types = [d.writes[i] for i in graded] + [d.reads[i] for i in adds]
        after: list[Type] = ([0] if state else []) + types + [program.grad_bytes[p] for p in again + into]
        outputs: list[Type] = [d.reads[i] for i in wants] + [program.grad_bytes[p] for p in trained]
        index = layer.planes.index
        spec = BodySpec(
            layer.template,
            forward=False,
            keep=keep,
            grads=graded,
            adds=adds,
            sums=tuple(map(index, again)),
            into=tuple(map(index, into)),
            wants=wants,
            trains=tuple(map(index, trained)),
            state=state,
        )
        homes = [gslots[trained.index(p)] for p in into]
        call = _body(e, layer, spec, "bwd.keep" if keep else "bwd", inputs, outputs, after)
        reads = ([f"k_{layer.label}"] if keep else []) + [place.get(n, n) for n in layer.reads] + slots
        reads += ([f"rng_{layer.label}"] if state else []) + upstream + before + old + homes
        ops.append(Op(_label("bwd", layer.label), "compute", tuple(reads), tuple(results + gslots), call))
        ops += leaving
    ops += [late[p] for p in used_planes(program) if p in late]
    wanted = [i.name for i in program.inputs if i.kind == "input" and i.name in program.needs and i.name in have]
    return tuple(ops), tuple(grads), tuple(have[n] for n in wanted)


def _landing(e: _Emitter, plane: str, layers: bool) -> str:
    """The host buffer that the gradients of a plane (of a numbered layer, or not) go to."""
    if not e.program.update:
        return f"{plane.removesuffix('.w')}.dw"
    if plane in e.program.plan.deferred:
        return f"ring.{RING + e.program.plan.deferred.index(plane)}.g"
    e.turn["ring"] += layers
    return f"ring.{(e.turn['ring'] - 1) % RING}.g" if layers else "ring.own.g"


def used_planes(program: Program) -> list[str]:
    """The planes that the layers use, in the order in which the forward does."""
    return list(dict.fromkeys(p for layer in program.layers for p in layer.planes))


def _given(program: Program) -> list[str]:
    """The caller's results whose gradient the backward half is given."""
    carries = {
        n
        for layer in program.layers
        for n, f in zip(layer.writes, program.derivatives[layer.template].differentiable, strict=False)
        if f
    }
    results = program.outputs[: len(program.outputs) - len(program.writes_back)]
    wanted = program.wanted or (True,) * len(results)
    return list(dict.fromkeys(n for n, w in zip(results, wanted, strict=True) if w and n in carries))


def _active(program: Program, given: list[str]) -> set[str]:
    """Layers that take part in the backward: a gradient reaches one of their results."""
    reached = set(given)
    active: set[str] = set()
    for layer in reversed(program.layers):
        d = program.derivatives[layer.template]
        if any(n in reached and f for n, f in zip(layer.writes, d.differentiable, strict=False)):
            active.add(layer.name)
            reached.update(_wanted(program, layer))
    return active


def _want_indices(program: Program, layer: Layer) -> tuple[int, ...]:
    return tuple(i for i, f in enumerate(program.derivatives[layer.template].needs) if f)


def _wanted(program: Program, layer: Layer) -> list[str]:
    return [layer.reads[i] for i in _want_indices(program, layer)]


def _trained(program: Program, layer: Layer) -> list[str]:
    """Planes of the layer that hold a weight which gets a gradient from it, in order."""
    template = program.template(layer.template)
    flags = program.derivatives[layer.template].trains
    found = {layer.planes[p] for (p, _), f in zip(template.weights, flags, strict=True) if f}
    return [p for p in layer.planes if p in found]
