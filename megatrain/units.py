"""Modules whose calls are captured: a compiled model, or a part of one that runs layer by layer."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import sympy
from torch import nn

from megatrain.calls import (
    Call,
    CaptureError,
    bind_sizes,
    difference,
    mode_key,
    module_key,
    ones_of,
    refuse_hooks,
)
from megatrain.capture import capture
from megatrain.deferred import quiet
from megatrain.made import Made
from megatrain.offline import broken_guard, described, observers_of
from megatrain.pipeline import run
from megatrain.rates import rates_of
from megatrain.transfer import casting, without_gradients

if TYPE_CHECKING:
    from megatrain.compiled import Compiled

LOG = logging.getLogger("megatrain")
MOST_CAPTURES = 8


class Unit:
    """The captures of one module: of a compiled model (`path` is empty), or of its part at `path`."""

    def __init__(self, compiled: Compiled, forward: Callable[..., Any], path: str = ""):
        self.of = weakref.ref(compiled)
        self.forward, self.path = forward, path
        self.signature = inspect.signature(forward)
        self.captures: dict[Any, list[Made]] = {}
        self.reasons: list[str] = []
        self.refused: dict[Any, CaptureError] = {}
        """By key, why no graph is made of such calls: their forward runs as it is."""
        self.tried: set[Any] = set()

    @property
    def compiled(self) -> Compiled:
        found = self.of()
        assert found is not None
        return found

    def captured(self, model: nn.Module, call: Call) -> tuple[Made, dict[sympy.Symbol, int]]:
        """A capture whose key and guards this call meets, made now if there is none."""
        with quiet():
            key = (call.key, mode_key(), module_key(model))
        if error := self.refused.get(key):
            raise error
        shapes = tuple(t.shape for t in call.tensors.values())
        changed = ""
        for made in self.captures.get(key, []):
            if attribute := made.capture.reads.changed():
                changed = attribute
                continue
            if not made.ones <= ones_of(call, made.ones):
                changed = f"{min(made.ones)} is not all ones"
                continue
            if shapes not in made.sizes:
                made.sizes[shapes] = bind_sizes(made.program, call.tensors)
            if (sizes := made.sizes[shapes]) is not None:
                return made, sizes
        refuse_hooks(model)
        count = sum(map(len, self.captures.values()))
        reason = changed or difference(key, shapes, self.captures)
        if count >= MOST_CAPTURES:
            seen = "\n".join(f"  {r}" for r in dict.fromkeys([*self.reasons, reason]))
            raise CaptureError(
                f"this model was captured {count} times and this call needs another; what keeps changing:\n{seen}\n"
                "keep it constant between calls, pass it as a tensor, or compile a model for each value",
                layerwise=bool(self.path),
            )
        if count:
            expected = self.path or reason.startswith("grad mode") or "all ones" in reason  # each of two once
            LOG.log(logging.INFO if expected else logging.WARNING, "megatrain: capturing again: %s", reason)
            self.reasons.append(reason)
        try:
            made = self.capture(model, call)
        except CaptureError as error:
            first = key not in self.tried
            self.tried.add(key)
            if error.layerwise and not (error.again and first):
                self.refused[key] = error
            raise
        sizes = bind_sizes(made.program, call.tensors)
        if sizes is None:
            made = self.capture(model, call, distinct=False)
            sizes = bind_sizes(made.program, call.tensors)
        if sizes is None:
            failed = broken_guard(made.program, call)
            raise CaptureError(f"the captured graph does not hold for its own sizes ({failed}): give other sizes")
        self.captures.setdefault(key, []).append(made)
        made.sizes[shapes] = sizes
        return made, sizes

    def capture(self, model: nn.Module, call: Call, distinct: bool = True) -> Made:
        c = self.compiled
        c.updates.settle_all()
        transfers = c.runtime.transfers
        naming = casting(model, c.names, transfers.dtype) if transfers else nullcontext(c.names)
        with without_gradients(c.tensors), naming as names:
            found = capture(model, self.forward, call, c.device, names, distinct)
        warn_whole(model, found.whole, c.warned)
        constants = {name: t.contiguous() for name, t in found.constants.items()}
        tensors = (transfers.seen(c.tensors) if transfers else c.tensors) | constants
        planes = dict(c.planes)
        if constants:
            plane = f"{self.path + '.' if self.path else ''}constants{sum(map(len, self.captures.values())) or ''}.w"
            planes[plane] = tuple(constants)
            c.hold(plane, constants)
        layers = {"": self.path} if self.path else c.layers
        program = described(found.program, tensors, planes, layers, c.budget, c.backend)
        ones = ones_of(call, call.tensors)
        named = tuple(i.name for i in program.inputs if i.kind == "input" and i.target in ones)
        program = program.replace(rates=rates_of(c.device), ones=named)
        c.observing = observers_of(program)
        made = Made(found, run(program, c.first, c.observing), bool(self.path))
        made_by = {i.name: i.target for i in made.program.inputs if i.kind == "input"}
        made.ones = frozenset(made_by[n] for n in made.program.ones)
        made.written = tuple(made_by[n] for n in made.program.writes_back if n in made_by)
        if written := [i.target for i in made.program.inputs if i.kind == "state" and i.target in made.program.needs]:
            raise CaptureError(
                f"forward writes into {written[0]}, a parameter that requires a gradient (embedding's max_norm?)\n"
                "change it after the step instead, under torch.no_grad()"
            )
        return made


def warn_whole(model: nn.Module, whole: Mapping[str, str], warned: set[str]) -> None:
    """One line for each class of children that no graph holds."""
    kinds: dict[type, list[str]] = {}
    for path in whole:
        kinds.setdefault(type(model.get_submodule(path)), []).append(path)
    for kind, paths in kinds.items():
        if kind.__qualname__ not in warned:
            warned.add(kind.__qualname__)
            LOG.warning(
                "megatrain: %s (%s)%s cannot be captured and is called whole: its weights still stream and its "
                "gradients still leave, but its kernels are PyTorch's (%s)",
                paths[0], kind.__name__, f" and {len(paths) - 1} more of its kind" if paths[1:] else "",
                whole[paths[0]],
            )  # fmt: skip
