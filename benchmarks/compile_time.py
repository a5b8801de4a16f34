"""Capture and compile time of a small Llama by depth: is it linear, and how many templates are there?

python benchmarks/compile_time.py --depths 4,16,64
"""

from __future__ import annotations

import argparse
import time

import torch

import megatrain
from megatrain.pipeline import pipeline, split


def main() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,16,64")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    first, rest = split(pipeline(megatrain.DEFAULT_PASSES))
    print(
        f"once a capture: {', '.join(p.name for p in first)}; for each set of sizes: {', '.join(p.name for p in rest)}"
    )
    print(
        f"{'layers':>6} {'capture and compile s':>22} {'s a layer':>10} {'another size s':>15} "
        f"{'templates':>10} {'ops':>6}"
    )
    for depth in map(int, args.depths.split(",")):
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=depth, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=256, use_cache=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.zeros(2, 64, dtype=torch.long)
        start = time.perf_counter()
        megatrain.compile(model, device=args.device, example=dict(input_ids=ids, labels=ids))
        middle = time.perf_counter()
        other = torch.zeros(3, 48, dtype=torch.long)
        model.__dict__["_megatrain"].prepare(model, (), dict(input_ids=other, labels=other))
        end = time.perf_counter()
        s = megatrain.schedule(model)
        print(
            f"{depth:>6} {middle - start:>22.2f} {(middle - start) / depth:>10.3f} {end - middle:>15.2f} "
            f"{len(s.templates):>10} {len(s.ops):>6}",
            flush=True,
        )


if __name__ == "__main__":
    main()
