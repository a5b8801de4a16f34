"""A linear layer and the cross entropy of its results as one operator: forward and gradients in one pass over chunks of
rows, so that fp32 logits of all rows, their softmax and their gradients are never held.

Where the caller wants the logits, they are written in the layer's own dtype, as the layer would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatrain.meter import LOSS_CHUNK

Shape = tuple[float, float]
"""(a, b): logits x become a x where b is 0, else b tanh(a x), before the loss."""


def shape_of(steps: str) -> Shape | None:
    """What steps do together, from their text, `float; div 30.0; tanh; mul 30.0`; None for what is no `Shape`."""
    before, after, capped = 1.0, 1.0, False
    for kind, *rest in (s.split() for s in steps.split(";") if s.strip()):
        if kind == "tanh" and capped:
            return None
        capped = capped or kind == "tanh"
        if kind in ("mul", "div"):
            number = float(rest[0])
            if not number:
                return None
            factor = number if kind == "mul" else 1 / number
            before, after = (before, after * factor) if capped else (before * factor, after)
    if capped and not after:
        return None
    return (before, after if capped else 0.0)


def slopes(logits: Tensor, target: Tensor, scale: Tensor, shape: Shape, ignore: int, out: Tensor | None) -> Tensor:
    """The sum of the cross entropies of some rows (fp32 []).  Where `out` is given, the gradient of that by the logits
    times `scale` goes there: softmax minus the target's indicator, carried back through the shape."""
    if logits.device.type == "cuda":
        from megatrain.triton_kernels import cross_entropy

        return cross_entropy(logits, target, scale, *shape, ignore, out)
    a, b = shape
    x = logits.float() * a
    y = b * torch.tanh(x) if b else x
    total = torch.logsumexp(y, -1)
    valid = target != ignore
    safe = torch.where(valid, target, 0)
    if out is not None:
        slope = torch.exp(y - total[:, None])
        slope.scatter_add_(1, safe[:, None], torch.full_like(slope[:, :1], -1.0))
        slope *= torch.where(valid, scale, 0.0)[:, None]
        slope *= a * (b - y * y / b) if b else a
        out.copy_(slope)
    return torch.where(valid, total - y.gather(1, safe[:, None])[:, 0], 0.0).sum()


@torch.library.custom_op("megatrain::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, steps: str, mean: bool, ignore: int, logits: bool, grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss fp32 [], logits [..., classes] or empty, gradients of the loss by `x` and `weight` or empty).

    `x` [..., features], `weight` [classes, features], `target` [rows] (int64), rows being all but the last dimension of
    `x`; `steps` as `shape_of` takes them; the mean over rows whose target is not `ignore`, or the sum."""
    rows = x.reshape(-1, x.shape[-1])
    goal = target.reshape(-1)
    count, classes = rows.shape[0], weight.shape[0]
    scale = torch.ones((), device=x.device)
    if mean:
        scale = 1.0 / (goal != ignore).sum().float()
    out = x.new_empty((count, classes) if logits else (0,))
    dx = torch.empty_like(rows) if grad else x.new_empty(0)
    dw = torch.zeros_like(weight) if grad else weight.new_empty(0)
    loss = torch.zeros((), device=x.device)
    shape = shape_of(steps)
    assert shape is not None, f"{steps}: no shape of logits"
    size = max(128, LOSS_CHUNK // (classes * x.element_size()) // 128 * 128)
    for start in range(0, count, size):
        chunk = slice(start, min(start + size, count))
        made = out[chunk] if logits else x.new_empty((chunk.stop - start, classes))
        torch.mm(rows[chunk], weight.t(), out=made)
        slope = (torch.empty_like(made) if logits else made) if grad else None
        loss += slopes(made, goal[chunk], scale, shape, ignore, slope)
        if slope is not None:
            torch.mm(slope, weight, out=dx[chunk])
            dw.addmm_(slope.t(), rows[chunk])
    return loss * scale, out.view((*x.shape[:-1], classes) if logits else (0,)), dx.view(x.shape) if grad else dx, dw


@linear_cross_entropy.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, steps: str, mean: bool, ignore: int, logits: bool, grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]) if logits else (0,))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if grad else x.new_empty(0)
    return x.new_empty((), dtype=torch.float32), out, dx, torch.empty_like(weight) if grad else weight.new_empty(0)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, weight = inputs[:2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.save_for_backward(x, weight, output[2], output[3])


def backward(ctx: Any, loss: Tensor | None, logits: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, dx, dw = ctx.saved_tensors
    out: list[Tensor | None] = [None, None]
    if loss is not None:
        out = [dx * loss.to(dx.dtype), dw * loss.to(dw.dtype)]
    if logits is not None and logits.numel():
        rows, slope = x.reshape(-1, x.shape[-1]), logits.reshape(-1, logits.shape[-1])
        more = [(slope @ weight).view(x.shape), slope.t() @ rows]
        out = [m if o is None else o + m for o, m in zip(out, more, strict=True)]
    return (*out, None, None, None, None, None, None)


linear_cross_entropy.register_autograd(backward, setup_context=setup)
