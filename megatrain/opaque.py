"""Children that a graph calls whole: a child with forward hooks, which must see real tensors, once a call.

While a model is traced, such a child is replaced by one call of the operator `megatrain::opaque`; in the captured graph
that call is an `Opaque`, which runs the child itself, hooks and all, on the weights it is given.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatrain.structure import Structure, flatten

OPERATOR = "megatrain.opaque.default"
_library = torch.library.Library("megatrain", "DEF")
_library.define("opaque(Tensor[] tensors, str path) -> Tensor[]")
_children: ContextVar[dict[str, Opaque]] = ContextVar("children")


class Opaque:
    """A call of `module` with weights, buffers and arguments given as one list of tensors.

    `names` and then `buffer_names` are the dotted names (within the module) of the first tensors; the call may
    write into the buffers.  Arguments that are no tensors are those of the traced call."""

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module = path, module
        self.__name__ = f"opaque[{path}]"
        self.names = [n for n, _ in module.named_parameters()]
        self.buffer_names = [n for n, _ in module.named_buffers()]
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.structure = Structure()

    def __repr__(self) -> str:
        return self.__name__

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """The child's tensors, flat.  Its hooks run unless the tensors are fake."""
        if any(isinstance(t, FakeTensor) for t in tensors):
            with unhooked(self.module):
                return list(flatten(self.result(tensors), Structure()))
        return list(flatten(self.result(tensors), Structure()))

    def result(self, tensors: list[Tensor]) -> Any:
        """What the child returns."""
        named = [*self.names, *self.buffer_names]
        weights = dict(zip(named, tensors, strict=False))
        rest = iter(tensors[len(named) :])
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return torch.func.functional_call(self.module, weights, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the child's forward while the model is traced."""
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        own = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        tensors = [own[n] for n in [*self.names, *self.buffer_names]]
        tensors += [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        results = torch.ops.megatrain.opaque(tensors, self.path)
        self.leaves = [_Tensor if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self.structure.build(list(results))


_Tensor = torch.empty(0)


@torch.library.register_fake("megatrain::opaque")
def _shapes(tensors: list[Tensor], path: str) -> list[Tensor]:
    opaque = _children.get()[path]
    forward = opaque.module.__dict__.pop("forward")
    try:
        results = opaque.result(tensors)
    finally:
        opaque.module.__dict__["forward"] = forward
    return [t.clone() for t in flatten(results, opaque.structure)]


@contextmanager
def unhooked(module: nn.Module) -> Generator[None, None, None]:
    """Inside, the module and its children have no forward hooks."""
    tables = [t for m in module.modules() for t in (m._forward_hooks, m._forward_pre_hooks)]
    hooks = [dict(t) for t in tables]
    for t in tables:
        t.clear()
    try:
        yield
    finally:
        for t, h in zip(tables, hooks, strict=True):
            t.update(h)


@contextmanager
def tracing(model: nn.Module) -> Generator[dict[str, Opaque], None, None]:
    """Inside, the outermost children of `model` with forward hooks are opaque; gives them by path."""
    found: dict[str, Opaque] = {}
    for path, module in model.named_modules():
        hooked = path and (module._forward_hooks or module._forward_pre_hooks)
        if hooked and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = Opaque(path, module)
    own = {path: o.module.__dict__.get("forward") for path, o in found.items()}
    token = _children.set(found)
    with unhooked(model):
        for o in found.values():
            o.module.__dict__["forward"] = o.trace
        try:
            yield found
        finally:
            for path, o in found.items():
                del o.module.__dict__["forward"]
                if own[path] is not None:
                    o.module.__dict__["forward"] = own[path]
            _children.reset(token)
