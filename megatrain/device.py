"""The rules of `kernels` on the device, for planes whose state lives there: the same formulas in the same order, in
torch operations.  Moments have the host's bits; torch's square root and CUDA's division by a number are not correctly
rounded everywhere, so that an fp32 master may differ by a unit in the last place or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 26
"""Elements updated at a time: bounds the fp32 temporaries."""

TEMPORARIES = 6
"""fp32 temporaries of CHUNK elements that are alive at once, at most."""


def master(w: Tensor, r: Tensor | None) -> Tensor:
    """The fp32 master of a weight: bf16 and its remainder, or fp32 itself."""
    if r is None:
        return w.clone()
    return w.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(r).view(torch.float32)


def store(w: Tensor, r: Tensor | None, x: Tensor) -> None:
    """Writes the master of a weight; a NaN becomes the canonical one."""
    if r is None:
        w.copy_(x)
        return
    number = x == x
    bits = x.view(torch.int32)
    high = (bits.to(torch.int64) + 0x8000).bitwise_right_shift_(16)
    low = torch.where(number, bits - high.to(torch.int32).bitwise_left_shift_(16), 0)
    r.copy_(low.to(torch.int16))
    whole = torch.where(number, high.to(torch.int32), 0x7FC0)
    w.view(torch.int16).copy_(whole.to(torch.int16))


def adamw(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[float]) -> None:
    decay, rise1, beta2, rise2, size, root, eps, factor = c
    m, v = moments
    d = g.float() * factor
    m.add_((d - m).mul_(rise1))
    v.mul_(beta2).add_((d * rise2).mul_(d))
    x = master(w, r).mul_(decay)
    x.sub_(m.div(v.sqrt().div_(root).add_(eps)).mul_(size))
    store(w, r, x)


def sgd(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[float]) -> None:
    lr, decay, factor = c
    x = master(w, r)
    store(w, r, x - (g.float() * factor).add_(x * decay).mul_(lr))


def momentum(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[float]) -> None:
    lr, decay, mu, rise, ahead, now, factor = c
    (m,) = moments
    x = master(w, r)
    d = (g.float() * factor).add_(x * decay)
    m.mul_(mu).add_(d * rise)
    store(w, r, x - (d + m * ahead if now else m) * lr)


def lion(w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], c: Sequence[float]) -> None:
    lr, decay, beta1, rise1, beta2, rise2, factor = c
    (m,) = moments
    d = g.float() * factor
    sign = (m * beta1).add_(d * rise1).sign_()
    m.mul_(beta2).add_(d.mul_(rise2))
    store(w, r, master(w, r).mul_(decay).sub_(sign.mul_(lr)))


RULES: dict[str, Callable[..., None]] = {rule.__name__: rule for rule in (adamw, sgd, momentum, lion)}


def update(rule: str, w: Tensor, r: Tensor | None, g: Tensor, moments: Sequence[Tensor], constants: Any) -> None:
    """Updates one weight; all tensors are dense and of one shape and stride.  `constants` are those of the kernel."""
    c = [float(x) for x in constants]
    flats = [t.as_strided((t.numel(),), (1,)) for t in (w, g, *moments)]
    rest = None if r is None else r.as_strided((r.numel(),), (1,))
    for start in range(0, w.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        one, gradient, *others = (t[part] for t in flats)
        RULES[rule](one, None if rest is None else rest[part], gradient, others, c)
