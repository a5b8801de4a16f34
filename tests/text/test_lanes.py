"""Lanes without CUDA: order by tickets, failures, interrupts, forks; what is promised of all lanes, on threads."""

import gc
import os
import random
import signal
import threading
import time
import weakref

import pytest

from megatrain.lanes import ALL, InlineLanes, ThreadLanes


@pytest.fixture(params=[InlineLanes, ThreadLanes])
def lanes(request):
    return request.param(describe=lambda label: f"op {label}")


def crew_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("megatrain-")]


@pytest.mark.parametrize("seed", range(8))
def test_tickets_order_under_random_delays(seed):
    """Ops of one lane run in the order of issue, and no op before those it waits for, whatever the delays."""
    rng = random.Random(seed)
    delays = {f"op{i}": rng.choice([0, 0, 0.003]) for i in range(40)}
    lanes = ThreadLanes(delay=delays.__getitem__)
    ran: list[str] = []
    tickets, befores = [], []
    for i in range(40):
        waits = rng.sample(range(i), min(i, rng.choice([0, 1, 2])))
        lane = rng.choice(ALL)
        befores.append({f"op{j}" for j in waits} | {t.label for t in tickets if t.lane == lane})
        tickets.append(lanes.issue(lane, f"op{i}", lambda i=i: ran.append(f"op{i}"), [tickets[j] for j in waits]))
    lanes.finish()
    assert len(ran) == 40
    assert all(before <= set(ran[: ran.index(f"op{i}")]) for i, before in enumerate(befores))


def test_lanes_run_beside_one_another():
    """Two ops that wait for each other's start end, each on its lane; finishing one lane leaves the others alone."""
    lanes = ThreadLanes()
    both, go = threading.Barrier(2), threading.Event()
    lanes.issue("h2d", "a", both.wait)
    lanes.issue("compute", "b", both.wait)
    held = lanes.issue("host", "c", go.wait)
    lanes.finish(("h2d", "compute"))
    assert held.done is not None and not go.is_set()
    go.set()
    lanes.finish()
    held.wait()


def test_failure_surfaces_with_its_line_and_nothing_hangs(lanes):
    error, ran = ValueError("no"), []

    def fail():
        raise error

    for _ in range(3):
        first = lanes.issue("h2d", "fetch0", fail)
        second = lanes.issue("compute", "fwd0", lambda: ran.append("fwd0"), [first])
        lanes.issue("d2h", "save0", lambda: ran.append("save0"), [second])
        lanes.issue("h2d", "fetch1", lambda: ran.append("fetch1"))
        with pytest.raises(ValueError) as caught:
            lanes.finish(("compute",))
        assert caught.value is error and error.__notes__ == ["op fetch0"] and ran == []
        del error.__notes__
        lanes.issue("compute", "fwd0", lambda: ran.append("again"), [first, second])  # tickets of skipped ops: ended
        lanes.finish()
        assert ran.pop() == "again"


def test_first_failure_wins_and_running_ops_end():
    lanes = ThreadLanes()
    began, failed, ended = threading.Event(), threading.Event(), []

    def fail():
        began.wait()
        failed.set()
        raise ValueError("first")

    def slow():
        began.set()
        failed.wait()
        time.sleep(0.05)
        ended.append("slow")
        raise ValueError("second")

    lanes.issue("host", "slow", slow)
    lanes.issue("h2d", "fail", fail)
    with pytest.raises(ValueError, match="first"):
        lanes.finish(("h2d",))
    assert ended == ["slow"], "finish raises when every lane has come to rest"
    lanes.finish()


def test_ctrl_c_in_finish_skips_the_queue_and_leaves_lanes_usable(request: pytest.FixtureRequest):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    lanes, ran, waiting = ThreadLanes(), [], threading.Event()

    def all_lanes():
        yield from ALL
        waiting.set()

    def slow():
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.5)
        ran.append("whole")

    ticket = lanes.issue("host", "upd0", slow)
    lanes.issue("host", "upd1", lambda: ran.append("upd1"))
    lanes.issue("h2d", "fetch0", lambda: ran.append("fetch0"), [ticket])
    with pytest.raises(KeyboardInterrupt):
        lanes.finish(all_lanes())
    assert ran == ["whole"]
    lanes.issue("host", "upd1", lambda: ran.append("upd1"))
    lanes.finish()
    assert ran == ["whole", "upd1"]


def test_cancel_forgets(lanes):
    go = threading.Event()
    go.set()
    lanes.issue("h2d", "a", go.wait)
    lanes.issue("h2d", "b", lambda: 1 / 0)
    lanes.cancel()
    lanes.finish()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_has_threads_of_its_own():
    """Also while the parent's lane is in the middle of an op, whose ticket the child does not wait for."""
    lanes, go = ThreadLanes(), threading.Event()
    held = lanes.issue("host", "a", go.wait)
    pid = os.fork()
    if not pid:
        ran = []
        lanes.issue("compute", "b", lambda: ran.append("b"), [held])
        lanes.finish()
        os._exit(0 if ran == ["b"] and not go.is_set() else 1)
    for _ in range(500):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        status = -1
    go.set()
    lanes.finish()
    assert status == 0


def test_threads_end_with_their_lanes():
    gc.collect()
    before = set(crew_threads())
    lanes = ThreadLanes()
    assert set(crew_threads()) == before, "none is started before there is work"
    for lane in ALL:
        lanes.issue(lane, "a", int)
    lanes.finish()
    mine = set(crew_threads()) - before
    assert len(mine) == 4 and all(t.daemon for t in mine)
    del lanes
    gc.collect()
    for t in mine:
        t.join(5)
    assert not any(t.is_alive() for t in mine)


def test_lanes_keep_no_work_alive():
    lanes = ThreadLanes()
    tensors = {1}
    alive = weakref.ref(tensors)
    ticket = lanes.issue("compute", "a", tensors.copy)
    del tensors
    lanes.finish()
    lanes.finish()
    assert alive() is None and ticket.label == "a"


def test_trace_tells_when(lanes):
    lanes.trace = []
    start = time.perf_counter()
    first = lanes.issue("h2d", "fetch0", lambda: time.sleep(0.01))
    lanes.issue("compute", "fwd0", int, [first])
    lanes.finish()
    (a, b), end = lanes.trace, time.perf_counter()
    assert a[:2] == ("fetch0", "h2d") and b[:2] == ("fwd0", "compute")
    assert start <= a[2] < a[3] <= b[2] <= b[3] <= end and a[3] - a[2] >= 0.01
    lanes.trace = None
    lanes.issue("h2d", "fetch1", int)
    lanes.finish()
