"""How near the AdamW kernel comes to the speed at which this machine copies memory.

    python benchmarks/host_update.py --parameters 200

Bytes moved a parameter are what the kernel has to read and write: bf16 weight, remainder and two fp32 moments both
ways, and a bf16 gradient (26 bytes); with fp32 parameters 28.  The copy rate counts reads and writes of a large copy by
torch, and of one by numba with the same threads: the better one is the measure.  Medians of several rounds, the systems
in turn, so that a busy machine is equally busy for all.

Where there is CUDA, also the same update of pinned host memory by the device alone, through staging slots, and by host
and device together, weights of 68 million parameters each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch

from megatrain import kernels
from megatrain.host import HostBuffer
from megatrain.schedule import STAGING
from megatrain.streamed import ELEMENT, MOST, Sharing

F32 = np.float32


@numba.njit(parallel=True, nogil=True)
def copied(to: Any, source: Any) -> None:
    for i in numba.prange(to.size):
        to[i] = source[i]


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def shared(arrays: list[Any], c: Any, fixed: float | None) -> Callable[[], object]:
    """An update of pinned arrays like these by the device, or by both."""
    slots = {name: torch.empty(ELEMENT * MOST, dtype=torch.uint8, device="cuda") for name in STAGING}
    sharing = Sharing(torch.device("cuda"), slots, fixed)
    pinned = [HostBuffer(a.nbytes, pin=True).flat.numpy().view(a.dtype) for a in arrays]
    size = 68_000_000

    def work() -> None:
        for start in range(0, pinned[0].size, size):
            sharing(kernels.adamw, *(a[start : start + size] for a in pinned), c)

    work.sharing = sharing  # type: ignore[attr-defined]
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200, help="millions")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    n = args.parameters * 1_000_000
    weights = np.full(n, 0x3F80, np.uint16)
    gradients, remainders = np.full(n, 0x3C00, np.uint16), np.zeros(n, np.int16)
    m, v = np.zeros(n, F32), np.zeros(n, F32)
    whole, slope, none = np.ones(n, F32), np.full(n, 0.01, F32), np.zeros(0, np.int16)
    c = np.array([0.9999, 0.1, 0.999, 0.001, 1e-3, 0.5, 1e-8, 1.0], F32)
    tensors = torch.from_numpy(m), torch.from_numpy(v)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "copy, torch": (8 * n, lambda: tensors[0].copy_(tensors[1])),
        "copy, numba": (8 * n, lambda: copied(m, v)),
        "adamw bf16": (26 * n, lambda: kernels.adamw(weights, remainders, gradients, m, v, c)),
        "adamw fp32": (28 * n, lambda: kernels.adamw(whole, none, slope, m, v, c)),
        "norm bf16": (2 * n, lambda: kernels.squares(gradients)),
    }
    if torch.cuda.is_available():
        state = [weights, remainders, gradients, m, v]
        works["on the device"] = 26 * n, shared(state, c, 1.0)
        works["on both"] = 26 * n, shared(state, c, None)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds + 1):
        for name, (_, work) in works.items():
            seconds[name].append(timed(work))
    rates = {name: works[name][0] / statistics.median(s[1:]) / 1e9 for name, s in seconds.items()}
    copy = max(rates["copy, torch"], rates["copy, numba"])
    print(
        json.dumps({"parameters": n, "threads": numba.get_num_threads(), **{k: round(x, 1) for k, x in rates.items()}})
    )
    print(f"{'work':<14} {'GB/s':>7} {'of the copy':>12} {'G parameters/s':>15}")
    for name, rate in rates.items():
        of = "" if name.startswith("copy") else f"{n / statistics.median(seconds[name][1:]) / 1e9:.2f}"
        print(f"{name:<14} {rate:>7.1f} {rate / copy:>12.2f} {of:>15}")


if __name__ == "__main__":
    main()
