"""The text of a schedule, there and back, and what a diff and an error say."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from schedules import QUICK, paper, papers, printable

from megatrain.diff import diff_schedules
from megatrain.schedule import Schedule, Template
from megatrain.text import parse_op, parse_schedule, show_about, show_bytes, show_ops, show_paths, show_schedule

GOLDEN = """
; 3 layers, peak 4.3 MiB of 16.0 MiB
budget 16 MiB
template block  layers.0 .. layers.2
  fwd(f32[8,1024], 1 MiB) -> f32[8,1024]                     workspace 96 KiB
  bwd(f32[8,1024], 1 MiB, f32[8,1024]) -> f32[8,1024], 1 MiB workspace 160 KiB
slots w0 w1  weights 1 MiB each
slots g0 g1  gradients 1 MiB each
inputs x0 f32[8,1024]
outputs x3
forward
fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)          ;    4.0 MiB
fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)          ;    4.0 MiB
fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0                              ;    4.2 MiB
fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w)              ;    4.1 MiB
fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1                              ;    4.2 MiB
fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2                              ;    4.2 MiB
backward
grads dx3 f32[8,1024]
input_grads dx0
refetch2 prefetch  layers.2.w               -> w0           after prev(w0), prev(layers.2.w)          ;    4.2 MiB
refetch1 prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)          ;    4.2 MiB
bwd2     compute   block.bwd(x2, w0, dx3)   -> dx2, g0      after refetch2, prev(g0)                  ;    4.3 MiB
refetch0 prefetch  layers.0.w               -> w0           after bwd2, prev(layers.0.w)              ;    4.1 MiB
grad2    offload   g0                       -> layers.2.dw  after bwd2, prev(layers.2.dw)             ;    4.1 MiB
bwd1     compute   block.bwd(x1, w1, dx2)   -> dx1, g1      after refetch1, prev(g1)                  ;    4.3 MiB
grad1    offload   g1                       -> layers.1.dw  after bwd1, prev(layers.1.dw)             ;    4.1 MiB
bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0      after refetch0, grad2                     ;    4.3 MiB
grad0    offload   g0                       -> layers.0.dw  after bwd0, prev(layers.0.dw)             ;    4.1 MiB
update
upd0     update    adamw(layers.0.dw)       -> layers.0.w   after prev(layers.0.dw), prev(layers.0.w) ;    4.0 MiB
upd1     update    adamw(layers.1.dw)       -> layers.1.w   after prev(layers.1.dw), prev(layers.1.w) ;    4.0 MiB
upd2     update    adamw(layers.2.dw)       -> layers.2.w   after prev(layers.2.dw), prev(layers.2.w) ;    4.0 MiB
""".strip()

SMALL = """
template block  layers.0
  fwd(f32[2], 8 B) -> f32[2]
slots w0  weights 8 B each
inputs x0 f32[2]
forward
fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
""".strip()


def test_show():
    assert show_schedule(paper(3, 2, 2)) == GOLDEN


def test_parse_show():
    schedule = paper(3, 2, 2)
    assert parse_schedule(GOLDEN) == schedule


@QUICK
@given(papers)
def test_parse_is_the_inverse_of_show(schedule: Schedule):
    assert parse_schedule(show_schedule(schedule)) == schedule


@QUICK
@given(printable)
def test_parse_is_the_inverse_of_show_for_whatever_can_be_written(schedule: Schedule):
    assert parse_schedule(show_schedule(schedule)) == schedule


def test_an_empty_schedule():
    assert show_schedule(Schedule()) == "; 0 layers, peak 0 B"
    assert parse_schedule("") == Schedule()


def test_an_op_alone():
    line = "fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w)"
    assert show_ops([parse_op(line)]) == [line]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1"], "layers.0, layers.1"),
        ([f"layers.{i}" for i in range(28)], "layers.0 .. layers.27"),
        ([f"h.{i}.mlp" for i in range(9, 12)], "h.9.mlp .. h.11.mlp"),
        (["a.0", "a.1", "a.2", "a.4", "b.5", "b.6", "b.7", "head"], "a.0 .. a.2, a.4, b.5 .. b.7, head"),
        (["a.2", "a.1", "a.0"], "a.2, a.1, a.0"),
        (["a.08", "a.09", "a.10"], "a.08, a.09, a.10"),
        (["0", "1", "2"], "0 .. 2"),
        (["a.0.0", "a.0.1", "a.1.1"], "a.0.0, a.0.1, a.1.1"),
    ],
)
def test_layers_in_runs(names: list[str], shown: str):
    schedule = Schedule(templates=(Template("block", tuple(names)),))
    assert show_paths(names) == shown
    assert parse_schedule(f"template block  {shown}") == schedule


def test_bytes_are_exact_where_parsed_and_round_where_derived():
    counts = (0, 1, 1023, 1024, 1 << 20, 3 << 30, (1 << 30) + 1024, 33000)
    assert [show_bytes(n) for n in counts] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1 MiB", "3 GiB", "1048577 KiB", "33000 B",
    ]  # fmt: skip
    assert [show_about(n) for n in counts] == [
        "0 B", "1 B", "1023 B", "1.0 KiB", "1.0 MiB", "3.0 GiB", "1.0 GiB", "32.2 KiB",
    ]  # fmt: skip


SIZE = "write a whole number of B, KiB, MiB or GiB, such as 32 MiB"
OPERAND = "write an identifier (w1) for what is on the device, a dotted path (layers.3.w) for what is on the host"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("budget 1.5 GiB", f"line 1: budget 1.5 GiB\n'1.5 GiB' is no size: {SIZE}"),
        (
            "forward\nfwd0 computes block.fwd(x0) -> x1",
            "line 2: fwd0 computes block.fwd(x0) -> x1\n"
            "'computes' is no verb: write one of prefetch, compute, offload, update",
        ),
        (
            "forward\n\n0 prefetch layers.0.w -> w0",
            "line 3: 0 prefetch layers.0.w -> w0\n'0' is no label: write an identifier that is none of after, "
            "backward, budget, forward, grads, input_grads, inputs, outputs, slots, template, update",
        ),
        (
            "forward\nfwd0 compute block.fwd(x0,, w0)",
            f"line 2: fwd0 compute block.fwd(x0,, w0)\n'' is no name here: {OPERAND}",
        ),
        (
            "forward\nfetch0 prefetch layers.0.w -> 0w  ; 1 MiB",
            f"line 2: fetch0 prefetch layers.0.w -> 0w  ; 1 MiB\n'0w' is no name here: {OPERAND}",
        ),
        (
            "forward\nfwd0 compute block.fwd(x0) after prev(0)",
            "line 2: fwd0 compute block.fwd(x0) after prev(0)\n'prev(0)' is no name here: write the label of an "
            "earlier op (fwd0), or prev(w0) for the last users of w0 in whatever ran before",
        ),
        ("forward\nfwd0", "line 2: fwd0\nan op is LABEL VERB operands -> results after LABEL, ..."),
        (
            "fwd0 compute block.fwd(x0, w0) -> x1",
            "line 1: fwd0 compute block.fwd(x0, w0) -> x1\nthis is no declaration (budget, template, slots, inputs, "
            "outputs, grads, input_grads) and no body such as fwd(f32[8]) -> f32[8]; "
            "an op stands below the line forward or backward or update",
        ),
        (
            "fwd(f32[8]) -> f32[8]",
            "line 1: fwd(f32[8]) -> f32[8]\nthis body has no template: write 'template NAME  LAYERS' above it",
        ),
        (
            "slots w0 weights 32 MiB",
            "line 1: slots w0 weights 32 MiB\n"
            "slots are declared by names, role and size: write 'slots w0 w1  weights 32 MiB each'",
        ),
        (
            "inputs ids int64[2,64]",
            "line 1: inputs ids int64[2,64]\n'int64[2,64]' is no type: write f32[8,1024], with one of the dtypes f64, "
            "f32, bf16, f16, f8e4m3, f8e5m2, c64, c128, i64, i32, i16, i8, u8, u16, u32, u64, bool",
        ),
        (
            "template block  layers.3 .. layers.0",
            "line 1: template block  layers.3 .. layers.0\n'layers.3 .. layers.0' is no run: "
            "write two names that differ in one number, such as layers.0 .. layers.27",
        ),
    ],
)
def test_parse_quotes_the_line(text: str, error: str):
    with pytest.raises(ValueError) as caught:
        parse_schedule(text)
    assert str(caught.value) == error


def test_diff_of_a_move_and_a_change():
    a = paper(3, 2, 2)
    fetch, moved = a.forward[0], replace(a.forward[3], after=())
    b = a.replace(forward=(fetch, moved, a.forward[1], a.forward[2], *a.forward[4:]), budget=8 << 20)
    assert diff_schedules(show_schedule(a), show_schedule(b)) == dedent("""\
        - budget 16 MiB
        + budget 8 MiB
          template block  layers.0 .. layers.2
            fwd(f32[8,1024], 1 MiB) -> f32[8,1024]                     workspace 96 KiB
          ...
          forward
          fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
        + fetch2   prefetch  layers.2.w               -> w0 ; moved up
          fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
          fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
        - fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w) ; moved up
          fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1
          fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2""")


def test_diff_of_what_is_added_and_removed():
    a = parse_schedule(SMALL)
    kept = SMALL.replace("fetch0   prefetch", "load0    prefetch").replace("after fetch0", "after load0 ; 8 B")
    assert diff_schedules(show_schedule(a), kept) == dedent("""\
          ...
          inputs x0 f32[2]
          forward
        - fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
        + load0    prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
        - fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
        + fwd0     compute   block.fwd(x0, w0)        -> x1           after load0""")


def test_diff_ignores_derived_facts_and_spaces():
    assert diff_schedules(GOLDEN, GOLDEN.replace("4.2 MiB", "4.3 MiB").replace("  -> ", " -> ")) == ""
