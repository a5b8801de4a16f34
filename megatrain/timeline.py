"""When each op of a step ran, on which lane, and the same as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from megatrain.lanes import ALL, Span


@contextmanager
def record(model: nn.Module) -> Generator[list[Span], None, None]:
    """Inside, every op that the compiled `model` runs leaves a span in the list that is given, complete when the block
    ends.  Raises ValueError for a model that is not compiled."""
    state = model.__dict__.get("_megatrain")
    if state is None:
        raise ValueError(f"this {type(model).__name__} is not compiled: call megatrain.compile(model) first")
    lanes = state.runtime.lanes
    spans: list[Span] = []
    lanes.finish()
    before, lanes.trace = lanes.trace, spans
    try:
        yield spans
        lanes.finish()
    finally:
        lanes.trace = before


def chrome_trace(spans: Sequence[Span], name: str = "megatrain") -> dict[str, Any]:
    """The spans as JSON-able data in the Chrome trace event format: process `name`, a thread a lane, a complete event
    an op, in microseconds from the first start."""
    threads = {lane: i for i, lane in enumerate(lanes_of(spans))}
    zero = min((start for _, _, start, _ in spans), default=0.0)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    for lane, i in threads.items():
        events.append({"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 0, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}})
    for label, lane, start, end in sorted(spans, key=lambda span: span[2]):
        times = {"ts": (start - zero) * 1e6, "dur": (end - start) * 1e6}
        events.append({"ph": "X", "pid": 0, "tid": threads[lane], "name": label, "cat": lane, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def lane_times(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds that each lane was busy, lanes in the order h2d, compute, d2h, host; those without spans are left out."""
    spans = list(spans)
    return {lane: sum(end - start for _, at, start, end in spans if at == lane) for lane in lanes_of(spans)}


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """The lanes that occur, in the order of `lanes.ALL`."""
    found = {lane for _, lane, _, _ in spans}
    return [lane for lane in ALL if lane in found]
