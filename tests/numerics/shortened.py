"""Takes away what a failure of a random model does not need."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from random_models import Recipe, Settings


def shorter(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with one thing less."""
    for i, c in enumerate(recipe.classes):

        def put(name: str, value: Any, i: int = i) -> Recipe:
            classes = [*recipe.classes]
            classes[i] = replace(classes[i], **{name: value})
            return replace(recipe, classes=tuple(classes))

        for name in ("body", "inits"):
            lines = getattr(c, name)
            for j in range(len(lines) - 1, -1, -1):
                yield put(name, (*lines[:j], *lines[j + 1 :]))
            for j, statement in enumerate(lines):
                parts = statement.splitlines()
                for k in range(len(parts) if len(parts) > 1 else 0):
                    rest = "\n".join(parts[:k] + parts[k + 1 :])
                    yield put(name, (*lines[:j], rest, *lines[j + 1 :]))
                if "range(" in statement and "range(1)" not in statement:
                    for fewer in ("range(1)", "range(2)"):
                        head, _, tail = statement.partition("range(")
                        changed = f"{head}{fewer}{tail.partition(')')[2]}"
                        if changed != statement:
                            yield put(name, (*lines[:j], changed, *lines[j + 1 :]))
        if i == len(recipe.classes) - 1 and c.result != "x":
            for name in ["x", *(s.split(" = ")[0] for s in c.body if " = " in s)]:
                if name.isidentifier() and name != c.result:
                    yield put("result", name)
    for j in range(1, len(recipe.inputs)):
        fewer = (*recipe.inputs[:j], *recipe.inputs[j + 1 :])
        last = recipe.classes[-1]
        classes = (*recipe.classes[:-1], replace(last, arguments=tuple(n for n, _ in fewer)))
        yield replace(recipe, inputs=fewer, classes=classes, grads=tuple(g for g in recipe.grads if g in dict(fewer)))
    for j, (name, expression) in enumerate(recipe.inputs):
        simple = (
            re.sub(r"(torch\.randn\(.*?dtype=dtype\)).*", r"\1", expression)
            .replace("T, B,", "B, T,")
            .replace("2 * ", "")
        )
        if simple != expression:
            yield replace(recipe, inputs=(*recipe.inputs[:j], (name, simple), *recipe.inputs[j + 1 :]))
    if recipe.grads:
        yield replace(recipe, grads=())


def reduced(
    recipe: Recipe, settings: Settings, holds: Callable[[Recipe, Settings], bool], most: int = 400
) -> tuple[Recipe, Settings]:
    """A recipe and settings as short as can be of which `holds` is still true."""
    plainest = Settings()
    tries = 0
    changed = True
    while changed and tries < most:
        changed = False
        for f in dataclasses.fields(Settings):
            value = getattr(plainest, f.name) if f.name != "steps" else max(1, settings.steps - 1)
            other = replace(settings, **{f.name: value})
            if other != settings and holds(recipe, other):
                settings, changed = other, True
            tries += 1
        again = True
        while again and tries < most:
            again = False
            for candidate in shorter(recipe):
                tries += 1
                if tries >= most:
                    break
                if holds(candidate, settings):
                    recipe, again, changed = candidate, True, True
                    break
    return recipe, settings


def main(seeds: list[int]) -> None:
    """Prints, for each seed that fails, the shortest model found that fails in the same way."""
    from test_random_models import Outcome, outcome, tried

    def kind(o: Outcome) -> tuple[str, str]:
        return o.kind, o.what.partition(":")[2][:12] if o.kind == "different" else o.what[:30]

    for seed in seeds:
        recipe, settings, found = tried(seed)
        if found.kind in ("different", "crashed", "refused"):
            wanted = kind(found)
            recipe, settings = reduced(recipe, settings, lambda r, s, w=wanted: kind(outcome(r, s)) == w)
            found = outcome(recipe, settings)
        print(f"seed {seed}: {found.kind} {found.what}\n{recipe}\n{settings}")


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
