"""Updates of state that lives on the host, shared between the host's cores and the device.

The elements of a weight are split: the host's kernel updates the first, the rest go through two staging slots of the
device, chunk by chunk: weights, gradients and state in, the same kernel there, weights and state back, each in a stream
of its own.  Both have the same bits, so that the split, which follows the rates measured while training, changes no
result.

Both read and write the same memory: where the cores alone take all that it gives, sharing gains nothing.  So the first
updates are the host's, the next ones are shared, and what was faster stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain import device, kernels
from megatrain.schedule import STAGING

ELEMENT = 4 + 2 + 4 + 4 + 4
"""Bytes of an element in a staging slot: weights and gradients of up to 4 bytes, a remainder, two moments."""

MOST = 1 << 23
"""The most elements of a staging slot: enough for copies at the link's full rate."""

FEWEST = 1 << 20
"""Elements below which a weight is left to the host."""

Array = np.ndarray[Any, Any]
Arrays = tuple[Array, ...]
"""Weight, remainder, gradient and two moments; empty where a rule has none."""


TRIALS = 6
"""Updates of large weights by the host alone, and then as many shared, before one of the two is chosen."""

GAIN = 1.1
"""What sharing must gain to be worth the link."""


class Sharing:
    """Runs updates on host and device at once.  `share` is the part of the elements that goes to the device: `fixed`,
    or with None what the rates measured so far say."""

    def __init__(self, where: torch.device, slots: Mapping[str, Tensor], fixed: float | None):
        self.where, self.slots, self.fixed = where, slots, fixed
        self.rates = {"host": 0.0, "device": 0.0, "alone": 0.0, "together": 0.0}
        """Elements a second, averaged: of each of the two while they share, of the host alone, of both."""
        self.tried = 0
        streams = 3 if where.type == "cuda" else 0
        self.streams: list[Any] = [torch.cuda.Stream(where) for _ in range(streams)]

    @property
    def share(self) -> float:
        if self.fixed is not None:
            return self.fixed
        if self.tried < TRIALS:
            return 0.0
        if self.tried >= 2 * TRIALS and self.rates["together"] < GAIN * self.rates["alone"]:
            return 0.0
        host, there = self.rates["host"], self.rates["device"]
        return there / (host + there) if host and there else 0.4

    def __call__(self, kernel: Any, *arrays: Any) -> None:
        """Updates one weight: `arrays` are those of a kernel, flat, and its constants."""
        *parts, constants = arrays
        count = parts[0].size
        there = int(count * self.share) if count >= FEWEST and all(n in self.slots for n in STAGING) else 0
        here = 0 if there == count else count - there // 1024 * 1024
        began = time.perf_counter()
        work = Streaming(self, kernel.__name__, cut(parts, here, count), constants) if here < count else None
        try:
            if here:
                kernels.call(kernel, *cut(parts, 0, here), constants)
                self.note("host" if there else "alone", here, time.perf_counter() - began)
        finally:
            if work is not None:
                self.note("device", count - here, work.finish())
        if count >= FEWEST:
            self.tried += 1
            if there:
                self.note("together", count, time.perf_counter() - began)

    def note(self, who: str, count: int, seconds: float) -> None:
        """What one of the two has done."""
        if count >= FEWEST // 4 and seconds > 0:
            old, new = self.rates[who], count / seconds
            self.rates[who] = new if not old else 0.8 * old + 0.2 * new

    def on(self, lane: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.streams[lane]) if self.streams else nullcontext()


class Streaming:
    """One weight's elements on their way through the device; all that is to be done for them has been issued."""

    def __init__(self, of: Sharing, rule: str, arrays: Arrays, constants: Array):
        self.of = of
        self.start = time.perf_counter()
        hosts = [torch.from_numpy(a.view(np.int16) if a.dtype == np.uint16 else a) for a in arrays]
        self.marks: list[torch.cuda.Event] = []
        """The ends of the chunks, after the beginning."""
        if of.streams:
            self.mark(0)
        size = of.slots[STAGING[0]].numel() // ELEMENT // 128 * 128
        for k, at in enumerate(range(0, arrays[0].size, size)):
            self.chunk(of.slots[STAGING[k % 2]], rule, [h[at : at + size] for h in hosts], constants)

    def chunk(self, slot: Tensor, rule: str, hosts: list[Tensor], constants: Array) -> None:
        of, up, down = self.of, 0, 2
        if of.streams and len(self.marks) > 2:  # who used this slot before
            of.streams[up].wait_event(self.marks[-2])
        staged = list(carved(slot, hosts))
        with of.on(up):
            for to, source in zip(staged, hosts, strict=True):
                to.copy_(source, non_blocking=True)
        self.follow(1, 0)
        weight, remainder, gradient, *moments = staged
        moments = [m for m in moments if m.numel()]
        halves = bool(remainder.numel())
        if gradient.dtype == torch.int16:
            gradient = gradient.view(torch.bfloat16)
        with of.on(1):
            weight = weight.view(torch.bfloat16) if halves else weight
            device.update(rule, weight, remainder if halves else None, gradient, moments, constants)
        self.follow(2, 1)
        with of.on(down):
            for i, (source, to) in enumerate(zip(staged, hosts, strict=True)):
                if i != 2:  # the gradient
                    to.copy_(source, non_blocking=True)
        if of.streams:
            self.mark(2)

    def follow(self, lane: int, before: int) -> None:
        if self.of.streams:
            self.of.streams[lane].wait_stream(self.of.streams[before])

    def mark(self, lane: int) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.of.streams[lane])
        self.marks.append(event)

    def finish(self) -> float:
        """Waits until all is back on the host; the seconds that the device took."""
        if not self.marks:
            return time.perf_counter() - self.start
        self.marks[-1].synchronize()
        return self.marks[0].elapsed_time(self.marks[-1]) / 1e3


def cut(arrays: list[Array] | Arrays, start: int, end: int) -> Arrays:
    return tuple(a[start:end] for a in arrays)


def carved(slot: Tensor, hosts: list[Tensor]) -> Iterator[Tensor]:
    """Tensors like these in a slot, one after the other."""
    at = 0
    for h in hosts:
        size = h.numel() * h.element_size()
        yield slot[at : at + size].view(h.dtype)
        at += -(-size // 256) * 256
