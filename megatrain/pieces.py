"""Calls that no one graph holds: the model's own forward runs as it is, layer by layer, and each layer is a call of its
own, captured where it can be."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.calls import Call, CaptureError
from megatrain.opaque import unhooked
from megatrain.planes import part_paths
from megatrain.units import Unit

if TYPE_CHECKING:
    from megatrain.compiled import Compiled

LOG = logging.getLogger("megatrain")


class Pieces:
    """Runs a compiled model layer by layer: a branch on data between layers, a generation cache, sizes that grow.

    A part (a layer, or a module outside the layers) that is given tensors and plain values is captured and streamed as
    a model is, one forward of several before a backward.  One that is given anything else (a cache) runs as it is, on
    copies of its weights on the device."""

    def __init__(self, compiled: Compiled, model: nn.Module):
        self.of = weakref.ref(compiled)
        self.paths = part_paths(model)
        self.units: dict[str, Unit] = {}

    @property
    def compiled(self) -> Compiled:
        found = self.of()
        assert found is not None
        return found

    def call(self, model: nn.Module, call: Call, why: str) -> Any:
        """The model's result; `why` there is no graph of the whole."""
        c = self.compiled
        if c.updates.rule and torch.is_grad_enabled():
            raise CaptureError(
                f"{why}\nwith update='in-backward' a model is one graph: use update='host' to run it layer by layer"
            )
        if c.runtime.transfers:
            raise CaptureError(f"{why}\nwith compute_dtype= a model is one graph: use torch.autocast around the call")
        self.warn(model, why)
        c.updates.settle_all()
        args, kwargs = call.arguments([t.to(c.device) for t in call.tensors.values()])
        with ExitStack() as stack:
            for path in self.paths:
                stack.enter_context(self.taken(path, model.get_submodule(path)))
            stack.enter_context(self.moved(model))
            return c.whole.forward(*args, **kwargs)

    def warn(self, model: nn.Module, why: str) -> None:
        first = why.splitlines()[0]
        if first not in self.compiled.warned:
            self.compiled.warned.add(first)
            LOG.warning(
                "megatrain: %s runs layer by layer, each a graph of its own where it can be, which is slower: %s",
                type(model).__name__, "\n".join(why.splitlines()[:3]),
            )  # fmt: skip

    @contextmanager
    def taken(self, path: str, module: nn.Module) -> Generator[None, None, None]:
        """Inside, calls of the part come here."""
        own = module.__dict__.get("forward")
        forward = own or type(module).forward.__get__(module)
        if path not in self.units or self.units[path].forward != forward:
            self.units[path] = Unit(self.compiled, forward, path)

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.part(self.units[path], module, args, kwargs)

        module.__dict__["forward"] = run
        try:
            yield
        finally:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own

    def part(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a part."""
        run = module.__dict__.pop("forward")
        try:
            call = Call(unit.signature, args, kwargs)
            if not call.foreign:
                try:
                    return self.compiled.routed(module, call, unit)
                except CaptureError as error:
                    if not error.layerwise:
                        raise
            return self.direct(unit, module, args, kwargs)
        finally:
            module.__dict__["forward"] = run

    def direct(self, unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a part as it is, on its weights on the device."""
        c = self.compiled
        if c.device.type == "cpu":
            return unit.forward(*args, **kwargs)
        own = dict([*module.named_parameters(), *module.named_buffers()])
        there = {n: t.to(c.device, non_blocking=True) for n, t in own.items()}
        versions = {n: t._version for n, t in there.items()}
        with unhooked(module):
            result = torch.func.functional_call(module, there, args, kwargs)
        kept(own, there, versions)
        return result

    @contextmanager
    def moved(self, model: nn.Module) -> Generator[None, None, None]:
        """Inside, what modules around the parts hold themselves is on the device."""
        c = self.compiled
        if c.device.type == "cpu":
            yield
            return
        tables: list[tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], dict[str, int]]] = []
        for path, module in model.named_modules():
            if any(path == p or path.startswith(f"{p}.") for p in self.paths):
                continue
            for table in (module._parameters, module._buffers):
                own = {n: t for n, t in table.items() if t is not None}
                there = {n: t.to(c.device) for n, t in own.items()}
                tables.append((table, own, there, {n: t._version for n, t in there.items()}))
                table.update(there)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for table, own, there, versions in tables:
                table.update(own)
                kept(own, there, versions)


def kept(own: Mapping[str, Tensor], there: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
    """What was written into copies of buffers goes to the buffers."""
    with torch.no_grad():
        for n, t in there.items():
            if t._version != versions[n] and t is not own[n] and not isinstance(own[n], nn.Parameter):
                own[n].copy_(t)
