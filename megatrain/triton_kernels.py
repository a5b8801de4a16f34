"""The rules of `kernels` on a CUDA device, in Triton: the same operations in the same order, each correctly rounded and
none contracted into another, so that weights, remainders and moments have the same bits as on the host.

Imported only where there is Triton, which torch's builds for CUDA bring along.
"""

# pyright: reportMissingParameterType=false, reportMissingImports=false, reportUnknownMemberType=false
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of one program instance."""

EXACT = {"enable_fp_fusion": False}
"""No product and sum in one rounding."""


@triton.jit
def master(w, r, i, there, SPLIT: tl.constexpr):
    """The fp32 master of weight `i`: the bits of bf16 (int16) and its remainder, or fp32 itself."""
    if SPLIT:
        high = tl.load(w + i, mask=there, other=0).to(tl.int32) << 16
        x = (high + tl.load(r + i, mask=there, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        x = tl.load(w + i, mask=there, other=0.0)
    return x


@triton.jit
def write(w, r, i, there, x, SPLIT: tl.constexpr):
    """Writes the master of weight `i`; a NaN becomes the canonical one."""
    if SPLIT:
        bits = x.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        number = x == x
        tl.store(w + i, tl.where(number, high, 0x7FC0).to(tl.int16), mask=there)
        tl.store(r + i, tl.where(number, bits - (high << 16), 0).to(tl.int16), mask=there)
    else:
        tl.store(w + i, x, mask=there)


@triton.jit
def gradient(g, i, there, factor):
    """The gradient of weight `i`, from fp32 or from the bits of bf16 (int16)."""
    d = tl.load(g + i, mask=there, other=0)
    if d.dtype == tl.int16:
        d = (d.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return d * factor


@triton.jit
def adamw(w, r, g, m, v, n, decay, rise1, beta2, rise2, size, root, eps, factor, SPLIT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = i < n
    x = master(w, r, i, there, SPLIT) * decay
    d = gradient(g, i, there, factor)
    a = tl.load(m + i, mask=there, other=0.0)
    a = a + rise1 * (d - a)
    s = tl.load(v + i, mask=there, other=0.0) * beta2 + (rise2 * d) * d
    tl.store(m + i, a, mask=there)
    tl.store(v + i, s, mask=there)
    below = tl.div_rn(tl.sqrt_rn(s), root) + eps
    write(w, r, i, there, x - size * tl.div_rn(a, below), SPLIT)


@triton.jit
def sgd(w, r, g, m, v, n, lr, decay, factor, SPLIT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = i < n
    x = master(w, r, i, there, SPLIT)
    write(w, r, i, there, x - lr * (gradient(g, i, there, factor) + decay * x), SPLIT)


@triton.jit
def momentum(w, r, g, m, v, n, lr, decay, mu, rise, ahead, now, factor, SPLIT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = i < n
    x = master(w, r, i, there, SPLIT)
    d = gradient(g, i, there, factor) + decay * x
    a = tl.load(m + i, mask=there, other=0.0) * mu + rise * d
    tl.store(m + i, a, mask=there)
    step = a
    if now > 0:
        step = d + ahead * a
    write(w, r, i, there, x - lr * step, SPLIT)


@triton.jit
def lion(w, r, g, m, v, n, lr, decay, beta1, rise1, beta2, rise2, factor, SPLIT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    there = i < n
    d = gradient(g, i, there, factor)
    old = tl.load(m + i, mask=there, other=0.0)
    a = old * beta1 + rise1 * d
    tl.store(m + i, old * beta2 + rise2 * d, mask=there)
    sign = tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, a))
    write(w, r, i, there, master(w, r, i, there, SPLIT) * decay - lr * sign, SPLIT)


RULES: dict[str, Any] = {"adamw": adamw, "sgd": sgd, "momentum": momentum, "lion": lion}


def update(rule: str, w: Tensor, r: Tensor | None, g: Tensor, moments: list[Tensor], c: np.ndarray[Any, Any]) -> None:
    """Updates one weight on the current stream.  Flat tensors of one size on one device; `c` holds the numbers of the
    kernel of this name (fp32)."""
    split = r is not None
    n = w.numel()
    g = g.view(torch.int16) if g.dtype == torch.bfloat16 else g
    m, v = [*moments, g, g][:2]  # g: stands for what the rule does not look at
    operands = (w.view(torch.int16) if split else w, r if split else w, g, m, v, n)
    if n:
        RULES[rule][(triton.cdiv(n, BLOCK),)](*operands, *map(float, c), SPLIT=split, B=BLOCK, **EXACT)


@triton.jit
def shaped(x, a, b, CAPPED: tl.constexpr):
    """(y, dy/dx) of a logit: a x, or b tanh(a x)."""
    y = x * a
    slope = a
    if CAPPED:
        t = 2 * tl.sigmoid(2 * y) - 1
        y = b * t
        slope = a * b * (1 - t * t)
    return y, slope


@triton.jit
def cross_entropies(
    logits, target, scale, losses, out, width, ignore, a, b, CAPPED: tl.constexpr, GRAD: tl.constexpr, B: tl.constexpr
):
    """One row: its loss, by a running maximum and sum of exponentials (arXiv 1805.02867), and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(target + row)
    most = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, B):
        i = start + tl.arange(0, B)
        x = tl.load(logits + row * width + i, mask=i < width, other=0.0).to(tl.float32)
        y, _ = shaped(x, a, b, CAPPED)
        y = tl.where(i < width, y, -float("inf"))
        new = tl.maximum(most, tl.max(y, 0))
        total = total * tl.exp(most - new) + tl.sum(tl.exp(y - new), 0)
        most = new
    total = most + tl.log(total)
    valid = goal != ignore
    inside = (goal >= 0) & (goal < width)
    at = tl.where(valid & inside, goal, 0)
    gold, _ = shaped(tl.load(logits + row * width + at).to(tl.float32), a, b, CAPPED)
    loss = tl.where(inside, total - gold, float("nan"))  # a target that is no class
    tl.store(losses + row, tl.where(valid, loss, 0.0))
    if GRAD:
        factor = tl.where(valid, tl.load(scale), 0.0)
        for start in range(0, width, B):
            i = start + tl.arange(0, B)
            x = tl.load(logits + row * width + i, mask=i < width, other=0.0).to(tl.float32)
            y, slope = shaped(x, a, b, CAPPED)
            d = (tl.exp(y - total) - tl.where(i == at, 1.0, 0.0)) * slope * factor
            tl.store(out + row * width + i, d.to(out.dtype.element_ty), mask=i < width)


def cross_entropy(
    logits: Tensor, target: Tensor, scale: Tensor, a: float, b: float, ignore: int, out: Tensor | None
) -> Tensor:
    """The sum of the cross entropies of rows, and in `out` (which may be `logits`) its gradient times `scale`; see
    `losses.slopes`."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    to = logits if out is None else out
    launch: Any = cross_entropies
    launch[(rows,)](
        logits, target, scale, losses, to, width, ignore, a, b, CAPPED=bool(b), GRAD=out is not None, B=4096,
        num_warps=16,
    )  # fmt: skip
    return losses.sum()
