"""The compiled state of a model: captures, executables, and the call that autograd sees."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from megatrain import settings
from megatrain.calls import (
    Call,
    CaptureError,
    check_written,
)
from megatrain.deferred import HOMES, Home, Updates, quiet
from megatrain.executable import Executable, executable_of
from megatrain.host import HostBuffer
from megatrain.lanes import Lanes
from megatrain.liveness import peak
from megatrain.made import Made
from megatrain.offline import (
    arguments_of,
    layout,
    sized,
    tensors_of,
)
from megatrain.pieces import Pieces
from megatrain.pipeline import Observer, Pass, run, split
from megatrain.planes import layer_of, planes_of
from megatrain.program import Plan, Program
from megatrain.rooms import Rooms
from megatrain.runtime import Runtime
from megatrain.schedule import Schedule
from megatrain.step import Running, Step
from megatrain.store import adopt
from megatrain.transfer import Transfers
from megatrain.units import Unit
from megatrain.watching import global_hooks, transformed

LOG = logging.getLogger("megatrain")
MOST_CAPTURES = 8
MOST_EXECUTABLES = 64


@dataclass(frozen=True)
class Stats:
    """What the last forward or backward did.  Bytes on the device: `planned_peak` by the plan, `device_peak` as
    measured (on the CPU as counted from slots, values and planned workspaces), `budget` allowed (0: no limit)."""

    planned_peak: int = 0
    device_peak: int = 0
    budget: int = 0


class Compiled:
    """Everything behind a compiled model.  A deep copy or a pickle of it is None: the copy is eager."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        device: torch.device,
        budget: int,
        host_memory: int,
        backend: str,
        compute_dtype: torch.dtype | None,
        passes: Sequence[Pass],
        lanes: Lanes,
        options: tuple[Any, ...],
    ):
        self.whole = Unit(self, forward)
        self.device, self.budget, self.options = device, budget, options
        self.backend, self.compute_dtype = backend, compute_dtype
        self.task = -2
        """The run of autograd's engine that last came here."""
        self.adds = backend != "eager"
        """Gradients are added on the device to those of backwards before; in another order than autograd's, where a
        loss has another part too."""
        self.host_memory = host_memory
        """Host bytes that the model and its optimizers may take; 0: what there is."""
        self.first, self.rest = split(passes)
        self.runtime = Runtime(device, lanes, pin=device.type == "cuda")
        self.runtime.measure = settings.verify_level() == 2 and backend == "eager"  # no compiled body runs in a meter
        self.schedules: dict[str, Schedule] = {}
        self.plans: dict[str, Plan] = {}
        """The last schedule run, and its plan, by kind; see `ran`."""
        self.warned: set[str] = set()
        self.observing: list[Observer] = []
        self.rooms = Rooms(self)
        self.lock = threading.RLock()
        self.updates = Updates(self.runtime)
        this, root = weakref.ref(self), weakref.ref(model)
        self.updates.check = lambda: (c := this()) and (m := root()) and c.checked(m)
        self.updates.host_room = lambda: c.rooms.host() if (c := this()) else 0
        self.updates.settle_at_ends()
        self.adopted(model)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return (_nothing, ())

    def adopted(self, model: nn.Module) -> None:
        """Lays out the host planes and forgets what was captured."""
        self.updates.settle_all()
        self.runtime.evict()
        for name, p in model.named_parameters():
            if p.device not in (torch.device("cpu"), torch.device("meta"), self.device):
                raise ValueError(
                    f"{name} is on {p.device}, but this model is compiled for {self.device} and its parameters live on "
                    f"the host\nmove it back with model.to('cpu'), or leave the moving to megatrain"
                )
        self.planes = planes_of(model)
        self.layers = layer_of(model)
        self.runtime.store = adopt(model, self.planes, self.runtime.pin, self.runtime.store)
        self.tensors, self.names = tensors_of(model)
        for plane, names in self.planes.items():
            for name in names:
                if isinstance(t := self.tensors[name], nn.Parameter):
                    HOMES[t] = Home(weakref.ref(self.updates), plane, name)
        self.whole.captures.clear()
        self.whole.refused.clear()
        self.pieces = Pieces(self, model)
        self.rooms.resident = None
        if self.compute_dtype:
            store, pin = self.runtime.store, self.runtime.pin
            self.runtime.transfers = Transfers(store, self.planes, self.tensors, self.compute_dtype, pin)

    # -- one call ---------------------------------------------------------------------------------------------------

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's result.  One thread at a time; a call under torch.func (functional_call, grad, vmap) runs eagerly
        on the host, one with arguments that a graph cannot take layer by layer."""
        if kinds := global_hooks():
            raise CaptureError(
                f"there is a hook on all modules ({', '.join(kinds)}), which a captured graph would not call\n"
                "remove it before the call, or put it on the modules that it is for"
            )
        with self.lock:
            return self.locked(model, self.bound(args, kwargs))

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call, with its tensors in the dtype that is computed with."""
        if self.runtime.transfers:
            args, kwargs = self.runtime.transfers.cast((args, kwargs))
        return Call(self.whole.signature, args, kwargs)

    def checked(self, model: nn.Module) -> None:
        """Lays planes out again if a parameter or a module was replaced, or a parameter was given other memory."""
        if reason := self.runtime.store.changed(model):
            LOG.warning("megatrain: %s; laying out host planes and capturing again", reason)
            self.adopted(model)

    def locked(self, model: nn.Module, call: Call) -> Any:
        if transformed() or self.runtime.store.substituted():
            return self.eager(call)
        self.checked(model)
        if torch.is_inference_mode_enabled():  # slots and planes made there could not be used outside
            with torch.inference_mode(False), torch.no_grad():
                return self.locked(model, call)
        if call.foreign and self.runtime.transfers:  # with fp32 weights
            return self.eager(call)
        if call.foreign:
            name, value = next(iter(call.foreign.items()))
            return self.pieces.call(model, call, f"argument {name} is a {type(value).__name__}")
        try:
            return self.routed(model, call, self.whole)
        except CaptureError as error:
            if not error.layerwise:
                raise
            why = str(error)
        return self.pieces.call(model, call, why)

    def routed(self, model: nn.Module, call: Call, unit: Unit) -> Any:
        """The result of a call of the model, or of a part of it, by a graph."""
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # the caller's are not for what is traced
            made, sizes = unit.captured(model, call)
            if made.written:
                check_written(made.written, call)
            return self.computed(made, sizes, call)

    def computed(self, made: Made, sizes: Mapping[sympy.Symbol, int], call: Call) -> Any:
        program = made.program
        wants = program.training and bool(program.needs or any(t.requires_grad for t in call.tensors.values()))
        extra = wants and any(f.values for f in self.runtime.frames)
        executable = self.executable(made, call, sizes, extra, ())
        frame = self.runtime.frame(executable)
        with quiet():
            step = Running(self, made, call, sizes, extra, frame)
        if wants:
            tensors = [*step.parameters.values(), *(call.tensors[t] for t in step.inputs.values())]
            results = Step.apply(step, *tensors)
        else:
            with torch.no_grad():
                results = step.forward()
        found: list[Tensor | None] = list(results)
        for i in program.skipped:
            found.insert(i, None)
        return made.capture.structure.rebuild(found, call.tensors, self.tensors, sizes)

    def refresh(self, executable: Executable, program: Program) -> None:
        """What was written on the host of what the program reads goes to the planes that live on the device."""
        if executable.residents:
            self.runtime.claim(executable)
        if transfers := self.runtime.transfers:
            names = {i.target for i in program.inputs if i.kind == "weight"} & transfers.copies.keys()
            transfers.refresh({n: self.tensors[n] for n in names})
        read = {i.target for i in program.inputs if i.kind == "weight"}
        for plane, resident in self.runtime.residents.items():
            with quiet(), torch.no_grad():
                tensors = {n: self.tensors[n] for n in self.planes[plane] if n in read}
                if resident.stale(tensors):
                    self.runtime.lanes.finish()
                    resident.load(self.runtime.store.planes[plane].flat[: resident.weight_layout.bytes], tensors)

    def ran(self, kind: str, executable: Executable) -> None:
        self.schedules[kind], self.plans[kind] = executable.schedule, executable.plan
        if kind == "train":
            self.updates.train(executable.schedule)

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
        """Captures and schedules a call with these arguments, without running it."""
        call = self.bound(args, kwargs)
        made, sizes = self.whole.captured(model, call)
        e = self.executable(made, call, sizes, False, ())
        self.ran("train" if e.schedule.backward else "eval", e)
        return e.schedule

    def current_stats(self) -> Stats:
        """Stats of the last step."""
        found = self.schedules.get("train") or self.schedules.get("eval") or Schedule()
        planned = peak(found)
        if self.device.type == "cuda":
            measured = torch.cuda.max_memory_allocated(self.device)
        else:
            measured = self.runtime.peak if self.runtime.measure else planned
        return Stats(planned, measured, self.budget)

    def eager(self, call: Call) -> Any:
        """The call as it would be without the compiler, on the host weights."""
        self.updates.settle_all()
        args, kwargs = call.arguments([t.to("cpu") for t in call.tensors.values()])
        result = self.whole.forward(*args, **kwargs)
        return pytree.tree_map(lambda x: x.to(self.device) if isinstance(x, Tensor) else x, result)

    def hold(self, plane: str, constants: Mapping[str, Tensor]) -> None:
        """Gives the constants of a capture a plane of their own."""
        store = self.runtime.store
        store.layouts[plane] = layout(constants, constants)
        store.planes[plane] = HostBuffer(store.layouts[plane].bytes, self.runtime.pin)
        for place, t in zip(store.planes[plane].tensors(store.layouts[plane]), constants.values(), strict=True):
            place.copy_(t)

    def executable(
        self,
        made: Made,
        call: Call,
        sizes: Mapping[sympy.Symbol, int],
        extra: bool,
        wanted: tuple[bool, ...],
        adding: frozenset[str] = frozenset(),
    ) -> Executable:
        """The schedule for these sizes, ready to run; made when it is first needed.  A backward that is given other
        gradients than every one that could be (`wanted`), or adds to the gradients of planes (`adding`), is emitted
        from the same plan."""
        shapes = tuple(arguments_of(made.program, call).items())
        flags = tuple(t.requires_grad for t in call.tensors.values())
        candidates, state_bytes = ((), self.rooms.states()) if made.part else self.rooms.candidates(made.program)
        room, staging = self.rooms.gradients(), self.rooms.staging()
        form = (shapes, flags, extra, self.updates.rule, room, staging, candidates, tuple(state_bytes.values()))
        if (form, wanted, adding) in made.executables:
            return made.executables[form, wanted, adding]
        before = [p for p in self.rest if p.needs not in ("planned", "scheduled")]
        after = self.rest[len(before) :]
        if form not in made.planned:
            program = sized(made.program, call, sizes, extra)
            program = program.replace(update=self.updates.rule, gradient_room=room, staging=staging)
            program = program.replace(candidates=candidates, state_bytes=state_bytes, spare=self.rooms.spare())
            if program.backend == "inductor" and not made.compiles(shapes, self.warned):
                program = program.replace(backend="eager")
            planned = run(program, before, self.observing)
            if candidates != planned.plan.resident:  # from now on there are fewer candidates
                self.rooms.resident = planned.plan.resident
                return self.executable(made, call, sizes, extra, wanted, adding)
            made.planned[form] = planned
        program = run(made.planned[form].replace(wanted=wanted, adding=adding), after, self.observing)
        if len(made.executables) >= MOST_EXECUTABLES:
            oldest = next(iter(made.executables))
            del made.executables[oldest]
            made.planned.pop(oldest[0], None)
        runtime = self.runtime
        layouts = runtime.store.layouts | (runtime.transfers.layouts if runtime.transfers else {})
        made.executables[form, wanted, adding] = executable_of(program, self.device, layouts, self.tensors)
        return made.executables[form, wanted, adding]


def _nothing() -> None:
    return None


def _same(t: Tensor) -> Tensor:
    return t
