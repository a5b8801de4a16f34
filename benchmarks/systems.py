"""What `step_time.py` trains: one model and, of it, each system ready for its first step.

A system is a function (model on the host, options, ids of a micro-batch) -> `System`; `SYSTEMS` names them.  It imports
what it needs when called, so that no process holds another system's modules.  All have bf16 weights and gradients and
AdamW; they differ in what else they hold and where:

    megatrain  weights streamed under the budget, an exact fp32 master (`megatrain.AdamW`, `--update`)
    plain      all on the device: bf16 states (fused AdamW), checkpointed layers
    fsdp2      `fully_shard` of each layer and of the root with `CPUOffloadPolicy`: weights, gradients and bf16 states
               on the host (fused AdamW), checkpointed layers, one rank
    deepspeed  ZeRO-3, parameters and optimizer on the host: fp32 master and states (CPUAdam), checkpointed layers, one
               rank
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR = 1e-5
SHAPES: dict[str, dict[str, Any]] = {}
"""Qwen2's public configurations by parameters, deeper ones of 7.62b and of 1.5b, and one for trying this script out."""

for line in [
    "",
    "tiny   64    4   4   2  128    512     yes",
    "0.49b  896   24  14  2  4864   151936  yes",
    "3.09b  2048  36  16  2  11008  151936  yes",
    "7.62b  3584  28  28  4  18944  152064  no",
    "8.55b  3584  32  28  4  18944  152064  no",
    "10.2b  3584  39  28  4  18944  152064  no",
    "14.8b  5120  48  40  8  13824  152064  no",
    "deep28   1536  28   12  2  8960  151936  yes",
    "deep112  1536  112  12  2  8960  151936  yes",
    "",
][1:-1]:
    name, *numbers, tied = line.split()
    keys = [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
    ]
    SHAPES[name] = dict(zip(keys, map(int, numbers), strict=True)) | {"tie_word_embeddings": tied == "yes"}


class System(NamedTuple):
    """A model in training."""

    model: Callable[..., Any]
    """(input_ids, labels) -> what has a `loss`."""
    backward: Callable[[Tensor], object]
    """Of the loss of one micro-batch, as the model gave it."""
    step: Callable[[], object]
    """Clips, updates and forgets gradients; may return before that is done."""
    finish: Callable[[], object] = int
    """Waits for updates that are due on the host."""
    notes: dict[str, Any] = {}  # noqa: RUF012
    """What the row should tell of it."""


def build(shape: dict[str, Any], device: str) -> nn.Module:
    """The model with random weights, made on the device that fills it fastest, then on the host."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**shape, max_position_embeddings=32768, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to("cpu").train()


def streamed(model: nn.Module, args: argparse.Namespace, ids: Tensor) -> System:
    import megatrain

    megatrain.compile(
        model, device=args.device, memory=args.memory, host_memory=args.host_memory, backend=args.backend,
        skip_logits=args.skip_logits, example=dict(input_ids=ids, labels=ids),
    )  # fmt: skip
    optimizer = megatrain.AdamW(model.parameters(), lr=LR, max_grad_norm=args.clip or None, update=args.update)
    return by_torch(model, optimizer, args, clip=0.0)._replace(finish=lanes_of(model).finish)


def lanes_of(model: nn.Module) -> Any:
    """What runs the ops of a compiled model."""
    return model.__dict__["_megatrain"].runtime.lanes


def plain(model: nn.Module, args: argparse.Namespace, ids: Tensor) -> System:
    model.to(args.device)
    checkpoint_layers(model)
    return by_torch(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), args, args.clip)


def fsdp2(model: Any, args: argparse.Namespace, ids: Tensor) -> System:
    """Gradients are reduced, and so leave for the host, at every micro-batch: with `set_requires_gradient_sync(False)`
    those of the whole model would stay on the device, which is what offloading is to avoid."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    one_process("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
    mesh = init_device_mesh(args.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    checkpoint_layers(model)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh, offload_policy=policy)
    kind = "fused"
    try:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    except RuntimeError:  # a torch without this kernel for parameters on the host
        kind = "foreach"
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=True)
    return by_torch(model, optimizer, args, args.clip)._replace(notes=dict(adamw=kind))


def zero3(model: nn.Module, args: argparse.Namespace, ids: Tensor) -> System:
    """The engine divides losses by the micro-batches itself.  Layers are checkpointed the older, reentrant way: the
    other compares shapes, and those of weights change as they are gathered."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    one_process("nccl" if args.device == "cuda" else "gloo")
    checkpoint_layers(model, reentrant=True)
    offload = {"device": "cpu", "pin_memory": args.device == "cuda"}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.micro,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "offload_optimizer": offload,
            "overlap_comm": True,
        },
    }
    engine: Any = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]

    def backward(loss: Tensor) -> None:
        engine.backward(loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch

    return System(engine, backward, engine.step, notes=dict(deepspeed=deepspeed.__version__))


SYSTEMS = {"megatrain": streamed, "plain": plain, "fsdp2": fsdp2, "deepspeed": zero3}

PACKAGES = {"megatrain": "megatrain", "plain": "torch", "fsdp2": "torch.distributed.fsdp", "deepspeed": "deepspeed"}
"""What each imports."""


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, clip: float) -> System:
    """Trains as a PyTorch loop does: gradients of the mean loss, clipped where `clip` is given, then a step."""

    def step() -> None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return System(model, lambda loss: (loss / args.micro).backward(), step)


def checkpoint_layers(model: Any, reentrant: bool = False) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def one_process(backend: str) -> None:
    """A process group of this process alone, on a free port."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
