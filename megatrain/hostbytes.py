"""Host memory that optimizers need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megatrain.deferred import HOMES, quiet
from megatrain.host import gradient_dtype
from megatrain.text import show_about


def state_bytes(parameters: Iterable[nn.Parameter], moments: Sequence[str]) -> int:
    """Bytes of fp32 moments, and of the rest of the fp32 master of bf16 parameters."""
    with quiet():
        return sum(p.numel() * (4 * len(moments) + 2 * (p.dtype == torch.bfloat16)) for p in parameters)


def check_room(who: str, parameters: Sequence[nn.Parameter], moments: Sequence[str], gradients: bool) -> None:
    """Raises ValueError where the host has not the memory for the state of these parameters, and for their `gradients`
    if these are all kept there."""
    with quiet():
        owners = {home.updates() for p in parameters if (home := HOMES.get(p))}
        grads = sum(p.numel() * gradient_dtype(p).itemsize for p in parameters) if gradients else 0
    state = state_bytes(parameters, moments)
    free = min([u.host_room() for u in owners if u], default=state + grads)
    if state + grads > free:
        what = ", ".join([f"fp32 {m}" for m in moments] + ["the rest of the fp32 master"])
        what = f"{show_about(state)} for {what}" + (f", {show_about(grads)} for gradients" if grads else "")
        raise ValueError(
            f"megatrain.{who} needs {show_about(state + grads)} of host memory ({what}), and "
            f"{show_about(max(0, free))} are free\nuse a smaller model, an optimizer with less state (SGD, Lion), or "
            "update='in-backward', which keeps few gradients"
        )
