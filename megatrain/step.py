"""One call of a compiled model, as it runs and as autograd sees it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor, nn

from megatrain.calls import Call
from megatrain.deferred import quiet
from megatrain.executable import Executable
from megatrain.runtime import Frame
from megatrain.watching import transformed

if TYPE_CHECKING:
    from megatrain.compiled import Compiled
    from megatrain.host import HostBuffer
    from megatrain.made import Made


class Running:
    """One call of the model: its forward half now, its backward half when autograd asks for it."""

    def __init__(
        self, compiled: Compiled, made: Made, call: Call, sizes: Mapping[sympy.Symbol, int], extra: bool, frame: Frame
    ):
        self.compiled, self.made, self.call, self.sizes, self.extra, self.frame = (
            compiled,
            made,
            call,
            sizes,
            extra,
            frame,
        )
        program = made.program
        used = {n for names in program.planes.values() for n in names}
        read = {i.target for i in program.inputs if i.kind == "weight"} & used
        self.parameters = {
            n: t for n, t in compiled.tensors.items() if n in read and t.requires_grad and isinstance(t, nn.Parameter)
        }
        inputs = [i for i in program.inputs if i.kind == "input"]
        self.inputs = {i.name: i.target for i in inputs if call.tensors[i.target].requires_grad}
        self.versions = {n: compiled.tensors[n]._version for n in read if n in compiled.tensors}
        self.outputs: list[tuple[Tensor, int]] = []
        self.store = compiled.runtime.store
        self.update = compiled.updates.rule

    def forward(self) -> tuple[Tensor, ...]:
        c, program, frame = self.compiled, self.made.program, self.frame
        for i in program.inputs:
            if i.kind == "input":
                t = self.call.tensors[i.target].detach()
                frame.values[i.name] = t.clone() if t.device == c.device else t.to(c.device)
            elif i.kind == "state":
                frame.values[i.name] = c.tensors[i.target].detach().to(c.device, copy=True)
        s = frame.executable.schedule
        c.ran("train" if s.backward else "eval", frame.executable)
        try:
            c.refresh(frame.executable, program)
            c.runtime.run("forward", frame)
        except BaseException:
            frame.values.clear()
            raise
        values = [frame.values[n] for n in s.outputs]
        own = len(values) - len(program.writes_back)
        targets = {i.name: i for i in program.inputs}
        with torch.no_grad():
            for name, new in zip(program.writes_back, values[own:], strict=True):
                target = targets[name]
                old = c.tensors[target.target] if target.kind == "state" else self.call.tensors[target.target]
                old.copy_(new)
        results = [v.detach() for v in values[:own]]
        later = {n for op in s.backward for n in op.reads}
        for n in s.outputs:
            if n not in later:
                frame.values.pop(n, None)
        self.outputs = [(frame.values[n], frame.values[n]._version) for n in s.outputs[:own] if n in frame.values]
        return tuple(results)

    def differentiable(self) -> list[bool]:
        given = {v.name.removesuffix("_given") for v in self.frame.executable.schedule.grads}
        own = len(self.frame.executable.schedule.outputs) - len(self.made.program.writes_back)
        return [f"d{n}" in given for n in self.frame.executable.schedule.outputs[:own]]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        c, frame = self.compiled, self.frame
        c.updates.settle_gradients()
        if transformed() or any(map(batched, grads)):
            raise RuntimeError(
                "vmap over the backward of a compiled model (is_grads_batched=True) is not supported\n"
                "call the model and backward once for each, or use an eager copy: copy.deepcopy(model)"
            )
        if not frame.values and not frame.spilled:
            raise RuntimeError(
                "backward through the same forward a second time: its values are gone\n"
                "call the model again, or add the losses up and call backward once"
            )
        if c.runtime.store is not self.store:
            raise RuntimeError(
                "a parameter or module was replaced between this forward and its backward, and planes were laid out "
                "again\n"
                "call backward before the change, or the model again after it"
            )
        with quiet():
            changed = [n for n, v in self.versions.items() if c.tensors[n]._version != v]
        if changed or any(t._version != v for t, v in self.outputs):
            what = changed[0] if changed else "a result of the model"
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what} changed between this forward and its backward (a step in between?)\n"
                "call backward before the step, or the model again after it"
                + ("\nwith update='in-backward' each backward is a step: one forward at a time" if self.update else "")
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "double backward (create_graph=True) through a compiled model is not supported\n"
                "compute this gradient with an eager copy: copy.deepcopy(model)"
            )
        flags = tuple(g is not None for g in grads)
        with quiet():
            partial = not all(map(accumulates, self.parameters.values()))
            adding = {} if partial else self.adding()
        executable = c.executable(self.made, self.call, self.sizes, self.extra, flags, frozenset(adding))
        full = all(f or not d for f, d in zip(flags, self.differentiable(), strict=True))
        if full and self.update == c.updates.rule and not adding:
            executable = frame.executable
        fetched = {n for op in executable.schedule.backward if op.verb == "prefetch" for n in op.reads}
        adding = {p: held for p, held in adding.items() if f"{p.removesuffix('.w')}.dw" in fetched}  # used once
        frame.executable = executable
        s = executable.schedule
        c.ran("train", executable)
        for v in s.grads:
            output = v.name[1:].removesuffix("_given")
            g = grads[s.outputs.index(output)]
            assert g is not None
            frame.values[v.name] = g.detach().to(c.device)
        for op in s.backward:
            for target in op.writes:
                if op.verb == "offload" and target.endswith(".dw"):
                    plane = f"{target.removesuffix('.dw')}.w"
                    layout = executable.grad_layouts[plane]
                    frame.grads[target] = adding.get(plane) or c.runtime.gradients.take(target, layout)
        old = self.fetched(adding)
        frame.added = {plane: set(names) for plane, names in old.items()}
        c.runtime.claim(executable)
        filled = {p for p in executable.residents if self.begun(p, executable, partial)}
        try:
            frame.land = c.updates.begin_backward(self.parameters, partial)
            c.runtime.ring(executable)
            c.updates.end_backward(c.runtime.run("backward", frame), self.parameters, frame.defined)
            inputs = {n[1:]: frame.values.get(n) for n in s.input_grads}
            by_name: dict[str, Tensor] = {}
            for target, (_, tensors) in frame.grads.items():
                plane = f"{target.removesuffix('.dw')}.w"
                names = [e.name for e in executable.grad_layouts[plane].entries]
                has = old.get(plane, {})
                made = {n: t for n, t in zip(names, tensors, strict=True) if n in frame.defined}
                for n in has.keys() & made.keys():  # in the place of autograd
                    torch.autograd.graph.increment_version(has[n])
                c.updates.norms.note(plane, [has.get(n, made.get(n)) for n in names])
                by_name |= {n: t for n, t in made.items() if n not in has}
            for plane in executable.residents:
                by_name |= self.resided(plane, executable, plane in filled)
            if waiting := [p for p in executable.residents if p not in filled]:
                torch.autograd.Variable._execution_engine.queue_callback(functools.partial(landed, c, waiting))  # type: ignore
        finally:
            frame.values.clear()
            frame.spilled.clear()
            frame.done()
            frame.grads.clear()
        out: list[Tensor | None] = [by_name.pop(n, None) for n in self.parameters]
        for name, target in self.inputs.items():
            g = inputs.get(name)
            out.append(None if g is None else g.detach().to(self.call.tensors[target].device))
        return out

    def adding(self) -> dict[str, tuple[HostBuffer, list[Tensor]]]:
        """The planes whose gradients, of backwards before, lie as this one's will: these are added on the device, with
        fresh tensors over the memory.  Not where somebody listens to gradients, where another forward's may come in the
        same backward, and not with backend "eager": autograd adds what one backward makes first."""
        c = self.compiled
        others = any(f.values for f in c.runtime.frames if f is not self.frame) or c.task == engine_run()
        c.task = engine_run()
        if not c.adds or c.updates.rule or others:
            return {}
        found: dict[str, tuple[HostBuffer, list[Tensor]]] = {}
        for op in self.frame.executable.schedule.backward:
            for target in op.writes:
                if op.verb != "offload" or not target.endswith(".dw"):
                    continue
                plane = f"{target.removesuffix('.dw')}.w"
                layout = self.frame.executable.grad_layouts[plane]
                ps = [c.tensors[entry.name] for entry in layout.entries]
                if all(p.grad is None for p in ps) or any(map(listened, ps)):
                    continue
                if held := c.runtime.gradients.holding(target, layout, [p.grad for p in ps]):
                    found[plane] = held
        return found

    def fetched(self, adding: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """By plane, the gradients that there are, by name."""
        c = self.compiled
        with quiet():
            names = {plane: [e.name for e in self.frame.executable.grad_layouts[plane].entries] for plane in adding}
            grads = {plane: {n: c.tensors[n].grad for n in ns} for plane, ns in names.items()}
        return {plane: {n: g for n, g in found.items() if g is not None} for plane, found in grads.items()}

    def begun(self, plane: str, executable: Executable, partial: bool) -> bool:
        """A backward is about to add to the gradients of a plane that lives on the device: those that somebody has
        dropped or replaced are no longer there.  Whether the new ones must be filled at once, because the host is to
        add them to others, or because (`partial`) not all go into `.grad`."""
        c = self.compiled
        resident = c.runtime.residents[plane]
        if resident.task == engine_run() != -1 and not partial:  # another forward's, on their way to `.grad`
            return False
        if resident.handed() or partial:
            c.updates.settle(plane)
        filled = partial
        with quiet():
            for e in executable.grad_layouts[plane].entries:
                grad = c.tensors[e.name].grad
                if grad is None or not resident.holds_gradient(e.name, grad):
                    resident.has.discard(e.name)
                    resident.given.pop(e.name, None)
                    filled = filled or grad is not None
        return filled

    def resided(self, plane: str, executable: Executable, filled: bool) -> dict[str, Tensor]:
        """What autograd is given for the gradients of a plane that live on the device: host tensors, once, which are
        filled when somebody looks at them, or now if `filled`."""
        c = self.compiled
        resident, layout = c.runtime.residents[plane], executable.grad_layouts[plane]
        names = [e.name for e in layout.entries]
        new = [n for n in names if n in resident.has and n not in resident.given]
        found: dict[str, Tensor] = {}
        if new:
            buffer, tensors = c.runtime.unfilled.take(f"{plane.removesuffix('.w')}.dw", layout)
            if buffer.written:
                buffer.flat.zero_()
                buffer.written = False
            resident.buffers.append(buffer)
            resident.task = engine_run()
            settle = functools.partial(c.updates.settle, plane)
            for n, t, alias in zip(names, tensors, buffer.tensors(layout), strict=True):
                if n in new:
                    found[n] = resident.land(n, t, alias, settle)
        c.updates.norms.note(plane, [resident.given.get(n) for n in names])
        if filled:
            c.runtime.pull(plane)
        else:
            c.updates.guard(plane, [c.tensors[n] for n in names if n in resident.has])  # type: ignore[misc]
        return found


def engine_run() -> int:
    """The number of autograd's backward that runs in this thread; -1 where none does."""
    return torch._C._current_graph_task_id()


def landed(c: Compiled, planes: Sequence[str]) -> None:
    """A backward has ended that was given gradients of these planes to be filled, which are zeros until then.  Those
    that autograd has added to others, of another forward or another loss, or copied, are added to what it made."""
    for plane in planes:
        resident = c.runtime.residents.get(plane)
        for name in list(resident.given) if resident else ():
            with quiet(), torch.no_grad():
                grad = c.tensors[name].grad
                if resident and grad is not None and not resident.holds_gradient(name, grad):
                    if name in resident.has:
                        grad.add_(resident.gradient_views[name].to(grad.device))
                    resident.has.discard(name)
                    resident.given.pop(name)


def accumulates(p: Tensor) -> bool:
    """Whether the backward that runs adds to the parameter's `.grad`: not in `torch.autograd.grad`, and not for other
    parameters than `backward(inputs=...)` names."""
    node = torch.autograd.graph.get_gradient_edge(p).node
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:  # a leaf in torch.autograd.grad
        return False


def listened(p: Tensor) -> bool:
    """Whether somebody is called with the parameter's gradient."""
    return bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))


def batched(g: Tensor | None) -> bool:
    """Whether vmap, the new one or autograd's own, has wrapped the tensor."""
    return g is not None and "Batched" in repr(torch._C._dispatch_keys(g))  # autograd's own key has no public name


class Step(torch.autograd.Function):
    """A call of a compiled model as autograd sees it: its parameters and inputs in, its results out."""

    @staticmethod
    def forward(ctx: Any, step: Running, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = step.forward()
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r, d in zip(results, step.differentiable(), strict=True) if not d))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        step: Running = ctx.step
        with step.compiled.lock:
            return (None, *step.backward(grads))
