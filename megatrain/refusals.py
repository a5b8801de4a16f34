"""Models that `compile` does not take, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
"""Of torch: each moves parameters or copies the module itself."""


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model whose parameters megatrain cannot lay out or whose forward it cannot capture."""
    for path, module in model.named_modules():
        here = f"{path} ({type(module).__name__})" if path else f"this {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{here} is a torch.jit.ScriptModule, which has no Python forward to capture\n"
                "compile the module that it was made of"
            )
        kinds = [c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.") and c is not nn.Module]
        if found := next((k for k in kinds if k in WRAPPERS), None):
            raise ValueError(
                f"{here} is wrapped by {found}, which moves the same parameters as megatrain\n"
                "compile the module without it: megatrain runs on one device"
            )
    for name, t in tensors_of(model):
        if isinstance(t, (UninitializedBuffer, UninitializedParameter)):
            raise ValueError(
                f"{name} of a lazy module has no shape yet\ncall the model once with an example, then compile it"
            )
        if is_traceable_wrapper_subclass(t) or hasattr(t, "quant_state"):
            raise ValueError(
                f"{name} is a {type(t).__name__}, a tensor that holds others, which a flat plane cannot\n"
                "make them parameters or buffers of their own (torchao.utils.unwrap_tensor_subclass(model) does that): "
                "then they stream as they are, int8 as int8"
            )


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                yield f"{path}.{name}" if path else name, t
