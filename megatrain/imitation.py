"""What is known of a module that cannot be traced: it is run on random tensors in the place of fake ones.

That tells what it returns, how sizes of its results follow from those of its arguments, which results a gradient comes
through, and what memory it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from megatrain.meter import Meter
from megatrain.structure import Structure, flatten
from megatrain.watching import Refused, is_plain, unwatched

if TYPE_CHECKING:
    from megatrain.opaque import Opaque

Shape = tuple[Any, ...]
"""Sizes as sympy expressions or integers."""


@dataclass(frozen=True)
class Sizes:
    """The shapes of a module's arguments and of its results, in the symbols of the trace."""

    given: tuple[Shape, ...]
    results: tuple[tuple[Shape, torch.dtype], ...]

    def made(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fake results of a call with these fake tensors."""
        env = symbols_of(tensors)

        def size(expr: Any) -> Any:
            if isinstance(expr, int) or expr.is_number:
                return int(expr)
            assert env is not None
            return env.create_symintnode(expr, hint=int(expr.xreplace(hints_of(env))))

        like = tensors[0] if tensors else torch.empty(0)
        return [like.new_empty([size(e) for e in shape], dtype=dtype) for shape, dtype in self.results]

    def broken(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> str:
        """In words, how results of a real call are not what was expected; empty where they are."""
        pairs = zip(self.given, tensors, strict=True)
        known = {e: s for shape, t in pairs for e, s in zip(shape, t.shape, strict=True)}
        known = {a * b: known[a] * known[b] for a, b in pairs_of(known)} | known
        if len(results) != len(self.results):
            return f"returns {len(results)} tensors, not {len(self.results)}"
        for r, (shape, dtype) in zip(results, self.results, strict=True):
            expected = [known[e] if e in known else int(e) for e in shape]
            if expected != list(r.shape) or dtype != r.dtype:
                return f"returns a tensor {list(r.shape)} of {r.dtype}, not {expected} of {dtype}"
        return ""


def followed(opaque: Opaque, tensors: Sequence[Tensor]) -> Sizes:
    """How the results' sizes follow from those of the arguments: found on two sets of sizes.  Raises Refused where they
    do not, and where a result that is no tensor differs between two runs."""
    given = tuple(tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in t.shape) for t in tensors)
    env = symbols_of(tensors)
    hints = hints_of(env)
    free = sorted({s for shape in given for e in shape if isinstance(e, sympy.Basic) for s in e.free_symbols}, key=str)
    other = {s: hints[s] + 1 + i for i, s in enumerate(free)}
    first, second, third = (
        ran(opaque, tensors, [[size(e, at) for e in shape] for shape in given], seed)
        for at, seed in ((hints, 1), (hints, 2), (hints | other, 3))
    )
    if not first[1] == second[1] == third[1]:
        raise Refused("a result that is no tensor depends on the data", "return it as a tensor")
    flatten(first[0], opaque.structure)
    known: dict[Any, None] = dict.fromkeys(
        e for shape in given for e in shape if isinstance(e, sympy.Basic) and not e.is_number
    )
    candidates = [*known, *(a * b for a, b in pairs_of(known))]
    results: list[tuple[Shape, torch.dtype]] = []
    for a, b, c in zip(first[2], second[2], third[2], strict=True):
        if a.shape != b.shape or a.dim() != c.dim() or not a.dtype == b.dtype == c.dtype:
            raise Refused("the size of a result depends on the data", "return tensors whose sizes are known beforehand")
        shape: list[Any] = []
        for here, there in zip(a.shape, c.shape, strict=True):
            fits = (e for e in candidates if size(e, hints) == here and size(e, hints | other) == there)
            expr = here if here == there else next(fits, None)
            if expr is None:
                raise Refused(
                    f"the size {here} of a result is none of its arguments' sizes, nor a product of two",
                    "return tensors of the sizes of arguments",
                )
            shape.append(expr)
        results.append((tuple(shape), a.dtype))
    return Sizes(given, tuple(results))


def pairs_of(sizes: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return itertools.combinations_with_replacement(list(sizes), 2)


def symbols_of(tensors: Sequence[Tensor]) -> Any:
    """The symbols of the trace that sizes are written in; None where none is."""
    return next((s.node.shape_env for t in tensors for s in t.shape if isinstance(s, torch.SymInt)), None)


def hints_of(env: Any) -> dict[Any, int]:
    """The sizes that the trace was begun with."""
    found = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})  # the second until torch 2.12
    return {k: int(v) for k, v in found.items()}


def size(e: Any, at: dict[Any, int]) -> int:
    return int(e.xreplace(at)) if hasattr(e, "xreplace") else int(e)


def ran(
    opaque: Opaque, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], seed: int
) -> tuple[Any, list[Any], list[Tensor]]:
    """(what the module returns on random tensors of these shapes, the plain values among it, its tensors)."""
    with random_tensors(seed), torch.no_grad():
        made = [sampled(t, shape, signed=seed > 1) for t, shape in zip(tensors, shapes, strict=True)]
        versions = [t._version for t in made]
        result = opaque.result(made)
        skip = len(opaque.names) + len(opaque.buffer_names)
        if versions[skip:] != [t._version for t in made[skip:]]:
            raise Refused("it writes into an argument", "have it return what it makes, or write into a clone")
        leaves = [leaf for leaf in pytree.tree_leaves(result) if not isinstance(leaf, Tensor)]
        if not all(map(is_plain, leaves)):
            raise Refused("it returns what is neither a tensor nor a plain value", "return tensors")
        return result, leaves, list(flatten(result, Structure()))


@contextmanager
def random_tensors(seed: int) -> Generator[None, None, None]:
    """Inside, tensors are real and generators start from `seed`; afterwards all is as it was."""
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), unwatched():
        torch.manual_seed(seed)
        yield


def sampled(t: Tensor, shape: Sequence[int], signed: bool = False) -> Tensor:
    """A random tensor like `t` of another shape, on the host: numbers between 0 and 1, or normal ones if `signed`,
    indices 0, masks of ones."""
    made = torch.zeros(tuple(map(int, shape)), dtype=t.dtype)
    if t.is_floating_point():
        made.normal_() if signed else made.uniform_()
    elif t.dtype == torch.bool:
        made.fill_(True)
    return made


class Imitation(torch.autograd.Function):
    """A call of an opaque module on fake tensors, with the gradients and the memory of a real one."""

    @staticmethod
    def forward(ctx: Any, opaque: Opaque, *fakes: Tensor) -> tuple[Tensor, ...]:
        needs = ctx.needs_input_grad[1:]
        meters = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, Meter)]
        with random_tensors(1), torch.set_grad_enabled(any(needs)):
            with _disable_current_modes():
                leaves = [sampled(t, t.shape).requires_grad_(n) for t, n in zip(fakes, needs, strict=True)]
            for meter in meters:
                meter.known |= {t.untyped_storage()._cdata for t in leaves}
            inputs = [t.view_as(t) if n else t for t, n in zip(leaves, needs, strict=True)]
            results = [r.contiguous() for r in flatten(opaque.result(inputs), Structure())]
        ctx.leaves, ctx.results = leaves, results
        home = next((t.device for t in fakes), torch.device("cpu"))
        made = [torch.empty(r.shape, dtype=r.dtype, device=home) for r in results]
        ctx.mark_non_differentiable(*(m for m, r in zip(made, results, strict=True) if not r.requires_grad))
        ctx.set_materialize_grads(False)
        ctx.homes = [t.device for t in fakes]
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        with random_tensors(2), torch.enable_grad():
            given = [(r, torch.ones_like(r)) for r, g in zip(ctx.results, grads, strict=True) if g is not None]
            wanted = [t for t in ctx.leaves if t.requires_grad]
            outputs, ones = [r for r, _ in given], [g for _, g in given]
            made = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
        found = iter(made)
        out: list[Tensor | None] = []
        for leaf, home in zip(ctx.leaves, ctx.homes, strict=True):
            g = next(found) if leaf.requires_grad else None
            out.append(None if g is None else torch.empty(g.shape, dtype=g.dtype, device=home))
        return (None, *out)
