"""From a model and a call to a program, without laying out host memory: what the compiler does before anything runs.

The model may be on the host or on `meta`; nothing of its size is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from megatrain import settings
from megatrain.capture import Call, Capture, CaptureError, bind_sizes, capture, signature_of
from megatrain.observe import Dump, Verify
from megatrain.passes import DEFAULT
from megatrain.pipeline import Observer, Pass, run, split
from megatrain.planes import layer_of, planes_of
from megatrain.program import STAGES, Program, Strided
from megatrain.store import Layout, dense_stride, layout_of


def program_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: str | torch.device = "cpu",
    memory: str | int | None = None,
    passes: Sequence[Pass] = DEFAULT,
    stage: str = "scheduled",
) -> Program:
    """The program of `model(*args, **kwargs)` on `device` within `memory`, after the last of `passes` that gives `stage`
    or an earlier one.  Only the arguments' shapes and dtypes are used.  Gradients are wanted if grad mode is on.

    Raises ValueError for an unknown stage or a model that is compiled already, CaptureError and BudgetError."""
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: there is {', '.join(STAGES)}")
    if "_megatrain" in model.__dict__:
        raise ValueError(f"this {type(model).__name__} is compiled already: see megatrain.schedule(model)")
    tensors, names = tensors_of(model)
    call = Call(inspect.signature(model.forward), args, kwargs)
    found, sizes = captured(model, model.forward, call, torch.device(device), names)
    planes = dict(planes_of(model))
    layouts = {plane: layout(members, tensors) for plane, members in planes.items()}
    if found.constants:
        planes["constants0.w"] = tuple(found.constants)
        layouts["constants0.w"] = layout(tuple(found.constants), found.constants)
    program = described(
        found, tensors, planes, layouts, MappingProxyType(layer_of(model)), settings.parse_bytes(memory)
    )
    observers = observers_of(program)
    first, rest = split([p for p in passes if STAGES.index(p.gives) <= STAGES.index(stage)])
    program = run(program, first, observers)
    return run(sized(program, call, sizes), rest, observers) if rest else program
