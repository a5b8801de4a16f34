"""Lanes: where ops run.  Each lane runs its ops in the order of issue; between lanes only tickets give an order.

`ThreadLanes` (a thread a lane: the CPU as the device), `InlineLanes` (at once, in the caller) and `streams.StreamLanes`
(CUDA) do the same things, those of the protocol `Lanes`.  One thread issues at a time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch

from megatrain.schedule import LANES

ALL = tuple(LANES.values())
"""The lanes: h2d, compute, d2h, host."""

Describe = Callable[[str], str]
"""Label -> the line to quote when that op fails."""

Delay = Callable[[str], float]
"""Label -> seconds to wait before its work, on its lane, as part of the op; for tests."""

Span = tuple[str, str, float, float]
"""(label, lane, start, end) of an op that ran, in seconds of time.perf_counter()."""


class Ticket:
    """The promise that one op completes, or is skipped after a failure.  It stays valid for ever."""

    __slots__ = ("_pid", "done", "issued", "label", "lane")

    def __init__(self, lane: str, label: str, done: threading.Event | torch.cuda.Event | None = None) -> None:
        """`done`: what tells of the end of the op; None if it has ended."""
        self.lane = lane
        self.label = label
        self.done = done
        self.issued: threading.Event | None = None
        """What tells that `done` is there, for an op that another thread issues."""
        self._pid = os.getpid()

    @property
    def blocked(self) -> bool:
        """Whether nothing can be made to wait for the op but a thread."""
        if self.issued is not None:
            return not self.issued.is_set()
        return isinstance(self.done, threading.Event) and not self.done.is_set()

    def wait(self) -> None:
        """Block the calling thread until the op has ended.  A forked child does not wait for ops of its parent."""
        if self._pid != os.getpid():
            return
        if self.issued is not None:
            wait_for(self.issued)
        if self.done is None:
            return
        if isinstance(self.done, threading.Event):
            wait_for(self.done)
        else:
            self.done.synchronize()


def wait_for(done: threading.Event) -> None:
    """Blocks until `done`, looking up now and then: a signal that comes just before a thread blocks does not wake it,
    and Ctrl-C would wait as long as the op."""
    while not done.wait(0.2):
        pass


class Lanes(Protocol):
    """What runs ops.  `describe`, `delay` and `trace` may be set between halves; spans are added to `trace` while it is
    a list, those of an op by the `finish` of its lane."""

    describe: Describe
    delay: Delay | None
    trace: list[Span] | None

    def begin(self) -> None:
        """A half starts."""
        ...

    def issue(
        self, lane: str, label: str, work: Callable[[], object], waits: Sequence[Ticket] = (), always: bool = False
    ) -> Ticket:
        """Have `work` run on `lane` after all that was issued there before and after all ops of `waits`.  An exception
        in it is kept for `finish`; all work not begun by then, on every lane, is skipped until `finish` has raised it.
        With `always` (on the host lane), work is never skipped: an update of which others have been done already."""
        ...

    def finish(self, lanes: Iterable[str] = ALL) -> None:
        """Block until all work issued on `lanes` is complete.  If any op has failed, on whichever lane: wait for every
        lane, then raise the first failure, the original exception with the op's line as a note.  KeyboardInterrupt
        while blocked: as `cancel`, then it goes on.  The lanes are usable after either."""
        ...

    def cancel(self) -> None:
        """Skip all work that has not begun, wait for what has, forget failures.  For who issues and is interrupted."""
        ...


class Interrupted(RuntimeError):
    """Raised by `finish` where a `cancel` was itself interrupted, and work was skipped that nobody was told of."""


class Fault:
    """The first failure since the last `finish`; while there is one, work is skipped."""

    def __init__(self) -> None:
        self._first: list[tuple[BaseException, str]] = []

    def __bool__(self) -> bool:
        return bool(self._first)

    def record(self, error: BaseException, label: str) -> None:
        self._first.append((error, label))  # atomic: the first stays first

    def clear(self) -> None:
        self._first.clear()

    def throw(self, describe: Describe) -> None:
        """Raise the failure, if there is one, and forget it."""
        if not self._first:
            return
        error, label = self._first[0]
        self._first.clear()
        if label:
            error.add_note(describe(label))
        try:
            raise error
        finally:
            del error  # the traceback holds this frame


class InlineLanes:
    """Runs work at once in the caller; waits are satisfied by then.  Delays are ignored."""

    def __init__(
        self, *, describe: Describe = str, delay: Delay | None = None, trace: list[Span] | None = None
    ) -> None:
        self.describe, self.delay, self.trace = describe, delay, trace
        self._fault = Fault()

    def begin(self) -> None:
        pass

    def issue(
        self, lane: str, label: str, work: Callable[[], object], waits: Sequence[Ticket] = (), always: bool = False
    ) -> Ticket:
        if self._fault and not always:
            return Ticket(lane, label)
        start = time.perf_counter()
        try:
            work()
        except Exception as error:
            self._fault.record(error, label)
        if self.trace is not None:
            self.trace.append((label, lane, start, time.perf_counter()))
        return Ticket(lane, label)

    def finish(self, lanes: Iterable[str] = ALL) -> None:
        self._fault.throw(self.describe)

    def cancel(self) -> None:
        self._fault.clear()


class Item(NamedTuple):
    """An op on its way to a lane's thread."""

    lane: str
    label: str
    work: Callable[[], object]
    waits: Sequence[Ticket]
    done: threading.Event
    delay: Delay | None
    trace: list[Span] | None
    always: bool = False


class Crew:
    """The threads of one process's lanes, started when first needed.  They hold the queues and the fault, not the crew,
    and end when the crew is collected."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fault = Fault()
        self._queues: dict[str, SimpleQueue[Item | None]] = {}
        weakref.finalize(self, dismiss, self._queues)

    def put(self, item: Item) -> None:
        if item.lane not in self._queues:
            queue: SimpleQueue[Item | None] = SimpleQueue()
            self._queues[item.lane] = queue
            name = f"megatrain-{item.lane}"
            threading.Thread(target=serve, args=(queue, self.fault), name=name, daemon=True).start()
        self._queues[item.lane].put(item)

    def drain(self, lanes: Iterable[str]) -> None:
        """Wait until these lanes have done, or skipped, all that was put before."""
        marks = [Item(lane, "", int, (), threading.Event(), None, None) for lane in lanes if lane in self._queues]
        for mark in marks:
            self.put(mark)
        for mark in marks:
            wait_for(mark.done)


def dismiss(queues: dict[str, SimpleQueue[Item | None]]) -> None:
    for queue in queues.values():
        queue.put(None)


def serve(queue: SimpleQueue[Item | None], fault: Fault) -> None:
    """A lane's thread.  It holds no op between two ops: the work of one holds tensors."""
    while serve_one(queue.get(), fault):
        pass


def serve_one(item: Item | None, fault: Fault) -> bool:
    """Run one op, or skip it; False at the end."""
    if item is None:
        return False
    try:
        for ticket in item.waits:
            ticket.wait()
        if item.always or not fault:
            run_item(item)
    except BaseException as error:
        fault.record(error, item.label)
    finally:
        item.done.set()
    return True


def run_item(item: Item) -> None:
    start = time.perf_counter()
    if item.delay is not None:
        time.sleep(item.delay(item.label))
    item.work()
    if item.trace is not None:
        item.trace.append((item.label, item.lane, start, time.perf_counter()))


class ThreadLanes:
    """A daemon thread a lane, started when first needed.  Work runs with the thread's own grad mode and the like: it
    sets what it needs.  A forked child gets threads of its own, and what its parent had issued is not its concern."""

    def __init__(
        self, *, describe: Describe = str, delay: Delay | None = None, trace: list[Span] | None = None
    ) -> None:
        self.describe, self.delay, self.trace = describe, delay, trace
        self._crew = Crew()

    @property
    def crew(self) -> Crew:
        """The threads of this process."""
        if self._crew.pid != os.getpid():
            self._crew = Crew()
        return self._crew

    @property
    def fault(self) -> Fault:
        return self.crew.fault

    def begin(self) -> None:
        pass

    def issue(
        self, lane: str, label: str, work: Callable[[], object], waits: Sequence[Ticket] = (), always: bool = False
    ) -> Ticket:
        done = threading.Event()
        self.crew.put(Item(lane, label, work, tuple(waits), done, self.delay, self.trace, always))
        return Ticket(lane, label, done)

    def finish(self, lanes: Iterable[str] = ALL) -> None:
        crew = self.crew
        try:
            crew.drain(lanes)
            if crew.fault:
                crew.drain(ALL)
        except BaseException:
            self.cancel()
            raise
        crew.fault.throw(self.describe)

    def cancel(self) -> None:
        crew = self.crew
        crew.fault.record(Interrupted("a step was interrupted twice; part of its work was skipped"), "")
        crew.drain(ALL)
        crew.fault.clear()
