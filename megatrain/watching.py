"""What is watched while a forward is traced.

A captured graph holds a forward's tensor work and nothing else.  The attributes that the forward reads decide which
later calls the graph serves: they are noted, and compared at each call.  What the graph would lose is refused: an
attribute that is set, a custom autograd.Function, a hook on a tensor, a draw from a generator that is not torch's.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack

from megatrain.plain import DEEPEST, LONGEST, MISSING, Missing, held, is_plain, put_back
from megatrain.recorders import MARK, unrecorded

OWN = frozenset(nn.Module().__dict__) | {"forward", "_apply", "_megatrain", "__dict__", "__class__", MARK}
"""Attributes of every module, or every one of transformers, which are not its author's; `training` and the hooks are in
the key of a capture."""

TRACED = "transformers.integrations.moe"
"""Told that it is traced, for then it leaves out `aten._grouped_mm`, which has no fake kernel for fp32."""


_unwatched: ContextVar[bool] = ContextVar("unwatched", default=False)


class Refused(Exception):
    """The forward does what a captured graph would lose; `cure` says what to do instead.  `whole`: a call of the module
    itself, in the place of what it did, would not lose it.  `path` of the module, where it is known.
    `again`: a second forward may not do it."""

    def __init__(self, reason: str, cure: str, whole: bool = False, path: str | None = None, again: bool = False):
        super().__init__(reason)
        self.cure, self.whole, self.path, self.again = cure, whole, path, again


@contextmanager
def unwatched() -> Generator[None, None, None]:
    """Inside, what is refused for the sake of a graph is done: no graph is made of it."""
    token = _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.reset(token)


class Same:
    """Equal for the same object only; does not keep it alive where it can be referred to weakly."""

    def __init__(self, value: Any):
        try:
            self.ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self.ref = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (value := self.ref()) is not None and value is other.ref()

    __hash__ = None  # type: ignore[assignment]


def frozen(value: Any, memo: dict[int, Any], depth: int = 0) -> Any:
    """What `value` is at this moment, to be compared with what it is later.  Containers, configurations and other plain
    objects are compared by what they hold; tensors by identity and version; modules and functions by identity."""
    if is_plain(value):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return Same(value), None if value.is_inference() else value._version
    if isinstance(value, (nn.Module, type)) or callable(value) or depth == DEEPEST:
        return Same(value)
    if id(value) in memo:
        return memo[id(value)]
    memo[id(value)] = Same(value)  # a cycle ends here
    made: Any
    if isinstance(value, Mapping):
        parts = [*value.items()] if len(value) <= LONGEST else []
        made = (type(value), len(value), [(frozen(k, memo, depth + 1), frozen(v, memo, depth + 1)) for k, v in parts])
    elif isinstance(value, (list, tuple)):
        parts = value if len(value) <= LONGEST else ()
        made = (type(value), len(value), [frozen(v, memo, depth + 1) for v in parts])
    elif isinstance(value, (set, frozenset)):
        made = (type(value), set(value)) if all(map(is_plain, value)) else Same(value)
    elif fields := getattr(value, "__dict__", None):
        made = (type(value), [(k, frozen(v, memo, depth + 1)) for k, v in fields.items()])
    else:
        made = Same(value)
    memo[id(value)] = made
    return made


@dataclass
class Reads:
    """The attributes of modules that a forward read: (module, its path, the attribute) with what it was."""

    found: dict[tuple[int, str], tuple[nn.Module, str, Any]] = field(default_factory=dict)

    def forget(self, modules: Iterable[nn.Module]) -> None:
        """Tensors among the attributes of modules whose hooks run in every call, which may set them anew
        (`weight_norm`), may be others in each."""
        own = {id(m) for m in modules}
        for key, (module, _, _) in list(self.found.items()):
            if key[0] in own and isinstance(module.__dict__.get(key[1]), torch.Tensor):
                del self.found[key]

    def changed(self) -> str:
        """A line about the first attribute that is not what it was; empty where all are."""
        memo: dict[int, Any] = {}
        for (_, name), (module, path, was) in self.found.items():
            value = module.__dict__.get(name, MISSING)
            if frozen(value, memo) != was:
                text = f" is {value!r} now" if is_plain(value) else " changed"
                return f"{path}.{name}{text}".lstrip(".")
        return ""


@contextmanager
def watched(model: nn.Module) -> Generator[Reads, None, None]:
    """Inside, attribute reads of the modules of `model` are noted, and what a graph would lose raises Refused, at the
    latest at the end.  Attributes are put back as they were, and what plain objects and containers in them held."""
    reads = Reads()
    paths = {id(m): n for n, m in model.named_modules()}
    before = list(_attributes(model))
    memo: dict[int, Any] = {}
    state = {(id(m), k): frozen(v, memo) for m, k, v, _ in before}
    holders = held([v for _, _, v, _ in before])
    generators = _generators()

    def look(self: nn.Module, name: str) -> Any:
        if id(self) in paths and (id(self), name) not in reads.found and not owned(self, name):
            own = object.__getattribute__(self, "__dict__")
            if name in own or not (hasattr(type(self), name) or _holds(own, name)):
                was = state.get((id(self), name), (Missing, MISSING))
                reads.found[id(self), name] = (self, paths[id(self)], was)
        return object.__getattribute__(self, name)

    assigned: dict[tuple[int, str], Any] = {}

    def note(self: nn.Module, name: str, value: Any) -> None:
        if id(self) in paths and not owned(self, name) and not _holds(self.__dict__, name):
            assigned[id(self), name] = frozen(value, {})  # export puts plain attributes back itself
        setattr_of_module(self, name, value)

    done = False
    setattr_of_module: Any = nn.Module.__setattr__
    with ExitStack() as stack:
        stack.enter_context(unrecorded(model))
        stack.enter_context(_set(nn.Module, "__setattr__", note))
        stack.enter_context(_set(nn.Module, "__getattribute__", look))
        stack.enter_context(_set(torch.autograd.Function, "apply", classmethod(_refuse_function)))
        stack.enter_context(_set(torch.Tensor, "register_hook", _refuse_hook))
        for name in ("is_compiling", "is_exporting"):
            stack.enter_context(_set(torch.compiler, name, _told_to_torch(getattr(torch.compiler, name))))
        try:
            yield reads
            done = True
        finally:
            line = _written(model, paths, state, assigned)
            for module, name, value, copied in before:
                _restore(module, name, value, copied)
            put_back(holders)
            kept = {(id(m), k) for m, k, _, _ in before}
            for module, name, _, _ in list(_attributes(model)):
                if (id(module), name) not in kept:
                    del module.__dict__[name]
            drawn = _generators() != generators
            _set_generators(generators)
    if done and line:
        raise Refused(
            f"forward sets {line}, which a captured graph would not do again",
            "make it a buffer, return it, or set it in a hook or outside of forward",
            again=True,
        )
    if done and drawn:
        raise Refused(
            "forward draws from Python's or numpy's generator: a captured graph would use the same number ever after",
            "draw with torch (torch.rand), or draw outside and pass the number as a tensor",
        )


def _attributes(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any, Any]]:
    """(module, name, value, copy of a container) of the attributes that modules' authors gave them."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if not owned(module, name):
                yield module, name, value, value.copy() if isinstance(value, (list, dict, set)) else None


def owned(module: nn.Module, name: str) -> bool:
    """Whether the attribute is torch's own: of every module, or the RNNs' second list of their weights."""
    return name in OWN or (name.startswith("_flat_weight") and isinstance(module, nn.RNNBase))


def _written(
    model: nn.Module,
    paths: Mapping[int, str],
    state: Mapping[tuple[int, str], Any],
    assigned: Mapping[tuple[int, str], Any],
) -> str:
    """The attributes that are not what `state` says, or were not when they were `assigned`, in words."""
    memo: dict[int, Any] = {}
    found = {(id(m), k): (paths.get(id(m), ""), frozen(v, memo)) for m, k, v, _ in _attributes(model)}
    lost = [k for k in state if k not in found]
    found |= {key: (paths[key[0]], value) for key, value in assigned.items()}
    names = [f"{path}.{k[1]}" for k, (path, now) in found.items() if k not in state or state[k] != now]
    return ", ".join(n.lstrip(".") for n in [*names, *(f"{paths[i]}.{name}" for i, name in lost)][:3])


def _restore(module: nn.Module, name: str, value: Any, copied: Any) -> None:
    module.__dict__[name] = value
    if isinstance(value, list) and value != copied:
        value[:] = copied
    elif isinstance(value, (dict, set)) and value != copied:
        value.clear()
        value.update(copied)


def _holds(own: Mapping[str, Any], name: str) -> bool:
    return any(name in own[table] for table in ("_parameters", "_buffers", "_modules") if table in own)


def _generators() -> Any:
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)  # type: ignore[union-attr]


def _set_generators(state: Any) -> None:
    random.setstate(state[0])
    kind, keys, *rest = state[1]
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))


def _told_to_torch(asked: Callable[[], bool]) -> Callable[[], bool]:
    """What `asked` says, for torch's own code; False for the model's, which so takes the branches it takes in eager:
    transformers has other algorithms for export."""

    def answer() -> bool:
        frame = sys._getframe(1)
        callers = [str(f.f_globals.get("__name__", "")) for f in (frame, frame.f_back) if f]
        return asked() and (callers[0].partition(".")[0] == "torch" or TRACED in callers)

    return answer


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Generator[None, None, None]:
    had, old = name in owner.__dict__, owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old) if had else delattr(owner, name)


_APPLY: Any = torch.autograd.Function.apply.__func__  # pyright: ignore


def _refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
    if _unwatched.get() or cls.__module__.startswith(
        "torch._library"
    ):  # the backward of a registered operator stays with the operator
        return _APPLY(cls, *args, **kwargs)
    raise Refused(
        f"{cls.__qualname__} is a custom autograd.Function, whose own backward a captured graph would lose",
        "write it with differentiable operations, or register it as an operator (torch.library.custom_op with "
        "register_autograd)",
        whole=True,
    )


_HOOK: Any = torch.Tensor.register_hook


def _refuse_hook(*args: Any, **kwargs: Any) -> Any:
    if _unwatched.get():
        return _HOOK(*args, **kwargs)
    raise Refused(
        "forward puts a hook on a tensor, which a captured graph would lose",
        "put it on a parameter or on a result of the model, outside of forward",
        whole=True,
    )


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap) is being run."""
    interpreter: Any = peek_interpreter_stack()
    return interpreter is not None


def global_hooks() -> Sequence[str]:
    """The kinds of hooks on all modules that are registered now."""
    tables = {
        "forward": nn.modules.module._global_forward_hooks,
        "forward pre": nn.modules.module._global_forward_pre_hooks,
        "backward": nn.modules.module._global_backward_hooks,
        "backward pre": nn.modules.module._global_backward_pre_hooks,
    }
    return [kind for kind, table in tables.items() if table]
