"""Children that a graph calls whole: those with forward hooks, which must see real tensors, once a call, and those
that cannot be traced (a branch on data, an `autograd.Function` of its own).

While a model is traced, such a child is replaced by one call of the operator `megatrain::opaque`; in the captured graph
that call is an `Opaque`, which runs the child itself, hooks and all, on the weights it is given.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatrain.imitation import Imitation, Sizes, followed
from megatrain.structure import Structure, flatten
from megatrain.watching import frozen, owned

OPERATOR = "megatrain.opaque.default"
_library = torch.library.Library("megatrain", "DEF")
_library.define("opaque(Tensor[] tensors, str call) -> Tensor[]")
_taking: list[None] = []
"""Not empty while a layer's gradients are taken, in whichever thread of autograd."""
_calls: ContextVar[dict[str, Opaque]] = ContextVar("calls")


class Opaque:
    """A call of `module` with weights, buffers and arguments given as one list of tensors.

    `names` and then `buffer_names` are the dotted names (within the module) of the first tensors; the call may
    write into the buffers.  Arguments that are no tensors are those of the traced call.  `reason` says why the module
    is not traced; empty where it could be, and only its hooks must run."""

    def __init__(self, path: str, module: nn.Module, reason: str, hooked: bool):
        self.path, self.module, self.reason, self.hooked = path, module, reason, hooked
        self.__name__ = f"opaque[{path}]"
        self.names = [n for n, _ in module.named_parameters()]
        self.buffer_names = [n for n, _ in module.named_buffers()]
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.structure = Structure()
        self.sizes: Sizes | None = None

    def __repr__(self) -> str:
        return self.__name__

    def does_as(self, other: Opaque) -> bool:
        """Whether, given this one's weights and arguments, the other call does the same."""
        return not (self.hooked or other.hooked) and self.spec == other.spec and made_as(self) == made_as(other)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """The child's tensors, flat.  Its hooks run unless the tensors are fake."""
        if not any(isinstance(t, FakeTensor) for t in tensors):
            results = self.whole(tensors) if self.reason else list(flatten(self.result(tensors), Structure()))
            for r in results if self.hooked else ():
                if r.requires_grad:
                    r.register_hook(self.asked)
            return results
        with unhooked(self.module):
            if self.reason:
                return list(Imitation.apply(self, *tensors))  # type: ignore[arg-type]
            return list(flatten(self.result(tensors), Structure()))

    def asked(self, gradient: Tensor) -> None:
        """A gradient comes to a result: from the layer's backward, not from what a hook has kept."""
        if not _taking:
            raise RuntimeError(
                f"a loss was made of a tensor that a hook of {self.path} ({type(self.module).__name__}) has kept: its "
                "gradient cannot reach the model\nhave forward return the tensor, or detach it in the hook"
            )

    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        """As the call of a module that was not traced: what tracing would have found is checked here."""
        given = tensors[len(self.names) + len(self.buffer_names) :]
        versions = [t._version for t in given]
        results = [r.contiguous() for r in flatten(self.result(tensors), Structure())]
        if versions != [t._version for t in given]:
            raise RuntimeError(
                f"{self.path} ({type(self.module).__name__}) is called whole ({self.reason}) and writes into an "
                "argument\nhave it return what it makes, or write into a clone"
            )
        if self.sizes and (line := self.sizes.broken(tensors, results)):
            raise RuntimeError(
                f"{self.path} ({type(self.module).__name__}) is called whole ({self.reason}) and {line}\n"
                "sizes of its results may depend on those of its arguments alone"
            )
        return results

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """What the child returns."""
        named = [*self.names, *self.buffer_names]
        weights = dict(zip(named, tensors, strict=False))
        rest = iter(tensors[len(named) :])
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return torch.func.functional_call(self.module, weights, args, kwargs)

    @contextmanager
    def own(self) -> Generator[None, None, None]:
        """Inside, the module runs its own forward, also while it is traced."""
        forward = self.module.__dict__.pop("forward", None)
        try:
            yield
        finally:
            if forward is not None:
                self.module.__dict__["forward"] = forward


@contextmanager
def taking_gradients() -> Generator[None, None, None]:
    """Inside, gradients are those of a layer."""
    _taking.append(None)
    try:
        yield
    finally:
        _taking.pop()


_Tensor = torch.empty(0)


def made_as(o: Opaque) -> Any:
    """What a call does, its tensors apart: the classes and attributes of its modules, and its other arguments."""
    memo: dict[int, Any] = {}
    plain = [None if isinstance(leaf, Tensor) else frozen(leaf, memo) for leaf in o.leaves]
    parts: list[Any] = [o.names, o.buffer_names, plain]
    for name, module in o.module.named_modules():
        own = {k: frozen(v, memo) for k, v in vars(module).items() if not owned(module, k)}
        parts.append((name, type(module), module.training, own))
    return parts


@torch.library.register_fake("megatrain::opaque")
def _shapes(tensors: list[Tensor], call: str) -> list[Tensor]:
    opaque = _calls.get()[call]
    with opaque.own():
        if opaque.reason:
            opaque.sizes = followed(opaque, tensors)
            return opaque.sizes.made(tensors)
        results = opaque.result(tensors)
    return [t.clone() for t in flatten(results, opaque.structure)]


class Stand:
    """Stands in for the forward of a child while the model is traced: each call becomes an `Opaque`."""

    def __init__(self, path: str, module: nn.Module, reason: str, calls: dict[str, Opaque]):
        self.path, self.module, self.reason, self.calls = path, module, reason, calls
        self.hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        o = Opaque(self.path, self.module, self.reason, self.hooked)
        call = self.path
        while call in self.calls:
            call += "'"
        o.leaves, o.spec = pytree.tree_flatten((args, kwargs))
        self.calls[call] = o
        own = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        tensors = [own[n] for n in [*o.names, *o.buffer_names]]
        tensors += [leaf for leaf in o.leaves if isinstance(leaf, Tensor)]
        alike = next((other for other in self.calls.values() if other is not o and o.does_as(other)), o)
        o.__name__ = alike.__name__  # so that layers share a template
        results = torch.ops.megatrain.opaque(tensors, call)
        o.leaves = [_Tensor if isinstance(leaf, Tensor) else leaf for leaf in o.leaves]
        return o.structure.build(list(results))


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
            t.clear()  # of what was put there inside
            t.update(h)


@contextmanager
def tracing(model: nn.Module, whole: Mapping[str, str]) -> Generator[dict[str, Opaque], None, None]:
    """Inside, the outermost children of `model` with forward hooks, and those that `whole` names with its reasons, are
    opaque; gives what becomes of their calls, by the name of the call."""
    found: dict[str, Stand] = {}
    calls: dict[str, Opaque] = {}
    for path, module in model.named_modules():
        hooked = path and (module._forward_hooks or module._forward_pre_hooks)
        if (hooked or path in whole) and not any(path.startswith(f"{outer}.") for outer in found):
            inner = next((whole[p] for p in whole if p == path or p.startswith(f"{path}.")), "")
            found[path] = Stand(path, module, inner, calls)
    own = {path: s.module.__dict__.get("forward") for path, s in found.items()}
    token = _calls.set(calls)
    with unhooked(model):
        for s in found.values():
            s.module.__dict__["forward"] = s
        try:
            yield calls
        finally:
            for path, s in found.items():
                del s.module.__dict__["forward"]
                if own[path] is not None:
                    s.module.__dict__["forward"] = own[path]
            _calls.reset(token)
