"""Lanes on a GPU: the copies and compute are ordered by events, the host lane by its thread."""

import random

import pytest
import torch

from megatrain.host import PAGE, HostBuffer
from megatrain.streams import StreamLanes

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

N = 1 << 20


def round_trips(lanes: StreamLanes, count: int) -> list[float]:
    """Write `i` on the host, fetch, square, offload, add one up on the host: all through one slot and one plane."""
    plane = HostBuffer(4 * N, pin=True)
    host = plane.flat.view(torch.float32)
    slot = torch.empty(N, device=lanes.device)
    sums: list[float] = []
    lanes.begin()
    waits = []
    for i in range(count):
        ticket = lanes.issue("host", f"fill{i}", lambda i=i: host.fill_(i), waits)
        ticket = lanes.issue("h2d", f"fetch{i}", lambda: slot.copy_(host, non_blocking=True), [ticket])
        ticket = lanes.issue("compute", f"fwd{i}", lambda: slot.square_(), [ticket])
        ticket = lanes.issue("d2h", f"save{i}", lambda: host.copy_(slot, non_blocking=True), [ticket])
        waits = [lanes.issue("host", f"upd{i}", lambda: sums.append(host.double().sum().item()), [ticket])]
    lanes.finish()
    return sums


@pytest.mark.parametrize("seed", range(4))
def test_tickets_order_under_delays(seed):
    rng = random.Random(seed)
    lanes = StreamLanes("cuda", delay=lambda label: rng.choice([0, 0, 0.005]))
    for _ in range(2):
        assert round_trips(lanes, 6) == [float(i * i) * N for i in range(6)]


def test_issuing_does_not_wait_for_the_gpu_and_finish_does():
    lanes = StreamLanes("cuda", delay=lambda label: 0.1)
    lanes.begin()
    ticket = lanes.issue("h2d", "a", int)
    second = lanes.issue("compute", "b", int, [ticket])
    assert not ticket.done.query() and not second.done.query()
    lanes.finish(("compute",))
    assert ticket.done.query() and second.done.query()


def test_compute_is_the_current_stream():
    lanes, seen = StreamLanes("cuda"), []
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        lanes.begin()
    lanes.issue("compute", "a", lambda: seen.append(torch.cuda.current_stream()))
    lanes.issue("h2d", "b", lambda: seen.append(torch.cuda.current_stream()))
    lanes.finish()
    assert seen[0] == side and seen[1] not in (side, torch.cuda.default_stream())


def test_changing_the_compute_stream_keeps_the_order():
    x = torch.zeros(N, device="cuda")
    lanes = StreamLanes("cuda", delay=lambda label: 0.05 if label == "a" else 0)
    torch.cuda.synchronize()
    lanes.begin()
    lanes.issue("compute", "a", lambda: x.fill_(1))
    with torch.cuda.stream(torch.cuda.Stream()):
        lanes.begin()
        lanes.issue("compute", "b", lambda: x.mul_(3))
        lanes.finish()
    assert x.eq(3).all()


@pytest.mark.parametrize("lane", ["h2d", "compute", "host"])
def test_failure_surfaces_and_lanes_work_after(lane):
    lanes = StreamLanes("cuda", describe=lambda label: f"op {label}", delay=lambda label: 0.01)
    error, ran = ValueError("no"), []

    def fail():
        raise error

    ticket = lanes.issue(lane, "bad", fail)
    ticket = lanes.issue("d2h", "next", lambda: ran.append("next"), [ticket])
    lanes.issue("host", "last", lambda: ran.append("last"), [ticket])
    with pytest.raises(ValueError) as caught:
        lanes.finish()
    assert caught.value is error and error.__notes__ == ["op bad"] and not ran
    assert round_trips(lanes, 2) == [0.0, float(N)]


def test_trace_tells_when():
    trace = []
    lanes = StreamLanes("cuda", delay=lambda label: 0.02, trace=trace)
    lanes.begin()
    ticket = lanes.issue("h2d", "fetch0", int)
    ticket = lanes.issue("compute", "fwd0", int, [ticket])
    lanes.issue("host", "upd0", int, [ticket])
    lanes.finish()
    spans = {label: (start, end) for label, _, start, end in trace}
    assert len(trace) == 3 and spans["fetch0"][0] < spans["fetch0"][1] <= spans["fwd0"][0] < spans["fwd0"][1]
    assert spans["fwd0"][1] - spans["fwd0"][0] > 0.001


def test_host_buffers_are_pinned_and_freed():
    buffer = HostBuffer(3 * PAGE, pin=True)
    assert buffer.pinned and buffer.flat.is_pinned()
    for _ in range(20):  # the address comes again: still being registered, it would be refused
        buffer = HostBuffer(3 * PAGE, pin=True)
        assert buffer.pinned


def test_a_refused_registration_leaves_no_error_behind():
    from megatrain.host import register_piece

    buffer = HostBuffer(PAGE, pin=True)
    assert not register_piece(buffer.flat.data_ptr(), PAGE), "it is registered already"
    assert torch.ones(4, device="cuda").sum().item() == 4
