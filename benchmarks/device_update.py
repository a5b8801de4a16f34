"""Parameters a second that the AdamW kernel updates on a CUDA device, and the bytes that it moves.

    python benchmarks/device_update.py --parameters 200

A plane of bf16 weights with gradients, remainders and moments in slots, as they live there in training; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from megatrain import device
from megatrain.host import layout_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=200, help="millions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    n, where = args.parameters * 1_000_000, torch.device(args.device)
    halves = layout_of([("w", torch.bfloat16, (n,))])
    state = layout_of([("r", torch.int16, (n,)), ("m", torch.float32, (n,)), ("v", torch.float32, (n,))])
    slots = [torch.zeros(x.bytes, dtype=torch.uint8, device=where) for x in (halves, halves, state)]
    (w,), (g,), (r, m, v) = (x.views(s) for x, s in zip((halves, halves, state), slots, strict=True))
    constants = np.array([0.9999, 0.1, 0.999, 0.001, 1e-3, 0.5, 1e-8, 1.0], np.float32)
    seconds: list[float] = []
    for _ in range(8):
        start = time.perf_counter()
        device.update("adamw", w, r, g, [m, v], constants)
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds[2:])
    print(f"{n / took / 1e9:.1f} G parameters/s, {26 * n / took / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
