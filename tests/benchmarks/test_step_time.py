"""`benchmarks/step_time.py`: what bounds a step, what is printed, and that one system's failure is only its own."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

from benchmarks import step_time
from benchmarks.rows import Row, Span, against, apart, bounded, lane_seconds, parsed, table


def row(system: str, **changes: Any) -> Row:
    asked = dict(system=system, model="tiny", batch=2, micro=1, sequence=32, memory="2MiB", clip=1.0, date="2026-11-30")
    figures = dict(
        step_s=0.5, fwd_bwd_s=0.4, tokens_s=1000, tflops_6nt=80.0, device_gib=1.5, host_gib=9.0, host_bytes=14.0,
        losses=[6.25, 6.125], peak_share=0.1,
    )  # fmt: skip
    return asked | figures | changes


def trace(**seconds: float) -> list[Span]:
    """Ops that take so long in each of two steps, on the lane that their label is for."""
    lanes = {"fwd": "compute", "bwd": "compute", "acc": "compute", "fetch": "h2d", "grad": "d2h", "upd": "host"}
    return [(f"{name}_0", lanes[name], t, t + s) for name, s in seconds.items() for t in (1.0, 11.0)]


@pytest.mark.parametrize(
    "spans, clips, expected",
    [
        (dict(fwd=1, bwd=2, acc=0.5, fetch=1, grad=1, upd=2), False, ("compute", 3.5)),
        (dict(fwd=1, bwd=2, acc=0.5, fetch=1, grad=1, upd=2), True, ("clip", 4.5)),
        (dict(fwd=3, bwd=1, upd=1), True, ("compute", 4)),
        (dict(fwd=1, bwd=2, fetch=1, grad=4), True, ("link", 4)),
        (dict(fwd=1, bwd=2, upd=5), False, ("host", 5)),
    ],
)
def test_the_largest_of_lanes_and_the_chain_over_the_norm_bounds_a_step(
    spans: dict[str, float], clips: bool, expected: tuple[str, float]
) -> None:
    assert bounded(trace(**spans), 2, clips) == expected


def test_a_lane_is_busy_for_the_sum_of_its_ops() -> None:
    assert lane_seconds(trace(fwd=1, bwd=2, fetch=0.5), 2) == {"compute": 3, "h2d": 0.5}


def test_a_table_compares_peers_and_says_why_one_has_no_figures() -> None:
    rows = [
        row("megatrain", bound="clip", bound_s=0.45, bound_share=0.9),
        row("plain", tokens_s=2000, losses=[6.25, 6.1]),
        dict(system="deepspeed", failed="deepspeed is not installed"),
    ]
    assert table(rows).splitlines() == [
        "system     step s  fwd+bwd s  tok/s  TFLOP/s  of peak         bound  bound/step  device GiB  host GiB"
        "  host B/param  first loss  last loss  ours / its",
        "megatrain   0.500      0.400  1,000     80.0    10.0%  clip 0.450 s         90%        1.50       9.0"
        "         14.00      6.2500     6.1250           -",
        "plain       0.500      0.400  2,000     80.0    10.0%             -           -        1.50       9.0"
        "         14.00      6.2500     6.1000        0.50",
        "deepspeed  failed: deepspeed is not installed",
        "largest difference between the losses of a step, megatrain and plain: 0.0250",
    ]


def test_an_earlier_run_of_the_same_sizes_is_compared_with() -> None:
    earlier = parsed(
        [
            "a line of a plan",
            '{"system": "plain", "model": "tiny", "batch": 4, "tokens_s": 1}',
            '{"system": "plain", "model": "tiny", "batch": 2, "micro": 1, "sequence": 32, "memory": "2MiB", '
            '"clip": 1.0, "tokens_s": 1000, "date": "2026-11-29", "backend": "eager"}',
        ]
    )
    assert against([row("plain", tokens_s=960), row("megatrain")], earlier) == (
        "plain: 1,000 tok/s then (2026-11-29), 960 now, ratio 0.96 (other conditions: backend eager -> None)",
        True,
    )
    assert against([row("plain", tokens_s=940, backend="eager")], earlier) == (
        "plain: 1,000 tok/s then (2026-11-29), 940 now, ratio 0.94 SLOWER",
        False,
    )
    now = dict(row("plain", backend="eager"), failed="OutOfMemoryError: no room")
    del now["tokens_s"]
    assert against([now], earlier) == (
        "plain: 1,000 tok/s then (2026-11-29), now OutOfMemoryError: no room SLOWER",
        False,
    )
    assert against([row("plain", batch=8)], earlier) == (
        "no earlier row is of the same system, model, batch, micro, sequence and memory",
        True,
    )


def asked(monkeypatch: pytest.MonkeyPatch, line: str) -> argparse.Namespace:
    common = "--model tiny --batch 2 --sequence 32 --steps 2 --device cpu"
    monkeypatch.setattr(sys, "argv", ["step_time.py", *common.split(), *line.split()])
    return step_time.options()


def test_a_system_that_does_not_fit_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = step_time.here("megatrain", asked(monkeypatch, "--memory 1KiB"))
    assert found["failed"].startswith("BudgetError: "), found
    assert (found["system"], found["memory"]) == ("megatrain", "1KiB")


@pytest.mark.filterwarnings("ignore")  # transformers' and torch.distributed's own
def test_what_trains_on_pytorch_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked(monkeypatch, "--micro 2")
    ours, plain, fsdp2 = (step_time.here(name, args) for name in ("megatrain", "plain", "fsdp2"))
    assert plain["losses"] == fsdp2["losses"]
    assert apart(ours, plain) < 0.001
    assert ours["bound"] in ("compute", "link", "host", "clip")


def test_a_process_of_its_own_hands_its_row_back_or_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked(monkeypatch, "")
    assert step_time.isolated(step_time.MATRIX, args)["tflops"] > 0
    assert step_time.isolated("none", args)["failed"] == "ended with status 2"
