"""From a model and a call to a program, without laying out host memory: what the compiler does before anything runs.

The model may be on the host or on `meta`; nothing of its size is allocated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from megatrain import settings
from megatrain.calls import Call, CaptureError, bind_sizes
from megatrain.capture import capture
from megatrain.host import Layout, dense_stride, gradient_dtype, layout_of
from megatrain.observe import Dump, Verify
from megatrain.passes import DEFAULT
from megatrain.pipeline import Observer, Pass, pipeline, run, split
from megatrain.planes import layer_of, planes_of
from megatrain.program import STAGES, Program, Strided

Sizes = Mapping[sympy.Symbol, int]


def program_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: str | torch.device = "cpu",
    memory: str | int | None = None,
    passes: Iterable[Pass | str | Callable[[fx.GraphModule], fx.GraphModule]] = DEFAULT,
    stage: str = "scheduled",
) -> Program:
    """The program of `model(*args, **kwargs)` on `device` within `memory`, as the last pass that gives `stage`, or an
    earlier one, returns it.  Of the arguments only shapes, strides and dtypes are used.  Gradients are wanted if grad
    mode is on.

    Raises ValueError for a stage, device, size or pass that there is not and for a model that is compiled already,
    CaptureError for one that cannot be captured, BudgetError for a `memory` that cannot be met."""
    if stage not in STAGES:
        raise ValueError(f"stage={stage!r}: there is {', '.join(STAGES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():  # torch aborts on fake CUDA tensors then
        raise ValueError("device='cuda': this machine has no CUDA device, or torch was built without CUDA; use 'cpu'")
    if "_megatrain" in model.__dict__:
        raise ValueError(f"this {type(model).__name__} is compiled already: megatrain.schedule(model) is its schedule")
    tensors, names = tensors_of(model)
    call = Call(inspect.signature(model.forward), args, kwargs)
    budget, layers = settings.parse_bytes(memory), layer_of(model)
    first, rest = (up_to(stage, part) for part in split(pipeline(passes)))
    broken = ""
    for distinct in (True, False):
        found = capture(model, model.forward, call, torch.device(device), names, distinct)
        constants = {name: t.contiguous() for name, t in found.constants.items()}
        planes = planes_of(model) | ({"constants.w": tuple(constants)} if constants else {})
        program = described(found.program, tensors | constants, planes, layers, budget)
        observers = observers_of(program)
        program = run(program, first, observers)
        if not (broken := broken_guard(program, call)):
            sizes = bind_sizes(program, call.tensors)
            return run(sized(program, call, sizes or {}), rest, observers) if rest else program
    raise CaptureError(f"the captured graph does not hold for its own sizes ({broken}): give other sizes")


def up_to(stage: str, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes that give `stage` or an earlier one."""
    return tuple(p for p in passes if STAGES.index(p.gives) <= STAGES.index(stage))


def tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[int, str]]:
    """(the parameters and buffers by canonical dotted name, the canonical name of each by its id)."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    names: dict[int, str] = {}
    for name, t in tensors.items():
        names.setdefault(id(t), name)
    return tensors, names


def broken_guard(program: Program, call: Call) -> str:
    """The first guard that the sizes of this call break; empty where the program holds for them."""
    broken = (g for g in program.guards if bind_sizes(program.replace(guards=(g,)), call.tensors) is None)
    return next(map(str, broken), "")


def described(
    program: Program,
    tensors: Mapping[str, Tensor],
    planes: Mapping[str, Sequence[str]],
    layers: Mapping[str, str],
    budget: int,
    backend: str = "eager",
) -> Program:
    """A captured program with what is known of the model's tensors and of the call's surroundings.

    `tensors` are the parameters and buffers and the (contiguous) constants by dotted name, `planes` the names in each
    host plane, `layers` as `planes.layer_of` gives them, `budget` the bytes allowed on the device (0: no limit)."""
    tracked = frozenset(n for n, t in tensors.items() if t.requires_grad)
    return program.replace(
        planes=MappingProxyType({plane: tuple(names) for plane, names in planes.items()}),
        layer_of=MappingProxyType(dict(layers)),
        plane_bytes=MappingProxyType({plane: layout(names, tensors).bytes for plane, names in planes.items()}),
        grad_bytes=MappingProxyType({plane: grad_layout(names, tensors).bytes for plane, names in planes.items()}),
        weights=MappingProxyType({n: (tuple(t.shape), dense_stride(t), t.dtype) for n, t in tensors.items()}),
        needs=tracked if program.training else frozenset(),
        tracked=tracked,
        budget=budget,
        backend=backend,
        autocast=tuple((k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)),
    )


def layout(names: Iterable[str], tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of the plane that holds these tensors."""
    return layout_of((n, tensors[n].dtype, tensors[n].shape, dense_stride(tensors[n])) for n in names)


def grad_layout(names: Iterable[str], tensors: Mapping[str, Tensor]) -> Layout:
    """The layout of the gradients of those tensors that require one."""
    trained = {n: t for n in names if (t := tensors.get(n)) is not None and t.requires_grad}
    return layout_of((n, gradient_dtype(t), t.shape, dense_stride(t)) for n, t in trained.items())


def arguments_of(program: Program, call: Call) -> dict[str, Strided]:
    """(shape, stride, dtype) of the call's tensors, by input name."""
    given = {i.name: call.tensors[i.target] for i in program.inputs if i.kind == "input"}
    return {name: (tuple(t.shape), t.stride(), t.dtype) for name, t in given.items()}


def sized(program: Program, call: Call, sizes: Sizes, extra: bool = False) -> Program:
    """A partitioned program for the sizes of this call, and for the gradients that its arguments require."""
    needs = set(program.needs)
    if program.training:
        needs |= {i.name for i in program.inputs if i.kind == "input" and call.tensors[i.target].requires_grad}
    return program.replace(
        sizes=MappingProxyType(dict(sizes)),
        arguments=MappingProxyType(arguments_of(program, call)),
        extra=extra,
        needs=frozenset(needs),
        training=program.training and bool(needs),
    )


def observers_of(program: Program) -> list[Observer]:
    """What MEGATRAIN_VERIFY and MEGATRAIN_DUMP ask for; `program` is the captured one."""
    folder = settings.dump_dir()
    verifying: list[Observer] = [Verify()] if settings.verify_level() else []
    return [*verifying, Dump(folder, program)] if folder else verifying
