"""The hooks by which transformers records hidden states, attentions and router logits.

A model puts them on its children in the first forward that is asked for such results, and marks itself as having them.
They only note tensors, so they are traced as any code is: where they make a child opaque, or where putting them counts
as setting an attribute, no such model could be captured.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

MARK = "_output_capturing_hooks_installed"
HOME = "transformers.utils.output_capturing"


@contextmanager
def unrecorded(model: nn.Module) -> Generator[None, None, None]:
    """Inside, there are no such hooks and marks, and a forward puts its own; afterwards those from before are back."""
    modules = list(model.modules())
    marks = [m.__dict__.pop(MARK, None) for m in modules]
    hooks = [dict(m._forward_hooks) for m in modules]
    for m, table in zip(modules, hooks, strict=True):
        for key, hook in table.items():
            if getattr(hook, "__module__", "") == HOME:
                del m._forward_hooks[key]
    try:
        yield
    finally:
        for m, mark, table in zip(modules, marks, hooks, strict=True):
            m.__dict__.pop(MARK, None)
            if mark is not None:
                m.__dict__[MARK] = mark
            m._forward_hooks.clear()
            m._forward_hooks.update(table)
