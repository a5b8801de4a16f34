"""Spans of a compiled model's lanes, and their Chrome trace."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import megatrain
from megatrain.timeline import chrome_trace, lane_times, record

SPANS = [
    ("fwd0", "compute", 10.5, 10.75),
    ("fetch0", "h2d", 10.0, 10.5),
    ("fetch1", "h2d", 10.5, 11.0),
    ("upd0", "host", 11.0, 11.25),
]


def compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return megatrain.compile(model, device="cpu")


def test_the_trace_has_a_thread_a_lane_in_their_order() -> None:
    trace = chrome_trace(SPANS, name="a step")
    events = json.loads(json.dumps(trace))["traceEvents"]
    assert [e["args"] for e in events if e["name"] == "process_name"] == [{"name": "a step"}]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert [names[tid] for tid in sorted(names, key=order.__getitem__)] == ["h2d", "compute", "host"]
    complete = [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("fetch0", "h2d", 0.0, 5e5),
        ("fwd0", "compute", 5e5, 2.5e5),
        ("fetch1", "h2d", 5e5, 5e5),
        ("upd0", "host", 1e6, 2.5e5),
    ]


def test_lane_times_add_up() -> None:
    assert lane_times(SPANS) == {"h2d": 1.0, "compute": 0.25, "host": 0.25}
    assert list(lane_times(SPANS)) == ["h2d", "compute", "host"]
    assert lane_times([]) == {}


def test_no_spans_make_an_empty_trace() -> None:
    assert [e["ph"] for e in chrome_trace([])["traceEvents"]] == ["M"]


def test_every_op_of_a_step_leaves_one_span_on_its_lane() -> None:
    model = compiled()
    model(torch.randn(2, 4)).sum().backward()
    with record(model) as spans:
        model(torch.randn(2, 4)).sum().backward()
    seen = sorted((label, lane) for label, lane, _, _ in spans)
    assert seen == sorted((op.label, op.lane) for op in megatrain.schedule(model).ops)
    assert all(start <= end for _, _, start, end in spans)
    before = list(spans)
    model(torch.randn(2, 4)).sum().backward()
    assert spans == before


def test_recording_ends_where_the_block_fails() -> None:
    model = compiled()
    with pytest.raises(KeyError, match="mine"), record(model) as spans:
        raise KeyError("mine")
    model(torch.randn(2, 4))
    assert spans == []


def test_recordings_nest() -> None:
    model = compiled()
    with record(model) as outer:
        with record(model) as inner:
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert [label for label, *_ in inner] and {s[0] for s in outer} == {s[0] for s in inner}


def test_a_model_that_is_not_compiled_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"this Linear is not compiled: call megatrain\.compile\(model\) first"),
        record(nn.Linear(2, 2)),
    ):
        pass
