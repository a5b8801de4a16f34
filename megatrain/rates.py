"""What a machine does in a second: measured once for a CUDA device and its host, and stored."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from megatrain import kernels, settings

COPIED = 1 << 28
"""Bytes of a copy that is timed."""

STEPPED = 1 << 25
"""Parameters of an update that is timed."""

UPDATE_BYTES = 26
"""Bytes that AdamW moves for a bf16 parameter: weight, remainder and two fp32 moments read and written, a bf16 gradient
read."""


@dataclass(frozen=True)
class Rates:
    """Of one machine.  The numbers here are nominal, those of an H200 and its host with 16 cores.  On the CPU, where
    host memory stands in for the device, they are used as they are, so that a plan does not depend on the machine."""

    name: str = "nominal"
    flops: Mapping[str, float] = field(default_factory=lambda: {"bf16": 6.0e14, "f16": 6.0e14, "f32": 4.5e13})
    """Operations a second of large matrix products, by dtype."""
    memory: float = 4.0e12
    """Bytes a second that the device reads and writes."""
    h2d: float = 5.5e10
    d2h: float = 5.5e10
    """Bytes a second between pinned host memory and the device."""
    update: float = 1.4e11
    """Bytes a second that the host's update kernel reads and writes."""
    launch: float = 3e-5
    """Seconds in which an op is issued."""

    def flops_of(self, dtype: str) -> float:
        return self.flops.get(dtype) or self.flops["f32"]

    def __str__(self) -> str:
        products = ", ".join(f"{dtype} {rate / 1e12:.0f} TFLOP/s" for dtype, rate in self.flops.items())
        return (
            f"{self.name}: {products}; memory {self.memory / 1e9:.0f} GB/s, to the device {self.h2d / 1e9:.1f}, "
            f"from it {self.d2h / 1e9:.1f}, update on the host {self.update / 1e9:.0f}"
        )


@cache
def rates_of(device: torch.device) -> Rates:
    """The rates of this machine with this device: as stored, or measured now (about two seconds) and stored."""
    if device.type != "cuda":
        return Rates()
    name = f"{torch.cuda.get_device_name(device)}, {os.cpu_count()} cores, torch {torch.__version__}"
    path = settings.cache_dir() / "rates.json"
    try:
        known: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    if name in known:
        return Rates(**known[name])
    found = measured(device, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known | {name: asdict(found)}, indent=1))
        fresh.replace(path)
    except OSError:  # measured again next time
        pass
    return found


def measured(device: torch.device, name: str) -> Rates:
    with torch.no_grad(), torch.cuda.device(device):
        flops: dict[str, float] = {}
        for short, dtype, size in (("bf16", torch.bfloat16, 8192), ("f32", torch.float32, 4096)):
            a = torch.zeros(size, size, dtype=dtype, device=device)
            flops[short] = 2 * size**3 / seconds(lambda a=a: torch.mm(a, a))
        there, other = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))
        host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=True)

        def copied(to: torch.Tensor, source: torch.Tensor) -> float:
            return COPIED / seconds(lambda: to.copy_(source, non_blocking=True))

        found = Rates(
            name, flops | {"f16": flops["bf16"]}, 2 * copied(there, other), copied(there, host), copied(host, there)
        )
    return replace(found, update=host_update())


def host_update() -> float:
    """Bytes a second of AdamW over bf16 parameters on the host."""
    kernels.ready(kernels.adamw, halves=True, half_gradients=True)
    w, g = (np.zeros(STEPPED, np.uint16) for _ in range(2))
    r, m, v = np.zeros(STEPPED, np.int16), np.zeros(STEPPED, np.float32), np.zeros(STEPPED, np.float32)
    c = np.array([1, 0.1, 0.9, 0.1, 1e-3, 1, 1e-8, 1], np.float32)
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        kernels.call(kernels.adamw, w, r, g, m, v, c)
        times.append(time.perf_counter() - start)
    return UPDATE_BYTES * STEPPED / statistics.median(times[1:])


def seconds(work: Callable[[], Any]) -> float:
    """Device seconds of `work`: the median of five, after one."""
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times[1:])
