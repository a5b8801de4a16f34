"""Step time of megatrain beside plain PyTorch on one CUDA device: Qwen2-shaped models, random weights and tokens.

    python benchmarks/step_time.py --model 3.09b --batch 16 --sequence 1024 --memory 24GiB --steps 20

Each system runs in this process, one after the other, from the same weights and tokens; the losses of every step are
compared.  Plain PyTorch holds everything on the device: bf16 weights, bf16 optimizer state (fused AdamW), checkpointed
layers.  megatrain streams every weight under the budget and has an exact fp32 master (`megatrain.AdamW`, `--update`).
A step lasts from the start of one to the start of the next, so that it holds what is left of the update before; the
median leaves out the first two, which compile and take memory, and the last, which waits for all updates.
TFLOP/s counts 6 x parameters x tokens (no attention, no recomputation).  Host bytes a parameter are the peak RSS less
the RSS after CUDA has started and before the model exists.  Prints a JSON line a system and a table.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

import megatrain
from megatrain.stepping import HostOptimizer

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


def build(shape: dict[str, Any], device: str) -> nn.Module:
    """The model with random weights, made on the device that fills it fastest, then on the host."""
    config = Qwen2Config(**shape, max_position_embeddings=32768, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.to("cpu").train()


def batches(vocabulary: int, batch: int, sequence: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (batch, sequence), generator=generator) for _ in range(steps)]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: list[torch.Tensor], args: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    """(losses, seconds of forward and backward, seconds in all) of each step: forward and backward over the
    micro-batches, clipping, AdamW."""
    losses: list[float] = []
    computing: list[float] = []
    starts: list[float] = []
    clips = args.clip and not isinstance(optimizer, HostOptimizer)
    for ids in tokens:
        starts.append(time.perf_counter())
        loss = 0.0
        for part in ids.split(args.batch):
            part = part.to(args.device)
            out = model(input_ids=part, labels=part).loss / args.micro
            out.backward()
            loss += out.detach()
        if args.device != "cpu":
            torch.cuda.synchronize()
        computing.append(time.perf_counter() - starts[-1])
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    if isinstance(optimizer, HostOptimizer):
        model.__dict__["_megatrain"].runtime.lanes.finish()
    if args.device != "cpu":
        torch.cuda.synchronize()
    ends = [*starts[1:], time.perf_counter()]
    return losses, computing, [end - start for start, end in zip(starts, ends, strict=True)]


def resident(peak: bool = False) -> int:
    """Bytes of this process's memory that are in RAM, now or at most since it began."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measured(system: str, args: argparse.Namespace, tokens: list[torch.Tensor]) -> dict[str, Any]:
    cuda = args.device == "cuda"
    before = resident()
    model = build(SHAPES[args.model], args.device)
    count = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    row: dict[str, Any] = dict(
        system=system, model=args.model, parameters=count, batch=args.batch, sequence=args.sequence
    )
    if system == "plain":
        model.to(args.device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    else:
        ids = tokens[0][: args.batch]
        megatrain.compile(
            model, device=args.device, memory=args.memory, host_memory=args.host_memory, backend=args.backend,
            skip_logits=args.skip_logits, example=dict(input_ids=ids, labels=ids),
        )  # fmt: skip
        optimizer = megatrain.AdamW(model.parameters(), lr=1e-5, max_grad_norm=args.clip or None, update=args.update)
    row["prepare_s"] = round(time.perf_counter() - start, 1)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, computing, seconds = train(model, optimizer, tokens, args)
    step = statistics.median(seconds[2:-1] or seconds[-1:])
    n = args.batch * args.micro * args.sequence
    row |= dict(
        step_s=round(step, 3),
        fwd_bwd_s=round(statistics.median(computing[2:] or computing), 3),
        tokens_s=round(n / step),
        tflops_6nt=round(6 * count * n / step / 1e12, 1),
        device_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0,
        host_bytes=round((resident(peak=True) - before) / count, 2),
        host_gib=round(resident(peak=True) / 2**30, 1),
        losses=[round(x, 4) for x in losses],
    )
    if system != "plain":
        if args.trace:
            row["busy_s"] = busy(model, optimizer, tokens, args)
        if args.show:
            print(megatrain.schedule(model))
        print(megatrain.plan(model), flush=True)
        found = megatrain.stats(model)
        row |= dict(planned_gib=round(found.planned_peak / 2**30, 2), budget_gib=round(found.budget / 2**30, 2))
    del model, optimizer
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return row


def busy(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: list[torch.Tensor], args: argparse.Namespace
) -> dict[str, float]:
    """Seconds a step in which each lane has something to do, over three more steps."""
    lanes = model.__dict__["_megatrain"].runtime.lanes
    lanes.trace = trace = []
    train(model, optimizer, tokens[:3], args)
    lanes.finish()
    lanes.trace = None
    found: dict[str, float] = {}
    by_op: dict[str, list[float]] = {}
    for label, lane, start, end in trace:
        found[lane] = found.get(lane, 0) + (end - start) / 3
        if lane == "compute":
            by_op.setdefault(label, []).append(1000 * (end - start))
    print("compute, ms:", " ".join(f"{label} {statistics.median(ms):.1f}" for label, ms in by_op.items()), flush=True)
    return {lane: round(seconds, 3) for lane, seconds in sorted(found.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.49b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step, of --batch each")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0 for none")
    parser.add_argument("--update", default="auto", help="megatrain.AdamW's update=")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--memory", default=None, help="device budget; all that is free unless given")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default=None, help="megatrain's backend=")
    parser.add_argument("--host-memory", default=None, help="host bytes for megatrain; all that is free unless given")
    parser.add_argument("--skip-logits", action="store_true", help="megatrain's skip_logits=")
    parser.add_argument("--trace", action="store_true", help="also tell for how long each of megatrain's lanes is busy")
    parser.add_argument("--show", action="store_true", help="print the schedule")
    parser.add_argument("--systems", default="megatrain,plain")
    args = parser.parse_args()
    if args.device == "cuda":
        x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (x @ x).sum().backward()  # CUDA and its matrix libraries are there before memory is counted
    tokens = batches(SHAPES[args.model]["vocab_size"], args.batch * args.micro, args.sequence, args.steps)
    rows: list[dict[str, Any]] = []
    for system in args.systems.split(","):
        rows.append(measured(system, args, tokens))
        print(json.dumps(rows[-1]), flush=True)
    head = ("step_s", "fwd_bwd_s", "tokens_s", "tflops_6nt", "device_gib", "host_bytes")
    print(f"{'system':<10}", *(f"{h:>10}" for h in head), f"{'first loss':>11} {'last loss':>10}")
    for r in rows:
        print(f"{r['system']:<10}", *(f"{r[h]:>10}" for h in head), f"{r['losses'][0]:>11} {r['losses'][-1]:>10}")
    if len(rows) == 2:
        apart = max(abs(a - b) for a, b in zip(rows[0]["losses"], rows[1]["losses"], strict=True))
        print(f"largest difference between the losses of a step: {apart:.4f}; ratio of tok/s: "
              f"{rows[0]['tokens_s'] / rows[1]['tokens_s']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
