"""Planes that live on the device: weights, gradients and optimizer state in slots of their own, which no copy leaves or
enters while the loop runs.

The host's plane and gradients are filled again when somebody looks (see `deferred`), and what somebody writes on the
host is loaded before the next half.  Which planes live here is the plan's decision, and stands in the schedule as slots
with the role `resident`: `r3` holds weights, `h3` gradients, `o3` optimizer state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatrain.host import HostBuffer, Layout, norms

Slots = tuple[str, str, str]
"""Names of the slots of weights, gradients and state."""


@dataclass(eq=False)
class Resident:
    """What lives on the device for one plane."""

    weights: Tensor
    gradients: Tensor
    state: Tensor
    weight_layout: Layout
    gradient_layout: Layout
    loaded: dict[str, int] = field(default_factory=dict)
    """The version of each tensor on the host whose value `weights` holds."""
    newer: set[str] = field(default_factory=set)
    """Names of the parameters that are newer here than on the host."""
    has: set[str] = field(default_factory=set)
    """Names of the parameters with a gradient here."""
    given: dict[str, Tensor] = field(default_factory=dict)
    """Host tensors that autograd was given for these gradients, and that are to be filled when somebody looks."""
    buffers: list[HostBuffer] = field(default_factory=list)
    """The memory of `given`: zeros, until these are filled."""
    task: int = -1
    """The run of autograd's engine that was last given gradients to be filled."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Those that are guarded."""
    landing: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Those of `given` that autograd may have handed to the user."""
    states: Any = None
    """The optimizer's view of `state`, which it keeps here."""
    current: bool = False
    """The state here is the optimizer's; else the host's is."""

    @cached_property
    def weight_views(self) -> dict[str, Tensor]:
        """The weights by dotted name."""
        return self.weight_layout.named(self.weights)

    @cached_property
    def gradient_views(self) -> dict[str, Tensor]:
        """The gradients by dotted name."""
        return self.gradient_layout.named(self.gradients)

    def add(self, made: Mapping[str, Tensor]) -> None:
        """Adds gradients of a backward, or begins with them."""
        add_into(self.gradient_views, self.has, made)

    @cached_property
    def names(self) -> list[str]:
        """The parameters with a gradient, in the order of the layout."""
        return [entry.name for entry in self.gradient_layout.entries]

    def norms(self) -> Tensor | None:
        """The norms of all gradients, in the order of the layout."""
        return norms([*self.gradient_views.values()])

    def stale(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Which of these have been written on the host since they were taken from there."""
        return [n for n, t in tensors.items() if n not in self.newer and self.loaded.get(n) != t._version]

    def load(self, plane: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Takes from the host's plane what is stale here."""
        host = self.weight_layout.named(plane)
        for n in self.stale(tensors):
            self.weight_views[n].copy_(host[n])
            self.loaded[n] = tensors[n]._version

    def holds_gradient(self, name: str, grad: Tensor) -> bool:
        """Whether the gradient here is what `grad`, a parameter's, stands for."""
        alias = self.given.get(name)
        return alias is not None and grad.data_ptr() == alias.data_ptr() and grad._version == alias._version

    def pull_weights(self, plane: Tensor) -> None:
        """Gives the host's plane the weights that are newer here.  Others the user may have written there."""
        host = self.weight_layout.named(plane)
        for name in self.newer:
            host[name].copy_(self.weight_views[name])
        self.newer.clear()

    def pull_gradients(self) -> None:
        """Gives the host's gradients what they stand for; they are the host's from now on."""
        views = self.gradient_views
        for name, host in self.given.items():
            if name in self.has:
                host.add_(views[name].to(host.device))  # to zeros, or to what autograd has added there
        for buffer in self.buffers:
            buffer.written = True
        self.buffers.clear()
        for t in self.handed():
            if type(t) is Landing:
                object.__setattr__(t, "__class__", Tensor)
        self.given.clear()
        self.has.clear()
        self.landing.clear()

    def handed(self) -> list[Tensor]:
        """Gradients that are still in somebody's hands, beside `.grad`."""
        return [t for ref in self.landing if (t := ref()) is not None]

    def land(self, name: str, host: Tensor, alias: Tensor, settle: Callable[[], None]) -> Tensor:
        """`host`, to be given to autograd for the gradient `name`: whoever looks at it first calls `settle`.  `alias`
        is another tensor over its memory, made as it was."""
        self.given[name] = alias
        object.__setattr__(host, "__class__", Landing)
        host._settle = settle  # type: ignore[attr-defined]
        self.landing.append(weakref.ref(host))
        return host


def add_into(views: Mapping[str, Tensor], has: set[str], made: Mapping[str, Tensor]) -> None:
    """Adds what was made to the gradients that there are (`has`), and begins the others with it."""
    old = [n for n in made if n in has]
    new = [n for n in made if n not in has]
    if old:
        torch._foreach_add_([views[n] for n in old], [made[n] for n in old])
    if new:
        torch._foreach_copy_([views[n] for n in new], [made[n] for n in new])
    has.update(made)


class Landing(Tensor):
    """A gradient that is to be filled.  Never made: a tensor is given this class for a while."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for t in tree_leaves((args, kwargs)):
                if type(t) is Landing:
                    t._settle()  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
