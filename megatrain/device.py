"""Updates where the state lives on the device: the rules of `kernels` with the same bits, in Triton on CUDA, and by
those kernels themselves where host memory stands in for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatrain import kernels
from megatrain.host import flat


def able(device: torch.device) -> bool:
    """Whether updates can run on the device."""
    return device.type == "cpu" or find_spec("triton") is not None


@cache
def launcher() -> Callable[..., None]:
    """`triton_kernels.update`, imported where there is a device for it."""
    from megatrain.triton_kernels import update

    return update


def update(
    rule: str,
    w: Tensor,
    r: Tensor | None,
    g: Tensor,
    moments: Sequence[Tensor],
    constants: np.ndarray[Any, Any],
) -> None:
    """Updates one weight; all tensors are flat, of one size.  `constants` are those of the kernel of this name."""
    if w.device.type == "cuda":
        launcher()(rule, w, r, g, moments, constants)
        return
    arrays = [flat(m) for m in moments] + [kernels.NO_MOMENT] * (2 - len(moments))
    remainder = kernels.NO_REMAINDER if r is None else flat(r)
    kernels.call(getattr(kernels, rule), flat(w), remainder, flat(g), *arrays, constants)
