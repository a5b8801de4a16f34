"""One call of a model: its tensors, the key under which a capture serves it, and what sets it apart from others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import nn

from megatrain.graphs import evaluated
from megatrain.host import gradient_dtype
from megatrain.program import Program
from megatrain.structure import key_name
from megatrain.watching import is_plain


class CaptureError(ValueError):
    """The model cannot be captured for this call: names the module, the line and the cure.  `layerwise`: its own
    forward can run as it is, with its layers captured.  `again`: a second call may not have what is in the way."""

    def __init__(self, message: str, layerwise: bool = False, again: bool = False):
        super().__init__(message)
        self.layerwise, self.again = layerwise, again


class Call:
    """The arguments of one call of a model, by parameter name with defaults filled in.

    `tensors` maps the path of each tensor among them (`input_ids`, `batch.mask`, `args.0`) to it; `key` is what must be
    equal for a capture to serve another call, sizes apart (those are the guards'); `foreign` are arguments that are
    neither tensors nor plain values (a generation cache)."""

    def __init__(self, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.bound = signature.bind(*args, **kwargs)
        self.bound.apply_defaults()
        for name, parameter in signature.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and not self.bound.arguments[name]:
                del self.bound.arguments[name]
        leaves, spec = pytree.tree_flatten_with_path(dict(self.bound.arguments))
        self.tensors: dict[str, torch.Tensor] = {}
        self.foreign: dict[str, Any] = {}
        rest: list[Any] = [spec]
        seen: dict[int, str] = {}
        named = [(".".join(map(key_name, path)), value) for path, value in leaves]
        for name, value in named:
            if not isinstance(value, torch.Tensor):
                if not is_plain(value):
                    self.foreign[name] = value
                rest.append((name, type(value), value if is_plain(value) else id(value)))
                continue
            self.tensors[name] = value
            alias = seen.setdefault(id(value), name)
            small = tuple(s if s < 2 else 2 for s in value.shape)
            rest.append((name, value.dtype, small, value.requires_grad, alias, value.layout))
        self.key = tuple(rest)
        self._leaves, self._spec = [None if n in self.tensors else v for n, v in named], spec
        self._slots = [n in self.tensors for n, _ in named]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of this call with other tensors, in the order of `self.tensors`."""
        rest = iter(tensors)
        leaves = [next(rest) if slot else leaf for slot, leaf in zip(self._slots, self._leaves, strict=True)]
        bound = inspect.BoundArguments(self.bound.signature, pytree.tree_unflatten(leaves, self._spec))
        return bound.args, bound.kwargs


def module_key(model: nn.Module) -> tuple[Any, ...]:
    """What of the module tree may change what a forward computes, beside tensors' values and the attributes that the
    capture has seen read: classes, training flags, hooks, what gradients there are to be."""
    parts: list[Any] = []
    for name, module in model.named_modules():
        parts.append((name, type(module), module.training, *map(len, hooks_of(module))))
        parts.extend(p.requires_grad and gradient_dtype(p) for p in module._parameters.values() if p is not None)
    return tuple(parts)


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The hook tables that `nn.Module.__call__` reads: forward, forward-pre, backward, backward-pre."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def mode_key() -> tuple[Any, ...]:
    """The global modes that change what a call records."""
    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    return (torch.is_grad_enabled(), *((k, torch.get_autocast_dtype(k)) for k in kinds))


def bind_sizes(program: Program, tensors: Mapping[str, torch.Tensor]) -> dict[sympy.Symbol, int] | None:
    """The value of each size symbol in this call, or None where a guard fails: another capture is needed."""
    targets = {i.name: i.target for i in program.inputs}
    sizes = {symbol: tensors[targets[name]].shape[dim] for symbol, name, dim in program.symbols}
    return sizes if all(evaluated(g, sizes) in (True, sympy.true) for g in program.guards) else None


def check_written(written: Sequence[str], call: Call) -> None:
    """Raises CaptureError where writing into an argument would show elsewhere than in the argument."""
    for name in written:
        t = call.tensors[name]
        storage = t.untyped_storage()._cdata
        if t.requires_grad:
            raise CaptureError(
                f"forward writes into argument {name}, which requires a gradient\ngive it detached, or a copy of it"
            )
        for other, u in call.tensors.items():
            if other != name and u.untyped_storage()._cdata == storage:
                raise CaptureError(
                    f"forward writes into argument {name}, which shares memory with argument {other}\n"
                    "give a copy of one of them"
                )


def ones_of(call: Call, names: Iterable[str]) -> frozenset[str]:
    """Those of the named arguments that are masks of ones: on the host, where looking at them holds nothing up."""
    given = ((n, call.tensors[n]) for n in names)
    return frozenset(n for n, t in given if t.device.type == "cpu" and is_mask(t) and bool((t == 1).all()))


def is_mask(t: torch.Tensor) -> bool:
    return t.dim() >= 2 and not (t.is_floating_point() or t.is_complex()) and t.layout is torch.strided


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError for backward hooks of children."""
    for name, module in model.named_modules():
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"{name} ({type(module).__name__}) has a backward hook, which a captured child cannot call\n"
                "put the hook on the compiled model itself or on a parameter, or remove it before the call"
            )


def difference(key: Any, shapes: Any, captures: Mapping[Any, Any]) -> str:
    """What sets this call apart from the captures there are, in a line."""
    if not captures:
        return "the first call"
    for other in captures:
        call, mode, modules = (a == b for a, b in zip(key, other, strict=True))
        if call and mode and modules:
            return f"no capture holds for sizes {', '.join(str(list(s)) for s in shapes)}"
    other = list(captures)[-1]
    if key[0] != other[0]:
        parts = [a for a, b in zip(key[0][1:], other[0][1:], strict=False) if a != b]
        if not parts:
            return "other arguments are given"
        first = parts[0]
        return f"argument {first[0]} is {' '.join(str(p) for p in first[1:3])}"
    if key[1] != other[1]:
        return "grad mode or autocast is another"
    parts = [a for a, b in zip(key[2], other[2], strict=False) if a != b]
    where = next((p[0] or type(p[1]).__name__ for p in parts if isinstance(p, tuple) and p), "")
    return f"the module tree changed{f' at {where}' if where else ''} (training, a hook, requires_grad)"
