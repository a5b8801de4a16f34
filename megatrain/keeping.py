"""An optimizer's state of planes that live on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain import device
from megatrain.deferred import Updates, quiet
from megatrain.host import Layout, Spec, dense_stride, layout_of
from megatrain.hoststate import Group, Held, Numbers, Work
from megatrain.residence import Resident


class Keeping:
    """What an optimizer does with planes that live on the device; a part of `HostOptimizer`."""

    moments: tuple[str, ...]
    held: dict[nn.Parameter, Held]
    planes: dict[tuple[Updates, str], list[nn.Parameter]]
    layouts: dict[tuple[Updates, str, int], Layout]
    state: Any

    def kernel(self, group: Group) -> Any:
        raise NotImplementedError

    def begun(self, p: nn.Parameter, held: Held, foreign: bool) -> tuple[int, list[Tensor]]:
        raise NotImplementedError

    def constants(self, group: Group, step: int, factor: np.float32, known: Numbers) -> Any:
        raise NotImplementedError

    def keeps(self, updates: Updates) -> bool:
        """Whether it is this optimizer's state that lives on the device."""
        keeper: Any = updates.keeper() if updates.keeper else None
        return keeper is self

    def residing(self, updates: Updates, plane: str) -> Resident | None:
        """What lives on the device for a plane, its state too; None for a plane that lives on the host."""
        resident = updates.runtime.residents.get(plane)
        if resident is None:
            return None
        if not self.keeps(updates):  # another optimizer's: this one works on the host
            updates.settle(plane)
            return None
        if not resident.current:
            updates.runtime.lanes.finish(("compute",))
            for p, (remainder, moments) in self.resident_state(updates, plane, resident).items():
                held = self.held[p]
                began = "step" in dict.get(self.state, p, {})
                for here, there in zip(moments, held.moments, strict=True):
                    here.copy_(there) if began else here.zero_()
                if remainder is not None and held.remainder is not None:
                    remainder.copy_(held.remainder) if began else remainder.zero_()
            resident.current = True
        return resident

    def resident_state(
        self, updates: Updates, plane: str, resident: Resident
    ) -> dict[nn.Parameter, tuple[Tensor | None, list[Tensor]]]:
        """(remainder, moments) of a plane's parameters on the device."""
        if resident.states is None:
            ps = self.planes[updates, plane]
            views = iter(self.state_layout(updates, plane).views(resident.state))
            resident.states = {
                p: (next(views) if self.held[p].remainder is not None else None, [next(views) for _ in self.moments])
                for p in ps
            }
        return resident.states

    def state_layout(self, updates: Updates, plane: str) -> Layout:
        """Where the state of a plane's parameters lies.  Asked for at every call, so worked out once."""
        ps = self.planes.get((updates, plane), ())
        key = (updates, plane, len(ps))
        if key not in self.layouts:
            self.layouts[key] = self.laid_out(ps)
        return self.layouts[key]

    def laid_out(self, parameters: Sequence[nn.Parameter]) -> Layout:
        specs: list[Spec] = []
        for i, p in enumerate(parameters):
            kinds = [torch.int16] * (self.held[p].remainder is not None) + [torch.float32] * len(self.moments)
            specs += [(f"{i}.{k}", kind, tuple(p.shape), dense_stride(p)) for k, kind in enumerate(kinds)]
        return layout_of(specs)

    def state_bytes(self, updates: Updates, plane: str) -> int:
        """Bytes of the state of a plane."""
        with quiet():
            return self.state_layout(updates, plane).bytes

    def pull_state(self, updates: Updates, plane: str) -> None:
        """Gives the host the state of a plane that lives on the device."""
        resident = updates.runtime.residents[plane]
        if not resident.current:
            return
        updates.runtime.lanes.finish(("compute",))
        with quiet(), torch.no_grad():
            for p, (remainder, moments) in self.resident_state(updates, plane, resident).items():
                held = self.held[p]
                if "step" in dict.get(self.state, p, {}):
                    for here, there in zip(moments, held.moments, strict=True):
                        there.copy_(here)
                    if remainder is not None and held.remainder is not None:
                        held.remainder.copy_(remainder)

    def add_resident(
        self,
        work: Work,
        group: Group,
        p: nn.Parameter,
        grad: Tensor,
        factor: np.float32,
        numbers: Numbers,
        foreign: bool,
        resident: Resident,
    ) -> None:
        """Adds the update of a parameter that lives on the device."""
        held = self.held[p]
        updates = held.home.updates()
        assert updates is not None
        remainder, moments = self.resident_state(updates, held.home.plane, resident)[p]
        weight, gradient = resident.weight_views[held.home.name], resident.gradient_views.get(held.home.name)
        if gradient is None:  # of a parameter that was frozen since
            gradient = grad.detach().to(weight.device)
        step, zeroed = self.begun(p, held, foreign)
        here = dict(zip(map(id, [held.remainder, *held.moments]), [remainder, *moments], strict=True))
        work.zeroed += [t for z in zeroed if (t := here[id(z)]) is not None]
        if not resident.holds_gradient(held.home.name, grad):
            work.copies.append((gradient, grad.detach()))
        constants = self.constants(group, step, factor, numbers)
        flats = [t.as_strided((t.numel(),), (1,)) for t in (weight, gradient, *moments)]
        rest = None if remainder is None else remainder.as_strided((remainder.numel(),), (1,))
        call = (self.kernel(group).__name__, flats[0], rest, flats[1], flats[2:], constants)
        work.calls.append((device.update, call))
