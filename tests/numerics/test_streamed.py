"""Updates of host state on the device: the same bits as on the host, whatever part goes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain
from megatrain import streamed
from tests.numerics.test_optim import compiled, stepped
from tests.numerics.twins import same

RULES: list[Any] = [
    megatrain.AdamW,
    lambda ps, **o: megatrain.SGD(ps, lr=0.1, momentum=0.9, **o),
    lambda ps, **o: megatrain.SGD(ps, lr=0.1, weight_decay=0.1, **o),
    megatrain.Lion,
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights go through slots that hold few of their elements."""
    monkeypatch.setattr(streamed, "FEWEST", 16)
    monkeypatch.setattr(streamed, "MOST", 256)
    monkeypatch.setattr("megatrain.rooms.MOST", 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES, ids=["adamw", "momentum", "sgd", "lion"])
def test_the_bits_of_the_host(rule: Any, dtype: torch.dtype) -> None:
    models = [compiled(dtype, width=64, depth=3) for _ in range(2)]
    optimizers = [rule(m.parameters(), update=u) for m, u in zip(models, ("host", "device"), strict=True)]
    for t in range(6):
        for m, o in zip(models, optimizers, strict=True):
            stepped(m, o, t)
    assert all(same(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))
    states = [o.state_dict()["state"] for o in optimizers]
    assert all(torch.equal(s[n], states[1][i][n]) for i, s in states[0].items() for n in s)


def test_staging_slots_are_in_the_schedule_and_the_plan() -> None:
    model = compiled(width=64, depth=3)
    opt = megatrain.AdamW(model.parameters(), update="device")
    stepped(model, opt)
    slots = {s.name: s for s in megatrain.schedule(model).slots}
    assert slots["t0"].role == slots["t1"].role == "updates" and slots["t0"].bytes == -(-256 * 18 // 4096) * 4096
    megatrain.synchronize(model)
    (sharing,) = opt.shared.values()
    assert sharing.rates["device"] > 0 and sharing.rates["host"] == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
def test_any_share_gives_the_same(share: float) -> None:
    torch.manual_seed(0)
    n = 50_000
    slots = {name: torch.empty(256 * 18, dtype=torch.uint8) for name in ("t0", "t1")}
    sharing = streamed.Sharing(torch.device("cpu"), slots, share)
    w = torch.randn(n).bfloat16().view(torch.int16).numpy().view("uint16")
    g, r = torch.randn(n).numpy(), torch.randint(-(2**15), 2**15, (n,)).to(torch.int16).numpy()
    m, v = torch.randn(n).numpy(), torch.rand(n).numpy()
    constants = torch.tensor([0.9999, 0.1, 0.999, 0.001, 1e-3, 0.5, 1e-8, 0.7]).numpy()
    ours, theirs = [[a.copy() for a in (w, r, g, m, v)] for _ in range(2)]
    sharing(megatrain.kernels.adamw, *ours, constants)
    megatrain.kernels.adamw(*theirs, constants)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    assert (sharing.rates["device"] > 0) == (share > 0)


def test_the_share_follows_the_rates() -> None:
    """The host alone first, then both; then both if that was faster, each as much as it is fast."""
    sharing = streamed.Sharing(torch.device("cpu"), {}, None)
    assert sharing.share == 0
    sharing.tried = streamed.TRIALS
    assert 0 < sharing.share < 1
    for _ in range(30):
        sharing.note("host", 1 << 20, 0.001)
        sharing.note("device", 1 << 20, 0.003)
    assert sharing.share == pytest.approx(0.25)
    sharing.tried = 2 * streamed.TRIALS
    sharing.note("alone", 1 << 20, 0.001)
    sharing.note("together", 1 << 20, 0.0008)
    assert sharing.share == pytest.approx(0.25)
    for _ in range(30):
        sharing.note("alone", 1 << 20, 0.0008)
    assert sharing.share == 0


def test_auto_finds_out_what_is_faster() -> None:
    slots = {name: torch.empty(256 * 18, dtype=torch.uint8) for name in ("t0", "t1")}
    sharing = streamed.Sharing(torch.device("cpu"), slots, None)
    n = 5000
    arrays = [
        torch.randn(n).numpy(),
        torch.zeros(0, dtype=torch.int16).numpy(),
        *(torch.rand(n).numpy() for _ in "gmv"),
    ]
    constants = torch.tensor([0.9999, 0.1, 0.999, 0.001, 1e-3, 0.5, 1e-8, 0.7]).numpy()
    for _ in range(2 * streamed.TRIALS):
        sharing(megatrain.kernels.adamw, *arrays, constants)
    assert all(rate > 0 for rate in sharing.rates.values())
    assert sharing.share == 0 or sharing.rates["together"] > sharing.rates["alone"]


def test_a_step_before_the_slots_are_there_runs_on_the_host() -> None:
    model, other = compiled(width=64), compiled(width=64)
    loss = [m(torch.zeros(2, 3, dtype=torch.int64)).float().sum() for m in (model, other)]
    opt, reference = megatrain.AdamW(model.parameters(), update="device"), megatrain.AdamW(other.parameters())
    for value, o in zip(loss, (opt, reference), strict=True):
        value.backward()
        o.step()
    assert all(same(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
