"""Updates that run after `step()` has returned, and the guard by which whoever touches a parameter waits for its own.

While the update of a plane is due, its parameters have, in place, the class `Guarded`: the first access to one of
them, of whatever kind, waits for that plane's update and makes them ordinary parameters again.  So nobody reads a
half-updated weight, and nobody waits for more than is needed.  The access that the guard cannot see is one through an
alias made before (a numpy array, `detach()`, a held state_dict): `aliased` tells of it, and such a plane is settled at
once.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megatrain.emission import update_ops
from megatrain.lanes import Ticket
from megatrain.noted import Noted
from megatrain.schedule import Op, Schedule

if TYPE_CHECKING:
    from megatrain.runtime import Runtime


def quiet() -> AbstractContextManager[None]:
    """Inside, guards see nothing: for code that knows what is due."""
    return torch._C.DisableTorchFunctionSubclass()


@dataclass(frozen=True, eq=False)
class Home:
    """Where a parameter lives: a dotted name in a plane of a compiled model."""

    updates: weakref.ref[Updates]
    plane: str
    name: str


HOMES: MutableMapping[Tensor, Home] = WeakTensorKeyDictionary()
"""The home of every parameter of a compiled model.  A registry, because an attribute would be pickled with it."""


@dataclass(frozen=True, eq=False)
class Due:
    """An update that may still be running, of these parameters."""

    ticket: Ticket
    parameters: Sequence[nn.Parameter]


@dataclass(frozen=True, eq=False)
class Factor:
    """What the gradients of these parameters are to be multiplied by, when they are next looked at or used."""

    value: np.float32
    parameters: Sequence[nn.Parameter]


Land = Callable[[Mapping[str, Tensor]], None]
"""Updates parameters, given their gradients by dotted name; on the host lane."""


class Stepper(Protocol):
    """An optimizer that updates parameters as their gradients land."""

    rule: str

    def holds(self, p: nn.Parameter) -> bool: ...

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> Land:
        """A backward begins: options that change from now on, and what is written from now on, are the next one's."""
        ...

    def written(self, p: nn.Parameter) -> None:
        """The parameter is being updated: it counts as written from now on."""
        ...


class Keeper(Protocol):
    """An optimizer whose state may live on the device."""

    def holds(self, p: nn.Parameter) -> bool: ...

    def state_bytes(self, updates: Updates, plane: str) -> int: ...

    def pull_state(self, updates: Updates, plane: str) -> None:
        """Brings the state of a plane to the host."""
        ...


class Updates:
    """What is due on the planes of one compiled model, and what its last backward noted of the gradients."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.due: dict[str, Due] = {}
        self.factors: dict[str, Factor] = {}
        self.lock = threading.Lock()
        self.half: tuple[Op, ...] = ()
        """The update half that was issued last."""
        self.schedule = Schedule()
        """The last training schedule, whose update half this is."""
        self.stepper: Callable[[], Stepper | None] | None = None
        """A weak reference to the optimizer that updates parameters in the backward."""
        self.keeper: Callable[[], Keeper | None] | None = None
        """A weak reference to the optimizer whose state may live on the device."""
        runtime.evicting = self.evict
        self.check: Callable[[], None] = lambda: None
        """Lays planes out again if a parameter was replaced or given other memory."""
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        """The optimizers here that hold parameters of the model."""
        self.sharing = False
        """An optimizer updates planes of the host on the device too, through staging slots."""
        self.host_room: Callable[[], int] = lambda: 0
        """Host bytes that are free."""
        self.unstepped = False
        """A backward has updated parameters, and its optimizer's `step()` has not been called yet."""
        self.broken = False
        """A backward that updates parameters has failed half-way."""
        self.norms = Noted(runtime)
        self._ops: dict[tuple[str, ...], tuple[Op, ...]] = {}

    @property
    def rule(self) -> str:
        """The rule of updates in the backward; empty where there are none."""
        stepper = self.stepper() if self.stepper else None
        return stepper.rule if stepper else ""

    def begin_backward(self, parameters: Mapping[str, nn.Parameter], partial: bool) -> Land | None:
        """A backward for these parameters, by dotted name, begins; gives what updates them, where it does.  `partial`:
        not all of their gradients go into `.grad`.  Raises RuntimeError for what cannot be then."""
        stepper = self.stepper() if self.stepper else None
        if stepper is None:
            return None
        if self.broken:
            raise RuntimeError(
                "an earlier backward failed after it had updated some parameters and not others\n"
                "load the model and then the optimizer from a checkpoint (load_state_dict)"
            )
        if partial:
            raise RuntimeError(
                "torch.autograd.grad or backward(inputs=...) with update='in-backward': every gradient updates its "
                "parameter\nuse update='host', or an eager copy: copy.deepcopy(model)"
            )
        if self.unstepped:
            raise RuntimeError(
                "a second backward before step(): with update='in-backward' each backward is a step of its own\n"
                "add the losses up and call backward once, or use update='host' to accumulate gradients"
            )
        for name, p in parameters.items():
            if not stepper.holds(p):
                raise RuntimeError(
                    f"{name} requires a gradient and is not among the optimizer's parameters: with "
                    "update='in-backward' there is no gradient to look at\nfreeze it (requires_grad_(False)), or give "
                    "it to the optimizer"
                )
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"{name} has a hook on its gradient: with update='in-backward' there is none to call it with\n"
                    "remove the hook, or use update='host'"
                )
        self.broken = True
        return stepper.begin(parameters)

    def end_backward(
        self, due: Mapping[str, Ticket], parameters: Mapping[str, nn.Parameter], defined: Collection[str]
    ) -> None:
        """The backward was issued, and the updates in it are due."""
        stepper = self.stepper() if self.stepper else None
        planes: dict[str, list[nn.Parameter]] = {}
        for name in defined if due and stepper else ():
            p = parameters[name]
            if (home := HOMES.get(p)) and stepper:
                stepper.written(p)
                planes.setdefault(home.plane, []).append(p)
        for plane, ps in planes.items():
            self.defer(plane, due[plane], ps)
        self.unstepped = bool(due) or self.unstepped
        self.broken = False

    def train(self, schedule: Schedule) -> None:
        """`schedule` was run."""
        if schedule is not self.schedule:
            self.schedule = schedule
            self._ops.clear()

    def weight(self, home: Home) -> np.ndarray[Any, Any]:
        """The parameter's memory, flat; bf16 as uint16."""
        store = self.runtime.store
        entry = next(e for e in store.layouts[home.plane].entries if e.name == home.name)
        return store.planes[home.plane].array(entry)

    def issue(
        self, planes: Collection[str], work: Callable[[str], Callable[[], None]], rule: str, residents: Collection[str]
    ) -> dict[str, Ticket]:
        """Hands updates to the host lane, by weight plane, in the order in which the next forward needs them; those of
        `residents` to the device.  `work` is asked for that of a plane when those before it have been handed over, so
        that the first runs meanwhile."""
        slots = {p: names for p, names in self.runtime.resident_slots.items() if p in residents}
        key = (rule, *planes, *(names[1] for p, names in slots.items() if p in planes))
        if key not in self._ops:
            self._ops[key] = update_ops(self.schedule, tuple(planes), rule, slots)
        ops = self.half = self._ops[key]
        living = {names[1]: plane for plane, names in slots.items()}
        plane_of = {op.label: living[op.reads[0]] if op.verb == "compute" else op.writes[0] for op in ops}
        tickets = self.runtime.update(ops, lambda label: work(plane_of[label]))
        return {plane_of[label]: ticket for label, ticket in tickets.items()}

    def on_host(self, work: Callable[[], Any]) -> Any:
        """What `work` returns, run on the host lane."""
        found: list[Any] = []
        self.runtime.lines["reading"] = "a gradient's norm"
        self.runtime.lanes.issue("host", "reading", lambda: found.append(work()), always=True).wait()
        self.runtime.lanes.finish(())
        return found[0]

    def defer(self, plane: str, ticket: Ticket, parameters: Sequence[nn.Parameter]) -> None:
        """An update of `plane` was issued: guards its parameters.  One of another class than Parameter, or that
        somebody else sees into, is waited for."""
        self.due[plane] = Due(ticket, parameters)
        with quiet():
            seen = any(map(aliased, parameters))
        self.watch(plane, parameters, seen)

    def watch(self, plane: str, parameters: Sequence[nn.Parameter], at_once: bool = False) -> None:
        """Guards parameters, so that whoever touches one settles the plane; settles it `at_once`, or where one is of
        another class than Parameter."""
        with quiet():
            if at_once or any(type(p) not in (nn.Parameter, Guarded) for p in parameters):
                self.settle(plane)
                return
            for p in parameters:
                p.__class__ = Guarded

    def settle(self, plane: str) -> None:
        """Waits for the update of a plane, brings to the host what lives on the device, and multiplies its gradients by
        their factor.  Raises what failed on any lane."""
        due = self.due.get(plane)
        if due is not None:
            due.ticket.wait()
        with self.lock:
            if resident := self.runtime.residents.get(plane):
                with quiet(), torch.no_grad():
                    self.runtime.pull(plane)
                for p in resident.parameters:
                    unguard(p)
                resident.parameters.clear()
            factor = self.factors.pop(plane, None)
            for p in factor.parameters if factor else ():
                with quiet(), torch.no_grad():
                    if p.grad is not None:
                        p.grad.mul_(float(factor.value))  # type: ignore[union-attr]
            for p in (*(due.parameters if due else ()), *(factor.parameters if factor else ())):
                unguard(p)
            if due is not None and self.due.get(plane) is due:
                del self.due[plane]
        if due is not None:
            self.runtime.lanes.finish(())

    def settle_at_ends(self) -> None:
        """Before the process forks or ends: an update that is cut short would take the process with it."""
        this = weakref.ref(self)
        os.register_at_fork(before=lambda: (u := this()) and u.settle_all())
        atexit.register(lambda: (u := this()) and u.settle_all())

    def settle_all(self) -> None:
        for plane in {*self.due, *self.factors, *self.runtime.residents}:
            self.settle(plane)

    def evict(self, plane: str) -> None:
        """A plane is about to live on the host again."""
        keeper = self.keeper() if self.keeper else None
        if keeper is not None:
            keeper.pull_state(self, plane)
        for p in self.runtime.residents[plane].parameters:
            unguard(p)

    def guard(self, plane: str, parameters: Sequence[nn.Parameter]) -> None:
        """The gradients of these parameters live on the device."""
        self.runtime.residents[plane].parameters = list(parameters)
        self.watch(plane, parameters)

    def settle_gradients(self) -> None:
        """Multiplies gradients by their factors: more are about to be added."""
        for plane in list(self.factors):
            self.settle(plane)

    def forget_factors(self) -> None:
        """Gradients have been dropped: what they were to be multiplied by is of no interest any more."""
        with quiet():
            for plane, factor in list(self.factors.items()):
                if all(p.grad is None for p in factor.parameters):
                    self.factors.pop(plane, None)

    def scale(self, plane: str, factor: np.float32, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients are to be multiplied by `factor`: by the update, or when somebody looks."""
        if plane in self.factors:
            self.settle(plane)
        self.factors[plane] = Factor(factor, parameters)
        self.watch(plane, parameters)

    def factor(self, plane: str, p: nn.Parameter) -> np.float32:
        """The factor that waits for a parameter's gradient."""
        found = self.factors.get(plane)
        return found.value if found and any(q is p for q in found.parameters) else np.float32(1)


class Guarded(nn.Parameter):
    """A parameter whose update is due.  Never made: a Parameter is given this class for a while."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with quiet():  # whether there is a gradient, and dropping it, are no business of the update's
            free = (
                func in METADATA or (func is SET_GRAD and args[1] is None) or (func is GET_GRAD and func(*args) is None)
            )
        for p in () if free else guarded((args, kwargs or {})):
            release(p)
        with quiet():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        release(self)
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        release(self)
        return nn.Parameter.__reduce_ex__(self, proto)


GET_GRAD: Any = Tensor.grad.__get__  # type: ignore[attr-defined]
SET_GRAD: Any = Tensor.grad.__set__  # type: ignore[attr-defined]
FIELDS = "dtype device layout shape ndim requires_grad is_leaf _version is_cuda is_meta is_sparse is_quantized grad_fn"
METHODS = "size stride dim numel element_size is_floating_point is_complex is_contiguous __hash__ __len__"
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, n).__get__ for n in (*FIELDS.split(), "grad_dtype") if hasattr(Tensor, n)]
    + [getattr(Tensor, n) for n in METHODS.split()]
)
"""What can be asked of a parameter without waiting: nothing that an update changes."""


def unguard(p: Any) -> None:
    if type(p) is Guarded:
        object.__setattr__(p, "__class__", nn.Parameter)


def guarded(values: Any) -> Iterator[Guarded]:
    """The guarded parameters among arguments."""
    if isinstance(values, Guarded):
        yield values
    elif isinstance(values, (list, tuple, set)):
        for value in values:  # pyright: ignore[reportUnknownVariableType]
            yield from guarded(value)
    elif isinstance(values, dict):
        for value in values.values():  # pyright: ignore[reportUnknownVariableType]
            yield from guarded(value)


def release(p: Guarded) -> None:
    """Waits for what is due on a parameter, which is an ordinary one afterwards."""
    home = HOMES.get(p)
    updates = home.updates() if home else None
    if home and updates:
        updates.settle(home.plane)
    unguard(p)  # a copy, or nothing was due any more


def aliased(p: Tensor) -> bool:
    """Whether another tensor shares the parameter's storage."""
    storage = p.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the parameter and `storage`
