"""Norms of gradients, noted as the backward makes them, so that clipping reads nothing again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatrain.residence import Resident
    from megatrain.runtime import Runtime


class Noted:
    """The norms of one compiled model's gradients.  Those of a plane that lives on the device are worked out when
    somebody asks: they are of what several backwards have added up."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self.norms: dict[int, tuple[Tensor | weakref.ref[Resident], int, int]] = {}
        """By a gradient's address: its plane's norms or what lives on the device, its place there, its version."""
        self.read: dict[int, list[float]] = {}

    def note(self, plane: str, gradients: Sequence[Tensor | None]) -> None:
        """The backward has made the gradients of a plane, in the order of their layout (None: not this one)."""
        resident = self.runtime.residents.get(plane)
        norms = weakref.ref(resident) if resident else self.runtime.norms.get(plane)
        for i, g in enumerate(gradients):
            if g is not None and norms is not None:
                self.norms[g.data_ptr()] = norms, i, g._version
        self.read.clear()

    def square(self, gradient: Tensor) -> float | None:
        """The square of the gradient's norm, if it is as the backward made it."""
        norms, i, version = self.norms.get(gradient.data_ptr(), (None, 0, 0))
        if norms is None or version != gradient._version:
            return None
        if isinstance(norms, weakref.ref) and ((r := norms()) is None or not r.holds_gradient(r.names[i], gradient)):
            return None
        if id(norms) not in self.read:  # one copy for all planes
            every = {id(n): n for n, _, _ in self.norms.values()}
            found = {k: n if isinstance(n, Tensor) else (r := n()) and r.norms() for k, n in every.items()}
            known = {k: n for k, n in found.items() if n is not None}
            values = iter(torch.cat([*known.values()]).double().square().tolist() if known else ())
            self.read = {k: [next(values) for _ in range(n.numel())] for k, n in known.items()}
        return self.read[id(norms)][i] if id(norms) in self.read else None
