"""The rules of `kernels` on the device, for planes whose state lives there: the same formulas in the same order, in
torch operations, on CUDA fused by `torch.compile` into one pass over the data.

Moments have the host's bits on the CPU; torch's square root and CUDA's divisions are not correctly rounded everywhere,
and compilers contract products and sums, so that an fp32 master may differ by a few units in the last place.
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
CHUNK = 1 << 25
"""Elements updated at a time where nothing is fused: bounds the fp32 temporaries."""


def master(w: Tensor, r: Tensor | None) -> Tensor:
    """The fp32 master of a weight: the bits of bf16 (int16) and its remainder, or fp32 itself."""
    return w if r is None else ((w.to(torch.int32) << 16) + r).view(torch.float32)


def store(w: Tensor, r: Tensor | None, x: Tensor) -> None:
    """Writes the master of a weight; a NaN becomes the canonical one."""
    if r is None:
        w.copy_(x)
        return
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    number = x == x
    r.copy_(torch.where(number, bits - (high << 16), 0))
    w.copy_(torch.where(number, high, 0x7FC0))


def adamw(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> None:
    decay, rise1, beta2, rise2, size, root, eps, factor = c
    d = g.float() * factor
    a = moments[0] + rise1 * (d - moments[0])
    s = moments[1] * beta2 + (rise2 * d) * d
    x = master(w, r) * decay
    store(w, r, x - size * (a / (s.sqrt() / root + eps)))
    moments[0].copy_(a)
    moments[1].copy_(s)


def sgd(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> None:
    lr, decay, factor = c
    x = master(w, r)
    store(w, r, x - lr * (g.float() * factor + decay * x))


def momentum(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> None:
    lr, decay, mu, rise, ahead, now, factor = c
    x = master(w, r)
    d = g.float() * factor + decay * x
    a = moments[0] * mu + rise * d
    store(w, r, x - lr * (now * d + ahead * a))
    moments[0].copy_(a)


def lion(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[Any]) -> None:
    lr, decay, beta1, rise1, beta2, rise2, factor = c
    d = g.float() * factor
    a = moments[0] * beta1 + rise1 * d
    store(w, r, master(w, r) * decay - lr * a.sign())
    moments[0].copy_(moments[0] * beta2 + rise2 * d)


RULES: dict[str, Callable[..., None]] = {rule.__name__: rule for rule in (adamw, sgd, momentum, lion)}


def update(rule: str, w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], constants: Any) -> None:
    """Updates one weight; all tensors are flat, of one size.  `constants` are those of the kernel, as `constants_on`
    gives them."""
    fused = fused_rule(rule)
    if r is not None:  # here, because a compiled function may not write through a view of another dtype
        w = w.view(torch.int16)
    if w.device.type == "cuda" and fused.works:
        try:
            fused.call(w, r, g, moments, constants)
            return
        except Exception as error:  # a compiler that is not there, or does not work here
            fused.works = False
            LOG.warning("megatrain: %s on the device is not fused, because torch.compile fails here: %r", rule, error)
    for start in range(0, w.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        RULES[rule](w[part], None if r is None else r[part], g[part], [m[part] for m in moments], constants)


@dataclass
class Fused:
    """A rule compiled into one kernel, while that works."""

    call: Callable[..., None]
    works: bool = True


@cache
def fused_rule(rule: str) -> Fused:
    return Fused(torch.compile(RULES[rule], dynamic=True, fullgraph=True))


def constants_on(device: torch.device, constants: np.ndarray[Any, Any]) -> Sequence[Any]:
    """A rule's numbers as the device wants them: a change of them must not compile anew."""
    if device.type == "cuda":
        return torch.from_numpy(constants.copy()).to(device).unbind()
    return [float(x) for x in constants]
