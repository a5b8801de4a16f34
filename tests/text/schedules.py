"""Schedules for tests: written by hand in the paper's manner, and drawn at random."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatrain.order import place_waits
from megatrain.schedule import HALVES, ITEMSIZE, LANES, Body, Op, Schedule, Slot, Template, TensorType, Value, prev
from megatrain.text import is_label

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For every test on generated schedules: seconds in all, and a slow machine is no failure."""

X = TensorType("f32", (8, 1024))
WEIGHTS = 1 << 20


def paper(layers: int = 3, slots: int = 2, gradient_slots: int = 2, spill: bool = False) -> Schedule:
    """A stack of equal layers, all streamed, all recomputed: weights come through `slots` buffers, as early as these
    allow, and gradients leave through `gradient_slots`.  With `spill`, the inputs of all layers but the first go
    through three activation slots to the host and come back.  Waits are placed."""
    x = ["x0", *(f"a{i % 3}" if spill else f"x{i}" for i in range(1, layers)), f"x{layers}"]
    w = [f"w{i % slots}" for i in range(layers)]
    g = [f"g{i % gradient_slots}" for i in range(layers)]
    forward: list[Op] = []
    for i in range(layers):
        forward.append(Op(f"fwd{i}", "compute", (x[i], w[i]), (x[i + 1],), "block.fwd"))
        forward += [Op(f"spill{i}", "offload", (x[i],), (f"layers.{i}.x",))] if spill and i else []
    backward: list[Op] = []
    for i in reversed(range(layers)):
        backward += [Op(f"unspill{i}", "prefetch", (f"layers.{i}.x",), (x[i],))] if spill and i else []
        backward.append(Op(f"bwd{i}", "compute", (x[i], w[i], f"dx{i + 1}"), (f"dx{i}", g[i]), "block.bwd"))
        backward.append(Op(f"grad{i}", "offload", (g[i],), (f"layers.{i}.dw",)))
    order = list(range(layers))
    fwd, bwd = Body("fwd", (X, WEIGHTS), (X,), 96 << 10), Body("bwd", (X, WEIGHTS, X), (X, WEIGHTS), 160 << 10)
    return place_waits(
        Schedule(
            templates=(Template("block", tuple(f"layers.{i}" for i in order), (fwd, bwd)),),
            slots=(
                *(Slot(f"w{i}", "weights", WEIGHTS) for i in range(slots)),
                *(Slot(f"g{i}", "gradients", WEIGHTS) for i in range(gradient_slots)),
                *(Slot(f"a{i}", "activations", X.nbytes) for i in range(3 * spill)),
            ),
            inputs=(Value("x0", X),),
            outputs=(f"x{layers}",),
            grads=(Value(f"dx{layers}", X),),
            input_grads=("dx0",),
            forward=_with_prefetches(forward, "fetch", "fwd", order, slots),
            backward=_with_prefetches(backward, "refetch", "bwd", order[::-1], slots),
            update=tuple(Op(f"upd{i}", "update", (f"layers.{i}.dw",), (f"layers.{i}.w",), "adamw") for i in order),
            budget=16 << 20,
        )
    )


def _with_prefetches(ops: list[Op], fetch: str, user: str, order: list[int], slots: int) -> tuple[Op, ...]:
    """The ops with a prefetch of each layer's weights, issued as soon as its slot's last user was."""
    fetches = [Op(f"{fetch}{i}", "prefetch", (f"layers.{i}.w",), (f"w{i % slots}",)) for i in order]
    due = {f"{user}{i}": fetches[at + slots] for at, i in enumerate(order) if at + slots < len(fetches)}
    out = fetches[:slots]
    for op in ops:
        out += [op, *([due[op.label]] if op.label in due else [])]
    return tuple(out)


papers = st.builds(
    paper, layers=st.integers(1, 4), slots=st.integers(1, 3), gradient_slots=st.integers(1, 2), spill=st.booleans()
)

SLOTS = ("w0", "w1", "g0")


@st.composite
def tangles(draw: st.DrawFn) -> tuple[Op, ...]:
    """One half of ops that touch slots and planes in any way from any lane, without waits."""
    some = st.lists(st.sampled_from([*SLOTS, "layers.0.w", "layers.0.dw", "x"]), max_size=2, unique=True).map(tuple)
    drawn = draw(st.lists(st.tuples(st.sampled_from(sorted(LANES)), some, some), max_size=12))
    return tuple(Op(f"op{i}", verb, reads, writes) for i, (verb, reads, writes) in enumerate(drawn))


# The names are those that a careless grammar would take for something else.
_bare = st.sampled_from(
    ["x", "w0", "_", "prev", "each", "weights", "workspace", "MiB", "forward", "slots", "compute", "xß"]
)
_label = _bare.filter(is_label)
_word = st.sampled_from(["layers", "0", "1", "2", "10", "02", "after", "budget", "w", "prev", "²"])
_path = st.lists(_word, min_size=1, max_size=3).map(".".join)
_plane = st.tuples(_path, _path).map(".".join)
_operand = _bare | _plane
_tensor = st.builds(
    TensorType, st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 4096), max_size=3).map(tuple)
)
_bytes = (
    st.integers(0, 1 << 40) | st.integers(0, 1 << 20).map(lambda n: n << 10) | st.integers(0, 99).map(lambda n: n << 30)
)


def _some(of: st.SearchStrategy, most: int = 3) -> st.SearchStrategy[tuple]:
    return st.lists(of, max_size=most).map(tuple)


_op = st.builds(
    Op,
    _label,
    st.sampled_from(sorted(LANES)),
    _some(_operand),
    _some(_operand),
    st.just("") | _path,
    _some(_label | _operand.map(prev)),
)
_body = st.builds(Body, _path, _some(_tensor | _bytes), _some(_tensor | _bytes), st.just(0) | _bytes)
_layers = _some(_path, 5) | st.builds(
    lambda name, first, count: tuple(f"{name}.{i}" for i in range(first, first + count)),
    _path,
    st.integers(0, 12),
    st.integers(0, 6),
)
_values = _some(st.builds(Value, _bare, _tensor))
printable = st.builds(
    Schedule,
    templates=_some(st.builds(Template, _bare, _layers, _some(_body))),
    slots=_some(st.builds(Slot, _bare, _bare, st.sampled_from([512, 1 << 20, 33000])), 5),
    inputs=_values,
    outputs=_some(_bare),
    grads=_values,
    input_grads=_some(_bare),
    budget=st.just(0) | _bytes,
    **{half: _some(_op, 5) for half in HALVES},
)
"""Any schedule that can be printed, sense or not."""
