"""Runs schedules: a loop over ops, and one method a verb.  It decides nothing; every decision is in the schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatrain.bodies import Kept
from megatrain.executable import Executable, Step
from megatrain.host import GradientPlanes, HostBuffer, norms, round_up
from megatrain.lanes import Lanes, Ticket
from megatrain.meter import Meter
from megatrain.program import DTYPES, BodySpec
from megatrain.residence import Resident, Slots, add_into
from megatrain.schedule import PAGE, Op, on_host, prev_of
from megatrain.store import Store
from megatrain.text import show_op
from megatrain.transfer import Transfers

TORCH = {short: dtype for dtype, short in DTYPES.items()}


@dataclass(eq=False)
class Frame:
    """One call between its forward and its backward: values on the device, spilled values on the host, gradients."""

    executable: Executable
    values: dict[str, Any] = field(default_factory=dict)
    spilled: dict[str, HostBuffer] = field(default_factory=dict)
    grads: dict[str, tuple[HostBuffer, list[Tensor]]] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    """Dotted names of the parameters that have got a gradient."""
    added: dict[str, set[str]] = field(default_factory=dict)
    """By plane, the parameters whose gradients of backwards before are fetched and added to."""
    done: Callable[[], Any] = lambda: None
    """Gives the host buffers of spilled values back; at the latest when the frame goes."""
    land: Callable[[Mapping[str, Tensor]], None] | None = None
    """What updates parameters, given their gradients by dotted name, where the backward does that."""


class Runtime:
    """Slots on one device, and the lanes that use them.  One half runs at a time."""

    def __init__(self, device: torch.device, lanes: Lanes, pin: bool):
        self.device, self.lanes, self.pin = device, lanes, pin
        self.store = Store({}, {})
        self.transfers: Transfers | None = None
        """The planes that go to the device in the place of the store's, where these have another dtype."""
        self.gradients = GradientPlanes(pin)
        self.unfilled = GradientPlanes()
        """For gradients that live on the device: memory that is taken only when somebody looks."""
        self.slots: dict[str, Tensor] = {}
        self.last: dict[str, dict[str, Ticket]] = {}
        self.frames: weakref.WeakSet[Frame] = weakref.WeakSet()
        self.free: dict[int, list[HostBuffer]] = {}
        self.lines: dict[str, str] = {}
        """The line of every op that may still run, by label, for errors."""
        lanes.describe = lambda label: f"in {self.lines[label].strip()}"
        self.norms: dict[str, Tensor] = {}
        """Weight plane -> the norms of its parameters' gradients, f32 on the device, of the last backward."""
        self.residents: dict[str, Resident] = {}
        """Weight planes that live on the device."""
        self.resident_slots: dict[str, Slots] = {}
        self.evicting: Callable[[str], None] = lambda plane: None
        """Told of a plane before it ceases to live on the device."""
        self.rings: dict[str, HostBuffer] = {}
        """Host buffers that gradients go through when updates run in the backward."""
        self.measure = False
        self.peak = 0

    def run(self, half: str, frame: Frame) -> dict[str, Ticket]:
        """Runs the half; when it returns, no copy touches a host plane any more, and on the CPU nothing is computed.
        Updates may still run: their tickets, by weight plane.  Raises the first failure of an op, with its line."""
        e = frame.executable
        self.claim(e)
        lanes = self.lanes
        self.lines |= {op.label: e.steps[op.label].line for op in getattr(e.schedule, half)}
        lanes.begin()
        tickets: dict[str, Ticket] = {}
        updates: dict[str, Ticket] = {}
        try:
            for op in getattr(e.schedule, half):
                waits = [t for wait in op.after for t in self.resolved(wait, op, tickets)]
                ticket = lanes.issue(op.lane, op.label, partial(self.perform, op, e.steps[op.label], frame), waits)
                tickets[op.label] = ticket
                if op.verb == "update":
                    updates[op.writes[0]] = ticket
                for name in op.touches:
                    if on_host(name) or name in self.slots:
                        self.last.setdefault(name, {})[op.lane] = ticket
        except BaseException:
            lanes.cancel()
            raise
        lanes.finish(("h2d", "d2h") if self.device.type == "cuda" else ("h2d", "compute", "d2h"))
        return updates

    def update(self, ops: Sequence[Op], work: Callable[[str], Callable[[], None]]) -> dict[str, Ticket]:
        """Issues the update half, and returns without waiting; `work` gives what an op does, by its label, when those
        before it have been issued.  Tickets by label."""
        found: dict[str, Ticket] = {}
        self.lanes.begin()
        try:
            for op in ops:
                self.lines[op.label] = show_op(op)
                waits = [t for wait in op.after for t in self.resolved(wait, op, {})]
                ticket = self.lanes.issue(op.lane, op.label, work(op.label), waits, always=True)
                for name in op.touches:
                    self.last.setdefault(name, {})[op.lane] = ticket
                found[op.label] = ticket
        except BaseException:
            self.lanes.finish()
            raise
        return found

    def resolved(self, wait: str, op: Op, tickets: Mapping[str, Ticket]) -> Sequence[Ticket]:
        """The ops that a wait stands for: one label, or the last users of a name on the other lanes."""
        if name := prev_of(wait):
            return [t for lane, t in self.last.get(name, {}).items() if lane != op.lane]
        return [tickets[wait]]

    def claim(self, e: Executable) -> None:
        """Allocates the schedule's slots, where they are not there yet from the schedule before.  Under a budget
        there are these slots and no others; without one, slots only grow.  What lives on the device stays, or goes back
        to the host if it is to live there now."""
        schedule = e.schedule
        wanted = schedule.slot_bytes
        if self.resident_slots != e.residents or any(self.other(p, r, e) for p, r in self.residents.items()):
            self.lanes.finish()
            self.evict()
            self.resident_slots = dict(e.residents)
        have = {n: t.numel() for n, t in self.slots.items()}
        if not schedule.budget:
            wanted = have | {n: max(size, have.get(n, 0)) for n, size in wanted.items()}
        if wanted == have:
            return
        self.lanes.finish()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        own = {n for slots in self.resident_slots.values() for n in slots}
        kept = {n: t for n, t in self.slots.items() if n in own and t.numel() == wanted.get(n)}
        self.slots.clear()
        self.last.clear()
        new = {n: size for n, size in wanted.items() if n not in kept}
        self.slots |= kept | {n: torch.empty(s, dtype=torch.uint8, device=self.device) for n, s in new.items()}
        for plane, names in e.residents.items():
            if plane not in self.residents:
                w, g, o = (self.slots[n] for n in names)
                self.residents[plane] = Resident(w, g, o, e.layouts[plane], e.grad_layouts[plane])

    def other(self, plane: str, resident: Resident, e: Executable) -> bool:
        """Whether the executable wants a plane that lives on the device otherwise than it does."""
        sizes = e.schedule.slot_bytes
        state = sizes[e.residents[plane][2]] if plane in e.residents else 0
        return resident.gradient_layout != e.grad_layouts.get(plane) or resident.state.numel() != state

    def evict(self) -> None:
        """Brings everything that lives on the device back to the host, and forgets it."""
        for plane in list(self.residents):
            self.pull(plane)
            self.evicting(plane)
        for name in (n for names in self.resident_slots.values() for n in names):
            self.slots.pop(name, None)
        self.residents.clear()
        self.resident_slots = {}

    def pull(self, plane: str) -> None:
        """Gives the host's plane and gradients what lives on the device."""
        resident = self.residents[plane]
        if resident.newer or resident.given:
            self.lanes.finish(("compute",))
            resident.pull_weights(self.store.planes[plane].flat[: self.store.layouts[plane].bytes])
            resident.pull_gradients()

    def perform(self, op: Op, step: Step, frame: Frame) -> None:
        if op.verb == "compute" and "." not in op.call:
            self.gather(op, step, frame)
        elif op.verb == "compute":
            self.compute(op, step, frame)
        elif op.verb == "prefetch":
            self.prefetch(op, step, frame)
        elif op.verb == "offload":
            self.offload(op, step, frame)
        else:
            self.land(op, step, frame)
        for name in step.dies:
            frame.values.pop(name, None)

    def prefetch(self, op: Op, step: Step, frame: Frame) -> None:
        source = op.reads[0]
        planes = self.transfers.buffers if self.transfers and source in self.transfers.buffers else self.store.planes
        buffer = frame.grads[source][0] if source in frame.grads else planes.get(source) or frame.spilled[source]
        self.slots[op.writes[0]][: step.size].copy_(buffer.flat[: step.size], non_blocking=True)

    def offload(self, op: Op, step: Step, frame: Frame) -> None:
        target = op.writes[0]
        buffer = frame.grads[target][0] if target in frame.grads else frame.spilled.get(target) or self.rings[target]
        buffer.flat[: step.size].copy_(self.slots[op.reads[0]][: step.size], non_blocking=True)

    def gather(self, op: Op, step: Step, frame: Frame) -> None:
        """Adds the gradients of a plane to those that live on the device."""
        plane = step.planes[0]
        views = frame.executable.grad_layouts[plane].named(self.slots[op.reads[0]])
        with torch.no_grad():
            self.residents[plane].add({n: v for n, v in views.items() if n in frame.defined})

    def land(self, op: Op, step: Step, frame: Frame) -> None:
        """An update in the backward: gives the gradients of a plane, where there are any, to the optimizer."""
        views = frame.executable.grad_layouts[step.planes[0]].named(self.rings[op.reads[0]].flat)
        assert frame.land is not None, f"nothing runs {op.call}: updates are the optimizer's"
        frame.land({n: v for n, v in views.items() if n in frame.defined})

    def compute(self, op: Op, step: Step, frame: Frame) -> None:
        body = frame.executable.bodies[op.call]
        spec = body.spec
        operands = iter(op.reads)
        kept = self.value(next(operands), step, frame) if spec.keep and not spec.forward else None
        values = [self.value(next(operands), step, frame) for _ in body.needs]
        slots = [next(operands) for _ in step.planes]
        layouts = frame.executable.layouts
        views = [layouts[p].views(self.slots[s]) for p, s in zip(step.planes, slots, strict=True)]
        weights = [views[p][k] for p, k in frame.executable.weights[spec.template]]
        if spec.forward:
            grad = bool(frame.executable.schedule.backward)
            results = self.metered(lambda: body.forward(values, weights, grad), frame, [values, weights])
            for name, result in zip(op.writes, results, strict=True):
                self.put(name, result, step, frame)
            return
        state = self.value(next(operands), step, frame) if spec.state else None
        grads = [self.value(next(operands), step, frame) for _ in spec.grads]
        adds = [self.value(next(operands), step, frame) for _ in spec.adds]
        targets = op.writes[len(spec.wants) :]
        places = self.grad_views(frame.executable, spec, step.planes, targets)
        sums = {
            j: places[j][1]
            for j, (p, _) in enumerate(frame.executable.weights[spec.template])
            if p in spec.sums and j in places and places[j][0] in frame.defined
        }
        wider = {j: sums.pop(j) for j in list(sums) if sums[j].dtype != weights[j].dtype}
        call = partial(body.backward, values, weights, kept, state, grads, adds, sums)
        known = [values, weights, grads, adds, list(sums.values())]
        made, trained = self.metered(call, frame, known)
        for name, g in zip(op.writes, made, strict=False):
            self.put(name, g, step, frame)
        living: dict[str, dict[str, Tensor]] = {step.planes[p]: {} for p in spec.into}
        for j, g in trained.items():
            if g is not None:
                name, place = places[j]
                plane = step.planes[body.planes[j]]
                if plane in living:
                    living[plane][name] = g
                else:
                    place.add_(g) if j in wider else place.copy_(g)
                frame.defined.add(name)
        with torch.no_grad():
            for plane, new in living.items():
                resident = self.residents.get(plane)
                has = resident.has if resident else frame.added[plane]
                add_into(resident.gradient_views if resident else dict(places.values()), has, new)
        if frame.land is None:
            self.note_norms(frame.executable, spec, step.planes, targets)

    def note_norms(self, e: Executable, spec: BodySpec, planes: Sequence[str], slots: Sequence[str]) -> None:
        """Norms of the gradients in slots that a backward has just written, in the order of their layout.  Of a sum of
        several layers' gradients the last note holds."""
        for p, slot in zip(spec.trains, slots, strict=True):
            if planes[p] in e.residents:
                continue
            views = e.grad_layouts[planes[p]].views(self.slots[slot])
            self.norms.pop(planes[p], None)
            with torch.no_grad():
                found = norms(views)
            if found is not None:
                self.norms[planes[p]] = found

    def grad_views(
        self, e: Executable, spec: BodySpec, planes: Sequence[str], slots: Sequence[str]
    ) -> dict[int, tuple[str, Tensor]]:
        """Weight index -> (dotted name, its place in a gradient slot)."""
        places: dict[str, Tensor] = {}
        for p, slot in zip(spec.trains, slots, strict=True):
            layout = e.grad_layouts[planes[p]]
            names = [entry.name for entry in layout.entries]
            places |= dict(zip(names, layout.views(self.slots[slot]), strict=True))
        names = {j: e.layouts[planes[p]].entries[k].name for j, (p, k) in enumerate(e.weights[spec.template])}
        return {j: (n, places[n]) for j, n in names.items() if n in places}

    def value(self, name: str, step: Step, frame: Frame) -> Any:
        if name in step.types:
            t = step.types[name]
            return self.slots[name][: t.nbytes].view(TORCH[t.dtype]).view(t.shape)
        return frame.values[name]

    def put(self, name: str, result: Any, step: Step, frame: Frame) -> None:
        if name in step.types:
            self.value(name, step, frame).copy_(result)
        else:
            frame.values[name] = result

    def metered(self, call: Any, frame: Frame, known: list[Any]) -> Any:
        """Runs a body; with `measure` on, notes the device bytes in use at its peak (on the CPU, where nobody else
        does)."""
        if not self.measure:
            return call()
        with Meter(known) as meter:
            result = call()
        for made in result if isinstance(result, list) else ():
            if isinstance(made, Kept):
                made.bytes = meter.now - meter.bytes_of(result)  # results are counted as the values they are
        kept = sum(v.bytes for v in frame.values.values() if isinstance(v, Kept))
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(frame.values)}
        slots = sum(t.numel() for t in self.slots.values())
        self.peak = max(self.peak, slots + sum(held.values()) + kept + meter.peak)
        return result

    def buffer(self, size: int) -> HostBuffer:
        """A host buffer of `size` bytes for a spilled value; given back when its frame goes."""
        return self.free[size].pop() if self.free.get(size) else HostBuffer(size, self.pin)

    def ring(self, executable: Executable) -> None:
        """Host buffers for the gradients that go through a ring."""
        for op in executable.schedule.backward:
            if op.verb == "offload" and op.writes[0].startswith("ring."):
                name, size = op.writes[0], executable.steps[op.label].size
                if name not in self.rings or self.rings[name].bytes < size:
                    self.lanes.finish()
                    self.rings[name] = HostBuffer(round_up(size, PAGE), self.pin)

    def frame(self, executable: Executable) -> Frame:
        """A new call's frame, with host room for all that its forward spills."""
        made = Frame(executable)
        for op in executable.schedule.forward:
            if op.verb == "offload":
                made.spilled[op.writes[0]] = self.buffer(round_up(executable.steps[op.label].size, PAGE))
        self.frames.add(made)
        made.done = weakref.finalize(made, _recycle, self.free, list(made.spilled.values()))
        return made


def _recycle(free: dict[int, list[HostBuffer]], buffers: list[HostBuffer]) -> None:
    for b in buffers:
        free.setdefault(b.bytes, []).append(b)


def _tensors(values: Mapping[str, Any]) -> list[Tensor]:
    out: list[Tensor] = []
    for name, v in values.items():
        if isinstance(v, Tensor) and not name.startswith("rng_"):
            out.append(v)
    return out
