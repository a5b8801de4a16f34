"""Lanes on a CUDA device: a stream each, and a thread for the host lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from megatrain.lanes import ALL, Delay, Describe, Item, Span, ThreadLanes, Ticket, wait_for

CYCLES_A_SECOND = 1.5e9
"""Roughly the GPU clock, for injected delays."""


class StreamLanes:
    """CUDA: two streams of its own for the copies; compute is the stream that is current at `begin`; the host lane is a
    thread.  Issuing is asynchronous.  A copy that waits for the host lane is issued, with those after it on its lane,
    by a thread of that lane, so that it holds back no other lane.  An event is waited for only once it has been
    recorded: who waits for an op that a thread has yet to issue blocks until then."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        describe: Describe = str,
        delay: Delay | None = None,
        trace: list[Span] | None = None,
    ) -> None:
        self.describe, self.delay, self.trace = describe, delay, trace
        self.device = torch.device(device)
        self._host = ThreadLanes()
        self._streams = {
            "h2d": torch.cuda.Stream(self.device),
            "compute": torch.cuda.current_stream(self.device),
            "d2h": torch.cuda.Stream(self.device),
        }
        self._last: dict[str, torch.cuda.Event] = {}
        self._behind: dict[str, Ticket] = {}
        """By lane, the last op that was handed to its thread."""
        self._clock: tuple[torch.cuda.Event, float] | None = None
        self._spans: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Take the current stream for compute.  If that is another one than before, it waits for what the compute lane
        has to do."""
        stream = torch.cuda.current_stream(self.device)
        if stream != self._streams["compute"] and "compute" in self._last:
            stream.wait_event(self._last["compute"])
        self._streams["compute"] = stream

    def issue(
        self, lane: str, label: str, work: Callable[[], object], waits: Sequence[Ticket] = (), always: bool = False
    ) -> Ticket:
        if lane == "host":
            self._host.delay, self._host.trace = self.delay, self.trace
            return self._host.issue(lane, label, work, waits, always)
        waits = tuple(waits)
        behind = self._behind.get(lane)
        if lane == "compute" or not any(t.blocked for t in (*waits, *([behind] if behind else ()))):
            return Ticket(lane, label, self._launch(lane, label, work, waits, always))
        ticket = Ticket(lane, label)

        def launch() -> None:
            ticket.done = self._launch(lane, label, work, waits, always)

        ticket.issued = threading.Event()
        self._host.crew.put(Item(lane, label, launch, (), ticket.issued, None, None, always))
        self._behind[lane] = ticket
        return ticket

    def _launch(
        self, lane: str, label: str, work: Callable[[], object], waits: Sequence[Ticket], always: bool
    ) -> torch.cuda.Event | None:
        """Puts an op on its stream; gives what tells of its end, None if it is skipped."""
        stream = self._streams[lane]
        for ticket in waits:
            if ticket.issued is not None:
                wait_for(ticket.issued)
            if isinstance(ticket.done, torch.cuda.Event):
                stream.wait_event(ticket.done)
            else:
                ticket.wait()
        if self._host.fault and not always:
            return None
        end = torch.cuda.Event(enable_timing=self.trace is not None, blocking=True)
        with torch.cuda.stream(stream):
            self._mark_start(lane, label, end)
            try:
                if self.delay is not None:
                    torch.cuda._sleep(int(self.delay(label) * CYCLES_A_SECOND))
                work()
            except Exception as error:
                self._host.fault.record(error, label)
            end.record(stream)
        self._last[lane] = end
        return end

    def finish(self, lanes: Iterable[str] = ALL) -> None:
        try:
            self._drain(lanes)
            if self._host.fault:
                self._drain(ALL)
        except BaseException:
            self.cancel()
            raise
        self._resolve_spans()
        self._host.fault.throw(self.describe)

    def cancel(self) -> None:
        self._host.cancel()
        for stream in self._streams.values():  # an interrupted issue may have left work after the last event
            stream.synchronize()

    def _drain(self, lanes: Iterable[str]) -> None:
        for lane in lanes:
            if behind := self._behind.get(lane):
                behind.wait()
            if lane in self._last:
                self._last[lane].synchronize()
            if lane == "host":
                self._host.crew.drain((lane,))

    def _mark_start(self, lane: str, label: str, end: torch.cuda.Event) -> None:
        """When tracing: record where an op starts on the current stream, and, once, what the host's clock says then."""
        if self.trace is None:
            return
        if self._clock is None:
            torch.cuda.synchronize(self.device)
            zero = torch.cuda.Event(enable_timing=True)
            zero.record()
            zero.synchronize()
            self._clock = (zero, time.perf_counter())
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        self._spans.append((label, lane, start, end))

    def _resolve_spans(self) -> None:
        """Give `trace` the spans of the ops that have ended, and keep the others for a later `finish`."""
        if self._clock is None or self.trace is None:
            return
        zero, at = self._clock
        spans, self._spans = self._spans, []
        for label, lane, start, end in spans:
            if end.query():
                seconds = [at + zero.elapsed_time(event) / 1e3 for event in (start, end)]
                self.trace.append((label, lane, seconds[0], seconds[1]))
            else:
                self._spans.append((label, lane, start, end))
