"""What compiled bodies need on the device: each is run once on zeros, which also compiles it, and then measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.bodies import Body
from megatrain.program import BodySpec

LOG = logging.getLogger("megatrain")

Needs = tuple[dict[str, int], int, dict[str, float]]
"""Workspace bytes by kind of body, as in `Derivative.workspace`, the bytes that a kept graph holds, seconds by kind."""

UNSPLIT = 1 << 20


@dataclass(frozen=True)
class Trial:
    """A template's bodies on operands like `values` and `weights`: `specs` by kind, `grads` the results that a gradient
    comes through."""

    body: Callable[[BodySpec], Body]
    specs: Mapping[str, BodySpec]
    values: Sequence[Tensor]
    weights: Sequence[Tensor]
    grads: Sequence[int]
    training: bool

    def needs(self) -> Needs | None:
        """Bytes of the bodies, once compiled; None where the device has not the room to try."""
        try:
            with torch.cuda.device(next(t.device for t in (*self.values, *self.weights))):
                operands = [real(t) for t in self.values], [real(t) for t in self.weights]
                self.run(*operands)
                return self.run(*operands)
        except torch.cuda.OutOfMemoryError:
            LOG.info("megatrain: no room to measure %s; its bodies are estimated", self.specs["fwd"].template)
            return None
        finally:
            torch.cuda.empty_cache()

    def run(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> Needs:
        body, specs = self.body, self.specs
        workspace: dict[str, int] = {}
        seconds: dict[str, float] = {}

        def tried(kind: str, work: Callable[[], Any]) -> tuple[Any, int, int]:
            made, most, left, seconds[kind] = taken(work)
            return made, most, left

        results, most, _ = tried("fwd", lambda: body(specs["fwd"]).forward(values, weights, self.training))
        workspace["fwd"] = most - fresh(results)
        if "bwd" not in specs:
            return workspace, 0, seconds
        given = [torch.zeros_like(results[i]) for i in self.grads]
        del results
        made, most, _ = tried("bwd", lambda: body(specs["bwd"]).backward(values, weights, None, None, given, [], {}))
        workspace["bwd"] = most - fresh(made[0])  # gradients of weights are made beside the slots they go to
        del made
        before = torch.cuda.memory_allocated()
        held, most, left = tried("fwd.keep", lambda: body(specs["fwd.keep"]).forward(values, weights, True))
        workspace["fwd.keep"] = most - left
        graph = held[-1]
        del held
        kept = torch.cuda.memory_allocated() - before + unsplit(graph.saved or ())
        made, most, _ = tried(
            "bwd.keep", lambda: body(specs["bwd.keep"]).backward(values, weights, graph, None, given, [], {})
        )
        workspace["bwd.keep"] = most - fresh(made[0])
        return workspace, kept, seconds


def real(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()


def taken(work: Callable[[], Any]) -> tuple[Any, int, int, float]:
    """(what `work` gives, the most bytes it takes, the bytes it leaves taken, its seconds)."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = work()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return made, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before, seconds


def unsplit(tensors: Iterable[Any]) -> int:
    """Bytes that the allocator may hand out beyond those of these tensors: of a large block it splits off only more
    than `UNSPLIT`."""
    large = {t.untyped_storage()._cdata for t in tensors if isinstance(t, Tensor) and t.nbytes > UNSPLIT}
    return UNSPLIT * len(large)


def fresh(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of these tensors' storages."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(-(-size // 512) * 512 for size in found.values())
