"""What room there is for a compiled model and its optimizers: planes that may live on the device, and host memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from megatrain import device
from megatrain.deferred import quiet
from megatrain.host import available
from megatrain.offline import grad_layout
from megatrain.program import Program
from megatrain.streamed import ELEMENT, MOST

if TYPE_CHECKING:
    from megatrain.compiled import Compiled


class Rooms:
    """Remembers what was found for an optimizer, so that every schedule of a model agrees."""

    def __init__(self, compiled: Compiled):
        self.of = weakref.ref(compiled)
        self.keeper = 0
        self.stepper = 0
        self.waiting = 0
        self.resident: tuple[str, ...] | None = None
        """Planes that live on the device; None while nothing is decided."""

    @property
    def compiled(self) -> Compiled:
        found = self.of()
        assert found is not None
        return found

    def candidates(self, program: Program) -> tuple[tuple[str, ...], dict[str, int]]:
        """(planes that may live on the device, bytes of the optimizers' state of all planes): candidates are those that
        the program uses and whose trained parameters an optimizer with update="auto" holds."""
        c = self.compiled
        states = self.states()
        keeper = c.updates.keeper() if c.updates.keeper else None
        off = c.updates.rule or c.runtime.transfers or not device.able(c.device)
        if keeper is None or not c.budget or off:
            return (), states
        if self.resident is None or self.keeper != id(keeper):
            c.runtime.lanes.finish()
            c.runtime.evict()
            self.keeper = id(keeper)
            used = {p for layer in program.layers for p in layer.planes}
            with quiet():
                trained = {
                    plane: [t for n in names if isinstance(t := c.tensors[n], nn.Parameter) and t.requires_grad]
                    for plane, names in c.planes.items()
                }
            self.resident = tuple(p for p, ts in trained.items() if p in used and ts and all(map(keeper.holds, ts)))
        return self.resident, states | {p: keeper.state_bytes(c.updates, p) for p in self.resident}

    def states(self) -> dict[str, int]:
        """Bytes of state that megatrain's optimizers have of each plane."""
        c = self.compiled
        found: dict[str, int] = {}
        for opt in c.updates.holders:
            for updates, plane in opt.planes:
                if updates is c.updates:
                    found[plane] = found.get(plane, 0) + opt.state_bytes(c.updates, plane)
        return {p: found[p] for p in c.planes if p in found}

    def staging(self) -> int:
        """Bytes of each slot through which updates of host planes go on the device: what moves the largest weight in
        large copies, and little of the budget."""
        c = self.compiled
        if not c.updates.sharing:
            return 0
        with quiet():
            most = max((p.numel() for p in c.tensors.values() if isinstance(p, nn.Parameter)), default=0)
        size = ELEMENT * min(MOST, most)
        return min(size, c.budget // 16) if c.budget else size

    def gradients(self) -> int:
        """Host bytes for gradients of updates in the backward that wait for its end: a half of what `host_memory=`
        leaves free when the optimizer is first used, its state taken off.  Such updates are there to take little
        memory, so that they take more only if they are told how much."""
        c = self.compiled
        stepper = c.updates.stepper() if c.updates.stepper else None
        if stepper is not None and self.stepper != id(stepper):
            self.stepper = id(stepper)
            self.waiting = max(0, self.host()) // 2 if c.host_memory else 0
        return self.waiting if stepper is not None else 0

    def spare(self) -> int:
        """Host bytes that are free, and that neither gradients nor optimizer state are still to take."""
        c = self.compiled
        gradients = sum(grad_layout(names, c.tensors).bytes for names in c.planes.values())
        coming = max(0, gradients - c.runtime.gradients.bytes)
        most = min(self.host(), available() - sum(opt.coming() for opt in c.updates.holders))
        return max(0, most - coming)

    def host(self) -> int:
        """Host bytes that are free, of those that the model may take."""
        c = self.compiled
        held = sum(buffer.bytes for buffer in c.runtime.store.planes.values())
        held += sum(b.bytes for b in c.runtime.transfers.buffers.values()) if c.runtime.transfers else 0
        held += sum(opt.bytes() for opt in c.updates.holders)
        return min(available(), c.host_memory - held) if c.host_memory else available()
