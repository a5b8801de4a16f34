"""Backend "inductor" on a GPU: within rounding of eager, inside the plan."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from megatrain.losses import linear_cross_entropy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own, which would make it fail
]


def test_a_llama_trains_as_eager_inside_its_plan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=8192, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    eager: Any = LlamaForCausalLM(config).bfloat16()
    ours = megatrain.compile(copy.deepcopy(eager), device="cuda", memory="1GiB", backend="inductor")
    eager.cuda()
    optimizers = torch.optim.SGD(eager.parameters(), lr=0.1), megatrain.SGD(ours.parameters(), lr=0.1)
    apart: list[float] = []
    before = 0
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        for t in range(6):
            ids = torch.randint(0, 8192, (4, 256), generator=torch.Generator().manual_seed(t))
            losses: list[float] = []
            for m, opt in zip((eager, ours), optimizers, strict=True):
                if m is ours and t == 1:
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated() - sum(
                        s.numel() for s in ours.__dict__["_megatrain"].runtime.slots.values()
                    )
                loss = m(input_ids=ids.cuda(), labels=ids.cuda()).loss
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
                if m is ours and t == 1:
                    measured = torch.cuda.max_memory_allocated() - before
                    assert measured <= megatrain.stats(ours).planned_peak
            apart.append(abs(losses[0] - losses[1]))
    assert max(apart) < 0.02, apart
    assert not [r.message for r in caplog.records if "uncompiled" in r.message]
    assert megatrain.plan(ours).keep >= megatrain.plan(ours).layers - 1  # all but the embedding, which needs none


@pytest.mark.parametrize("steps", ["float", "mul 0.5; float", "float; div 30.0; tanh; mul 30.0"])
def test_the_fused_loss(steps: str) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(n, 256, device="cuda").bfloat16().mul(0.3).requires_grad_() for n in (3000, 20_000))
    target = torch.randint(0, 20_000, (3000,), device="cuda")
    target[::5] = -100
    loss, logits, _, _ = linear_cross_entropy(x, w, target, steps, True, -100, True, True)
    found = torch.autograd.grad(loss, (x, w))
    y = (x.double() @ w.double().t()).clone()
    y = y * 0.5 if "0.5" in steps else 30 * torch.tanh(y / 30) if "tanh" in steps else y
    expected = nn.functional.cross_entropy(y, target)
    assert abs(loss.item() - expected.item()) < 1e-3
    torch.testing.assert_close(logits, x @ w.t())
    for ours, exact in zip(found, torch.autograd.grad(expected, (x, w)), strict=True):
        assert (ours.double() - exact.double()).norm() < 0.02 * exact.double().norm()
