"""A model and its compiled twin, trained alike and compared bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import megatrain
from megatrain.passes import BudgetError, Plan

KEEP = tuple(Plan(activations="keep") if p.name == "plan" else p for p in megatrain.DEFAULT_PASSES)
"""The pipeline that keeps autograd graphs instead of recomputing."""

MODES: Mapping[str, Sequence[megatrain.Pass]] = {"recompute": megatrain.DEFAULT_PASSES, "keep": KEEP}


def twins(make: Callable[[], nn.Module], mode: str = "recompute", **options: Any) -> tuple[Any, Any]:
    """(an eager model, a compiled one) with equal weights."""
    torch.manual_seed(0)
    eager = make()
    ours = copy.deepcopy(eager)
    settings: dict[str, Any] = {"device": "cpu", "passes": MODES[mode], **options}
    return eager, megatrain.compile(ours, **settings)


def bits(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal bit for bit: structure, types, dtypes and all."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.shape == b.shape and a.dtype == b.dtype and a.requires_grad == b.requires_grad
        return alike and torch.equal(bits(a), bits(b))
    left, spec = pytree.tree_flatten(a)
    right, other = pytree.tree_flatten(b)
    if pytree.tree_is_leaf(a):
        return type(a) is type(b) and a == b
    return spec == other and all(map(same, left, right))


def state(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter, gradient and buffer."""
    found: dict[str, Tensor | None] = {n: t.detach().clone() for n, t in model.named_buffers()}
    for n, p in model.named_parameters():
        found[n] = p.detach().clone()
        found[f"{n}.grad"] = None if p.grad is None else p.grad.clone()
    return found


def differing(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> list[str]:
    """Names under which two states differ in any bit."""
    assert a.keys() == b.keys()
    return [n for n in a if (a[n] is None) != (b[n] is None) or (a[n] is not None and not same(a[n], b[n]))]


def check(eager: nn.Module, ours: nn.Module) -> None:
    """Every parameter, gradient and buffer is equal."""
    assert differing(state(eager), state(ours)) == []


def alike(eager: Any, ours: Any, do: Callable[[Any], Any], seed: int = 0) -> Any:
    """Does the same to both from the same random state; what it returns, and then both models, must be equal."""
    torch.manual_seed(seed)
    expected = do(eager)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    found = do(ours)
    assert same(expected, found), f"{expected}\n{found}"
    assert torch.equal(after, torch.get_rng_state()), "the random state afterwards"
    check(eager, ours)
    return found


@dataclass(frozen=True)
class Squeeze(megatrain.Pass):
    """Sets the budget between the smallest that works (share 0) and what an unlimited plan takes (share 1)."""

    name, needs, gives = "squeeze", "differentiated", "differentiated"
    share: float = 0.0

    def apply(self, program: megatrain.Program) -> megatrain.Program:
        try:
            Plan().apply(program.replace(budget=1))
        except BudgetError as e:
            least = e.smallest
        else:
            raise AssertionError("a budget of one byte was enough")
        most = Plan().apply(program.replace(budget=0)).plan.peak
        return program.replace(budget=least + int(self.share * (most - least)))


def squeezed(passes: Sequence[megatrain.Pass], share: float = 0.0) -> list[megatrain.Pass]:
    at = [p.name for p in passes].index("plan")
    return [*passes[:at], Squeeze(share), *passes[at:]]


@dataclass(frozen=True)
class SpillAll(megatrain.Pass):
    """The inputs of every layer wait on the host, whatever the budget."""

    name, needs, gives = "spill-all", "planned", "planned"

    def apply(self, program: megatrain.Program) -> megatrain.Program:
        return program.replace(plan=replace(program.plan, spill=frozenset(layer.name for layer in program.layers)))


def after_plan(passes: Sequence[megatrain.Pass], added: megatrain.Pass) -> list[megatrain.Pass]:
    at = [p.name for p in passes].index("plan") + 1
    return [*passes[:at], added, *passes[at:]]
