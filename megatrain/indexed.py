"""Tensors made of sizes alone, as functions of their indices.

`evaluate` follows a graph of aranges, comparisons and views and gives, for a boolean mask, the predicate on its indices
as a sympy expression; `equals_causal` decides whether that is the causal mask.  Exact: what it does not know gives
None.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from megatrain.effects import family, operation
from megatrain.graphs import size_of

Expr = Any


@dataclass(frozen=True)
class Indexed:
    """A tensor of `shape` whose element at indices i is `at(i)`."""

    shape: tuple[Expr, ...]
    at: Callable[[tuple[Expr, ...]], Expr]


class Unknown(Exception):
    """The value depends on data, or on an operator that is not modelled."""


def evaluate(node: fx.Node, known: dict[fx.Node, Indexed | None]) -> Indexed | None:
    """`node` as a function of its indices, None where it is not one of sizes alone.  `known` remembers."""
    if node not in known:
        known[node] = None
        try:
            if node.op == "call_function" and family(node):
                known[node] = _RULES[family(node)](node, known)
        except (Unknown, KeyError, IndexError):
            pass
    return known[node]


def _load(a: Any, known: dict[fx.Node, Indexed | None]) -> Any:
    if not isinstance(a, fx.Node):
        return a
    size = size_of(a)
    if size is not None:
        return size
    found = evaluate(a, known)
    if found is None:
        raise Unknown
    return found


def _args(node: fx.Node, known: dict[fx.Node, Indexed | None]) -> list[Any]:
    return [_load(a, known) for a in operation(node)[1]]


def _sizes(values: Sequence[Any]) -> list[Expr]:
    return [size_of(v) if isinstance(v, fx.Node) else v for v in values]


def _arange(node: fx.Node, known: Any) -> Indexed:
    args = _args(node, known)
    start, end = (0, args[0]) if len(args) == 1 else args[:2]
    if len(args) > 2 and args[2] != 1:
        raise Unknown
    return Indexed((end - start,), lambda i: start + i[0])


def _constant(value: Callable[[list[Any]], Any], shape: int) -> Callable[..., Indexed]:
    def rule(node: fx.Node, known: Any) -> Indexed:
        args = list(operation(node)[1])
        sizes = tuple(_sizes(args[shape]))
        made = value(args)
        return Indexed(sizes, lambda i: made)

    return rule


def _elementwise(f: Callable[..., Expr]) -> Callable[..., Indexed]:
    def rule(node: fx.Node, known: Any) -> Indexed:
        if node.kwargs.keys() & {"alpha", "rounding_mode"}:
            raise Unknown
        values = [v if isinstance(v, Indexed) else Indexed((), lambda i, v=v: v) for v in _args(node, known)]
        shape = _broadcast([v.shape for v in values])
        return Indexed(shape, lambda i: f(*(v.at(_project(i, v.shape)) for v in values)))

    return rule


def _broadcast(shapes: list[tuple[Expr, ...]]) -> tuple[Expr, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in dims if n != 1), 1) for dims in zip(*padded, strict=True))


def _project(i: tuple[Expr, ...], shape: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The indices of a tensor of `shape` that is broadcast to where the indices are i."""
    tail = i[len(i) - len(shape) :]
    return tuple(sympy.Integer(0) if n == 1 else k for k, n in zip(tail, shape, strict=True))


def _unsqueeze(node: fx.Node, known: Any) -> Indexed:
    x, dim = _args(node, known)
    dim = dim % (len(x.shape) + 1)
    return Indexed((*x.shape[:dim], 1, *x.shape[dim:]), lambda i: x.at(i[:dim] + i[dim + 1 :]))


def _expand(node: fx.Node, known: Any) -> Indexed:
    x = _load(operation(node)[1][0], known)
    sizes = _sizes(operation(node)[1][1])
    own = (1,) * (len(sizes) - len(x.shape)) + tuple(x.shape)
    shape = tuple(o if n == -1 else n for n, o in zip(sizes, own, strict=True))
    return Indexed(shape, lambda i: x.at(_project(i, x.shape)))


def _slice(node: fx.Node, known: Any) -> Indexed:
    given: list[Any] = _args(node, known)
    given += [0, 0, math.inf, 1][len(given) - 1 :]
    x, dim, start, end, step = given
    size, start = x.shape[dim], start or 0
    to_end = end is None or end == size or (not isinstance(end, sympy.Basic) and end >= 2**62)
    if step != 1 or not isinstance(start, int) or start < 0:
        raise Unknown
    if not to_end and not (isinstance(end, int) and end >= 0 and (not isinstance(size, int) or end <= size)):
        raise Unknown
    length: Expr = (size if to_end else end) - start  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
    dim = dim % len(x.shape)
    return Indexed(
        (*x.shape[:dim], length, *x.shape[dim + 1 :]), lambda i: x.at((*i[:dim], i[dim] + start, *i[dim + 1 :]))
    )


def _view(node: fx.Node, known: Any) -> Indexed:
    """Only views that add or remove dimensions of size 1."""
    x = _load(operation(node)[1][0], known)
    sizes = _sizes(operation(node)[1][1])
    long = [(d, n) for d, n in enumerate(x.shape) if n != 1]
    wide = [d for d, n in enumerate(sizes) if n != 1]
    if len(long) != len(wide) or any(sizes[w] not in (-1, n) for w, (_, n) in zip(wide, long, strict=True)):
        raise Unknown
    at = dict(zip([d for d, _ in long], wide, strict=True))
    shape = list(sizes)
    for w, (_, n) in zip(wide, long, strict=True):
        shape[w] = n
    return Indexed(tuple(shape), lambda i: x.at(tuple(i[at[d]] if d in at else 0 for d in range(len(x.shape)))))


def _index(node: fx.Node, known: Any) -> Indexed:
    x, indices = operation(node)[1]
    source = _load(x, known)
    found = [_load(a, known) for a in indices]
    if any(not isinstance(f, Indexed) for f in found):
        raise Unknown
    shape = _broadcast([f.shape for f in found])
    rest = source.shape[len(found) :]
    rank = len(shape)
    return Indexed(
        (*shape, *rest), lambda i: source.at((*(f.at(_project(i[:rank], f.shape)) for f in found), *i[rank:]))
    )


def _same(node: fx.Node, known: Any) -> Indexed:
    return _args(node, known)[0]


def _diff(node: fx.Node, known: Any) -> Indexed:
    """Of a value that grows by a constant step along the dimension, with one more element put before that continues
    it."""
    given: list[Any] = [*_args(node, known), None]
    x, n, dim, before = given[:4]
    if n != 1 or not isinstance(before, Indexed):
        raise Unknown
    dim = dim % len(x.shape)

    def at(i: tuple[Expr, ...]) -> Expr:
        k = sympy.Dummy("k", integer=True)
        step = sympy.expand(x.at((*i[:dim], k, *i[dim + 1 :])) - x.at((*i[:dim], k - 1, *i[dim + 1 :])))
        first = sympy.expand(x.at((*i[:dim], 0, *i[dim + 1 :])) - before.at((*i[:dim], 0, *i[dim + 1 :])))
        if step.free_symbols or step != first:
            raise Unknown
        return step

    return Indexed(x.shape, at)


def _cumsum(node: fx.Node, known: Any) -> Indexed:
    """Of zeros."""
    x = _args(node, known)[0]

    def at(i: tuple[Expr, ...]) -> Expr:
        if x.at(i) in (0, False, sympy.false):
            return sympy.Integer(0)
        raise Unknown

    return Indexed(x.shape, at)


def _triangle(upper: bool) -> Callable[..., Indexed]:
    def rule(node: fx.Node, known: Any) -> Indexed:
        given: list[Any] = [*_args(node, known), 0]
        x, diagonal = given[:2]

        def at(i: tuple[Expr, ...]) -> Expr:
            offset = i[-1] - i[-2] - diagonal
            return sympy.And(_true(x.at(i)), offset >= 0 if upper else offset <= 0)

        return Indexed(x.shape, at)

    return rule


def _true(value: Expr) -> Expr:
    return value if isinstance(value, sympy.logic.boolalg.Boolean) else sympy.true if value else sympy.false


_RULES: dict[str, Callable[..., Indexed]] = {
    "aten.arange": _arange,
    "aten.new_ones": _constant(lambda a: sympy.true, 1),
    "aten.ones": _constant(lambda a: sympy.true, 0),
    "aten.full": _constant(lambda a: a[1], 0),
    "aten.add": _elementwise(operator.add),
    "aten.sub": _elementwise(operator.sub),
    "aten.mul": _elementwise(operator.mul),
    "aten.neg": _elementwise(operator.neg),
    "aten.le": _elementwise(sympy.Le),
    "aten.lt": _elementwise(sympy.Lt),
    "aten.ge": _elementwise(sympy.Ge),
    "aten.gt": _elementwise(sympy.Gt),
    "aten.eq": _elementwise(sympy.Eq),
    "aten.ne": _elementwise(sympy.Ne),
    "aten.__and__": _elementwise(lambda a, b: sympy.And(_true(a), _true(b))),
    "aten.bitwise_and": _elementwise(lambda a, b: sympy.And(_true(a), _true(b))),
    "aten.logical_and": _elementwise(lambda a, b: sympy.And(_true(a), _true(b))),
    "aten.__or__": _elementwise(lambda a, b: sympy.Or(_true(a), _true(b))),
    "aten.bitwise_or": _elementwise(lambda a, b: sympy.Or(_true(a), _true(b))),
    "aten.logical_or": _elementwise(lambda a, b: sympy.Or(_true(a), _true(b))),
    "aten.bitwise_not": _elementwise(lambda a: sympy.Not(_true(a))),
    "aten.logical_not": _elementwise(lambda a: sympy.Not(_true(a))),
    "aten.unsqueeze": _unsqueeze,
    "aten.expand": _expand,
    "aten.slice": _slice,
    "aten.view": _view,
    "aten.reshape": _view,
    "aten.index": _index,
    "aten.diff": _diff,
    "aten.cumsum": _cumsum,
    "aten.tril": _triangle(upper=False),
    "aten.triu": _triangle(upper=True),
    "aten.to": _same,
    "aten.contiguous": _same,
    "aten.clone": _same,
    "aten.detach": _same,
    "aten.alias": _same,
}


def equals_causal(mask: Indexed) -> tuple[str, tuple[Expr, ...]] | None:
    """("causal" | "full", conditions on sizes) if the mask lets query i see exactly the keys j <= i, or every key,
    where the conditions hold; None if it is neither.  Queries and keys are the last two dimensions."""
    if len(mask.shape) < 2:
        return None
    square = sympy.simplify(mask.shape[-1] - mask.shape[-2]) == 0
    lead = tuple(sympy.Symbol(f"b{k}", integer=True, nonnegative=True) for k in range(len(mask.shape) - 2))
    i, j = sympy.symbols("i j", integer=True, nonnegative=True)
    try:
        predicate = _true(mask.at((*lead, i, j)))
    except Unknown:
        return None
    parts = predicate.args if isinstance(predicate, sympy.And) else (predicate,)
    causal = False
    conditions: list[Expr] = []
    for part in parts:
        if part is sympy.true:
            continue
        below = _at_most_zero(part)
        if below is None or below.free_symbols & set(lead):
            return None
        if sympy.expand(below - (j - i)) == 0:
            causal = True
            continue
        slack = sympy.expand(below - (i - j))
        if slack.free_symbols & {i, j}:
            return None
        conditions.append(sympy.Le(mask.shape[-2] - 1 + slack, 0))
    conditions = [c for c in conditions if c is not sympy.true]
    if causal:
        return ("causal", tuple(conditions)) if square and sympy.false not in conditions else None
    return None if conditions else ("full", ())


def _at_most_zero(part: Any) -> Any:
    """E such that `part` is E <= 0, for integers."""
    left: Any = getattr(part, "lhs", 0)
    right: Any = getattr(part, "rhs", 0)
    if isinstance(part, sympy.Le):
        return left - right
    if isinstance(part, sympy.Lt):
        return left - right + 1
    if isinstance(part, sympy.Ge):
        return right - left
    if isinstance(part, sympy.Gt):
        return right - left + 1
    return None
