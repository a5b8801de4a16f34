"""The rules of `kernels` on the device, for planes whose state lives there: the same formulas in the same order, in
torch operations, on CUDA fused by `torch.compile`.

Moments have the host's bits on the CPU; torch's square root and CUDA's divisions are not correctly rounded everywhere,
and compilers contract products and sums, so that an fp32 master may differ by a few units in the last place.

A rule gives new values, which are then copied into place: weights, remainders and moments share a slot's storage under
different dtypes, and a compiled function may not write through such views.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOG = logging.getLogger("megatrain")
CHUNK = 1 << 23
"""Elements updated at a time: bounds the temporaries."""

TEMPORARY = 48
"""Bytes an element that an update takes beside its operands where nothing is fused."""

New = tuple[Tensor, Tensor | None, list[Tensor]]
"""A weight's bits, remainder and moments."""


def master(w: Tensor, r: Tensor | None) -> Tensor:
    """The fp32 master of a weight: the bits of bf16 (int16) and its remainder, or fp32 itself."""
    return w if r is None else ((w.to(torch.int32) << 16) + r).view(torch.float32)


def parts(x: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The weight and the remainder of an fp32 master; a NaN becomes the canonical one."""
    if r is None:
        return x, None
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    number = x == x
    low = torch.where(number, bits - (high << 16), 0).to(torch.int16)
    return torch.where(number, high, 0x7FC0).to(torch.int16), low


def adamw(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> New:
    decay, rise1, beta2, rise2, size, root, eps, factor = c
    d = g.float() * factor
    a = moments[0] + rise1 * (d - moments[0])
    s = moments[1] * beta2 + (rise2 * d) * d
    x = master(w, r) * decay
    return *parts(x - size * (a / (s.sqrt() / root + eps)), r), [a, s]


def sgd(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> New:
    lr, decay, factor = c
    x = master(w, r)
    return *parts(x - lr * (g.float() * factor + decay * x), r), []


def momentum(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> New:
    lr, decay, mu, rise, ahead, now, factor = c
    x = master(w, r)
    d = g.float() * factor + decay * x
    a = moments[0] * mu + rise * d
    return *parts(x - lr * (now * d + ahead * a), r), [a]


def lion(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> New:
    lr, decay, beta1, rise1, beta2, rise2, factor = c
    d = g.float() * factor
    a = moments[0] * beta1 + rise1 * d
    return *parts(master(w, r) * decay - lr * a.sign(), r), [moments[0] * beta2 + rise2 * d]


RULES: dict[str, Callable[..., New]] = {rule.__name__: rule for rule in (adamw, sgd, momentum, lion)}


def update(rule: str, w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], constants: Any) -> None:
    """Updates one weight; all tensors are flat, of one size.  `constants` are those of the kernel, as `constants_on`
    gives them."""
    if r is not None:
        w = w.view(torch.int16)
    for start in range(0, w.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        old = w[part], None if r is None else r[part], [m[part] for m in moments]
        weight, rest, after = updated(rule, *old[:2], g[part], old[2], constants)
        old[0].copy_(weight)
        if old[1] is not None and rest is not None:
            old[1].copy_(rest)
        for to, new in zip(old[2], after, strict=True):
            to.copy_(new)


def updated(rule: str, *args: Any) -> New:
    """What the rule gives, fused where that works."""
    fused = fused_rule(rule)
    if args[0].device.type == "cuda" and fused.works:
        try:
            return fused.call(*args)
        except Exception as error:  # a compiler that is not there, or does not work here
            fused.works = False
            LOG.warning("megatrain: %s on the device is not fused, because torch.compile fails here: %r", rule, error)
    return RULES[rule](*args)


@dataclass
class Fused:
    """A rule compiled into one kernel, while that works."""

    call: Callable[..., New]
    works: bool = True


@cache
def fused_rule(rule: str) -> Fused:
    return Fused(torch.compile(RULES[rule], dynamic=True, fullgraph=True))


def constants_on(device: torch.device, constants: np.ndarray[Any, Any]) -> Sequence[Any]:
    """A rule's numbers as the device wants them: a change of them must not compile anew."""
    if device.type == "cuda":
        return torch.from_numpy(constants.copy()).to(device).unbind()
    return [float(x) for x in constants]
