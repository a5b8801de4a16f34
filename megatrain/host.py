"""Host memory: flat, page-aligned buffers, pinned where there is CUDA, and the layouts of the tensors in them.

A layout says where each tensor of a plane lies, for the host tensors and for the views of a device slot that a whole
plane was copied into.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain.schedule import PAGE

ALIGN = 256
"""Bytes; where an entry of a plane may begin.  A multiple of every itemsize and of what vector loads and DMA like."""

REGISTER_BYTES = 64 << 30
"""The most that one cudaHostRegister takes: one registration over 512 GiB fails."""

Spec = tuple[str, torch.dtype, Sequence[int]] | tuple[str, torch.dtype, Sequence[int], Sequence[int]]
"""(name, dtype, shape) or (name, dtype, shape, stride in elements) of a tensor to lay out."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a plane, `offset` bytes from its start.  `stride` (elements) is empty for the contiguous."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return self.stride or contiguous_stride(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a plane lie, and the plane's bytes."""

    entries: tuple[Entry, ...] = ()
    bytes: int = 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """One view an entry of `flat`, a contiguous uint8 tensor of at least `bytes` bytes on any device (a slot).
        The views share its storage and have the entry's dtype, shape and stride."""
        return [flat[e.offset : e.offset + e.nbytes].view(e.dtype).as_strided(e.shape, e.strides) for e in self.entries]

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The views by the names of their entries."""
        return dict(zip((e.name for e in self.entries), self.views(flat), strict=True))


def layout_of(specs: Iterable[Spec]) -> Layout:
    """Lay tensors out one after the other, each on an ALIGN boundary, the total a multiple of PAGE (0 for none).  A
    stride, where given, must be dense: the plane holds no gaps."""
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape, *rest in specs:
        stride = tuple(rest[0]) if rest else ()
        if stride == contiguous_stride(shape):
            stride = ()
        offset = round_up(end, ALIGN)
        entries.append(Entry(name, dtype, tuple(shape), offset, stride))
        end = offset + entries[-1].nbytes
    return Layout(tuple(entries), round_up(end, PAGE))


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride in elements that torch gives a new tensor of this shape."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_stride(t: Tensor) -> tuple[int, ...]:
    """The tensor's own stride if its elements fill a block of memory without gaps or overlap (channels_last does), else
    the contiguous one."""
    step = 1
    for stride, size in sorted((st, n) for st, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != step:
            return contiguous_stride(t.shape)
        step *= size
    return t.stride()


class HostBuffer:
    """`bytes` bytes of zeroed, page-aligned host memory; pages are taken at the first touch, or all at once if pinned.

    The memory lives as long as this object or any tensor over it, and stays registered with CUDA exactly as long.  Who
    copies on a stream must have those copies finished before letting go of both.  A forked child has a copy of its own,
    as of any tensor.
    """

    flat: Tensor
    """uint8 [bytes]: the whole buffer, for copies of the whole plane.  Not counted as a lease."""

    pinned: bool
    """Whether CUDA has it registered.  False where that was asked for and refused: a warning said so."""

    def __init__(self, bytes: int, pin: bool = False) -> None:
        self.bytes = bytes
        self._unasked = bytes > 0
        self.written = False
        """Somebody has noted that there may be other values than zeros."""
        self._memory = anonymous_memory(bytes)
        self.flat = torch.from_numpy(self._memory)
        self.pinned = False
        if pin:
            self.pin()

    def pin(self) -> None:
        """Registers the memory with CUDA, if that has not been done or refused before."""
        if self._unasked:
            self._unasked = False
            self.pinned = register(self._memory)

    def lease(self) -> memoryview:
        """A new view of the memory.  Tensors built over it hold it alive, and so does whatever shares their storage
        (`.grad`, `detach()`, numpy views): once a weak reference to it is dead, nobody uses them any more."""
        return self._memory.data

    def array(self, e: Entry) -> np.ndarray[Any, Any]:
        """The memory of entry `e`, flat; bf16 as uint16.  Not counted as a lease, and no tensor's storage."""
        part = self._memory[e.offset : e.offset + e.nbytes]
        return part.view(np.uint16 if e.dtype == torch.bfloat16 else torch.empty(0, dtype=e.dtype).numpy().dtype)

    def tensors(self, layout: Layout, lease: memoryview | None = None) -> list[Tensor]:
        """One tensor an entry over this memory, each with a storage of exactly its own bytes, so that saving one writes
        no more than that.  An entry without elements is an ordinary empty tensor.  They hold `lease` alive."""
        assert layout.bytes <= self.bytes, f"a layout of {layout.bytes} bytes in a buffer of {self.bytes}"
        view = self.lease() if lease is None else lease
        return [host_tensor(view, e) for e in layout.entries]


def host_tensor(memory: memoryview, e: Entry) -> Tensor:
    """The tensor of entry `e`, whose storage is its part of `memory` and holds `memory` alive."""
    out = torch.empty(0, dtype=e.dtype)
    if not e.nbytes:
        return out.resize_(e.shape)
    part = torch.frombuffer(memory, dtype=torch.uint8, count=e.nbytes, offset=e.offset)
    return out.set_(part.untyped_storage(), 0, e.shape, e.strides)  # type: ignore[call-overload]


def anonymous_memory(bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory of the process's own (not shared with forked children), in huge pages where the system grants them:
    they make the first touch, registering and streaming through it faster."""
    if not bytes:
        return np.empty(0, np.uint8)
    memory = mmap.mmap(-1, bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def available() -> int:
    """Bytes of host memory that can still be taken, by the system and by the container's limit."""
    found = [sys.maxsize]
    with suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(limit - used + int(cached["inactive_file"]))
    return max(0, min(found))


def register(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Pin `memory` until it is freed, in pieces of REGISTER_BYTES.  False, after the process's one warning, if the
    system refuses; then nothing of it is pinned."""
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    pieces: list[int] = []
    for piece in range(start, end, REGISTER_BYTES):
        if not register_piece(piece, min(REGISTER_BYTES, end - piece)):
            unregister(pieces, os.getpid(), None)
            warn_pageable()
            return False
        pieces.append(piece)
    weakref.finalize(memory, unregister, pieces, os.getpid(), memory.base).atexit = False
    return True


def register_piece(address: int, bytes: int) -> bool:
    """Whether CUDA has pinned these bytes, for every device."""
    if not torch.cuda.is_available():
        return False
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(address, bytes, 1)) == 0:  # 1: cudaHostRegisterPortable
        return True
    # The refusal is CUDA's "last error" now, and would be raised by whichever kernel is launched next: take it here.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unregister(pieces: Sequence[int], pid: int, mapping: object) -> None:
    """Undo `register`, in the process that registered; a forked child has no CUDA to tell.  `mapping` is the memory,
    which is unmapped only after this call."""
    for piece in pieces if os.getpid() == pid else ():
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostUnregister(piece)


@cache
def warn_pageable() -> None:
    warnings.warn(
        "megatrain: CUDA refused to pin host memory (WSL2, `ulimit -l` and containers limit it) and goes on with "
        "pageable memory: results are the same, transfers are slower and do not overlap with compute",
        RuntimeWarning,
        stacklevel=2,
    )


def flat(t: Tensor) -> np.ndarray[Any, Any]:
    """A dense tensor as an array of its memory; bf16 as uint16."""
    t = t.detach().as_strided((t.numel(),), (1,))
    return t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy()


def gradient_dtype(p: Tensor) -> torch.dtype:
    """The dtype of the parameter's `.grad`."""
    return getattr(p, "grad_dtype", None) or p.dtype


def norms(gradients: Sequence[Tensor]) -> Tensor | None:
    """The 2-norm of each gradient (fp32 [n]); None where there is none, or one that is not of 16 or 32 bits."""
    if not gradients or not all(g.dtype in (torch.float32, torch.bfloat16, torch.float16) for g in gradients):
        return None
    return torch.stack(torch._foreach_norm(list(gradients), 2, torch.float32))


class GradientPlanes:
    """Buffers for gradients, several a plane name if need be.

    Gradients are given to autograd as views of a plane, and `.grad` adopts them.  If the user still holds them when the
    next backward comes, that one's gradients must land elsewhere, or adding them up would add a gradient to itself.
    """

    def __init__(self, pin: bool = False) -> None:
        self.pin = pin
        self._made: dict[str, list[tuple[HostBuffer, weakref.ref[memoryview]]]] = {}

    @property
    def bytes(self) -> int:
        """Of all buffers made so far."""
        return sum(buffer.bytes for made in self._made.values() for buffer, _ in made)

    def take(self, name: str, layout: Layout) -> tuple[HostBuffer, list[Tensor]]:
        """A buffer for `name` of at least `layout.bytes` that no live tensor uses, and fresh tensors over it, whose
        values are whatever is there.  The buffer counts as used for as long as any of them (or an alias) lives: drop
        the list when autograd has the tensors, also because autograd copies a gradient that somebody else holds.
        Buffers are kept: a gradient copy still on its way never loses its memory."""
        made = self._made.setdefault(name, [])
        free = (i for i, (buffer, lease) in enumerate(made) if lease() is None and buffer.bytes >= layout.bytes)
        at = next(free, len(made))
        buffer = made[at][0] if at < len(made) else HostBuffer(layout.bytes, self.pin)
        lease = buffer.lease()
        made[at : at + 1] = [(buffer, weakref.ref(lease))]
        return buffer, buffer.tensors(layout, lease)

    def holding(
        self, name: str, layout: Layout, gradients: Sequence[Tensor | None]
    ) -> tuple[HostBuffer, list[Tensor]] | None:
        """The buffer in which these gradients lie, each in its place (None: there is no such one yet), with fresh
        tensors over it; None where they lie elsewhere."""
        for buffer, ref in self._made.get(name, ()):
            lease = ref()
            here = zip(layout.entries, gradients, strict=True)
            if lease is not None and all(g is None or _lies(g, e, buffer.flat.data_ptr()) for e, g in here):
                return buffer, buffer.tensors(layout, lease)
        return None


def _lies(t: Tensor, e: Entry, start: int) -> bool:
    """Whether a tensor is entry `e` of the memory at `start`."""
    same = t.dtype == e.dtype and tuple(t.shape) == tuple(e.shape) and t.stride() == tuple(e.strides)
    return same and t.device.type == "cpu" and t.data_ptr() == start + e.offset
