"""Call targets that a captured graph may hold beside ATen's: an op run in another mode than its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def without_grad(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`op` as inside `torch.no_grad()`."""
    with torch.no_grad():
        return op(*args, **kwargs)


def under_autocast(
    device: str, dtype: torch.dtype, enabled: bool, op: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`op` as inside `torch.autocast(device, dtype, enabled)`."""
    with torch.autocast(device, dtype, enabled):
        return op(*args, **kwargs)
