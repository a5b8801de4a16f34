"""differentiate: what each template's bodies take, make and need at the sizes of this call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from megatrain.bodies import Body
from megatrain.costs import work_of
from megatrain.fused import Pair, pair_of
from megatrain.graphs import number
from megatrain.measuring import Trial
from megatrain.meter import Meter
from megatrain.pipeline import Pass
from megatrain.program import BodySpec, Derivative, Layer, Program, TemplateGraph, type_of
from megatrain.rates import Rates

RESERVE = 96 * 2**20
"""Bytes that CUDA libraries hold for themselves: a workspace of 32 MiB for each thread that multiplies matrices (the
caller's and autograd's) and cuBLASLt's."""


@dataclass(frozen=True)
class Differentiate(Pass):
    """Runs every template once on fake tensors, forward and backward, and writes down the types of what it reads and
    makes, which of that carries a gradient, and the device bytes that the bodies need.

    Bodies are autograd on the template's own graph, so there is no code to derive here; with backend "inductor" that
    graph runs compiled, and on CUDA its bodies are measured instead.  A template whose layers differ in what needs a
    gradient becomes one template for each case."""

    name, needs, gives = "differentiate", "partitioned", "differentiated"

    def apply(self, program: Program) -> Program:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        env = _arguments(program, mode)
        carries = {n for n in env if n in program.needs}
        made: dict[object, tuple[TemplateGraph, Derivative, list[Tensor]]] = {}
        templates: list[TemplateGraph] = []
        layers: list[Layer] = []
        for layer in program.layers:
            template = program.template(layer.template)
            values = [env[n] for n in layer.reads]
            needs = tuple(n in carries for n in layer.reads)
            weights = [program.planes[layer.planes[p]][e] for p, e in template.weights]
            trains = tuple(w in (program.needs if program.training else program.tracked) for w in weights)
            key = (template.name, tuple((v.shape, v.stride(), v.dtype) for v in values), needs, trains)
            if key not in made:
                variant = _concrete(program, template, layer, sum(k[0] == template.name for k in made))  # type: ignore
                with mode:
                    specs = [program.weights[w] for w in weights]
                    fakes = [torch.empty_strided(s, st, dtype=d, device=program.device) for s, st, d in specs]
                made[key] = (variant, *_measured(program, variant, layer, values, fakes, needs, trains, mode))
                templates.append(variant)
            variant, derivative, results = made[key]
            layers.append(replace(layer, template=variant.name, ints=()))
            env.update(zip(layer.writes, results, strict=True))
            carries.update(n for n, d in zip(layer.writes, derivative.differentiable, strict=True) if d)
        derivatives = {t.name: d for t, d, _ in made.values()}
        return program.replace(
            templates=tuple(templates), layers=tuple(layers), derivatives=MappingProxyType(derivatives)
        )


def _arguments(program: Program, mode: FakeTensorMode) -> dict[str, Tensor]:
    """A fake tensor for each argument and state of the program, by value name."""
    with mode:
        return {
            i.name: torch.empty_strided(shape, stride, dtype=dtype, device=program.device)
            for i in program.inputs
            if i.kind != "weight"
            for shape, stride, dtype in [program.weights[i.target] if i.kind == "state" else program.arguments[i.name]]
        }


def _concrete(program: Program, template: TemplateGraph, layer: Layer, variants: int) -> TemplateGraph:
    """The template with this call's sizes written into its code, under a name of its own."""
    values = iter([number(e, program.sizes) for e in layer.ints])
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node | float] = {}
    placeholders = template.graph.graph.find_nodes(op="placeholder")
    for n in placeholders[len(placeholders) - template.ints :] if template.ints else []:
        env[n] = next(values)
    for n in template.graph.graph.nodes:
        if n not in env:
            env[n] = graph.node_copy(n, lambda a: env[a])  # type: ignore[arg-type, return-value]
    name = template.name if not variants else f"{template.name}_{variants + 1}"
    code = fx.GraphModule(template.graph, graph)
    return replace(template, name=name, graph=code, ints=0)


def _measured(
    program: Program,
    template: TemplateGraph,
    layer: Layer,
    values: list[Tensor],
    weights: list[Tensor],
    needs: tuple[bool, ...],
    trains: tuple[bool, ...],
    mode: FakeTensorMode,
) -> tuple[Derivative, list[Tensor]]:
    planes = tuple(p for p, _ in template.weights)
    device = torch.device(program.device)

    def body(spec: BodySpec, pair: Pair | None = None) -> Body:
        return Body(spec, template.graph, needs, trains, planes, device, program.autocast, pair)

    def specs(grads: tuple[int, ...]) -> dict[str, BodySpec]:
        """Those of all kinds, with gradients through these results."""
        wants, trained = tuple(i for i, n in enumerate(needs) if n), tuple(set(planes))
        found = {kind: BodySpec(template.name, forward=True, keep=kind != "fwd") for kind in ("fwd", "fwd.keep")}
        for kind in ("bwd", "bwd.keep"):
            keep = kind != "bwd"
            found[kind] = BodySpec(template.name, forward=False, keep=keep, grads=grads, wants=wants, trains=trained)
        return found

    known = [*values, *weights]
    workspace: dict[str, int] = {}
    forward = body(BodySpec(template.name, forward=True))
    with mode, Meter(known) as meter:
        results = forward.forward(values, weights, program.training)
    workspace["fwd"] = meter.peak - meter.bytes_of(results)
    flags: tuple[bool, ...] = (False,) * len(results)
    kept = 0
    if program.training and (any(needs) or any(trains)):
        with mode:
            _, recorded = forward.recorded(values, weights)
        flags = tuple(bool(r.requires_grad) for r in recorded)
        del recorded
        grads = tuple(i for i, f in enumerate(flags) if f)
        with mode:
            given = [torch.empty_like(results[i]) for i in grads]
        kinds = specs(grads)
        with mode, Meter([*known, *given]) as meter:
            made, _ = body(kinds["bwd"]).backward(values, weights, None, None, given, [], {})
        workspace["bwd"] = meter.peak - meter.bytes_of(made)
        with mode, Meter(known) as meter:
            *out, graph = body(kinds["fwd.keep"]).forward(values, weights, True)
        meter.collect()
        workspace["fwd.keep"] = max(0, meter.peak - meter.now)
        del out
        meter.collect()
        kept = meter.now  # with results that the graph saved: they may die as values before it does
        with mode, Meter([*known, *given]) as meter:
            made, _ = body(kinds["bwd.keep"]).backward(values, weights, graph, None, given, [], {})
        workspace["bwd.keep"] = meter.peak - meter.bytes_of(made)
        del graph, made
    seldom = _seldom(program, layer, results, flags)
    seconds = work_of(template.graph).seconds(program.rates or Rates(), program.sizes)
    grads = tuple(i for i, f in enumerate(flags) if f and i not in seldom)
    if (pair := pair_of(template, program.backend, grads)) and device.type == "cuda":
        kinds = specs(grads) if "bwd" in workspace else {"fwd": forward.spec}
        trial = Trial(lambda spec: body(spec, pair), kinds, values, weights, grads, program.training)
        if found := trial.needs():
            workspace, kept, seconds = found
    if device.type == "cuda":
        workspace = {kind: size + RESERVE for kind, size in workspace.items()}
    reads, writes = tuple(map(type_of, values)), tuple(map(type_of, results))
    dense = tuple(r.is_contiguous() for r in results)
    sizes, times = MappingProxyType(workspace), MappingProxyType(seconds)
    return Derivative(reads, writes, needs, trains, flags, dense, seldom, kept, sizes, times), results


def _seldom(program: Program, layer: Layer, results: list[Tensor], flags: tuple[bool, ...]) -> tuple[int, ...]:
    """Results that the caller gets beside a loss that comes from this layer too, and that no layer reads."""
    given = [n in program.outputs and f for n, f in zip(layer.writes, flags, strict=True)]
    if not any(g and r.dim() == 0 for g, r in zip(given, results, strict=True)):
        return ()
    read = {n for other in program.layers for n in other.reads}
    return tuple(i for i, n in enumerate(layer.writes) if given[i] and results[i].dim() and n not in read)
