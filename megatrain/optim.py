"""AdamW, SGD and Lion for the parameters of compiled models: options, and the numbers of each step.

What they share, host state and updates off the critical path, is in `stepping`.
"""

from __future__ import annotations

import math
from typing import Any

from megatrain import kernels
from megatrain.hoststate import Group
from megatrain.stepping import HostOptimizer


class AdamW(HostOptimizer):
    """AdamW (arXiv 1711.05101) with an exact fp32 master in 12 bytes of host memory a bf16 parameter: bf16 weight,
    int16 remainder, two fp32 moments.

    Of a compiled model's parameters, or groups of them with options of their own, as `torch.optim.AdamW`, to and from
    which its `state_dict` loads.  With `max_grad_norm` gradients are clipped by their global 2-norm as
    `torch.nn.utils.clip_grad_norm_` does, in the update, without another pass; `grad_norm` is the last step's norm.
    `update="auto"` lets weights, gradients and state of as many planes live on the device as the budget has room for,
    where updates take no time; the rest is updated on the host while the next forward runs, as all is with
    `update="host"`.  `update="in-backward"` runs them as gradients
    land: there is no `.grad`, gradients take a few layers' memory, and neither clipping nor accumulation over several
    backwards is possible; call `step()` after each backward all the same.

    Raises ValueError for options out of range, for parameters of no compiled model or neither bf16 nor fp32, and where
    the host has not the memory."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        update: str = "auto",
        amsgrad: bool = False,
        maximize: bool = False,
    ):
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults | only(amsgrad=amsgrad, maximize=maximize), max_grad_norm, update)

    def checked(self, group: Group) -> None:
        super().checked(group)
        in_range(group, lr=0, eps=0, weight_decay=0)
        if not all(0 <= b < 1 for b in group["betas"]):
            raise ValueError(f"betas={group['betas']}: give two numbers from 0 to below 1")

    def kernel(self, group: Group) -> Any:
        return kernels.adamw

    def numbers(self, group: Group, step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        size, root = lr / (1 - beta1**step), math.sqrt(1 - beta2**step)
        return [1 - lr * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, size, root, group["eps"]]


class SGD(HostOptimizer):
    """Stochastic gradient descent as `torch.optim.SGD`, on the mechanism of `AdamW`: bf16 parameters have an exact fp32
    master, and momentum is fp32."""

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_grad_norm: float | None = None,
        update: str = "auto",
        maximize: bool = False,
    ):
        self.moments = SGD.moments if momentum else ()
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults | only(maximize=maximize), max_grad_norm, update)

    def checked(self, group: Group) -> None:
        super().checked(group)
        in_range(group, lr=0, momentum=0, weight_decay=0)
        if group["momentum"] and not self.moments:
            raise ValueError("momentum in one group and not in the optimizer's default: give momentum to both")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError("nesterov=True needs momentum and no dampening")

    def kernel(self, group: Group) -> Any:
        return kernels.momentum if self.moments else kernels.sgd

    def numbers(self, group: Group, step: int) -> list[float]:
        lr, decay, mu = float(group["lr"]), group["weight_decay"], group["momentum"]
        if not self.moments:
            return [lr, decay]
        rise = 1.0 if step == 1 or not mu else 1 - group["dampening"]
        return [lr, decay, mu, rise, mu if group["nesterov"] else 1.0, float(group["nesterov"])]


class Lion(HostOptimizer):
    """Lion (arXiv 2302.06675) on the mechanism of `AdamW`: one fp32 moment, 8 bytes of host memory a bf16 parameter."""

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float | None = None,
        update: str = "auto",
    ):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), max_grad_norm, update)

    def checked(self, group: Group) -> None:
        super().checked(group)
        in_range(group, lr=0, weight_decay=0)
        if not all(0 <= b < 1 for b in group["betas"]):
            raise ValueError(f"betas={group['betas']}: give two numbers from 0 to below 1")

    def kernel(self, group: Group) -> Any:
        return kernels.lion

    def numbers(self, group: Group, step: int) -> list[float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return [lr, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2]


def only(**options: bool) -> dict[str, bool]:
    """The options that are set."""
    return {name: value for name, value in options.items() if value}


def in_range(group: Group, **least: float) -> None:
    for name, value in least.items():
        if not value <= float(group[name]):
            raise ValueError(f"{name}={group[name]}: give {value} or more")
