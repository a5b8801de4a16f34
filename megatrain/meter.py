"""How many device bytes a computation needs: storages alive at once, counted as they come and go, on real tensors or on
fake ones.  Each storage is rounded up to 512 bytes, as CUDA's caching allocator does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOSS_CHUNK = 1 << 29
"""Bytes of a chunk's logits in `losses`: rows enough for matrix products at full speed."""


class Meter(TorchDispatchMode):
    """Counts the bytes of storages that appear inside; `peak` is the most that were alive at once.

    `known` are tensors whose storages do not count.  Scratch memory that a kernel allocates for itself is estimated for
    the attention kernels of CUDA, whose backward keeps the queries' gradients in float32."""

    def __init__(self, known: list[Any]):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in tree_leaves(known) if isinstance(t, torch.Tensor)}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.collect()
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.add(t)
        self.peak = max(self.peak, self.now + scratch(func, args))
        return out

    def add(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        if storage._cdata not in self.known and storage._cdata not in self.alive:
            size = -(-int(storage.nbytes()) // 512) * 512
            self.alive[storage._cdata] = (StorageWeakRef(storage), size)
            self.now += size

    def bytes_of(self, tensors: Iterable[Any]) -> int:
        """Bytes of the storages of these tensors that appeared inside."""
        storages = {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}
        return sum(size for key, (_, size) in self.alive.items() if key in storages)

    def collect(self) -> None:
        for key, (ref, size) in list(self.alive.items()):
            if ref.expired():
                del self.alive[key]
                self.now -= size


def scratch(func: Any, args: Any) -> int:
    """Bytes that a kernel allocates for itself, by its own source: float32 gradients of the queries and expanded
    gradients of keys and values in attention's backward, two sorted copies of the indices in embedding's; a
    chunk of logits and of their gradients in the fused loss, on the CPU in fp32 too."""
    name = str(func)
    if "attention" in name and "backward" in name and args[0].device.type == "cuda":
        query, key = args[1], args[2]
        heads = max(query.shape[1], 1)
        expanded = 2 * key.numel() // max(key.shape[1], 1) * heads * key.element_size()
        return 4 * query.numel() + 8 * query.numel() // max(query.shape[-1], 1) + expanded
    if "linear_cross_entropy" in name:
        rows, classes, size = args[0].numel() // args[0].shape[-1], args[1].shape[0], args[0].element_size()
        return min(rows * classes, LOSS_CHUNK // size) * (2 * size + 16 * (args[0].device.type == "cpu"))
    if "embedding_dense_backward" in name and args[1].device.type == "cuda":
        return 6 * 8 * args[1].numel()
    return 0
