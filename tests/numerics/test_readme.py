"""The README's code runs, and its dump is what the command prints."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import megatrain
from megatrain.__main__ import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS: dict[str, list[str]] = {}
for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
    BLOCKS.setdefault(kind, []).append(text)


def test_the_dump_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = re.search(r"`cd (\S+) && megatrain (show [^`]+)`", README)
    assert command
    monkeypatch.chdir(ROOT / command[1])
    assert main(command[2].split()) == 0
    assert capsys.readouterr().out.rstrip() == BLOCKS[""][0].rstrip()
    assert str(megatrain.parse(BLOCKS[""][0])).rstrip() == BLOCKS[""][0].rstrip()


class Loss(nn.Module):
    """A model that returns what the README's loop expects."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layers(x).square().mean())


def python(containing: str) -> str:
    return next(text for text in BLOCKS["python"] if containing in text)


def test_the_training_loop_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = python("for batch in loader").replace('device="cuda", memory="24GiB"', 'device="cpu", memory="1MiB"')
    found: dict[str, Any] = {"model": Loss(), "loader": [{"x": torch.randn(4, 8)} for _ in range(3)]}
    before = [p.detach().clone() for p in found["model"].parameters()]
    exec(code, found)
    assert re.search(r"^fwd0 +compute +layer\.fwd\(x, r0\) +-> x1 ", capsys.readouterr().out, re.MULTILINE)
    assert not any(map(torch.equal, before, found["model"].parameters()))


def test_the_pass_works_and_is_the_example(tmp_path: Path) -> None:
    code = python("class PrefetchLater")
    example = (ROOT / "tests" / "example_pass" / "prefetch_later.py").read_text()
    assert code.strip() in example
    found: dict[str, Any] = {"__name__": __name__}
    exec(code, found)
    passes = (*megatrain.DEFAULT_PASSES, found["PrefetchLater"](ahead=0))
    model = megatrain.compile(Loss(), device="cpu", passes=passes)
    model(torch.randn(4, 8)).loss.backward()
    assert [op.label for op in megatrain.schedule(model).forward] == [
        "fetch0",
        "fwd0",
        "fetch1",
        "fwd1",
        "fwd_epilogue",
    ]


def test_the_commands_are_complete_and_one_line_each() -> None:
    install = [text.strip() for text in BLOCKS["sh"]][:2]
    assert [line.count("\n") for line in install] == [0, 0]
    assert all(line.startswith("python -m venv .venv && .venv/bin/pip install ") for line in install)
    assert install[0].endswith("megatrain demo") and install[1].endswith("-m pytest")
