"""Gradient clipping for compiled models: norms come from the backward, and the factor goes into the update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from megatrain import kernels
from megatrain.deferred import HOMES, Updates, quiet
from megatrain.host import flat


def total_norm(given: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
    """The 2-norm of gradients together (fp32): from the norms that the backward noted, where a gradient is as it made
    it; else read again, on the host lane."""
    squares = 0.0
    for p, grad in given:
        home = HOMES.get(p)
        updates = home.updates() if home else None
        noted = updates.norms.square(grad) if updates else None
        if noted is None:
            work = partial(
                kernels.call, kernels.squares, flat(grad.contiguous().float() if grad.dtype == torch.float16 else grad)
            )
            noted = updates.on_host(work) if updates else float(grad.double().square().sum())
        squares += noted
    return torch.tensor(math.sqrt(squares) if squares == squares else math.nan, dtype=torch.float32)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for parameters of a compiled model without a pass over the gradients: their
    norms come from the backward, and the factor goes into the optimizer's update, or into the gradients as soon as
    somebody looks at one.  Returns the norm before clipping (fp32).  Other norms than the 2-norm, and parameters of no
    compiled model, are torch's.  Raises RuntimeError for a norm that is not finite, with `error_if_nonfinite`."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    homes = [HOMES.get(p) for p in given]
    if norm_type != 2.0 or any(h is None or h.updates() is None for h in homes):
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    for updates in {u for home in homes if (u := home.updates() if home else None) is not None}:
        if updates.rule:
            raise RuntimeError(
                "clipping with update='in-backward': there are no gradients left to clip when the backward has ended\n"
                "use update='host'"
            )
        updates.settle_gradients()
    planes: dict[tuple[Updates, str], list[nn.Parameter]] = {}
    gradients: list[tuple[nn.Parameter, Tensor]] = []
    with quiet():
        for p, home in zip(given, homes, strict=True):
            updates = home.updates() if home else None
            if home and updates and p.grad is not None and isinstance(p, nn.Parameter):
                planes.setdefault((updates, home.plane), []).append(p)
                gradients.append((p, p.grad))
        norm = total_norm(gradients)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped: use error_if_nonfinite=False to go on"
        )
    factor = np.float32(clip_factor(norm, max_norm).item())
    for (updates, plane), ps in planes.items() if factor != 1 else ():
        updates.scale(plane, factor, ps)
    return norm


def synchronize(model: nn.Module) -> None:
    """Waits for all updates of a compiled model that are due.  Raises what failed in one."""
    for p in model.parameters():
        if (home := HOMES.get(p)) and (updates := home.updates()):
            updates.settle_all()


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by (fp32)."""
    return torch.clamp(most / (norm + 1e-6), max=1.0)
