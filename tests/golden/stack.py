"""The model whose schedule the README shows."""

from collections import OrderedDict

import torch
from torch import Tensor, nn


def stack() -> tuple[nn.Module, tuple[Tensor]]:
    """Four layers of 4 MiB, and a batch of eight rows."""
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers))), (torch.empty(8, 1024),)
