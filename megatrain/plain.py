"""Plain values, and the containers and plain objects that hold them: what they held is remembered and put back."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LONGEST = 1000
"""A container with more items is taken for what it is, not for what it holds."""

DEEPEST = 6


class Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()


def is_plain(value: Any) -> bool:
    """A value that is its own description: a number, a string, a dtype, None, or a tuple of such."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, Missing)
    )


@dataclass(frozen=True)
class Holder:
    """A container, or the attributes of a plain object, with what it held."""

    container: Any
    content: Any
    attributes: bool = False

    def changed(self) -> bool:
        now = content_of(self.container)
        if isinstance(now, dict):
            return [*now] != [*self.content] or any(now[k] is not v for k, v in self.content.items())
        if isinstance(now, set):
            return now != self.content
        return len(now) != len(self.content) or any(a is not b for a, b in zip(now, self.content, strict=True))


def content_of(container: Any) -> Any:
    """A shallow copy."""
    if isinstance(container, MutableMapping):
        return dict(container)
    return set(container) if isinstance(container, MutableSet) else list(container)


def held(values: Iterable[Any]) -> list[Holder]:
    """The containers and plain objects to be found in `values`, as deep as attributes are compared."""
    found: dict[int, Holder] = {}

    def look(value: Any, depth: int) -> None:
        opaque = isinstance(value, (torch.Tensor, nn.Module, type)) or callable(value) or is_plain(value)
        if opaque or depth == DEEPEST or id(value) in found:
            return
        if isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
            if len(value) <= LONGEST:
                found[id(value)] = Holder(value, content_of(value))
                parts = [*value.items()] if isinstance(value, MutableMapping) else [*value]
                for part in parts:
                    look(part, depth + 1)
        elif isinstance(value, tuple):
            for part in value:
                look(part, depth + 1)
        elif fields := getattr(value, "__dict__", None):
            found[id(value)] = Holder(fields, dict(fields), attributes=True)
            for part in fields.values():
                look(part, depth + 1)

    for value in values:
        look(value, 0)
    return list(found.values())


def put_back(holders: Iterable[Holder]) -> None:
    """Everything holds what it held."""
    for holder in holders:
        if not holder.changed():
            continue
        container, content = holder.container, holder.content
        if isinstance(container, MutableSequence):
            container[:] = content
            continue
        container.clear()
        container.update(content) if isinstance(content, dict) else container.__ior__(content)
