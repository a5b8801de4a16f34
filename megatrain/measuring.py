"""What compiled bodies need on the device: each is run once on zeros, which also compiles it, and then measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.bodies import Body
from megatrain.program import BodySpec

LOG = logging.getLogger("megatrain")

Needs = tuple[dict[str, int], int]
"""Workspace bytes by kind of body, as in `Derivative.workspace`, and the bytes that a kept graph holds."""


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
        results, most, _ = bytes_of(lambda: body(specs["fwd"]).forward(values, weights, self.training))
        workspace["fwd"] = most - fresh(results)
        if "bwd" not in specs:
            return workspace, 0
        given = [torch.zeros_like(results[i]) for i in self.grads]
        del results
        made, most, _ = bytes_of(lambda: body(specs["bwd"]).backward(values, weights, None, None, given, [], {}))
        workspace["bwd"] = most - fresh(made[0])  # gradients of weights are made beside the slots they go to
        del made
        before = torch.cuda.memory_allocated()
        held, most, left = bytes_of(lambda: body(specs["fwd.keep"]).forward(values, weights, True))
        workspace["fwd.keep"] = most - left
        graph = held[-1]
        del held
        kept = torch.cuda.memory_allocated() - before
        made, most, _ = bytes_of(lambda: body(specs["bwd.keep"]).backward(values, weights, graph, None, given, [], {}))
        workspace["bwd.keep"] = most - fresh(made[0])  # gradients of weights are made beside the slots they go to
        return workspace, kept


def real(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()


def bytes_of(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what `work` gives, the most bytes it takes, the bytes it leaves taken)."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = work()
    return made, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


def fresh(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of these tensors' storages."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(-(-size // 512) * 512 for size in found.values())
