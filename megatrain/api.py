"""`compile`, `schedule`, `stats`: what a training script calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from megatrain import settings
from megatrain.compiled import Compiled, Stats
from megatrain.lanes import ThreadLanes
from megatrain.passes import DEFAULT, FuseLoss
from megatrain.pipeline import Pass, pipeline
from megatrain.planning import Residency, residency
from megatrain.refusals import check_model
from megatrain.schedule import Schedule
from megatrain.streams import StreamLanes
from megatrain.text import show_about

STATE = "_megatrain"
BACKENDS = ("eager", "inductor")
SHARE = 0.92
"""Of the device memory that is free, what a model may take if nothing is said: allocators lose some to fragments."""


M = TypeVar("M", bound=nn.Module)


def compile(
    model: M,
    *,
    device: str | torch.device | None = None,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    backend: str | None = None,
    passes: Sequence[Pass | str | Callable[..., Any]] | None = None,
    skip_logits: bool = False,
    example: Any = None,
) -> M:
    """Routes `model`'s forward through compiled schedules, in place, and returns `model`.

    Parameters move, in place, into flat host planes at once; graphs are captured at the first call, or from
    `example`: a tuple of positional or a dict of keyword arguments, never computed with.  `device` is where the
    schedules run: "cuda" (the default where there is one) or "cpu".  `memory` caps the device bytes ("24GiB");
    without it, it is what is free on a CUDA device less a margin, and no limit on the CPU.  `host_memory` caps the host
    bytes of weights, gradients and optimizer state; without it, it is what the machine has.  With it, updates in the
    backward use what is left for gradients that wait, so that the backward need not.
    `compute_dtype=torch.bfloat16` computes with fp32 parameters and arguments rounded to bf16, of which the host holds
    a copy for the device; parameters, their gradients and updates stay fp32, and planes stay on the host.  With
    `grad_dtype=torch.float32` gradients of bf16 and fp16 parameters leave the layer that makes them in fp32, are added
    up so, and `.grad` is fp32, as with torch's `Tensor.grad_dtype`, which it sets.  `passes` is the whole
    pipeline, `megatrain.DEFAULT_PASSES` unless given; a plain `fn(GraphModule) -> GraphModule` in it is run on the
    captured graph.  `skip_logits=True` drops the logits of which the model makes its loss: they are None among its
    results, and with backend "inductor" nobody ever holds them.  `backend="eager"` (the default on the CPU) runs
    templates with PyTorch's own kernels: the same bits as eager.  `backend="inductor"` (the default on CUDA) compiles
    them with `torch.compile`, once for a shape: faster, and equal within rounding.

    Compiling a compiled model again returns it; with other options it is an error.  Raises ValueError on a model with
    parameters on meta, lazy, sparse or of a class that holds other tensors, one wrapped by DDP or FSDP, an unknown
    device, size, backend or pass; the first call raises CaptureError for a model that
    cannot be captured and BudgetError for a budget that cannot be met."""
    target = _device(device)
    budget = settings.parse_bytes(memory)
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r}: there is {', '.join(map(repr, BACKENDS))}")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"megatrain.compile takes a torch.nn.Module, not {type(model).__name__}")
    made = pipeline(DEFAULT if passes is None else passes)
    if skip_logits:
        if not any(isinstance(p, FuseLoss) for p in made):
            raise ValueError("skip_logits=True: the pass that drops them, fuse_loss, is not among the passes")
        made = tuple(FuseLoss(skip_logits=True) if isinstance(p, FuseLoss) else p for p in made)
    host = settings.parse_bytes(host_memory, "host_memory")
    if compute_dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"compute_dtype={compute_dtype}: there is torch.bfloat16, torch.float16, or None")
    if grad_dtype not in (None, torch.float32):
        raise ValueError(f"grad_dtype={grad_dtype}: there is torch.float32, or None for each parameter's own")
    backend = backend or ("inductor" if target.type == "cuda" else "eager")
    options = (str(target), budget, host, compute_dtype, grad_dtype, backend, tuple(map(str, made)))
    state = model.__dict__.get(STATE)
    if isinstance(state, Compiled):
        if state.options == options:
            return model
        raise ValueError(f"this model is compiled already, with {state.options}: compile a copy for other options")
    for name, module in model.named_modules():
        if name and isinstance(module.__dict__.get(STATE), Compiled):
            raise ValueError(f"{name} is compiled already: compile either the whole model or its part")
    check_model(model)
    forward = model.__dict__.get("forward", None) or type(model).forward.__get__(model)
    if memory is None and target.type == "cuda":
        unused = torch.cuda.memory_reserved(target) - torch.cuda.memory_allocated(target)
        budget = int((torch.cuda.mem_get_info(target)[0] + unused) * SHARE)
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if host and size > host:
        raise ValueError(f"host_memory={host_memory!r} is too small: the model alone takes {show_about(size)}")
    for p in model.parameters() if grad_dtype else ():
        if p.is_floating_point():
            p.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    lanes = StreamLanes(target) if target.type == "cuda" else ThreadLanes()
    compiled = Compiled(model, forward, target, budget, host, backend, compute_dtype, made, lanes, options)
    model.__dict__[STATE] = compiled
    model.__dict__["forward"] = MethodType(_forward_like(forward), model)
    model.__dict__["_apply"] = MethodType(_apply, model)
    if example is not None:
        args, kwargs = ((), dict(example)) if isinstance(example, dict) else (tuple(example), {})
        compiled.prepare(model, args, kwargs)
    return model


def schedule(model: nn.Module, kind: str = "train") -> Schedule:
    """The schedule of `kind` ("train" or "eval") that was last run or prepared.  Raises ValueError where there is
    none."""
    state = _state(model)
    if kind not in ("train", "eval"):
        raise ValueError(f"kind={kind!r}: use 'train' or 'eval'")
    if kind not in state.schedules:
        raise ValueError(f"no {kind} schedule yet: call the model once, or compile it with example=")
    found = state.schedules[kind]
    return found.replace(update=state.updates.half) if kind == "train" else found


def stats(model: nn.Module) -> Stats:
    """What the model's last step did; see `Stats`."""
    return _state(model).current_stats()


def plan(model: nn.Module) -> Residency:
    """What is where, in bytes by class: on the device at the planned peak, on the host as taken so far; `print` it.
    Raises ValueError where nothing is planned yet."""
    return residency(_state(model))


def _state(model: nn.Module) -> Compiled:
    state = model.__dict__.get(STATE)
    if not isinstance(state, Compiled):
        raise ValueError(f"this {type(model).__name__} is not compiled: call megatrain.compile(model) first")
    return state


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type not in ("cuda", "cpu"):
        raise ValueError(f"device={str(device)!r}: megatrain runs on 'cuda' or 'cpu'")
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "device='cuda': this machine has no CUDA device, or torch was built without CUDA; use 'cpu'"
            )
        target = torch.device("cuda", target.index if ":" in str(target) else torch.cuda.current_device())
    return target


def _forward_like(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A method that finds the compiled state in the instance, and is eager where there is none (a copy, say)."""
    plain = getattr(forward, "__func__", forward)

    @functools.wraps(plain)
    def compiled_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get(STATE)
        if isinstance(state, Compiled):
            return state.call(self, args, kwargs)
        return type(self).forward(self, *args, **kwargs)

    return compiled_forward


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    """`.to()`, `.cuda()`, `.half()`: a move to the compiled device does nothing, another device is an error, and what
    else changes is noticed at the next call."""
    state = self.__dict__.get(STATE)
    original = type(self)._apply
    if not isinstance(state, Compiled):
        return original(self, fn, *args, **kwargs)
    probe = torch.empty(0)
    moved = fn(probe)
    if moved.device not in (probe.device, state.device):
        raise ValueError(
            f"this model is compiled for {state.device} and cannot move to {moved.device}: its parameters live on "
            "the host"
        )
    floats = next((p for p in self.parameters() if p.is_floating_point()), probe)
    if moved.device != probe.device and fn(floats.detach().new_empty(0)).dtype == floats.dtype:
        return self
    return original(self, lambda t: fn(t).to(t.device), *args, **kwargs)
