"""What an optimizer holds on the host for each parameter, and the work of one update."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.deferred import Home
from megatrain.host import HostBuffer, Spec, dense_stride, flat, layout_of
from megatrain.transfer import Transfers

Array = np.ndarray[Any, Any]
Group = dict[str, Any]
Numbers = dict[Any, Any]
"""A rule's constants by (group, step, factor)."""
Due = tuple[Group, nn.Parameter, Tensor]
"""A parameter that is to be updated, its group's options and its gradient."""

UPDATES = ("auto", "host", "device", "in-backward")


def check_options(update: str, max_grad_norm: float | None) -> None:
    """Raises ValueError for options of an optimizer that there are not, or not together."""
    if update not in UPDATES:
        raise ValueError(f"update={update!r}: there is {', '.join(map(repr, UPDATES))}")
    if update == "in-backward" and max_grad_norm is not None:
        raise ValueError(
            "max_grad_norm with update='in-backward': the norm of all gradients is known only when the backward "
            "ends; use update='host' to clip"
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}: give a positive number, or None")


@dataclass(eq=False)
class Held:
    """What an optimizer holds for one parameter: fp32 moments, and for bf16 the remainder of its master (int16), each
    with the shape and stride of the parameter."""

    home: Home
    moments: list[Tensor]
    remainder: Tensor | None
    buffers: Sequence[HostBuffer]
    """The memory of its plane's state."""
    version: int
    """The parameter's version when its remainder was last right: a later write by somebody else makes it zero."""

    def arrays(self, p: nn.Parameter, grad: Tensor) -> tuple[Array, ...]:
        """weight, remainder, gradient and two moments, as flat arrays in the order of the parameter's memory."""
        if grad.stride() != p.stride() or grad.dtype not in (torch.bfloat16, torch.float32):
            grad = torch.empty_like(p, dtype=grad.dtype if grad.dtype == torch.bfloat16 else torch.float32).copy_(grad)
        moments = [flat(m) for m in self.moments] + [kernels.NO_MOMENT] * (2 - len(self.moments))
        remainder = kernels.NO_REMAINDER if self.remainder is None else flat(self.remainder)
        updates = self.home.updates()
        assert updates is not None
        return (updates.weight(self.home), remainder, flat(grad), *moments)

    @property
    def transfers(self) -> Transfers | None:
        """The planes in another dtype that the parameter's is rounded into."""
        updates = self.home.updates()
        return updates.runtime.transfers if updates else None


@dataclass
class Work:
    """The update of one plane: (kernel, its arrays) of each parameter, and tensors to be zeroed first."""

    calls: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    zeroed: list[Tensor] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(to, from) of what is on the host and is needed on the device."""
    after: list[Callable[[], Any]] = field(default_factory=list)
    """What is to be done when all is updated."""
    pinned: list[HostBuffer] = field(default_factory=list)
    """Memory that the device is to copy from and to."""

    def __call__(self) -> None:
        for buffer in self.pinned:
            buffer.pin()
        for t in self.zeroed:
            t.zero_()
        with torch.no_grad():
            for to, source in self.copies:
                to.copy_(source)
            for kernel, arrays in self.calls:
                kernel(*arrays)
            for copy in self.after:
                copy()
        self.calls.clear()  # with the gradients
        self.copies.clear()


class State(defaultdict[Any, Any]):
    """`optimizer.state`: who looks into it waits for what is due, and what it was given is up to date after each step
    from then on."""

    def __init__(self, expose: Callable[[Iterable[Any]], None]):
        """`expose`, a method, is told of the parameters whose state is given away."""
        super().__init__(dict)
        self.expose = weakref.WeakMethod(expose)  # type: ignore[arg-type]

    def exposed(self, *keys: Any) -> None:
        if expose := self.expose():
            expose(keys)

    def __getitem__(self, key: Any) -> Any:
        self.exposed(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.exposed(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.exposed(*self)
        return super().items()

    def values(self) -> Any:
        self.exposed(*self)
        return super().values()

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def state_plane(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> tuple[HostBuffer, list[Tensor]]:
    """Zeros like each of the parameters, of another dtype, in one host buffer."""
    specs: list[Spec] = [(str(i), dtype, tuple(p.shape), dense_stride(p)) for i, p in enumerate(parameters)]
    layout = layout_of(specs)
    buffer = HostBuffer(layout.bytes)
    return buffer, buffer.tensors(layout)


def alias(value: Any) -> Any:
    """Another tensor over the same memory, so that the memory's use count tells whether the user holds it."""
    return value.detach() if isinstance(value, Tensor) and value.dim() else value
