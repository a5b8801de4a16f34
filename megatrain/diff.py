"""What a pass did, as lines: two printed schedules compared label by label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from megatrain.schedule import HALVES
from megatrain.text import DECLARATIONS


def diff_schedules(a: str, b: str) -> str:
    """What changed from text `a` to text `b`, in the manner of a unified diff; "" if only derived facts and spaces did.

    Lines are matched by their label (a declaration by its first words), so an op that moved says so, and one that only
    changed stands in its place.
    """
    old, new = _keyed(a), _keyed(b)
    gone = {key for key, _ in old} - {key for key, _ in new}
    come = {key for key, _ in new} - {key for key, _ in old}
    out: list[str] = []
    met: set[str] = set()
    matcher = SequenceMatcher(None, [key for key, _ in old], [key for key, _ in new], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal":
            for (_, x), (_, y) in zip(old[i:i_end], new[j:j_end], strict=True):
                out += [f"  {y}"] if x.split() == y.split() else [f"- {x}", f"+ {y}"]
            continue
        for sign, lines, alone in (("-", old[i:i_end], gone), ("+", new[j:j_end], come)):
            for key, line in lines:
                # Met at its new place before its old one, it moved up.
                up = (sign == "-") == (key in met)
                out.append(f"{sign} {line}" if key in alone else f"{sign} {line} ; moved {'up' if up else 'down'}")
                met.add(key)
    return "\n".join(_near_changes(out, 2))


def _keyed(text: str) -> list[tuple[str, str]]:
    """(key, line) for each line, without derived facts."""
    keyed: list[tuple[str, str]] = []
    template = ""
    half = False
    for line in text.splitlines():
        code = line.split(";", 1)[0].rstrip()
        words = code.split()
        if not words:
            continue
        half = half or code in HALVES
        key = words[0]
        if key in ("template", "slots"):
            key = template = " ".join(words[:2])
        elif not half and key not in DECLARATIONS:
            key = f"{template} {key.split('(')[0]}"
        keyed.append((key, code))
    return keyed


def _near_changes(lines: Sequence[str], context: int) -> Iterator[str]:
    changed = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    near = sorted({j for i in changed for j in range(max(0, i - context), min(len(lines), i + context + 1))})
    for last, i in zip([-1, *near], near, strict=False):
        if i > last + 1:
            yield "  ..."
        yield lines[i]
