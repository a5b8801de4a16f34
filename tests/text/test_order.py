"""Waits are enough, and none is too many: by the rule for single halves and over whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from textwrap import dedent

import pytest
from hypothesis import given
from schedules import QUICK, SLOTS, X, paper, papers, tangles

from megatrain.order import Race, conflicts, happens_before, place_waits, place_waits_ops, races, unrolled_races
from megatrain.schedule import HALVES, Op, Schedule, on_host, prev, prev_of
from megatrain.text import show_ops

Run = list[tuple[Schedule, str]]

PAPERS = {
    "two slots": paper(3, 2, 2),
    "one slot": paper(3, 1, 1),
    "more slots than layers": paper(2, 3, 2),
    "spill": paper(4, 2, 1, spill=True),
}


def shown(ops: tuple[Op, ...]) -> str:
    return "\n".join(show_ops(ops))


def text(golden: str) -> str:
    return dedent(golden).strip()


def strangers(schedule: Schedule, name: str) -> Iterator[Run]:
    """Schedules of another shape over the same slots, of which only one op uses `name`."""
    ops = [
        Op("use", "offload", ("w0",), (name,)) if on_host(name) else Op("use", "offload", (name,), ("other.dw",)),
        Op("use", "prefetch", (name,), ("w0",)) if on_host(name) else Op("use", "prefetch", ("other.w",), (name,)),
        Op("use", "update", (), (name,), "adamw") if on_host(name) else Op("use", "compute", (), (name,), "step"),
    ]
    for op in ops:
        yield [(schedule.replace(forward=place_waits_ops([op], schedule.slot_bytes)), "forward")]


def runs(schedule: Schedule) -> Iterator[Run]:
    """What users do: halves of `schedule`, and of others over the same slots and planes, in many orders."""
    f, b, u = ((schedule, half) for half in HALVES)
    other = paper(layers=4, slots=3, gradient_slots=1)
    yield [f, f, b, b, u, f]
    yield [f, f, b, u]
    yield [f, b, f, b, f, b, u, f, b, u]
    yield [f, (other, "forward"), b, u, (other, "forward"), f, b]
    yield [(other, "forward"), (other, "backward"), f, b, u, (other, "update"), f]
    yield [u, u, f, u]
    names = dict.fromkeys(n for op in schedule.ops for n in op.touches if n in schedule.slot_bytes or on_host(n))
    for name in names:
        for stranger in strangers(schedule, name):
            for half in (f, b, u):
                yield [*stranger, half]


def without_each_wait(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for half, ops in schedule.halves():
        for i, op in enumerate(ops):
            for wait in op.after:
                fewer = replace(op, after=tuple(w for w in op.after if w != wait))
                yield f"{op.label} after {wait}", schedule.replace(**{half: (*ops[:i], fewer, *ops[i + 1 :])})


def test_waits_of_the_forward():
    assert shown(paper(3, 2).forward) == text("""
        fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
        fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
        fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
        fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w)
        fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1
        fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2
    """)


def test_waits_of_the_backward():
    assert shown(paper(3, 2, 1).backward) == text("""
        refetch2 prefetch  layers.2.w               -> w0           after prev(w0), prev(layers.2.w)
        refetch1 prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
        bwd2     compute   block.bwd(x2, w0, dx3)   -> dx2, g0      after refetch2, prev(g0)
        refetch0 prefetch  layers.0.w               -> w0           after bwd2, prev(layers.0.w)
        grad2    offload   g0                       -> layers.2.dw  after bwd2, prev(layers.2.dw)
        bwd1     compute   block.bwd(x1, w1, dx2)   -> dx1, g0      after refetch1, grad2
        grad1    offload   g0                       -> layers.1.dw  after bwd1, prev(layers.1.dw)
        bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, grad1
        grad0    offload   g0                       -> layers.0.dw  after bwd0, prev(layers.0.dw)
    """)


def test_a_wait_that_another_implies_is_left_out():
    ops = (
        Op("a", "prefetch", ("layers.0.w",), ("w0",)),
        Op("b", "prefetch", ("layers.1.w",), ("w1",)),
        Op("c", "compute", ("w0", "w1"), ("w0",), "step"),
    )
    assert [op.after for op in place_waits_ops(ops, {"w0", "w1"})] == [
        ("prev(w0)", "prev(layers.0.w)"),
        ("prev(w1)", "prev(layers.1.w)"),
        ("b",),
    ]


@QUICK
@given(tangles())
def test_waits_are_the_transitive_reduction(ops: tuple[Op, ...]):
    placed = place_waits_ops(ops, SLOTS)
    edges = {(i, j) for i, j in combinations(range(len(ops)), 2) if _ordered(ops[i], ops[j])}
    reach = set(edges)
    for k in range(len(ops)):
        reach |= {(i, j) for i in range(k) for j in range(k + 1, len(ops)) if (i, k) in reach and (k, j) in reach}
    needed = {(i, j) for i, j in edges if not any((i, k) in reach and (k, j) in reach for k in range(i + 1, j))}
    for j, op in enumerate(placed):
        labels = tuple(ops[i].label for i in range(j) if (i, j) in needed and ops[i].lane != op.lane)
        assert tuple(w for w in op.after if not w.startswith("prev(")) == labels
    assert reach == {(i, j) for j, bits in enumerate(happens_before(placed)) for i in range(j) if bits >> i & 1}


def _ordered(a: Op, b: Op) -> bool:
    return a.lane == b.lane or bool(conflicts(a, b, SLOTS))


@QUICK
@given(tangles())
def test_a_tangle_is_ordered_and_removing_any_wait_is_a_race(ops: tuple[Op, ...]):
    schedule = paper(1).replace(slots=paper(1, 2, 1).slots, forward=place_waits_ops(ops, SLOTS), backward=(), update=())
    assert races(schedule) == []
    assert unrolled_races([(schedule, "forward")] * 3) == []
    for wait, less in without_each_wait(schedule):
        assert races(less), wait


@QUICK
@given(papers)
def test_removing_any_single_wait_is_a_race(schedule: Schedule):
    assert races(schedule) == []
    assert place_waits(schedule) == schedule
    for wait, less in without_each_wait(schedule):
        assert len(races(less)) >= 1, wait


@pytest.mark.parametrize("name", PAPERS)
def test_whole_runs_are_ordered(name: str):
    for run in runs(PAPERS[name]):
        assert unrolled_races(run) == []


@pytest.mark.parametrize("name", PAPERS)
def test_removing_any_single_wait_is_a_race_in_some_run(name: str):
    for wait, less in without_each_wait(PAPERS[name]):
        assert any(unrolled_races(run) for run in runs(less)) or wait in late_prevs(PAPERS[name]), wait


def test_only_a_late_prev_may_be_needless():
    assert {name: sorted(late_prevs(schedule)) for name, schedule in PAPERS.items()} == {
        "two slots": [],
        "one slot": [],
        "more slots than layers": [],
        "spill": ["unspill1 after prev(a1)"],
    }


def late_prevs(schedule: Schedule) -> set[str]:
    """The `prev` waits of ops that come, in their half, after an op of every lane that can touch the name: the order of
    those lanes implies them.  The rule asks for them all the same, since it looks at one name at a time."""
    late: set[str] = set()
    for _, ops in schedule.halves():
        for op, bits in zip(ops, happens_before(ops), strict=True):
            lanes = {op.lane} | {o.lane for i, o in enumerate(ops) if bits >> i & 1}
            for wait in filter(prev_of, op.after):
                if lanes >= {"h2d", "d2h", "host" if on_host(prev_of(wait)) else "compute"}:
                    late.add(f"{op.label} after {wait}")
    return late


@QUICK
@given(papers)
def test_whole_runs_of_any_shape_are_ordered(schedule: Schedule):
    for run in list(runs(schedule))[:6]:
        assert unrolled_races(run) == []


def test_waits_within_two_steps_do_not_reach_micro_steps():
    """Seen: without `prev`, a second backward overwrites gradients that the first still sends."""
    schedule = paper(2, 2, 1)
    backward = tuple(replace(op, after=tuple(w for w in op.after if w != prev("g0"))) for op in schedule.backward)
    less = schedule.replace(backward=backward)
    assert races(less) == [Race("backward", "g0", "prev(g0)", "bwd1")]
    assert unrolled_races([(less, "forward"), (less, "backward")]) == []
    again = unrolled_races([(less, "forward"), (less, "backward"), (less, "forward"), (less, "backward")])
    assert Race("backward", "g0", "1:grad0", "3:bwd1") in again


def test_a_race_names_the_wait_to_add():
    schedule = paper(3, 2)
    fetch = replace(schedule.forward[3], after=("prev(layers.2.w)",))
    less = schedule.replace(forward=(*schedule.forward[:3], fetch, *schedule.forward[4:]))
    assert races(less) == [Race("forward", "w0", "fwd0", "fetch2")]


def test_values_belong_to_the_compute_lane():
    a = Op("a", "compute", ("x0",), ("x1",), "block.fwd")
    b = Op("b", "offload", ("x1",), ("layers.0.x",))
    assert X.nbytes == 32768
    assert conflicts(a, b, {"w0"}) == ()
    assert conflicts(a, b, {"x1"}) == ("x1",)
