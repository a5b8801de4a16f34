"""The measurements of `step_time.py`: one system in this process, and the device's matrix product."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.rows import Row, Span, bounded, lane_seconds
from benchmarks.systems import PACKAGES, SHAPES, SYSTEMS, System, build, lanes_of

TRACED = 2
"""Steps that are traced, after those that are timed."""


def matrix_tflops(device: str) -> float:
    """TFLOP/s of bf16 products of 8192 x 8192 matrices on the device, the median of a few; on the CPU of small fp32
    ones."""
    cuda = device == "cuda"
    n, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    seconds: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(a, b)
        synchronize(device)
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * n**3 / statistics.median(seconds[2:]) / 1e12


def warm(name: str, device: str) -> None:
    """Modules, CUDA and its matrix libraries are there before memory is counted."""
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    importlib.import_module(PACKAGES[name])
    build(SHAPES["tiny"], device)
    if device == "cuda":
        x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (x @ x).sum().backward()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def batches(vocabulary: int, batch: int, sequence: int, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (batch, sequence), generator=generator) for _ in range(steps)]


def train(
    system: System, tokens: list[torch.Tensor], args: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    """(losses, seconds of forward and backward, seconds in all) of each step: forward and backward over the
    micro-batches, clipping, AdamW."""
    losses: list[float] = []
    computing: list[float] = []
    starts: list[float] = []
    for ids in tokens:
        starts.append(time.perf_counter())
        if len(starts) > 1:
            print(f"step {len(losses)} of {len(tokens)}: {starts[-1] - starts[-2]:.3f} s", file=sys.stderr, flush=True)
        loss = 0.0
        for part in ids.split(args.batch):
            part = part.to(args.device)
            out = system.model(input_ids=part, labels=part).loss
            system.backward(out)
            loss += out.detach() / args.micro
        synchronize(args.device)
        computing.append(time.perf_counter() - starts[-1])
        system.step()
        losses.append(float(loss))
    system.finish()
    synchronize(args.device)
    ends = [*starts[1:], time.perf_counter()]
    return losses, computing, [end - start for start, end in zip(starts, ends, strict=True)]


def resident(peak: bool = False) -> int:
    """Bytes of this process's memory that are in RAM, now or at most since it began."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def described(system: str, args: argparse.Namespace) -> Row:
    """What was asked for, on what: enough to find the same run again."""
    asked = ("model", "batch", "micro", "sequence", "memory", "clip", "update", "backend", "host_memory", "skip_logits")
    row: Row = dict(system=system) | {key: getattr(args, key) for key in (*asked, "device")}
    return row | dict(torch=str(torch.__version__), date=datetime.date.today().isoformat())


def measured(name: str, args: argparse.Namespace) -> Row:
    """One system's row.  Prints megatrain's plan, and what `--show` and `--trace` ask for."""
    warm(name, args.device)
    cuda = args.device == "cuda"
    tokens = batches(SHAPES[args.model]["vocab_size"], args.batch * args.micro, args.sequence, args.steps)
    before = resident()
    model = build(SHAPES[args.model], args.device)
    count = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    system = SYSTEMS[name](model, args, tokens[0][: args.batch])
    row = described(name, args) | dict(parameters=count, prepare_s=round(time.perf_counter() - start, 1))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, computing, seconds = train(system, tokens, args)
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
        **system.notes,
    )
    if name == "megatrain":
        row |= of_megatrain(model, system, tokens, args, step)
    if dist.is_initialized():
        dist.destroy_process_group()
    return row


def of_megatrain(
    model: torch.nn.Module, system: System, tokens: list[torch.Tensor], args: argparse.Namespace, step: float
) -> Row:
    """What a few traced steps and the plan tell: how long lanes are busy, the bound, planned bytes."""
    import megatrain
    from megatrain.timeline import chrome_trace

    traced = tokens[:TRACED]
    lanes = lanes_of(model)
    lanes.trace = trace = []
    train(system, traced, args)
    lanes.trace = None
    if args.chrome:
        args.chrome.write_text(json.dumps(chrome_trace(trace)))
    if args.trace:
        print("compute, ms:", per_op(trace), flush=True)
    if args.show:
        print(megatrain.schedule(model))
    print(megatrain.plan(model), flush=True)
    found = megatrain.stats(model)
    bound, seconds = bounded(trace, len(traced), clips=bool(args.clip))
    return dict(
        busy_s={lane: round(s, 3) for lane, s in sorted(lane_seconds(trace, len(traced)).items())},
        bound=bound,
        bound_s=round(seconds, 3),
        bound_share=round(seconds / step, 3),
        planned_gib=round(found.planned_peak / 2**30, 2),
        budget_gib=round(found.budget / 2**30, 2),
    )


def per_op(trace: list[Span]) -> str:
    """Median milliseconds of each compute op."""
    by_op: dict[str, list[float]] = {}
    for label, lane, start, end in trace:
        if lane == "compute":
            by_op.setdefault(label, []).append(1000 * (end - start))
    return " ".join(f"{label} {statistics.median(ms):.1f}" for label, ms in by_op.items())


def failed(name: str, args: argparse.Namespace, why: Any) -> Row:
    """The row of a system that gave no figures."""
    return described(name, args) | dict(failed=why)
