"""Optimizer updates over host memory, in numba: each reads gradients, weights and state once and writes them once.

A weight is fp32, or bf16 with a signed 16-bit remainder, which together are the bits of an fp32 master:
`bits(master) = (bits(bf16) << 16) + remainder`.  The bf16 is the master rounded to nearest, ties away from zero (to
even would not fit 16 bits); a NaN is the canonical one.  bf16 comes as uint16 arrays.

Every element is computed by itself, in IEEE fp32 operations in the order that is written here (no fastmath), so results
do not depend on the number of threads.  `c` holds a rule's numbers, worked out in double precision by the caller, and
last the factor that gradients are multiplied by first.  Only one thread may be inside numba's default threading layer
at a time: `call` lets one in.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

ONE = np.float32(1)
BLOCK = 1 << 13
"""Elements that `squares` adds up in one go; a fixed number, so that sums do not depend on the number of threads."""


NO_MOMENT, NO_REMAINDER = np.empty(0, np.float32), np.empty(0, np.int16)
"""What stands for a moment, or a remainder, that there is not."""

TURN = threading.Lock()


def call(kernel: Any, *arrays: Any) -> Any:
    """What a kernel returns; one at a time."""
    with TURN:
        return kernel(*arrays)


def wide(x: Any) -> Any:
    """The float of a gradient's element."""
    raise NotImplementedError


@overload(wide)
def _wide(x: Any) -> Any:
    def of_bf16(x: Any) -> Any:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    def of_fp32(x: Any) -> Any:
        return np.float32(x)

    return of_bf16 if x == types.uint16 else of_fp32


def load(w: Any, r: Any, i: Any) -> Any:
    """The master of weight `i`."""
    raise NotImplementedError


@overload(load)
def _load(w: Any, r: Any, i: Any) -> Any:
    def split(w: Any, r: Any, i: Any) -> Any:
        return np.uint32((np.uint32(w[i]) << np.uint32(16)) + np.uint32(np.int32(r[i]))).view(np.float32)

    def whole(w: Any, r: Any, i: Any) -> Any:
        return w[i]

    return split if w.dtype == types.uint16 else whole


def store(w: Any, r: Any, i: Any, x: Any) -> Any:
    """Writes the master of weight `i`."""
    raise NotImplementedError


@overload(store)
def _store(w: Any, r: Any, i: Any, x: Any) -> Any:
    def whole(w: Any, r: Any, i: Any, x: Any) -> None:
        w[i] = x

    def split(w: Any, r: Any, i: Any, x: Any) -> None:
        bits = np.float32(x).view(np.uint32)
        high = np.uint32((bits + np.uint32(0x8000)) >> np.uint32(16))
        number = x == x
        w[i] = np.uint16(high) if number else np.uint16(0x7FC0)
        r[i] = np.int16(np.uint32(bits - np.uint32(high << np.uint32(16)))) if number else np.int16(0)

    return split if w.dtype == types.uint16 else whole


def _parallel(kernel: Any) -> Any:
    return njit(parallel=True, nogil=True, error_model="numpy", cache=True)(kernel)


def ready(*rules: Any, halves: bool, half_gradients: bool) -> None:
    """Compiles rules for bf16 (`halves`) or fp32 weights and gradients, in the calling thread.

    Left to the first call, on the host lane, it could meet a capture, during which torch replaces builtins."""
    element, gradient = (types.Array(types.uint16 if x else types.float32, 1, "C") for x in (halves, half_gradients))
    moment, remainder = types.Array(types.float32, 1, "C"), types.Array(types.int16, 1, "C")
    step = (element, remainder, gradient, moment, moment, moment)
    for rule, signature in [*((rule, step) for rule in rules), (squares, (gradient,))]:
        if signature not in rule.signatures:
            rule.compile(signature)


@_parallel
def adamw(w: Any, r: Any, g: Any, m: Any, v: Any, c: Any) -> None:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), in the order of torch's single-tensor AdamW.

    c: 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1^t), sqrt(1 - beta2^t), eps, factor."""
    decay, rise1, beta2, rise2, size, root, eps, factor = c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]
    for i in prange(w.size):
        x = load(w, r, i) * decay
        d = wide(g[i]) * factor
        a = m[i] + rise1 * (d - m[i])
        s = v[i] * beta2 + (rise2 * d) * d
        m[i] = a
        v[i] = s
        store(w, r, i, x - size * (a / (np.sqrt(s) / root + eps)))


@_parallel
def sgd(w: Any, r: Any, g: Any, m: Any, v: Any, c: Any) -> None:
    """Stochastic gradient descent without momentum, as torch's.  c: lr, weight_decay, factor."""
    lr, decay, factor = c[0], c[1], c[2]
    for i in prange(w.size):
        x = load(w, r, i)
        store(w, r, i, x - lr * (wide(g[i]) * factor + decay * x))


@_parallel
def momentum(w: Any, r: Any, g: Any, m: Any, v: Any, c: Any) -> None:
    """Stochastic gradient descent with momentum, as torch's.

    c: lr, weight_decay, momentum, 1 - dampening (1 at the first step), momentum if nesterov else 1, 1 if nesterov
    else 0, factor."""
    lr, decay, mu, rise, ahead, now, factor = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    nesterov = now > 0
    for i in prange(w.size):
        x = load(w, r, i)
        d = wide(g[i]) * factor + decay * x
        a = m[i] * mu + rise * d
        m[i] = a
        store(w, r, i, x - lr * ((d + ahead * a) if nesterov else a))


@_parallel
def lion(w: Any, r: Any, g: Any, m: Any, v: Any, c: Any) -> None:
    """Sign of an interpolation of momentum and gradient (Chen et al., arXiv 2302.06675, algorithm 2).

    c: lr, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, factor."""
    lr, decay, beta1, rise1, beta2, rise2, factor = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    for i in prange(w.size):
        d = wide(g[i]) * factor
        a = m[i] * beta1 + rise1 * d
        m[i] = m[i] * beta2 + rise2 * d
        sign = ONE if a > 0 else (-ONE if a < 0 else a)
        store(w, r, i, load(w, r, i) * decay - lr * sign)


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz", "contract"})
def _squares(g: Any) -> Any:
    """The sum of squares of a block: in whatever order is fast, which is the same each time."""
    total = np.float32(0)
    for i in range(g.size):
        x = wide(g[i])
        total += x * x
    return total


@_parallel
def squares(g: Any) -> Any:
    """The sum of squares of a gradient: blocks by themselves in fp32, then block by block in double precision."""
    blocks = (g.size + BLOCK - 1) // BLOCK
    sums = np.zeros(blocks, np.float64)
    for b in prange(blocks):
        sums[b] = _squares(g[b * BLOCK : (b + 1) * BLOCK])
    total = 0.0
    for b in range(blocks):
        total += sums[b]
    return total
