"""`compute_dtype`: fp32 parameters that are computed with in bf16 or fp16.

The parameters stay fp32, in their host planes, and are their own master.  Beside each plane there is one of the same
tensors in the compute dtype, which is what goes to the device; a weight is rounded into it (to nearest, ties to even)
when it has been updated, or before the next call if somebody else has written it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megatrain.deferred import quiet
from megatrain.host import HostBuffer, Layout, gradient_dtype, layout_of
from megatrain.store import Store


class Transfers:
    """The planes that go to the device, of one adopted model."""

    def __init__(
        self, store: Store, planes: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor], dtype: torch.dtype,
        pin: bool,
    ):  # fmt: skip
        self.dtype = dtype
        self.layouts: dict[str, Layout] = {}
        self.buffers: dict[str, HostBuffer] = {}
        self.copies: dict[str, Callable[[], Any]] = {}
        """Dotted name -> rounds that tensor into its place."""
        self.versions: dict[str, int] = {}
        """The version of each tensor on the host that is in its place."""
        for plane, names in planes.items():
            specs = [(n, self.dtype_of(tensors[n]), e.shape, e.strides) for n, e in zip(
                names, store.layouts[plane].entries, strict=True
            )]  # fmt: skip
            self.layouts[plane] = layout_of(specs)
            self.buffers[plane] = HostBuffer(self.layouts[plane].bytes, pin)
            places = self.buffers[plane].tensors(self.layouts[plane])
            sources = store.planes[plane].tensors(store.layouts[plane])
            self.copies |= {n: _copy(to, source) for n, to, source in zip(names, places, sources, strict=True)}

    def dtype_of(self, t: Tensor) -> torch.dtype:
        """The dtype that a tensor is computed with."""
        return self.dtype if isinstance(t, nn.Parameter) and t.dtype == torch.float32 else t.dtype

    def refresh(self, tensors: Mapping[str, Tensor]) -> None:
        """Rounds what has been written since."""
        with quiet():
            for name, t in tensors.items():
                if self.versions.get(name) != t._version:
                    self.copies[name]()
                    self.versions[name] = t._version

    def seen(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as the compiler is to see them, without memory."""
        found: dict[str, Tensor] = dict(tensors)
        for name, t in tensors.items():
            with quiet():
                if self.dtype_of(t) != t.dtype:
                    found[name] = like(t, self.dtype, "meta")
        return found

    def cast(self, arguments: Any) -> Any:
        """A call's arguments with its fp32 tensors in the compute dtype, as autograd sees it."""

        def one(x: Any) -> Any:
            return x.to(self.dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x

        return tree_map(one, arguments)


def _copy(to: Tensor, source: Tensor) -> Callable[[], Any]:
    def copy() -> None:
        with torch.no_grad():
            to.copy_(source)

    return copy


def like(p: Tensor, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """A parameter of another dtype, without values, whose gradient is as that of `p`."""
    memory = torch.empty_strided(p.shape, p.stride(), dtype=dtype, device=device)
    made = nn.Parameter(memory, requires_grad=p.requires_grad)
    made.grad_dtype = gradient_dtype(p)  # type: ignore[attr-defined]
    return made


@contextmanager
def without_gradients(tensors: Mapping[str, Tensor]) -> Generator[None, None, None]:
    """Inside, tensors whose gradient has another dtype have none: tracing would give it to a copy that may not have
    it."""
    with quiet():
        found = [(t, t.grad) for t in tensors.values() if t.grad is not None and t.grad.dtype != t.dtype]
        for t, _ in found:
            t.grad = None
    try:
        yield
    finally:
        with quiet():
            for t, grad in found:
                t.grad = grad


@contextmanager
def casting(model: nn.Module, names: Mapping[int, str], dtype: torch.dtype) -> Generator[dict[int, str], None, None]:
    """Inside, fp32 parameters of the model are others, of `dtype` and without values, for tracing; gives the names of
    all by their ids."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    others: dict[int, nn.Parameter] = {}
    try:
        for module in model.modules():
            for key, p in list(module._parameters.items()):
                with quiet():
                    if p is None or p.dtype != torch.float32:
                        continue
                    swapped.append((module, key, p))
                    if id(p) not in others:
                        others[id(p)] = like(p, dtype, p.device)
                setattr(module, key, others[id(p)])
        yield {**names, **{id(other): names[was] for was, other in others.items() if was in names}}
    finally:
        for module, key, p in swapped:
            setattr(module, key, p)
