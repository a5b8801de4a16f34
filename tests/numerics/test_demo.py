"""The demo's model, data and loop, small."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatrain import demo

TINY = demo.LlamaConfig(width=32, layers=3, heads=4, kv_heads=2, hidden=48, longest=64)
PRESET = demo.Preset(TINY, steps=4, batch=3, length=17, memory="64MiB", lr=1e-2, compared=4)


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return demo.corpus(demo.sources()[:40])


def test_the_corpus_is_sorted_and_split_by_file(tmp_path: Path) -> None:
    files = demo.sources()
    assert files == sorted(files) and len(files) == len(set(files)) > 100
    written = [tmp_path / f"{i}.py" for i in range(40)]
    for i, f in enumerate(written):
        f.write_bytes(bytes([i]) * 2)
    train, held = demo.corpus(written)
    assert held.tolist() == [19, 19, 39, 39]
    assert train.tolist() == [i for i in range(40) if i not in (19, 39) for _ in range(2)]


def test_batches_follow_from_the_seed(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, again, other = (list(islice(demo.batches(data[0], 3, 17, seed), 2)) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other[0][0])
    ids, labels = first[0]
    assert ids.shape == labels.shape == (3, 17) and torch.equal(ids[:, 1:], labels[:, :-1])


def test_a_window_may_end_on_the_last_byte() -> None:
    ids, labels = demo.windows(torch.arange(5, dtype=torch.uint8), torch.tensor([2]), 2)
    assert ids.tolist() == [[2, 3]] and labels.tolist() == [[3, 4]]


def test_the_model_follows_from_the_seed_and_leaves_the_global_generator() -> None:
    state = torch.get_rng_state()
    a, b = demo.build(TINY), demo.build(TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_model_is_causal_and_every_parameter_learns() -> None:
    model = demo.build(TINY)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    out = model(ids, ids.roll(-1, dims=1))
    assert out["logits"].shape == (2, 9, 256) and out["loss"].shape == ()
    assert model(ids).keys() == {"logits"}
    changed = ids.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(changed)["logits"][:, :5], out["logits"][:, :5])
    out["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_training_lowers_the_loss(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = demo.build(TINY)
    before = demo.held_out_loss(model, data[1], PRESET)
    preset = demo.Preset(TINY, steps=30, batch=4, length=32, memory="64MiB", lr=1e-2, compared=0)
    losses = list(demo.train(model, demo.plain(model), data[0], preset, seed=0))
    assert len(losses) == 30
    assert demo.held_out_loss(model, data[1], PRESET) < before - 1


def run(tmp_path: Path) -> tuple[int, str]:
    text = io.StringIO()
    status = demo.run_demo("cpu", out=tmp_path / "out", preset=PRESET, console=Console(file=text, width=200))
    return status, text.getvalue()


def test_the_demo_says_what_it_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRAIN_DUMP", raising=False)
    status, text = run(tmp_path)
    assert status == 0, text
    assert "checked: all 4 losses are identical, bit for bit, to eager PyTorch's on cpu" in text
    out = tmp_path / "out"
    assert "prefetch" in (out / "schedule.txt").read_text()
    assert json.loads((out / "trace.json").read_text())["traceEvents"]
    assert list((out / "passes").rglob("*.txt"))


def test_the_demo_fails_where_a_loss_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(model: torch.nn.Module, device: torch.device) -> demo.Step:
        step = demo.plain(model)
        return lambda ids, labels: step(labels, ids)

    monkeypatch.setattr(demo, "mirrored", other)
    status, text = run(tmp_path)
    assert status == 1
    assert "NOT IDENTICAL: the loss of step 0 is" in text
