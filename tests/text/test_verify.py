"""One schedule that breaks each rule, with the whole message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from textwrap import dedent

import pytest
from hypothesis import given
from schedules import QUICK, paper, papers

from megatrain.schedule import Op, Schedule, Slot
from megatrain.text import parse_schedule
from megatrain.verify import RULES, SCHEDULE_RULES, VerifyError, verify, verify_schedule

TEXT = """
budget 3 KiB
template block  layers.0
  fwd(f32[4], 64 B) -> f32[4]
  bwd(f32[4], 64 B, f32[4]) -> f32[4], 64 B
slots w0 g0  weights 64 B each
inputs x0 f32[4], ids i64[4]
outputs x1
forward
fetch0   prefetch  layers.0.w   -> w0            after prev(w0), prev(layers.0.w)
fwd0     compute   block.fwd(x0, w0) -> x1       after fetch0
backward
grads dx1 f32[4]
input_grads dx0
refetch0 prefetch  layers.0.w   -> w0            after prev(w0), prev(layers.0.w)
bwd0     compute   block.bwd(x0, w0, dx1) -> dx0, g0   after refetch0, prev(g0)
grad0    offload   g0           -> layers.0.dw   after bwd0, prev(layers.0.dw)
update
upd0     update    adamw(layers.0.dw) -> layers.0.w    after prev(layers.0.dw), prev(layers.0.w)
"""

BROKEN = {
    "label": (
        ("grad0    offload", "fwd0    offload"),
        """\
        label: two ops are called fwd0
          fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
          fwd0     offload   g0                       -> layers.0.dw  after bwd0, prev(layers.0.dw)
        give one of them another label""",
    ),
    "declared": (
        ("grads dx1", "grads w0"),
        """\
        declared: w0 is declared 2 times
        give each slot, value and body its own name""",
    ),
    "operand: copy": (
        ("prefetch  layers.0.w   -> w0            after prev(w0), prev(layers.0.w)\nfwd0", "prefetch  w0 -> g0\nfwd0"),
        """\
        operand: fetch0 is no copy between host and device
          fetch0   prefetch  w0                       -> g0
        write 'prefetch layers.0.w -> w0'""",
    ),
    "operand: unknown slot": (
        ("grad0    offload   g0", "grad0    offload   dx0"),
        """\
        operand: grad0 copies dx0, which is no slot
          grad0    offload   dx0                      -> layers.0.dw  after bwd0, prev(layers.0.dw)
        declare dx0 as a slot, or name one of: w0, g0""",
    ),
    "operand: place": (
        ("block.fwd(x0, w0)", "block.fwd(x0, layers.0.w)"),
        """\
        operand: fwd0 runs on the device and layers.0.w is on the host
          fwd0     compute   block.fwd(x0, layers.0.w) -> x1           after fetch0
        copy layers.0.w to the device first, or use the verb that works on the host""",
    ),
    "wait: other half": (
        ("after refetch0, prev(g0)", "after fetch0, prev(g0)"),
        """\
        wait: bwd0 waits for fetch0, which is no op of the backward half
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after fetch0, prev(g0)
        drop it, or wait for the last users of a name with prev(x0)""",
    ),
    "wait: later": (
        ("after refetch0, prev(g0)", "after grad0, prev(g0)"),
        """\
        wait: bwd0 waits for grad0, which is not issued before it
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after grad0, prev(g0)
          grad0    offload   g0                       -> layers.0.dw  after bwd0, prev(layers.0.dw)
        move grad0 above bwd0, or drop the wait""",
    ),
    "wait: value": (
        ("after refetch0, prev(g0)", "after refetch0, prev(x0)"),
        """\
        wait: bwd0 waits for prev(x0), and x0 is no slot and no plane
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, prev(x0)
        drop it, or declare x0 as a slot""",
    ),
    "body: unknown": (
        ("block.fwd(x0, w0)", "block.forward(x0, w0)"),
        """\
        body: fwd0 calls block.forward, which no template has
          fwd0     compute   block.forward(x0, w0)    -> x1           after fetch0
        declare it, or call one of: block.fwd, block.bwd""",
    ),
    "body: operands": (
        ("block.fwd(x0, w0)", "block.fwd(x0)"),
        """\
        body: fwd0 has 1 operands
          fwd0     compute   block.fwd(x0)            -> x1           after fetch0
        block.fwd has 2 operands: f32[4], 64 B""",
    ),
    "body: results": (
        ("-> dx0, g0", "-> dx0"),
        """\
        body: bwd0 has 1 results
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0          after refetch0, prev(g0)
        block.bwd has 2 results: f32[4], 64 B""",
    ),
    "body: update of a value": (
        ("block.fwd(x0, w0)", "fwd(x0, w0)"),
        """\
        body: fwd0 updates on the device what is in no slot
          fwd0     compute   fwd(x0, w0)              -> x1           after fetch0
        put x0, x1 in slots, or call a body: TEMPLATE.fwd""",
    ),
    "body: copy": (
        ("offload   g0 ", "offload   sum(g0) "),
        """\
        body: grad0 is a copy and calls sum
          grad0    offload   sum(g0)                  -> layers.0.dw  after bwd0, prev(layers.0.dw)
        drop sum, or compute it""",
    ),
    "body: none": (
        ("adamw(layers.0.dw)", "layers.0.dw"),
        """\
        body: upd0 calls nothing
          upd0     update    layers.0.dw              -> layers.0.w   after prev(layers.0.dw), prev(layers.0.w)
        write what it calls: block.fwd(x0, w0)""",
    ),
    "once": (
        ("-> dx0, g0", "-> x1, g0"),
        """\
        once: bwd0 makes x1 again
          fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
          bwd0     compute   block.bwd(x0, w0, dx1)   -> x1, g0       after refetch0, prev(g0)
        give the result of bwd0 another name""",
    ),
    "once: given": (
        ("-> dx0, g0", "-> dx1, g0"),
        """\
        once: bwd0 makes dx1, which is given
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx1, g0      after refetch0, prev(g0)
        give the result of bwd0 another name""",
    ),
    "made: later": (
        ("block.fwd(x0, w0)", "block.fwd(dx0, w0)"),
        """\
        made: fwd0 reads dx0, which is not made yet
          fwd0     compute   block.fwd(dx0, w0)       -> x1           after fetch0
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, prev(g0)
        move bwd0 above it""",
    ),
    "made: never": (
        ("block.fwd(x0, w0)", "block.fwd(y, w0)"),
        """\
        made: fwd0 reads y, which is not made yet
          fwd0     compute   block.fwd(y, w0)         -> x1           after fetch0
        make y first, or declare it an input""",
    ),
    "made: received": (
        ("outputs x1", "outputs x1, logits"),
        """\
        made: the caller receives logits after the forward half, which does not make it
        make it in the forward half, or do not return it""",
    ),
    "fit: slot": (
        ("slots w0 g0  weights 64 B each", "slots w0  weights 64 B each\nslots g0  gradients 60 B each"),
        """\
        fit: 64 B does not fit g0 of 60 B
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, prev(g0)
        make g0 at least 64 B""",
    ),
    "fit: type": (
        ("block.fwd(x0, w0)", "block.fwd(ids, w0)"),
        """\
        fit: ids is i64[4]
          fwd0     compute   block.fwd(ids, w0)       -> x1           after fetch0
        block.fwd expects f32[4]: pass that, or call a body for i64[4]""",
    ),
    "budget": (
        ("budget 3 KiB", "budget 2175 B"),
        """\
        budget: bwd0 needs 2.1 KiB, the budget is 2.1 KiB
          bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, prev(g0)
        allow 2176 B, or keep less on the device""",
    ),
    "race": (
        ("-> x1       after fetch0", "-> x1"),
        """\
        race: fwd0 may overtake fetch0
          fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
          fwd0     compute   block.fwd(x0, w0)        -> x1
        add 'after fetch0' to fwd0

        race: fwd0 may overtake the last users of w0
          fwd0     compute   block.fwd(x0, w0)        -> x1
        add 'after prev(w0)' to fwd0""",
    ),
    "stale": (
        (
            "bwd0     compute   block.bwd(x0, w0, dx1) -> dx0, g0",
            "bwd0     compute   block.bwd(x0, g0, dx1) -> dx0, g0",
        ),
        """\
        stale: bwd0 reads g0, which the backward half has not filled
          bwd0     compute   block.bwd(x0, g0, dx1)   -> dx0, g0      after refetch0, prev(g0)
        fill g0 earlier in the backward half""",
    ),
    "race: before": (
        ("after bwd0, prev(layers.0.dw)", "after bwd0"),
        """\
        race: grad0 may overtake the last users of layers.0.dw
          grad0    offload   g0                       -> layers.0.dw  after bwd0
        add 'after prev(layers.0.dw)' to grad0""",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule(broken: str):
    (old, new), message = BROKEN[broken]
    assert old in TEXT
    with pytest.raises(VerifyError) as caught:
        verify_schedule(parse_schedule(TEXT.replace(old, new)))
    assert str(caught.value) == dedent(message)
    assert caught.value.rule == broken.split(":")[0]


def test_what_the_parser_would_refuse_is_refused_in_a_schedule_too():
    schedule = parse_schedule(TEXT)
    unknown = replace(schedule.update[0], verb="broadcast")
    with pytest.raises(VerifyError) as caught:
        verify_schedule(schedule.replace(update=(unknown,)))
    assert str(caught.value) == dedent("""\
        verb: upd0 has no known verb
          upd0     broadcast adamw(layers.0.dw)       -> layers.0.w   after prev(layers.0.dw), prev(layers.0.w)
        write one of prefetch, compute, offload, update""")
    after = Op("after", "compute", ("g 0",), (), "step")
    with pytest.raises(VerifyError) as caught:
        verify_schedule(schedule.replace(update=(after,), slots=(*schedule.slots, Slot("0", "weights", 1))))
    assert str(caught.value) == dedent("""\
        name: 'after' cannot be read back
          after    compute   step(g 0)
        write an identifier, or a dotted path for the host

        name: 'g 0' cannot be read back
          after    compute   step(g 0)
        write an identifier, or a dotted path for the host

        name: the declared name '0' cannot be read back
        write an identifier""")


def test_every_rule_is_broken_above():
    broken = {name.split(":")[0] for name in BROKEN} | {"verb", "name"}
    assert broken == {rule.__name__ for rule in SCHEDULE_RULES}


def test_many_faults_are_counted():
    bare = paper(3)
    bare = bare.replace(**{half: tuple(replace(op, after=()) for op in ops) for half, ops in bare.halves()})
    with pytest.raises(VerifyError) as caught:
        verify_schedule(bare)
    assert str(caught.value).splitlines()[-1] == f"and {len(caught.value.faults) - 4} more of the rule 'race'"


def test_the_example_of_the_design():
    schedule = paper(3, 2, 2)
    fetch = replace(schedule.forward[3], after=("prev(layers.2.w)",))
    with pytest.raises(VerifyError) as caught:
        verify_schedule(schedule.replace(forward=(*schedule.forward[:3], fetch, *schedule.forward[4:])))
    assert str(caught.value) == dedent("""\
        race: fetch2 may overtake fwd0
          fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
          fetch2   prefetch  layers.2.w               -> w0           after prev(layers.2.w)
        add 'after fwd0' to fetch2""")


@QUICK
@given(papers)
def test_good_schedules_pass(schedule: Schedule):
    verify_schedule(schedule)


@dataclass(frozen=True)
class Program:
    schedule: Schedule


def test_a_stage_verifies_programs():
    verify(Program(parse_schedule(TEXT)), "scheduled")
    with pytest.raises(VerifyError, match=r"^race: "):
        verify(Program(parse_schedule(TEXT.replace("after fetch0", ""))), "scheduled")
    assert [rule.__name__ for rule in RULES["scheduled"]] == [rule.__name__ for rule in SCHEDULE_RULES]
