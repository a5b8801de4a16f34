"""`megatrain demo`: a byte-level Llama trained on the standard library's own sources, in less memory than it needs.

Three parts: the model, in plain PyTorch; the data; and `run_demo`, which trains once through megatrain under a cap on
device memory, once in eager PyTorch without one, and compares the losses bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn

import megatrain
from megatrain import timeline
from megatrain.settings import dump_dir, parse_bytes

# ---------------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class LlamaConfig:
    """`hidden` is the width of the gated MLP; `heads` query heads share `kv_heads` heads of keys and values."""

    width: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    hidden: int = 512
    vocabulary: int = 256
    longest: int = 1024
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def head(self) -> int:
        return self.width // self.heads


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: `x` is [batch, heads, time, head], `cos` and `sin` are [time, head / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with fewer heads for keys and values than for queries."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head = c.head
        self.q = nn.Linear(c.width, c.heads * c.head, bias=False)
        self.k = nn.Linear(c.width, c.kv_heads * c.head, bias=False)
        self.v = nn.Linear(c.width, c.kv_heads * c.head, bias=False)
        self.out = nn.Linear(c.heads * c.head, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.width, c.eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.width, c.eps)
        self.mlp = SwiGLU(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """`forward(ids, labels)` takes int64 [batch, time] and gives {"logits": [batch, time, vocabulary]}, with "loss",
    the mean cross entropy in nats, if there are labels.  `labels[:, t]` is the byte that follows `ids[:, t]`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        rates = config.rope_base ** (-torch.arange(0, config.head, 2) / config.head)
        angles = torch.outer(torch.arange(config.longest), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                to_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if to_residual else 0.02)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def build(config: LlamaConfig, seed: int = 0) -> Llama:
    """A model on the host whose weights depend on `seed` alone; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Llama(config)


# ----------------------------------------------------------------------------------------------------------- the data


SKIPPED = frozenset({"encodings", "pydoc_data", "test"})
"""Packages of the standard library that are tables and tests more than they are code."""


def sources() -> list[Path]:
    """The standard library's modules and the modules of its top-level packages, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*root.glob("*.py"), *root.glob("*/*.py")]
    packaged = [f for f in files if f.parent == root or (f.parent / "__init__.py").exists()]
    kept = [f for f in packaged if f.parent.name not in SKIPPED and not f.name.startswith("_sysconfigdata")]
    if not kept:
        raise ValueError(f"no *.py files in {root}: the demo reads the sources of Python's standard library; use an "
                         f"interpreter that ships them")  # fmt: skip
    return sorted(kept)


def corpus(files: list[Path]) -> tuple[Tensor, Tensor]:
    """(training bytes, held-out bytes), uint8: every 20th file is held out whole."""
    held = files[19::20]
    train = [f for i, f in enumerate(files) if i % 20 != 19]
    return contents(train), contents(held)


def contents(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(ids, labels), int64 [len(starts), length]: labels are ids one byte later."""
    rows = data[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(data: Tensor, batch: int, length: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(data, torch.randint(len(data) - length, (batch,), generator=generator), length)


# ----------------------------------------------------------------------------------------------------------- the demo


@dataclass(frozen=True)
class Preset:
    """What one run of the demo is: the model, how it is trained, and the bytes of device memory it may use."""

    config: LlamaConfig
    steps: int
    batch: int
    length: int
    memory: str
    lr: float
    compared: int
    """How many of the first steps eager PyTorch repeats."""


CPU = Preset(LlamaConfig(), steps=140, batch=8, length=64, memory="28MiB", lr=4e-3, compared=140)
GPU = Preset(
    LlamaConfig(width=1024, layers=24, heads=16, kv_heads=4, hidden=2816),
    steps=80, batch=8, length=512, memory="2GiB", lr=6e-4, compared=20,
)  # fmt: skip

Step = Callable[[Tensor, Tensor], Tensor]
"""(ids, labels) -> loss, with the gradients left on the host model's parameters."""


def train(model: nn.Module, step: Step, data: Tensor, preset: Preset, seed: int) -> Iterator[float]:
    """An ordinary training loop on the model's parameters, which are on the host; gives the loss after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warm = max(1, preset.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * i / preset.steps))
    )
    for ids, labels in islice(batches(data, preset.batch, preset.length, seed), preset.steps):
        loss = step(ids, labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss.item()


def plain(model: nn.Module) -> Step:
    """The step of any training loop; also megatrain's, whose compiled model is the model."""

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model(ids, labels)["loss"]
        loss.backward()
        return loss

    return step


def mirrored(model: nn.Module, device: torch.device) -> Step:
    """Eager PyTorch on a GPU with the optimizer on the host, where megatrain has it: a copy of the model on the device
    gets the weights before each step and gives its gradients after.  On the CPU there is nothing to copy."""
    if device.type == "cpu":
        return plain(model)
    twin = copy.deepcopy(model).to(device)
    on_device = plain(twin)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            for host, mirror in pairs:
                mirror.copy_(host)
                mirror.grad = None
        loss = on_device(ids.to(device), labels.to(device))
        for host, mirror in pairs:
            host.grad = None if mirror.grad is None else mirror.grad.to(host.device)
        return loss

    return step


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Tensor, preset: Preset, rounds: int = 8) -> float:
    """Mean loss over evenly spaced windows."""
    starts = torch.linspace(0, len(data) - preset.length - 1, rounds * preset.batch).long()
    losses = [model(*windows(data, s, preset.length))["loss"].item() for s in starts.split(preset.batch)]
    return sum(losses) / len(losses)


@contextmanager
def environment(**values: str) -> Generator[None, None, None]:
    """Sets the variables that are not set already, and takes them back."""
    added = {k: v for k, v in values.items() if not os.environ.get(k)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def deterministic(wanted: bool) -> Generator[None, None, None]:
    """Kernels that give the same bits each time, where it is wanted; some attention kernels of a GPU do not."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def follow(
    title: str, losses: Iterator[float], total: int, preset: Preset, console: Console, device_bytes: Callable[[], str]
) -> list[float]:
    """Runs a training loop under a live progress bar; where there is no terminal, prints a line every tenth of it."""
    seen: list[float] = []
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=8), MofNCompleteColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, note="")
        start = time.perf_counter()
        for loss in losses:
            seen.append(loss)
            rate = len(seen) * preset.batch * preset.length / (time.perf_counter() - start)
            note = f"loss {loss:.3f}  {rate:,.0f} tok/s  {device_bytes()}"
            bar.update(task, advance=1, note=note)
            if not console.is_terminal and len(seen) % max(1, total // 10) == 0:
                console.print(f"{title} {len(seen)}/{total}  {note}", highlight=False)
    return seen


def run_demo(
    device: str | None = None,
    memory: str | None = None,
    steps: int | None = None,
    out: Path = Path("megatrain-demo"),
    seed: int = 0,
    preset: Preset | None = None,
    console: Console | None = None,
) -> int:
    """The exit status: 0 if the losses were eager PyTorch's, bit for bit, 1 if not."""
    console = console or Console()

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    preset = preset or (GPU if on.type == "cuda" else CPU)
    preset = replace(preset, steps=steps or preset.steps, memory=memory or preset.memory)
    out.mkdir(parents=True, exist_ok=True)

    data, held_out = corpus(sources())
    model = build(preset.config, seed)
    weights = sum(p.nbytes for p in model.parameters())
    say(
        f"megatrain demo on {on}: a byte-level Llama of {weights // 4:,} parameters learns {len(data):,} bytes "
        f"of Python's standard library"
    )
    say(
        f"weights {size(weights)} + gradients {size(weights)} + optimizer state {size(2 * weights)} = "
        f"{size(4 * weights)}; the device may hold {size(parse_bytes(preset.memory))} in all"
    )

    dumps = dump_dir() or out / "passes"
    with environment(MEGATRAIN_DUMP=str(dumps), CUBLAS_WORKSPACE_CONFIG=":4096:8"), deterministic(on.type == "cuda"):
        compiled = megatrain.compile(model, device=str(on), memory=preset.memory, backend="eager")

        def device_bytes() -> str:
            stats = megatrain.stats(compiled)
            return f"device {size(stats.device_peak)}/{size(stats.budget)}"

        before = held_out_loss(compiled, held_out, preset)
        loop = train(compiled, plain(compiled), data, preset, seed)
        losses = follow("megatrain", loop, preset.steps, preset, console, device_bytes)
        after = held_out_loss(compiled, held_out, preset)
        with timeline.record(compiled) as events:
            plain(compiled)(*next(batches(data, preset.batch, preset.length, seed)))
        (out / "schedule.txt").write_text(f"{megatrain.schedule(compiled)}\n")
        (out / "trace.json").write_text(json.dumps(timeline.chrome_trace(events)))

        eager = build(preset.config, seed)
        compared = min(preset.compared, preset.steps)
        loop = islice(train(eager, mirrored(eager, on), data, preset, seed), compared)
        expected = follow("eager", loop, compared, preset, console, lambda: "no cap")

    say(f"held-out loss {before:.3f} before, {after:.3f} after {len(losses)} steps")
    say(
        f"schedule  {out / 'schedule.txt'}\npasses    {dumps}\n"
        f"trace     {out / 'trace.json'} (the lanes of one step, for chrome://tracing)"
    )
    wrong = [i for i, (a, b) in enumerate(zip(losses, expected, strict=False)) if a != b]
    if wrong:
        i = wrong[0]
        say(
            f"NOT IDENTICAL: the loss of step {i} is {losses[i]!r} here and {expected[i]!r} in eager PyTorch; "
            f"{len(wrong)} of {len(expected)} steps differ"
        )
        return 1
    say(
        f"checked: all {len(expected)} losses are identical, bit for bit, to eager PyTorch's on {on}, from the "
        f"same seed and data"
    )
    return 0
