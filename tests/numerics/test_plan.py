"""`megatrain.plan`: bytes by class, on the device and on the host."""

from __future__ import annotations

import pytest
import torch

import megatrain
from tests.numerics.test_optim import compiled, stepped


def test_host_bytes_by_class() -> None:
    model = compiled(width=64, depth=3)
    opt = megatrain.AdamW(model.parameters(), update="host")
    stepped(model, opt)
    found = megatrain.plan(model)
    count = sum(p.numel() for p in model.parameters())
    assert found.parameters == count and not found.resident
    assert found.host["master"] == 2 * count and found.host["moments"] == 8 * count
    assert 2 * count <= found.host["weights"] < 4 * count and 0 < found.host["gradients"] < 4 * count
    text = str(found).partition("\n\n")[0].splitlines()
    assert text[0].split() == ["device", "host", "host,", "bytes", "a", "parameter"]
    assert [line.split()[0] for line in text[1:-2]] == ["weights", "gradients", "master", "moments", "values"]
    assert text[-1].startswith("device peak ") and text[-1].endswith(
        "0 planes live on the device, 1 of 5 layers keep their graph"
    )


def test_the_plans_that_were_compared() -> None:
    """Less room, fewer planes on the device; the one that was taken comes first, and none is much shorter."""
    found: list[int] = []
    for memory in ("160KiB", "300KiB", "600KiB"):
        torch.manual_seed(0)
        layers = (torch.nn.Linear(64, 64) for _ in range(6))
        model = megatrain.compile(torch.nn.Sequential(*layers).bfloat16(), device="cpu", memory=memory)
        opt = megatrain.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 64).bfloat16()).sum().backward()
            opt.step()
            opt.zero_grad()
        plan = megatrain.plan(model)
        chosen = plan.choices[0]
        assert chosen.resident == len(plan.resident) and chosen.peak == plan.peak <= plan.budget
        assert chosen.step <= 1.01 * min(c.step for c in plan.choices)
        assert {c.resident for c in plan.choices} == set(range(chosen.resident + 1))
        text = str(plan).partition("\n\n")[2].splitlines()
        assert text[0].startswith("plans compared, by nominal: bf16 600 TFLOP/s")
        assert text[2].split()[:3] == [str(chosen.resident), str(chosen.keep), str(chosen.spill)]
        found.append(chosen.resident)
    assert 0 < found[0] < found[1] < found[2] == 6


def test_what_lives_on_the_device_is_counted_there() -> None:
    torch.manual_seed(0)
    model = megatrain.compile(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).bfloat16(), device="cpu", memory="1GiB"
    )
    opt = megatrain.AdamW(model.parameters())
    model(torch.randn(2, 64).bfloat16()).sum().backward()
    opt.step()
    found = megatrain.plan(model)
    assert len(found.resident) == 4
    count = found.parameters
    assert found.device["master"] == 2 * count and found.device["moments"] >= 8 * count
    assert "moments" not in found.host and sum(found.device.values()) == found.peak <= found.budget


def test_before_anything_is_planned() -> None:
    with pytest.raises(ValueError, match=r"^nothing is planned yet: call the model once, or compile it with example="):
        megatrain.plan(compiled())
