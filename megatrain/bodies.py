"""Bodies: the code that a compute op runs, made of a template's graph and autograd.

The forward calls the same kernels in the same grad mode as eager PyTorch does, so that results are equal bit for bit.
Whatever autograd would save is dropped at once (recompute), or held with the weights taken out (keep): a saved
weight is packed as its place among the operands and unpacked from whichever slot holds it when the backward runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.fused import MADE, Cut, Pair
from megatrain.opaque import taking_gradients
from megatrain.program import BodySpec


@dataclass
class Kept:
    """A layer's autograd graph between its forward and its backward.  `weights` is set for the backward."""

    leaves: tuple[Tensor, ...] = ()
    results: tuple[GradientEdge | None, ...] = ()
    """Where a gradient of each result enters; the results themselves belong to whoever reads them."""
    weights: tuple[Tensor, ...] = ()
    saved: Sequence[Any] | None = None
    """Of a compiled layer, instead of all this: what its forward saved beside its operands."""
    bytes: int = 0
    """Device bytes it holds, where the runtime measures."""


@dataclass(frozen=True)
class Body:
    """A callable body.  `code` takes values and weights; `needs` and `trains` tell which of them get a gradient.

    `planes` gives for each weight the index of its plane among the layer's."""

    spec: BodySpec
    code: fx.GraphModule
    needs: tuple[bool, ...]
    trains: tuple[bool, ...]
    planes: tuple[int, ...]
    device: torch.device
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    fused: Pair | None = None
    """The code compiled; None: it runs as it is."""

    def forward(self, values: Sequence[Tensor], weights: Sequence[Tensor], grad: bool) -> list[Any]:
        """Results, then the generator state it began with (recomputed random bodies) or the kept graph."""
        extra: list[Any] = []
        if self.spec.state:
            extra.append(generator_state(self.device))
        bare = not grad or not (any(self.needs) or any(self.trains))
        if bare or (self.fused and not self.spec.keep):
            with torch.no_grad(), self.casting():
                results = (
                    self.fused.whole(*values, *weights) if self.fused else self.code(*values, *self.flagged(weights))
                )
            return [r.detach() for r in results] + extra + ([Kept()] if self.spec.keep else [])
        if self.fused and (cut := self.cut(self.fused.through, values, weights)):
            results = list(cut.forward(*values, *weights))
            count = len(results) - cut.saved.count(MADE)
            return [*results[:count], Kept(saved=results[count:])]
        kept = Kept()
        hooks = _packing(kept, weights) if self.spec.keep else _dropping
        with hooks:
            leaves, results = self.recorded(values, weights)
        if self.spec.keep:
            kept.leaves = tuple(leaves)
            kept.results = tuple(get_gradient_edge(r) if r.requires_grad else None for r in results)
            extra.append(kept)
        return [r.detach() for r in results] + extra

    def flagged(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights that require a gradient as eager PyTorch has them under no_grad: matmul, for one, chooses its
        kernel by that flag."""
        return [w.detach().requires_grad_() if f else w for w, f in zip(weights, self.trains, strict=True)]

    def cut(self, through: Sequence[int], values: Sequence[Tensor], weights: Sequence[Tensor]) -> Cut | None:
        """The compiled template for gradients that come through these results, where there is one."""
        if self.fused is None or not through:
            return None
        with self.casting():
            return self.fused.cut([*values, *weights], (*self.needs, *self.trains), through)

    def recorded(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        """(leaves, results) of a run with autograd on; a leaf for each value and weight."""
        flags = (*self.needs, *self.trains)
        with torch.enable_grad(), self.casting():
            leaves = [t.detach().requires_grad_(f) for t, f in zip((*values, *weights), flags, strict=True)]
            inputs = list(leaves)
            for i in self.summed():
                inputs[i] = leaves[i] = leaves[i].view_as(leaves[i])
            return leaves, self.code(*inputs)

    def entered(
        self, values: Sequence[Tensor], weights: Sequence[Tensor], state: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """(leaves, results that a gradient enters through) of a run that starts from the recorded generator state, of
        the code as it is."""
        with restarted(self.device, state):
            leaves, results = self.recorded(values, weights)
        return leaves, [r if r.requires_grad else None for r in results]

    def summed(self) -> list[int]:
        """Leaves that start from a sum of other layers' gradients: values in `adds`, trained weights of planes in
        `sums`. They pass through a node of their own, at which autograd adds their uses, last first, to the sum it
        is given."""
        if self.spec.forward and not self.spec.keep:
            return []
        count = len(self.needs)
        sums = [count + j for j, p in enumerate(self.planes) if p in self.spec.sums and self.trains[j]]
        return [i for i in self.spec.adds if self.needs[i]] + sums

    def backward(
        self,
        values: Sequence[Tensor],
        weights: Sequence[Tensor],
        kept: Kept | None,
        state: Tensor | None,
        grads: Sequence[Tensor | None],
        adds: Sequence[Tensor | None],
        sums: dict[int, Tensor],
    ) -> tuple[list[Tensor | None], dict[int, Tensor | None]]:
        """(gradients of the values in `wants`, gradient of each trained weight by its index); None where there is none.

        `sums` holds, for weights of planes in `spec.sums`, the gradient that later layers gave."""
        through = tuple(i for i, g in zip(self.spec.grads, grads, strict=True) if g is not None)
        given = [g for g in grads if g is not None]
        count = len(self.needs)
        trained = [j for j, f in enumerate(self.trains) if f and self.planes[j] in self.spec.trains]
        so_far = dict(zip(self.spec.adds, adds, strict=True)) | {count + j: g for j, g in sums.items()}
        targets = (*self.spec.wants, *(count + j for j in trained))
        found: list[Tensor | None] = [so_far.get(i) for i in targets]
        if not targets or not through:
            pass
        elif cut := self.cut(through, values, weights):
            assert self.fused is not None
            made = kept.saved if kept is not None and through == self.fused.through else None
            gradients = cut.gradients([*values, *weights], made, given)
            found = [_plus(gradients[i], g) for i, g in zip(targets, found, strict=True)]
        else:
            if kept is not None and kept.saved is None:
                leaves, entries = list(kept.leaves), kept.results
                kept.weights = tuple(weights)
            else:
                leaves, entries = self.entered(values, weights, state)
            entering = [(entries[i], g) for i, g in zip(through, given, strict=True)]
            entering += [(leaves[i], g) for i, g in so_far.items()]
            entering = [(entry, g) for entry, g in entering if entry is not None and g is not None]
            if entering:
                outputs, gradients = zip(*entering, strict=True)
                wanted = [leaves[i] for i in targets]
                with taking_gradients():
                    found = list(torch.autograd.grad(outputs, wanted, gradients, allow_unused=True))
        return found[: len(self.spec.wants)], dict(zip(trained, found[len(self.spec.wants) :], strict=True))

    @contextmanager
    def casting(self) -> Generator[None, None, None]:
        """Autocast as it was around the model's call."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield


def _plus(made: Tensor | None, so_far: Tensor | None) -> Tensor | None:
    return so_far if made is None else made if so_far is None else made + so_far


def _raise(_: Any) -> Tensor:
    raise AssertionError("a dropped tensor was asked for")


_dropping = torch.autograd.graph.saved_tensors_hooks(lambda t: None, _raise)


def _packing(kept: Kept, weights: Sequence[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks that save a view of a weight as (index, offset, size, stride) and anything else as it is."""
    spans = [(w.untyped_storage()._cdata, w.storage_offset(), w.numel(), w.dtype, i) for i, w in enumerate(weights)]

    def pack(t: Tensor) -> Any:
        storage = t.untyped_storage()._cdata
        for cdata, start, count, dtype, i in spans:
            if cdata == storage and dtype == t.dtype and start <= t.storage_offset() < start + count:
                return i, t.storage_offset() - start, t.size(), t.stride()
        return t

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        i, offset, size, stride = saved
        weight = kept.weights[i]
        return weight.detach().as_strided(size, stride, weight.storage_offset() + offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def generator_state(device: torch.device) -> Tensor:
    """The state of the device's default generator (on the host)."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


@contextmanager
def restarted(device: torch.device, state: Tensor | None) -> Generator[None, None, None]:
    """Inside, the default generator starts from `state`; afterwards it is as it was.  Does nothing without a state."""
    if state is None:
        yield
        return
    before = generator_state(device)
    _set_state(device, state)
    try:
        yield
    finally:
        _set_state(device, before)
