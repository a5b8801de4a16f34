"""When values die and what the device holds meanwhile."""

from __future__ import annotations

from schedules import paper

from megatrain.liveness import device_bytes, last_uses, peak, value_types
from megatrain.schedule import Schedule, TensorType
from megatrain.text import parse_schedule

STEP = parse_schedule("""
template block  layers.0, layers.1
  fwd(f32[4], 64 B) -> f32[4]       workspace 100 B
  bwd(f32[4], 64 B, f32[4]) -> f32[4], 64 B
template head  head
  fwd(f32[4], i64[2]) -> f32[], f32[8]
  bwd(f32[4], i64[2], f32[]) -> f32[4]
slots w0 g0  weights 64 B each
inputs x0 f32[4], labels i64[2], unread f32[2]
outputs loss, logits
forward
fetch0   prefetch  layers.0.w               -> w0
fwd0     compute   block.fwd(x0, w0)        -> x1
fetch1   prefetch  layers.1.w               -> w0
fwd1     compute   block.fwd(x1, w0)        -> x2
fwd2     compute   head.fwd(x2, labels)     -> loss, logits
done     offload   g0                       -> layers.9.dw
backward
grads dloss f32[]
input_grads dx0
bwd2     compute   head.bwd(x2, labels, dloss) -> dx2
bwd1     compute   block.bwd(x1, w0, dx2)   -> dx1, g0
grad1    offload   g0                       -> layers.1.dw
bwd0     compute   block.bwd(x0, w0, dx1)   -> dx0, g0
grad0    offload   g0                       -> layers.0.dw
""")


def test_last_uses():
    assert last_uses(STEP) == {
        "fetch0": ("unread",),
        "fwd0": (),
        "fetch1": (),
        "fwd1": (),
        "fwd2": (),
        "done": ("loss", "logits"),
        "bwd2": ("labels", "x2", "dloss"),
        "bwd1": ("x1", "dx2"),
        "grad1": (),
        "bwd0": ("x0", "dx1"),
        "grad0": ("dx0",),
    }


def test_a_result_that_the_backward_reads_lives_on():
    reads = STEP.replace(backward=(STEP.backward[0], *STEP.backward[1:]), outputs=("x2", "logits"))
    dying = last_uses(reads)
    assert (dying["done"], dying["fwd2"]) == (("logits",), ("loss",))
    assert "x2" in dying["bwd2"]


def test_without_a_backward_everything_dies_in_the_forward():
    dying = last_uses(STEP.replace(backward=(), grads=(), input_grads=()))
    assert (dying["fwd0"], dying["fwd1"], dying["fwd2"]) == (("x0",), ("x1",), ("labels", "x2"))


def test_value_types_are_those_of_the_bodies():
    types = value_types(STEP)
    assert (types["loss"], types["logits"], types["dx1"]) == tuple(TensorType("f32", s) for s in ((), (8,), (4,)))
    assert "g0" not in types


def test_device_bytes():
    slots, x = 128, 512
    assert device_bytes(STEP) == {
        "fetch0": slots + 3 * x,
        "fwd0": slots + 3 * x + 100,
        "fetch1": slots + 3 * x,
        "fwd1": slots + 4 * x + 100,
        "fwd2": slots + 6 * x,
        "done": slots + 6 * x,
        "bwd2": slots + 8 * x,  # the caller may still hold the loss and the logits
        "bwd1": slots + 6 * x,
        "grad1": slots + 4 * x,
        "bwd0": slots + 5 * x,
        "grad0": slots + 3 * x,
    }
    assert peak(STEP) == slots + 8 * x


def test_spilled_inputs_cost_their_slots_only():
    kept, spilled = paper(4), paper(4, spill=True)
    kept_layers = [name for names in last_uses(kept).values() for name in names if name.startswith("x")]
    spilled_layers = [name for names in last_uses(spilled).values() for name in names if name.startswith("x")]
    assert (sorted(kept_layers), sorted(spilled_layers)) == (["x0", "x1", "x2", "x3", "x4"], ["x0", "x4"])


def test_a_schedule_without_ops_holds_its_slots():
    assert (peak(Schedule()), peak(STEP.replace(forward=(), backward=()))) == (0, 128)
