"""Host state: the planes in which a model's parameters and buffers live, each tensor with a storage of its own.

A plane *is* the parameters' memory and the transfer buffer; there is no second copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.host import Entry, HostBuffer, Layout, dense_stride, layout_of


@dataclass(frozen=True, eq=False)
class Tree:
    """A module tree at one moment, in lists, because comparing whole lists is fast."""

    modules: list[str]
    dicts: list[dict[str, Any]]
    """Each module's parameters, buffers and children."""
    sizes: list[int]
    held: dict[str, tuple[dict[str, Any], str]]
    """Dotted name -> the dictionary and the key that it is held by."""
    objects: list[Any]
    tensors: dict[str, Tensor]
    look: list[list[Any]]
    """What `look_at` says of the tensors."""


@dataclass(frozen=True, eq=False)
class Store:
    """The planes of an adopted model and their layouts, by plane name."""

    planes: dict[str, HostBuffer]
    layouts: dict[str, Layout]
    tree: Tree = field(default_factory=lambda: tree_of(nn.Module()), repr=False)
    leases: dict[str, weakref.ref[memoryview]] = field(default_factory=dict, repr=False)
    """What the tensors over each plane hold alive."""

    def substituted(self) -> bool:
        """Whether plain tensors stand in the place of parameters, as inside `torch.func.functional_call`."""
        objects = [held.get(key) for held, key in self.tree.held.values()]
        if all(map(is_, objects, self.tree.objects)):
            return False
        pairs = zip(objects, self.tree.objects, strict=True)
        return any(
            isinstance(was, nn.Parameter) and isinstance(now, Tensor) and not isinstance(now, nn.Parameter)
            for now, was in pairs
        )

    def changed(self, model: nn.Module) -> str:
        """Empty while every module, parameter and buffer in `model` is the object it was when adopted, at the same
        address, with the same dtype, stride and number of elements; else a line that says what is not."""
        was = self.tree
        if model._modules is not was.dicts[2]:
            return f"this {type(model).__name__} is not the model that was adopted"
        sizes = list(map(len, was.dicts))
        if sizes != was.sizes:
            return resized(was, sizes)
        objects = [held.get(key) for held, key in was.held.values()]
        same = list(map(is_, objects, was.objects))
        if not all(same):
            return f"{list(was.held)[same.index(False)]} was replaced"
        look = look_at(was.tensors.values())
        return "" if look == was.look else changed_look(was, look)


def tree_of(model: nn.Module) -> Tree:
    modules = dict(model.named_modules())
    dicts: list[tuple[str, dict[str, Any]]] = []
    for path, m in modules.items():
        dicts += [(path, m._parameters), (path, m._buffers), (path, m._modules)]
    held = {f"{path}.{key}" if path else key: (d, key) for path, d in dicts for key in d}
    objects = {name: d[key] for name, (d, key) in held.items()}
    tensors = {name: t for name, t in objects.items() if isinstance(t, Tensor)}
    sizes = [len(d) for _, d in dicts]
    look = look_at(tensors.values())
    return Tree(list(modules), [d for _, d in dicts], sizes, held, list(objects.values()), tensors, look)


def look_at(tensors: Collection[Tensor]) -> list[list[Any]]:
    """Addresses, numbers of elements, strides and dtypes.  Parameters may be guarded by a __torch_function__ that waits
    for their update; looking at them does not."""
    with torch._C.DisableTorchFunctionSubclass():
        what = (Tensor.data_ptr, Tensor.numel, Tensor.stride)
        return [*(list(map(of, tensors)) for of in what), [t.dtype for t in tensors]]


def resized(was: Tree, sizes: Sequence[int]) -> str:
    """The line for the first module that gained or lost parameters, buffers or children."""
    at = next(i for i, size in enumerate(sizes) if size != was.sizes[i])
    what = ("parameter", "buffer", "module")[at % 3]
    how = "added to" if sizes[at] > was.sizes[at] else "removed from"
    return f"a {what} was {how} {was.modules[at // 3] or 'the model'}"


def changed_look(was: Tree, look: Sequence[Sequence[Any]]) -> str:
    """The line for the first tensor that is the same object as when adopted, but not what or where it was then."""
    at = next(
        i
        for i, (now, then) in enumerate(zip(zip(*look, strict=True), zip(*was.look, strict=True), strict=True))
        if now != then
    )
    name, t = list(was.tensors.items())[at]
    if t.device.type != "cpu":
        return f"{name} moved to {t.device}"
    if t.dtype is not was.look[3][at]:
        return f"{name} is {t.dtype} now, not {was.look[3][at]}"
    if (t.numel(), t.stride()) != (was.look[1][at], was.look[2][at]):
        return f"{name} has another shape now, {list(t.shape)}, or stride, {t.stride()}"
    return f"{name} was given other memory"


NO_STORE = Store({}, {})
"""The store of a model that was never adopted."""


@torch.no_grad()
def adopt(model: nn.Module, planes: Mapping[str, Sequence[str]], pin: bool = False, old: Store = NO_STORE) -> Store:
    """Move parameters and buffers of `model` into host planes, in place: `planes` gives, for each plane, their dotted
    names in order, a tied one once.  The objects stay the same, with their hooks, `.grad`, version and `requires_grad`;
    memory grows by one plane at a time, not by the model.  A tensor without gaps keeps its stride (channels_last), any
    other becomes contiguous.  A buffer that is a view of another tensor no longer is.

    With `old`, the store of an earlier adoption, its planes are used again where the layout and the tensor objects are
    the same and lie in their place, or where nothing lies in the plane any more.  A plane of which a tensor was
    replaced or given other memory is made anew: the old one may be the user's still.

    Raises ValueError, before anything has moved, for a name that is not there or given twice, for a tensor on meta or
    not strided, and for two parameters that share memory without being one object.
    """
    held = {plane: [(name, find(model, name)) for name in names] for plane, names in planes.items()}
    check_adoptable(chain.from_iterable(held.values()))
    layouts = {
        plane: layout_of((name, t.dtype, t.shape, dense_stride(t)) for name, t in pairs)
        for plane, pairs in held.items()
    }

    def entries(plane: str) -> list[tuple[tuple[str, Tensor], Entry]]:
        return list(zip(held[plane], layouts[plane].entries, strict=True))

    kept = {
        plane: old.planes[plane]
        for plane in planes
        if old.layouts.get(plane) == layouts[plane]
        and not any(name in old.tree.tensors and old.tree.tensors[name] is not t for name, t in held[plane])
        and (old.leases[plane]() is None or all(in_place(t, e, old.planes[plane]) for (_, t), e in entries(plane)))
    }
    settled = {
        id(t)
        for plane, buffer in kept.items()
        for (_, t), place in zip(held[plane], buffer.tensors(layouts[plane]), strict=True)
        if t.device == place.device and t.data_ptr() == place.data_ptr() and t.stride() == place.stride()
    }
    # What lies in a plane that is used again, but elsewhere (two weights swapped), is read before anything is written.
    loose = [t for _, t in chain.from_iterable(held.values()) if id(t) not in settled]
    sources = {id(t): t.detach().clone() for t in loose if any(lies_in(t, buffer) for buffer in kept.values())}
    buffers: dict[str, HostBuffer] = {}
    leases: dict[str, weakref.ref[memoryview]] = {}
    for plane, layout in layouts.items():
        buffers[plane] = kept[plane] if plane in kept else HostBuffer(layout.bytes, pin)
        lease = buffers[plane].lease()
        leases[plane] = weakref.ref(lease)
        for (_, t), place in zip(held[plane], buffers[plane].tensors(layout, lease), strict=True):
            if id(t) not in settled:
                t.data = place.copy_(sources.pop(id(t), t.detach()))
        if all(id(t) in settled for _, t in held[plane]) and plane in old.leases:
            leases[plane] = old.leases[plane]
    return Store(buffers, layouts, tree_of(model), leases)


def find(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer with this dotted name."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = nn.Module()
    t = {**module._buffers, **module._parameters}.get(key)
    if t is None:
        raise ValueError(f"{name} is not a parameter or buffer of this {type(model).__name__}")
    return t


def check_adoptable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise the ValueErrors of `adopt`."""
    objects: dict[int, str] = {}
    addresses: dict[int, str] = {}
    for name, t in named:
        if id(t) in objects:
            raise ValueError(f"{objects[id(t)]} and {name} are one tensor: a tied tensor is in one plane, once")
        objects[id(t)] = name
        if t.is_meta:
            raise ValueError(f"{name} is on meta: fill it first, from a checkpoint folder with megatrain.load_weights")
        if t.layout is not torch.strided:
            raise ValueError(f"{name} has layout {t.layout}: only strided tensors can be streamed")
        if not isinstance(t, nn.Parameter) or not t.numel():
            continue
        other = addresses.setdefault(t.data_ptr(), name)
        if other != name:
            raise ValueError(f"{other} and {name} share memory: to tie them, assign the same Parameter to both")


def in_place(t: Tensor, e: Entry, buffer: HostBuffer) -> bool:
    """Whether the tensor is the entry's part of the buffer."""
    if not e.nbytes:
        return t.device.type == "cpu"
    return t.device.type == "cpu" and t.data_ptr() == buffer.flat.data_ptr() + e.offset and t.stride() == e.strides


def lies_in(t: Tensor, buffer: HostBuffer) -> bool:
    start = buffer.flat.data_ptr()
    return t.device.type == "cpu" and start <= t.data_ptr() < start + buffer.bytes
