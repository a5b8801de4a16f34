"""plan: what lives where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatrain.emission import emitted, used_planes
from megatrain.liveness import peak
from megatrain.pipeline import Pass
from megatrain.program import Choice, Program
from megatrain.program import Plan as Residency
from megatrain.simulate import timing_of
from megatrain.text import show_about

GRID = 8
"""Steps from no plane on the device to as many as fit, of which each is tried."""


NEAR = 1.01
"""Of steps as near as this the one is taken that moves least: with most planes on the device."""


class BudgetError(ValueError):
    """The device budget cannot be met; `smallest` is the least that can, in bytes."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Plan(Pass):
    """The paper's plan: weights stream through `slots` slots, layers are recomputed from their inputs, and as many
    layers' inputs as the budget asks for wait on the host, the first layers' first, since theirs wait longest.  A
    layer that runs hooks of the user's keeps its graph: recomputing would run them twice.  With `activations="keep"`
    the last layers keep their autograd graphs instead, as many as fit.  Where another forward is outstanding, every
    layer's inputs go to the host.

    What room is left then goes to planes that live on the device, to graphs of compiled layers, or to that of what
    comes after the last layer (the head and the loss), whose backward comes next: in shares of which each is simulated,
    and the one with the shortest step is taken.  For compiled layers so is sending all inputs to the host, where that
    has the memory twice.  Raises BudgetError."""

    name, needs, gives = "plan", "differentiated", "planned"
    slots: int = 2
    activations: str = "recompute"

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"plan{{slots={self.slots}}}: at least one slot is needed")
        if self.activations not in ("recompute", "keep"):
            raise ValueError(f"plan{{activations={self.activations!r}}}: use 'recompute' or 'keep'")

    def apply(self, program: Program) -> Program:
        layers = [layer.name for layer in program.layers]
        count = len(layers)
        once = frozenset(layer.name for layer in program.layers if program.template(layer.template).once)

        later = deferred(program)

        def tried(slots: int, keep: int, spill: int, resident: tuple[str, ...] = ()) -> Program:
            keeps = frozenset(layers[count - keep :]) | once
            plan = Residency(slots, keeps, frozenset(layers[:spill]), resident=resident, deferred=later)
            made = program.replace(plan=plan)
            return made.replace(plan=replace(plan, peak=peak(emitted(made)[0])))

        def settled(made: Program) -> list[Program]:
            """With planes resident beside it: as many as fit, none, and some numbers between."""
            plan, planes = made.plan, program.candidates
            keep = count - min((i for i, n in enumerate(layers) if n in plan.keep - once), default=count)

            def holding(n: int) -> Program:
                return tried(plan.slots, keep, len(plan.spill), planes[:n])

            if not planes or not program.budget:
                return [made]
            most = _most(len(planes), lambda n: fits(holding(n)))
            return [holding(n) for n in sorted({most * i // GRID for i in range(GRID + 1)}, reverse=True)]

        def filled(made: Program) -> Program:
            """With as many layers keeping their graphs as fit beside it, where these are compiled: a graph then keeps
            little, and what it keeps is known."""
            plan = made.plan
            if program.backend == "eager" or not program.training or program.extra or not program.budget:
                return made
            least = len(plan.keep - once)

            def keeping(n: int) -> Program:
                return tried(plan.slots, max(n, least), len(plan.spill), plan.resident)

            return keeping(_most(count, lambda n: fits(keeping(n))))

        def fits(made: Program) -> bool:
            return not program.budget or made.plan.peak <= program.budget

        if program.extra and program.training:
            choices = [tried(self.slots, 0, count), tried(1, 0, count)]
        elif self.activations == "keep" and program.training:
            most = _most(count, lambda n: fits(tried(self.slots, n, 0)))
            choices = [tried(self.slots, most, 0)]
        else:
            last = program.training and not program.layers[-1].label.isdigit()
            choices = [tried(self.slots, 1, 0)] if last else []
            if not choices or not fits(choices[0]) or program.candidates:
                choices += [tried(self.slots, 0, 0)]
        if not program.extra and program.training and not fits(choices[-1]):
            spared = count - _most(count, lambda n: fits(tried(self.slots, 0, count - n)))
            choices += [tried(self.slots, 0, spared)]
        if not fits(choices[-1]):  # spilling costs slots of its own, so that more of it is not always less
            few = range(count + 1) if program.training else (0,)
            choices += [tried(slots, 0, spill) for slots in dict.fromkeys((self.slots, 1)) for spill in few]
        if program.backend != "eager" and program.training and not program.extra and program.budget:
            bare = tried(self.slots, 0, count)  # the link is idle where layers are long: room for their graphs
            if 0 < spilled_bytes(bare) <= program.spare // 2:
                choices.append(bare)
        found: dict[tuple[object, ...], tuple[Choice, Program]] = {}
        for made in [m for base in choices if fits(base) for m in settled(base)]:
            made = filled(made)
            plan = made.plan
            key = (plan.slots, plan.keep, plan.spill, plan.resident)
            if key not in found:
                timing = timing_of(made)
                kept, gone = len(plan.keep - once), len(plan.spill)
                choice = Choice(len(plan.resident), kept, gone, plan.peak, timing.step, timing.busy)
                found[key] = choice, made
        if found:
            shortest = min(choice.step for choice, _ in found.values())
            ranked = sorted(found.values(), key=lambda f: f[0].step)
            near = [f for f in ranked if f[0].step <= NEAR * shortest]
            best = max(near, key=lambda f: f[0].resident)
            ranked.sort(key=lambda f: f is not best)
            return best[1].replace(plan=replace(best[1].plan, choices=tuple(choice for choice, _ in ranked)))
        least = min(choices, key=lambda made: made.plan.peak).plan
        raise BudgetError(
            f"a device budget of {show_about(program.budget)} is too small for this model at these sizes: "
            f"the smallest that works is {show_about(least.peak)} ({least.slots} weight slot{'s' * (least.slots > 1)}, "
            f"inputs of {len(least.spill)} of {count} layers on the host)\n"
            f"compile with memory='{_rounded_up(least.peak)}' or more, or make the batch smaller",
            least.peak,
        )


def deferred(program: Program) -> tuple[str, ...]:
    """Planes whose update waits until the backward has ended: every second one, for as many as there is host memory to
    keep their gradients in.

    An update takes the host longer than a backward of few tokens takes the device.  With all updates in the order of
    the backward the next forward would wait for the last of them, its own first layer's.  This way half of the updates
    run beside the backward, and the others, first layer first, just ahead of the forward."""
    if not program.update:
        return ()
    found: list[str] = []
    room = program.gradient_room
    for plane in used_planes(program)[::2]:
        size = program.grad_bytes[plane]
        if size and size <= room:
            found.append(plane)
            room -= size
    return tuple(found)


def spilled_bytes(program: Program) -> int:
    """Host bytes of the layer inputs that a plan sends there."""
    schedule = emitted(program)[0]
    return sum(schedule.slot_bytes[op.reads[0]] for op in schedule.forward if op.verb == "offload")


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0..count for which `fits` holds, which it does up to some n; 0 where it never does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _rounded_up(size: int) -> str:
    """`size` bytes or little more, as `memory=` takes it."""
    unit, step = ("KiB", 2**10) if size < 2**26 else ("MiB", 2**20)
    return f"{-(-size // step)}{unit}"
