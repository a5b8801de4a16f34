"""Optimizers whose state lives in flat host planes and whose updates run behind the training loop's back.

bf16 parameters have an exact fp32 master in two bytes more (see `kernels`); fp32 parameters are stepped as they are.
`step()` works out the numbers, hands one update a plane to the host lane and returns; the next forward's prefetch of a
plane waits for its update, and so does whoever touches one of its parameters (see `deferred`).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain import device, kernels
from megatrain.clip import clip_factor, total_norm
from megatrain.deferred import HOMES, Home, Land, Updates, quiet
from megatrain.host import Layout, gradient_dtype
from megatrain.hostbytes import check_room, state_bytes
from megatrain.hoststate import Array, Due, Group, Held, Numbers, State, Work, alias, check_options, state_plane
from megatrain.keeping import Keeping
from megatrain.streamed import Sharing


class HostOptimizer(Keeping, torch.optim.Optimizer):
    """The mechanism that the optimizers here share.  A rule gives `moments` (the names of its fp32 state), `kernel` and
    `numbers`; the rest is the same for all."""

    moments: tuple[str, ...] = ()

    def __init__(self, params: Any, defaults: Group, max_grad_norm: float | None, update: str):
        check_options(update, max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.update = update
        self.grad_norm: Tensor = torch.tensor(math.nan)
        """Norm of the gradients at the last step, before clipping (fp32; NaN while there is no max_grad_norm)."""
        self.held: dict[nn.Parameter, Held] = {}
        self.planes: dict[tuple[Updates, str], list[nn.Parameter]] = {}
        """The parameters that have state, by plane."""
        self.layouts: dict[tuple[Updates, str, int], Layout] = {}
        self.exposed: set[str] = set()
        self.shared: dict[Updates, Sharing] = {}
        self.building = True
        super().__init__(params, defaults)
        self.building = False
        self.state = State(self.expose)
        self.hold(p for g in self.param_groups for p in g["params"] if p.requires_grad)
        for updates in self.owners():  # before a schedule is made
            self.sharing(updates)
            updates.holders.add(self)
            if update == "in-backward":
                if updates.stepper and updates.stepper():
                    raise ValueError("this model has an optimizer with update='in-backward' already: delete that first")
                updates.stepper = weakref.ref(self)  # type: ignore[assignment]
            elif update == "auto":
                updates.runtime.lanes.finish()
                updates.runtime.evict()  # the state there is another optimizer's
                updates.keeper = weakref.ref(self)  # type: ignore[assignment]

    @property
    def rule(self) -> str:
        """The name of the rule, as a schedule calls it."""
        return self.kernel(self.param_groups[0]).__name__

    def kernel(self, group: Group) -> Any:
        """The kernel for parameters of this group."""
        raise NotImplementedError

    def numbers(self, group: Group, step: int) -> list[float]:
        """The kernel's constants at this step (the first is 1), the factor of the gradients left out."""
        raise NotImplementedError

    def checked(self, group: Group) -> None:
        """Raises ValueError for options that there are not."""
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ValueError(f"{name}=True is not supported by megatrain.{type(self).__name__}: use torch.optim's")

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.checked(group)
            for i, p in enumerate(group["params"]):
                self.home(p, f"parameter {i} of group {len(self.param_groups) - 1}")
        except ValueError:
            self.param_groups.pop()
            raise
        if not self.building:
            self.hold(p for p in group["params"] if p.requires_grad)

    def home(self, p: Tensor, what: str = "") -> Home:
        """Where the parameter lives.  Raises ValueError for one that is not a compiled model's."""
        home = HOMES.get(p)
        what = f"{what or 'a parameter'} {list(p.shape)}"
        if home is None or home.updates() is None:
            raise ValueError(
                f"{what} is not a parameter of a compiled model: call megatrain.compile(model, ...) before "
                f"megatrain.{type(self).__name__}(model.parameters()), or use torch.optim for it"
            )
        if p.device.type != "cpu":
            raise ValueError(f"{home.name} is on {p.device}: parameters of a compiled model live on the host")
        if p.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{home.name} is {p.dtype}: megatrain.{type(self).__name__} steps bf16 and fp32 parameters"
            )
        return home

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gives these parameters state in flat planes, one a plane of weights and kind.  Memory is taken when it is
        first written."""
        planes: dict[tuple[int, str], list[nn.Parameter]] = {}
        for p in parameters:
            if p not in self.held:
                home = self.home(p)
                planes.setdefault((id(home.updates()), home.plane), []).append(p)
        every = [p for ps in planes.values() for p in ps]
        check_room(type(self).__name__, every, self.moments, self.update in ("host", "device"))
        for kinds in {(p.dtype, gradient_dtype(p)) for p in every}:
            halves, slopes = (kind == torch.bfloat16 for kind in kinds)
            kernels.ready(*(self.kernel(g) for g in self.param_groups), halves=halves, half_gradients=slopes)
        for ps in planes.values():
            halves = [p for p in ps if p.dtype == torch.bfloat16]
            whole = [state_plane(ps, torch.float32) for _ in self.moments]
            rest = state_plane(halves, torch.int16)
            buffers = [buffer for buffer, _ in (*whole, rest)]
            remainders = dict(zip(halves, rest[1], strict=True))
            for i, p in enumerate(ps):
                with quiet():
                    home = self.home(p)
                    if (updates := home.updates()) is not None:
                        self.planes.setdefault((updates, home.plane), []).append(p)
                    self.held[p] = Held(home, [m[i] for _, m in whole], remainders.get(p), buffers, p._version)

    def bytes(self) -> int:
        """Host bytes of its state."""
        return state_bytes(self.held, self.moments)

    def coming(self) -> int:
        """Bytes of these that no step has written yet, and that so take no memory yet."""
        return state_bytes((p for p in self.held if "step" not in dict.get(self.state, p, {})), self.moments)

    def sharing(self, updates: Updates) -> Sharing | None:
        """What runs updates of a compiled model's planes on the host and the device together; None where the host alone
        does."""
        there = updates.runtime.device
        if self.update not in ("auto", "device") or not device.able(there):
            return None
        if self.update == "auto" and there.type != "cuda":  # host memory either way
            return None
        if updates not in self.shared:
            self.shared[updates] = Sharing(there, updates.runtime.slots, 1.0 if self.update == "device" else None)
            updates.sharing = True
        return self.shared[updates]

    def owners(self) -> list[Updates]:
        """The compiled models that the parameters belong to."""
        found = {id(u): u for h in self.held.values() if (u := h.home.updates()) is not None}
        return list(found.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns before they are updated.  Whoever needs one waits."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.update == "in-backward":  # all is done, or under way
            for updates in self.owners():
                updates.unstepped = False
            return loss
        for updates in self.owners():
            updates.check()
        with quiet():
            given = [(g, p, p.grad) for g in self.param_groups for p in g["params"] if p.grad is not None]
            for _, p, grad in given:
                if grad.layout is not torch.strided:
                    raise RuntimeError(f"{self.home(p).name} has a sparse gradient: use torch.optim.SparseAdam for it")
            self.hold(p for _, p, _ in given)
            clip = self.clipping([(p, grad) for _, p, grad in given])
            due: dict[Updates, dict[str, list[Due]]] = {}
            for each in given:
                home = self.held[each[1]].home
                if updates := home.updates():
                    due.setdefault(updates, {}).setdefault(home.plane, []).append(each)
            numbers: Numbers = {}
            for updates, planes in due.items():
                self.issue(updates, planes, clip, numbers)
        return loss

    def work(self, updates: Updates, plane: str, due: Iterable[Due], clip: np.float32, numbers: Numbers) -> Work:
        """The update of a plane."""
        work = Work()
        resident = self.residing(updates, plane)
        for group, p, grad in due:
            home = self.held[p].home
            foreign = p._version != self.held[p].version
            if resident and resident.stale({home.name: p}):  # written on the host since the forward
                work.copies.append((resident.weight_views[home.name], p.detach()))
            self.written(p)
            factor = clip * updates.factor(plane, p)
            if resident:
                self.add_resident(work, group, p, grad, factor, numbers, foreign, resident)
            else:
                self.add(work, group, p, grad, factor, numbers, foreign)
        return work

    def add(
        self,
        work: Work,
        group: Group,
        p: nn.Parameter,
        grad: Tensor,
        factor: np.float32,
        numbers: Numbers,
        foreign: bool,
    ) -> None:
        """Adds the update of a parameter to its plane's.  `foreign`: somebody else has written the parameter since."""
        held = self.held[p]
        step, zeroed = self.begun(p, held, foreign)
        work.zeroed += zeroed
        arrays = held.arrays(p, grad)
        updates = held.home.updates()
        sharing = self.sharing(updates) if updates else None
        if sharing and sharing.share and sharing.where.type == "cuda":
            work.pinned += held.buffers
        if transfers := held.transfers:
            work.after.append(transfers.copies[held.home.name])
        constants = self.constants(group, step, factor, numbers)
        work.calls.append((sharing or kernels.call, (self.kernel(group), *arrays, constants)))

    def constants(self, group: Group, step: int, factor: np.float32, known: Numbers) -> Array:
        """The kernel's constants; `known` keeps those of a step."""
        key = (id(group), step, float(factor))
        if key not in known:
            known[key] = np.array([*self.numbers(group, step), factor], np.float32)
        return known[key]

    def holds(self, p: nn.Parameter) -> bool:
        return p in self.held

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> Land:
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        group_of = {p: o for g, o in zip(self.param_groups, options, strict=True) for p in g["params"]}
        with quiet():
            foreign = {p for p in parameters.values() if p._version != self.held[p].version}

        def land(gradients: Mapping[str, Tensor]) -> None:
            work = Work()
            numbers: Numbers = {}
            with quiet(), torch.no_grad():
                for name, grad in gradients.items():
                    p = parameters[name]
                    self.add(work, group_of[p], p, grad, np.float32(1), numbers, p in foreign)
            work()

        return land

    def written(self, p: nn.Parameter) -> None:
        """Counts the parameter as written, by its own optimizer."""
        with quiet():
            torch.autograd.graph.increment_version(p)
            held = self.held[p]
            held.version = p._version
            if transfers := held.transfers:
                transfers.versions[held.home.name] = p._version

    def begun(self, p: nn.Parameter, held: Held, foreign: bool) -> tuple[int, list[Tensor]]:
        """The number of the step that begins, counted in the public state, which is made at the first, as torch does;
        and the tensors among what is held that are to be zeroed first.  Takes up what the user has put there in our
        place."""
        state: dict[str, Any] = dict.setdefault(self.state, p, {})
        zeroed: list[Tensor] = []
        if "step" not in state:
            zeroed += [*held.moments, *([] if held.remainder is None else [held.remainder])]
            state["step"] = torch.tensor(0.0)
            state |= dict(zip(self.moments, held.moments, strict=True))
            if held.remainder is not None:
                state["remainder"] = held.remainder
        for name, own in zip(self.moments, held.moments, strict=True):
            if state[name] is not own:
                own.copy_(state[name])
                state[name] = own
        if held.remainder is not None and foreign:
            zeroed.append(held.remainder)
        state["step"] += 1
        return int(state["step"]), zeroed

    def issue(self, updates: Updates, planes: Mapping[str, Sequence[Due]], clip: np.float32, numbers: Numbers) -> None:
        residents = updates.runtime.residents if self.keeps(updates) else {}

        def work(plane: str) -> Work:
            return self.work(updates, plane, planes[plane], clip, numbers)

        for plane, ticket in updates.issue(planes, work, self.rule, residents).items():
            parameters = [p for _, p, _ in planes[plane]]
            if resident := residents.get(plane):
                updated = {self.held[p].home.name: p for p in parameters}
                resident.newer.update(updated)
                with quiet():
                    resident.loaded |= {n: p._version for n, p in updated.items()}
            updates.defer(plane, ticket, parameters)
            if plane in self.exposed:
                updates.settle(plane)
                if resident:
                    self.pull_state(updates, plane)
                    resident.current = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; does not wait for updates when gradients are set to None."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        with quiet():
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        for updates in self.owners():
            updates.forget_factors()

    def clipping(self, given: list[tuple[nn.Parameter, Tensor]]) -> np.float32:
        """The factor of the gradients at this step."""
        if self.max_grad_norm is None:
            return np.float32(1)
        self.grad_norm = total_norm(given)
        return np.float32(clip_factor(self.grad_norm, self.max_grad_norm).item())

    def settle(self) -> None:
        """Waits for all that is due."""
        for updates in self.owners():
            updates.settle_all()

    def expose(self, keys: Iterable[Any]) -> None:
        """Somebody is given the state of these parameters: waits for their updates, now and after each step."""
        for key in keys:
            if held := self.held.get(key):
                plane = held.home.plane
                self.exposed.add(plane)
                if updates := held.home.updates():
                    updates.settle(plane)
                    if resident := updates.runtime.residents.get(plane):
                        self.pull_state(updates, plane)
                        resident.current = False

    def state_dict(self) -> dict[str, Any]:
        """As torch's, which `torch.optim` loads; beside the moments it holds `remainder` (int16), the low halves of the
        fp32 masters of bf16 parameters."""
        self.settle()
        for updates, plane in self.planes:
            if plane in updates.runtime.residents:
                self.pull_state(updates, plane)
        own = self.state
        self.state = defaultdict(dict, {p: {k: alias(v) for k, v in s.items()} for p, s in dict.items(own)})
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict of this class or of torch.optim's.  Load the model's weights first: writing a weight makes
        its master what was written."""
        self.settle()
        groups, states = state_dict["param_groups"], state_dict["state"]
        for group in groups:
            self.checked(group)
        super().load_state_dict({"state": {}, "param_groups": groups})
        numbered = dict(
            zip(
                (i for g in groups for i in g["params"]),
                (p for g in self.param_groups for p in g["params"]),
                strict=True,
            )
        )
        self.state = State(self.expose)
        self.hold(numbered[i] for i in states)
        for i, state in states.items():
            p = numbered[i]
            held = self.held[p]
            own: dict[str, Any] = {"step": torch.tensor(float(state["step"]) if "step" in state else 1.0)}
            for name, moment in zip(self.moments, held.moments, strict=True):
                if state.get(name) is None:
                    raise ValueError(f"this state_dict has no {name} for {held.home.name}: it is another optimizer's")
                own[name] = moment.copy_(state[name])
            if held.remainder is not None:
                found = state.get("remainder")
                own["remainder"] = held.remainder.zero_() if found is None else held.remainder.copy_(found)
            held.version = p._version
            dict.__setitem__(self.state, p, own)
        for updates in self.owners():
            updates.broken = updates.unstepped = False
            for resident in updates.runtime.residents.values():
                resident.current = False
