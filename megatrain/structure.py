"""What a model's forward returns, taken apart into tensors and put together again: tuples, lists, dicts, named tuples,
dataclasses, registered pytrees (Hugging Face outputs among them), other objects, and plain values between them."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree

from megatrain.graphs import number

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""What is computed from sizes while a model is traced."""


@dataclass(frozen=True)
class Leaf:
    """Where a leaf of the result comes from: "result" (value = its index), "input" (name = the argument's path: the
    very object is returned), "weight" (name = dotted name), "size" (value = an expression), "constant" (value)."""

    kind: str
    name: str = ""
    value: Any = None


@dataclass
class Structure:
    """The shape of a result: `build` puts it together from leaves, `paths` name them, `leaves` tell their sources."""

    build: Callable[[list[Any]], Any] = lambda leaves: leaves
    paths: tuple[str, ...] = ()
    leaves: tuple[Leaf, ...] = ()

    def names(self, count: int) -> list[str]:
        """A unique identifier for each of `count` results, from where it stands in the structure (`loss`, `logits`)."""
        names = [""] * count
        for path, leaf in zip(self.paths, self.leaves, strict=True):
            if leaf.kind == "result" and not names[leaf.value]:
                names[leaf.value] = sanitized(path or "y")
        return unique(names)

    def rebuild(
        self,
        results: Sequence[torch.Tensor | None],
        inputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        sizes: Mapping[sympy.Symbol, int],
    ) -> Any:
        """The result that the caller gets."""
        found: list[Any] = []
        for leaf in self.leaves:
            if leaf.kind == "result":
                found.append(results[leaf.value])
            elif leaf.kind == "input":
                found.append(inputs[leaf.name])
            elif leaf.kind == "weight":
                found.append(weights[leaf.name])
            elif leaf.kind == "size":
                found.append(number(leaf.value, sizes))
            else:
                found.append(leaf.value)
        return self.build(found)


def flatten(value: Any, structure: Structure) -> tuple[Any, ...]:
    """The tensors and sizes in `value`, in order; fills in `structure.build` and `.paths`."""
    leaves: list[Any] = []
    paths: list[str] = []
    build = _take(value, "", leaves, paths)
    structure.build, structure.paths = build, tuple(paths)
    return tuple(leaves)


def _take(value: Any, path: str, leaves: list[Any], paths: list[str]) -> Callable[[list[Any]], Any]:
    if isinstance(value, (torch.Tensor, *SIZES)):
        index = len(leaves)
        leaves.append(value)
        paths.append(path)
        return lambda found: found[index]
    if pytree.tree_is_leaf(value):
        if not _holds_tensor(value, set()):
            return lambda found: value
        fields = _fields(value)
        parts = {name: _take(part, _join(path, name), leaves, paths) for name, part in fields.items()}
        return lambda found: _filled(value, {k: part(found) for k, part in parts.items()})
    children, spec = pytree.tree_flatten_with_path(value, is_leaf=lambda v: v is not value)
    takes = [_take(child, _join(path, key_name(key[0])), leaves, paths) for key, child in children]
    return lambda found: pytree.tree_unflatten([take(found) for take in takes], spec)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object that is no registered pytree: a dataclass's fields, or what its __dict__ holds."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return dict(getattr(value, "__dict__", {}))


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    """Whether a tensor or a size is to be found in the attributes of an object, or in theirs."""
    if id(value) in seen or isinstance(value, (type, torch.nn.Module)):
        return False
    seen.add(id(value))
    for part in pytree.tree_leaves(list(_fields(value).values())):
        if isinstance(part, (torch.Tensor, *SIZES)) or _holds_tensor(part, seen):
            return True
    return False


def _filled(value: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of the object `value` with other attributes, made without calling its __init__."""
    made = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(made, name, field)
    return made


def key_name(entry: Any) -> str:
    """A step of a pytree path as text."""
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


SLOT_NAME = re.compile(r"(?:[wugvsarho]\d+|d[A-Za-z_].*|k_\w+|\w+_given)(?<!_)")
"""Names that slots, gradients and kept graphs take in a schedule; with `_` behind, one is free for a value."""


def sanitized(name: str) -> str:
    """`name` as an identifier that a dump can use for a device value."""
    text = re.sub(r"\W", "_", name)
    text = text if re.match(r"[A-Za-z_]", text) else f"y{text}"
    return f"{text}_" if SLOT_NAME.fullmatch(text) else text


def fresh(name: str, taken: Container[str]) -> str:
    """`name` with `_` behind until it is free."""
    while name in taken:
        name += "_"
    return name


def unique(names: list[str]) -> list[str]:
    """`names` with a number behind those that are taken."""
    seen: set[str] = set()
    out: list[str] = []
    for name in names:
        n = 0
        candidate = name
        while candidate in seen:
            n += 1
            candidate = f"{name}_{n}"
        seen.add(candidate)
        out.append(candidate)
    return out
