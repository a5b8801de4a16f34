"""`benchmarks/models.py`: rows of the matrix, and what is said of those that are not equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.models import captured, cells, compared, reason, row, table, trained, verdict
from megatrain.calls import CaptureError


@pytest.mark.parametrize("name", ["llama", "graph_network"])
def test_a_row_is_bitwise(name: str) -> None:
    found = row(name, torch.float32)
    assert (found["captured"], found["captures"], verdict(found)) == ("graph", 1, "bitwise")
    assert len(found["losses"]) == 3 and found["finite"] and not found["warnings"]
    assert table([found]).splitlines()[2].startswith(f"| {name} | graph | ")


def test_what_differs_first_is_named_with_how_much() -> None:
    def steps(loss: float, weight: float) -> list[dict[str, Any]]:
        gradient = torch.tensor([loss, 1.0])
        first = {"the loss": torch.tensor(2.0), "the gradient of w": gradient, "w": torch.tensor([4.0])}
        return [first, {**first, "w": torch.tensor([weight])}]

    found = compared(steps(0.5, 4.0), steps(0.75, 5.0))
    assert verdict(found) == "within 2e-01, first the gradient of w of step 1; after three steps 2e-01"
    assert verdict(compared(steps(0.5, 4.0), steps(0.5, 4.0))) == "bitwise"
    assert verdict(found | dict(equal=True, deterministic=True)).startswith("bitwise, with deterministic algorithms")


def test_a_row_that_failed_says_why() -> None:
    failed = dict(name="odd", failed=reason(CaptureError("cannot capture Odd.forward\nthe cure")), where="odd.py:3")
    assert cells(failed) == ("odd", "-", "-", "cannot capture Odd.forward at odd.py:3", "-")
    assert reason(IndexError("no\nmore")) == "IndexError: no"


def test_a_model_that_is_not_compiled_is_not_captured() -> None:
    model = torch.nn.Linear(2, 2)
    assert captured(model) == {}
    assert trained(model, []) == []
