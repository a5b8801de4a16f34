"""From a module and a call to a captured graph.  The only caller of `torch.export`.

The graph is export's training IR (ATen calls as eager dispatches them, composite ones whole), cleaned: regions without
gradients or with another autocast become calls of `megatrain.ops`, metadata assertions go, constants that name the
capture's device name the compiled one, parameters and buffers are `get_attr` nodes.  What export drops is kept beside
it: the guards on sizes, and the structure of the result.
"""

from __future__ import annotations

import inspect
import io
import logging
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx, nn

from megatrain.calls import Call, CaptureError, hooks_of
from megatrain.cleaning import Copier
from megatrain.effects import sweep
from megatrain.faults import check_traced, explained, to_call_whole
from megatrain.opaque import Opaque, tracing
from megatrain.program import Input, Program
from megatrain.structure import Leaf, Structure, flatten, sanitized, unique
from megatrain.watching import Reads, Refused, watched

SYMBOLS = logging.getLogger("torch.fx.experimental.symbolic_shapes")


@dataclass(frozen=True)
class Capture:
    """A captured program with what a call needs: how its result is put together, the tensors that are constants, and
    the attributes that must be what they were.  `whole` gives the children that are called whole, and why."""

    program: Program
    structure: Structure
    constants: Mapping[str, torch.Tensor]
    reads: Reads
    whole: Mapping[str, str]


def capture(
    model: nn.Module,
    forward: Callable[..., Any],
    call: Call,
    device: torch.device,
    names: Mapping[int, str],
    distinct: bool = True,
) -> Capture:
    """Captures `forward` (the model's own, unhooked) for `call`.

    `device` is the device the graph will run on.  `names` maps the id of each parameter and buffer to its canonical
    dotted name.  Sizes of two or more become symbols where the model allows it; sizes 0 and 1 are taken as they are, so
    that the branches that eager takes for them are the ones recorded.  With `distinct`, sizes that occur twice in a
    tensor are told apart first.  Raises CaptureError."""
    home = next((t.device for t in model.state_dict(keep_vars=True).values()), torch.device("cpu"))
    whole: dict[str, str] = {}
    while True:
        error: Exception | None = None
        for sizes in (_distinct_sizes(call), {}) if distinct else ({},):
            structure = Structure()
            try:
                with (
                    watched(model) as reads,
                    _traced(model, forward, call, structure),
                    tracing(model, whole) as opaque,
                ):
                    exported = _export(model, call, sizes, home)
                check_traced(exported)
            except Refused as e:
                error = e
                break
            except Exception as e:
                error = e  # of the call's own sizes, where both fail
                continue
            reads.forget(module for o in opaque.values() if o.hooked for module in o.module.modules())
            program, constants = _captured(exported, structure, call, home, device, names, model, opaque)
            return Capture(program, structure, constants, reads, whole)
        assert error is not None
        if not (more := to_call_whole(model, error, whole)):
            again = isinstance(error, Refused) and error.again
            raise CaptureError(explained(model, error), layerwise=True, again=again) from error
        whole |= more


def _distinct_sizes(call: Call) -> dict[tuple[int, int], int]:
    """(dimension, size) -> another size, for sizes that occur twice in one tensor: export takes equal sizes for one."""
    used = {s for t in call.tensors.values() for s in t.shape}
    found: dict[tuple[int, int], int] = {}
    for t in call.tensors.values():
        first: dict[int, int] = {}
        for dim, size in enumerate(t.shape):
            if size >= 2 and first.setdefault(size, dim) != dim and (dim, size) not in found:
                found[dim, size] = next(n for n in range(size + 1, size + 1000) if n not in used)
                used.add(found[dim, size])
    return found


def _export(model: nn.Module, call: Call, sizes: Mapping[tuple[int, int], int], home: torch.device) -> Any:
    def example(value: torch.Tensor) -> torch.Tensor:
        shape = [sizes.get((d, s), s) for d, s in enumerate(value.shape)]
        if shape == list(value.shape) and not value.is_contiguous():
            return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device=home)
        return torch.empty(shape, dtype=value.dtype, device=home)

    tensors = call.tensors.values()
    shapes = tuple({d: torch.export.Dim.AUTO for d, s in enumerate(t.shape) if s >= 2} for t in tensors)
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), _silenced(SYMBOLS):  # of what it cannot trace
        warnings.filterwarnings(
            "ignore", r"The tensor attributes? .*_flat_weights"
        )  # nn.LSTM's second list of its weights
        return torch.export.export(model, tuple(map(example, tensors)), dynamic_shapes=shapes or None, strict=False)


@contextmanager
def _silenced(logger: logging.Logger) -> Generator[None, None, None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _traced(
    model: nn.Module, forward: Callable[..., Any], call: Call, structure: Structure
) -> Generator[None, None, None]:
    """Inside, the model takes the call's tensors by position, runs `forward` without the root's hooks with them and the
    call's other arguments, and returns its tensors as a flat tuple."""

    tracer = threading.get_ident()

    def flat(*tensors: Any, **named: Any) -> Any:
        if threading.get_ident() != tracer:  # another thread's call, which waits for the capture
            return forward(*tensors, **named) if own is None else own(*tensors, **named)
        args, kwargs = call.arguments(tensors)
        return flatten(forward(*args, **kwargs), structure)

    names = [sanitized(path) for path in call.tensors]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    flat.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in unique(names)])  # type: ignore
    tables = hooks_of(model)
    hooks = [dict(t) for t in tables]
    own = model.__dict__.get("forward")
    model.__dict__["forward"] = flat
    for t in tables:
        t.clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for t, h in zip(tables, hooks, strict=True):
            t.clear()  # type: ignore[attr-defined]
            t.update(h)  # type: ignore[attr-defined]
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def _captured(
    exported: Any,
    structure: Structure,
    call: Call,
    home: torch.device,
    device: torch.device,
    names: Mapping[int, str],
    model: nn.Module,
    opaque: Mapping[str, Opaque],
) -> tuple[Program, dict[str, torch.Tensor]]:
    source: fx.GraphModule = exported.graph_module
    graph = fx.Graph()
    signature = exported.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants: dict[str, torch.Tensor] = {}
    env: dict[fx.Node, Any] = {}
    inputs: list[Input] = []
    symbols: dict[sympy.Symbol, tuple[str, int]] = {}
    guards: list[sympy.Basic] = []
    root = nn.Module()
    paths = iter(call.tensors)
    shape_env: Any = None

    for node in source.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is not None:
            shape_env = shape_env or value.fake_mode.shape_env  # type: ignore[attr-defined]
        if node.name in weights or node.name in signature.inputs_to_lifted_tensor_constants:
            if node.name in weights:
                target = _canonical(model, weights[node.name], names)
            else:
                name = signature.inputs_to_lifted_tensor_constants[node.name]
                value_of = exported.constants[name].detach()
                target = next((n for n, t in constants.items() if _alike(t, value_of)), f"constants.{name}")
                constants.setdefault(target, value_of)
            env[node] = graph.get_attr(target)
            env[node].meta.update(node.meta)
            continue
        path = next(paths)
        env[node] = graph.placeholder(sanitized(path))
        env[node].meta.update(node.meta)
        inputs.append(Input(env[node].name, "input", path))
        for dim, size in enumerate(value.shape):
            expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
            if isinstance(expr, sympy.Symbol) and expr not in symbols:
                symbols[expr] = (env[node].name, dim)
                guards.append(expr >= 2)
                continue
            here = sympy.Symbol(f"{env[node].name}_{dim}", integer=True)
            symbols[here] = (env[node].name, dim)
            guards.append(sympy.Eq(here, expr))

    copier = Copier(graph, home, device, guards, opaque)
    copier.run(source, env)
    results = [env[n] if isinstance(n, fx.Node) else n for n in source.graph.output_node().args[0]]  # type: ignore
    kept: list[fx.Node] = []
    leaves: list[Leaf] = []
    taken = {i.name: i.target for i in inputs}
    for value in results:
        if not isinstance(value, fx.Node):
            leaves.append(Leaf("constant", value=value))
        elif value.op == "placeholder":
            leaves.append(Leaf("input", taken[value.name]))
        elif value.op == "get_attr" and not str(value.target).startswith("constants."):
            leaves.append(Leaf("weight", str(value.target)))
        elif not isinstance(value.meta.get("val"), torch.Tensor):
            leaves.append(Leaf("size", value=value.meta["val"].node.expr))
        else:
            leaves.append(Leaf("result", value=kept.index(value) if value in kept else len(kept)))
            kept.extend([] if value in kept else [value])
    structure.leaves = tuple(leaves)
    graph.output(tuple(kept))
    if shape_env is not None:
        guards.extend(shape_env.replace(g.expr) for g in shape_env.guards)
    free = {s for g in guards for s in g.free_symbols} - set(symbols)
    guards = [g for g in guards if not (g.free_symbols & free) and g is not sympy.true]
    _attach(root, graph, _named(model, names) | constants, source)
    module = fx.GraphModule(root, graph, type(model).__name__)
    sweep(module.graph)
    module.recompile()
    program = Program(
        stage="captured",
        graph=module,
        inputs=tuple(inputs),
        outputs=tuple(structure.names(len(kept))),
        guards=tuple(dict.fromkeys(guards)),
        symbols=tuple((s, *where) for s, where in symbols.items()),
        ties=_ties(model, names),
        training=torch.is_grad_enabled(),
        device=str(device),
    )
    return program, constants


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Constants that can be one, so that layers which each make their own still share a template."""
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return not a.numel() or (not a.is_meta and torch.equal(a, b))


def _canonical(model: nn.Module, target: str, names: Mapping[int, str]) -> str:
    owner, _, leaf = target.rpartition(".")
    return names[id(getattr(model.get_submodule(owner), leaf))]


def _ties(model: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Name -> canonical name, of tensors that have several; those of a part are named as in the whole model."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    local = {id(t): n for n, t in reversed([*model.named_parameters(), *model.named_buffers()])}
    return {n: names[id(t)] for n, t in every if local[id(t)] != n and names[id(t)] != n}


def _named(model: nn.Module, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """The tensors of the model, or of a part, by canonical name."""
    return {names[id(t)]: t for t in (*model.parameters(), *model.buffers())}


def _attach(root: nn.Module, graph: fx.Graph, tensors: Mapping[str, torch.Tensor], source: fx.GraphModule) -> None:
    """Gives `root` the attributes that `graph` names: the model's own tensors, not copies."""
    for node in graph.find_nodes(op="get_attr"):
        target = str(node.target)
        value: Any = tensors[target] if target in tensors else getattr(source, target)
        module: Any = root
        *path, leaf = target.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        if isinstance(value, (nn.Parameter, nn.Module)):
            setattr(module, leaf, value)
        elif leaf not in module._buffers:
            module.register_buffer(leaf, value)
