"""A schedule as text, both ways: `parse_schedule(show_schedule(s)) == s`.

    schedule    = ("budget" BYTES | template | slots | values | names | half | op)*          one a line
    template    = "template" NAME [PATHS]           then its bodies: BODY(TYPES) [-> TYPES] ["workspace" BYTES]
    slots       = "slots" NAME+ ROLE BYTES "each"
    values      = ("inputs" | "grads") NAME TYPE, ...
    names       = ("outputs" | "input_grads") NAME, ...
    half        = "forward" | "backward" | "update"
    op          = LABEL VERB [CALL(NAMES) | NAMES] [-> NAMES] ["after" (LABEL | prev(NAME)), ...]

NAME, LABEL and ROLE are identifiers, a host plane is a dotted path.  TYPE is `f32[8,1024]` or BYTES, BYTES is `32 MiB`,
exact.  PATHS lists layers; `layers.0 .. layers.27` stands for all between.  What follows `;` is derived, never parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatrain.liveness import device_bytes, peak
from megatrain.schedule import (
    HALVES,
    ITEMSIZE,
    LANES,
    Body,
    Op,
    Schedule,
    Slot,
    Template,
    TensorType,
    Type,
    Value,
    prev_of,
)

KEYWORDS = frozenset({"budget", "template", "slots", "inputs", "outputs", "grads", "input_grads", "after", *HALVES})
"""Words that begin a line or a clause: no label may be one."""

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))

_BARE = re.compile(r"[A-Za-z_]\w*")
_PATH = re.compile(r"\w+(\.\w+)*")
_BYTES = re.compile(r"(\d+) (GiB|MiB|KiB|B)")
_TENSOR = re.compile(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]")
_BODY = re.compile(
    r"(?P<name>[^\s(]+)\((?P<inputs>.*?)\)(?:\s*->\s*(?P<outputs>.*?))?(?:\s+workspace\s+(?P<bytes>.*))?"
)
_AFTER = re.compile(r"\s+after\s+")
_CALL = re.compile(r"(?P<call>[^\s(]+)\((?P<reads>.*)\)")


def is_label(name: str) -> bool:
    return is_bare(name) and name not in KEYWORDS


def is_bare(name: str) -> bool:
    """An identifier.  `after` is none: it begins the waits of an op."""
    return bool(_BARE.fullmatch(name)) and name != "after"


def is_path(name: str) -> bool:
    """Words joined by dots, such as a layer's name: `model.layers.3`.  One word will do."""
    return bool(_PATH.fullmatch(name))


def is_operand(name: str) -> bool:
    """A bare name, or a dotted one, of a host plane."""
    return is_path(name) if "." in name else is_bare(name)


# Show


def show_bytes(n: int) -> str:
    """Exact, in the largest unit that divides `n`: `32 MiB`, `33000 B`."""
    unit, size = next((unit, size) for unit, size in UNITS if n % size == 0 and (n or size == 1))
    return f"{n // size} {unit}"


def show_about(n: int) -> str:
    """Rounded to a tenth of the largest unit that `n` reaches: `96.3 MiB`.  For what is never parsed."""
    unit, size = next((unit, size) for unit, size in UNITS if n >= size or size == 1)
    return f"{n / size:.1f} {unit}" if size > 1 else f"{n} B"


def show_type(t: Type) -> str:
    return show_bytes(t) if isinstance(t, int) else f"{t.dtype}[{','.join(map(str, t.shape))}]"


def show_paths(names: Sequence[str]) -> str:
    """The names in order, three or more that count up in one place as a run: `layers.0 .. layers.27, layers.29`."""
    runs: list[list[str]] = []
    for name in names:
        run = runs[-1] if runs else []
        if run and (place := _counts_up(run[-1], name)) >= 0 and (len(run) == 1 or place == _counts_up(*run[-2:])):
            run.append(name)
        else:
            runs.append([name])
    return ", ".join(f"{run[0]} .. {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _counts_up(a: str, b: str) -> int:
    """The place of the one word in which path `b` is path `a` counted up by one; -1 if there is none."""
    words, others = a.split("."), b.split(".")
    places = [i for i, (x, y) in enumerate(zip(words, others, strict=False)) if x != y]
    if len(words) != len(others) or len(places) != 1:
        return -1
    x, y = words[places[0]], others[places[0]]
    return places[0] if _counts(x) and _counts(y) and int(y) == int(x) + 1 else -1


def _counts(word: str) -> bool:
    """A number as `str` writes it: without leading zeros."""
    return word.isascii() and word.isdigit() and str(int(word)) == word


def show_op(op: Op) -> str:
    return show_ops([op])[0]


def show_ops(ops: Sequence[Op]) -> list[str]:
    """A line for each op, without derived facts, columns aligned over all of `ops`."""
    rows = [_cells(op) for op in ops]
    widths = [
        _width((row[i] for row in rows), *limits) for i, limits in enumerate(((8, 16), (9, 9), (24, 48), (15, 24)))
    ]
    return [_aligned(row, widths) for row in rows]


def _cells(op: Op) -> tuple[str, ...]:
    reads = ", ".join(op.reads)
    work = f"{op.call}({reads})" if op.call else reads
    writes = f"-> {', '.join(op.writes)}" if op.writes else ""
    return op.label, op.verb, work, writes, f"after {', '.join(op.after)}" if op.after else ""


def _width(cells: Iterable[str], least: int, most: int) -> int:
    """The width of the longest cell between the limits; longer ones stick out."""
    return max([least, *(min(len(cell), most) for cell in cells)])


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
    return " ".join([*padded, *cells[len(widths) :]]).rstrip()


def show_schedule(schedule: Schedule) -> str:
    """The schedule as text, without a newline at the end.  Each op's line ends with the device bytes while it runs."""
    lines = [*_header(schedule), *_declarations(schedule)]
    held = device_bytes(schedule)
    shown = show_ops(schedule.ops)
    width = _width(shown, 0, 108)
    ops = iter([f"{s:<{width}} ; {show_about(held[op.label]):>10}" for s, op in zip(shown, schedule.ops, strict=True)])
    for half in HALVES:
        given = _given_backward(schedule) if half == "backward" else []
        mine = [next(ops) for _ in getattr(schedule, half)]
        lines += [half, *given, *mine] if given or mine else []
    return "\n".join(lines)


def _header(schedule: Schedule) -> Iterator[str]:
    layers = sum(len(t.layers) for t in schedule.templates)
    limit = f" of {show_about(schedule.budget)}" if schedule.budget else ""
    yield f"; {layers} layer{'s' * (layers != 1)}, peak {show_about(peak(schedule))}{limit}"


def _declarations(schedule: Schedule) -> Iterator[str]:
    if schedule.budget:
        yield f"budget {show_bytes(schedule.budget)}"
    for template in schedule.templates:
        yield f"template {template.name}  {show_paths(template.layers)}".rstrip()
        signatures = [_signature(body) for body in template.bodies]
        width = _width(signatures, 0, 80)
        for body, signature in zip(template.bodies, signatures, strict=True):
            workspace = f"workspace {show_bytes(body.workspace)}" if body.workspace else ""
            yield f"  {signature:<{width}} {workspace}".rstrip()
    alike: list[list[Slot]] = []
    for slot in schedule.slots:
        if alike and (alike[-1][0].role, alike[-1][0].bytes) == (slot.role, slot.bytes):
            alike[-1].append(slot)
        else:
            alike.append([slot])
    for slots in alike:
        yield f"slots {' '.join(s.name for s in slots)}  {slots[0].role} {show_bytes(slots[0].bytes)} each"
    if schedule.inputs:
        yield f"inputs {_show_values(schedule.inputs)}"
    if schedule.outputs:
        yield f"outputs {', '.join(schedule.outputs)}"


def _signature(body: Body) -> str:
    outputs = f" -> {', '.join(map(show_type, body.outputs))}" if body.outputs else ""
    return f"{body.name}({', '.join(map(show_type, body.inputs))}){outputs}"


def _show_values(values: Iterable[Value]) -> str:
    return ", ".join(f"{v.name} {show_type(v.type)}" for v in values)


def _given_backward(schedule: Schedule) -> list[str]:
    grads = [f"grads {_show_values(schedule.grads)}"] if schedule.grads else []
    return grads + ([f"input_grads {', '.join(schedule.input_grads)}"] if schedule.input_grads else [])


# Parse


def parse_schedule(text: str) -> Schedule:
    """The schedule that `text` shows.  ValueError quotes the line that is wrong and says what to write instead."""
    fields: dict[str, list[Any]] = {"budget": [], "templates": [], "slots": [], **{half: [] for half in HALVES}}
    fields |= {"inputs": [], "outputs": [], "grads": [], "input_grads": []}
    half = ""
    for number, line in enumerate(text.splitlines(), 1):
        code = line.split(";", 1)[0].strip()
        word, _, rest = code.partition(" ")
        try:
            if code in HALVES:
                half = code
            elif word in DECLARATIONS:
                field, read = DECLARATIONS[word]
                fields[field] += read(rest)
            elif half and code:
                fields[half].append(parse_op(code))
            elif code:
                fields["templates"][-1:] = _with_body(fields["templates"], code)
        except ValueError as fault:
            raise ValueError(f"line {number}: {line.strip()}\n{fault}") from None
    budget = fields.pop("budget")
    return Schedule(budget=sum(budget[-1:]), **{field: tuple(items) for field, items in fields.items()})


def parse_op(line: str) -> Op:
    """One op, `LABEL VERB operands -> results after LABEL*`."""
    head, *after = _AFTER.split(line.split(";", 1)[0].strip(), maxsplit=1)
    head, _, writes = head.partition("->")
    label, verb, work, *_ = [*head.split(None, 2), "", "", ""]
    if not is_label(label):
        raise ValueError(f"{label!r} is no label: write an identifier that is none of {', '.join(sorted(KEYWORDS))}")
    if not verb:
        raise ValueError("an op is LABEL VERB operands -> results after LABEL, ...")
    if verb not in LANES:
        raise ValueError(f"{verb!r} is no verb: write one of {', '.join(LANES)}")
    call = _CALL.fullmatch(work.strip())
    reads = _names(call["reads"] if call else work, is_operand, _OPERAND)
    waits = _names("".join(after), lambda wait: is_operand(prev_of(wait)) if prev_of(wait) else is_label(wait), _WAIT)
    if call and not is_path(call["call"]):
        raise ValueError(f"{call['call']!r} is no body or rule: write a name such as block.fwd or adamw")
    return Op(label, verb, reads, _names(writes, is_operand, _OPERAND), call["call"] if call else "", waits)


_OPERAND = "write an identifier (w1) for what is on the device, a dotted path (layers.3.w) for what is on the host"
_WAIT = "write the label of an earlier op (fwd0), or prev(w0) for the last users of w0 in whatever ran before"
_PATHS = "write words joined by dots (layers.3), separated by commas"
_IDENTIFIER = "write an identifier"


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)] if text.strip() else []


def _names(text: str, allowed: Callable[[str], bool], cure: str) -> tuple[str, ...]:
    names = _split(text)
    for name in names:
        if not allowed(name):
            raise ValueError(f"{name!r} is no name here: {cure}")
    return tuple(names)


def _bytes(text: str) -> int:
    match = _BYTES.fullmatch(" ".join(text.split()))
    if not match:
        raise ValueError(f"{text!r} is no size: write a whole number of B, KiB, MiB or GiB, such as 32 MiB")
    return int(match[1]) * dict(UNITS)[match[2]]


def _type(text: str) -> Type:
    return _tensor(text) if "[" in text else _bytes(text)


def _tensor(text: str) -> TensorType:
    match = _TENSOR.fullmatch(text.replace(" ", ""))
    if not match or match[1] not in ITEMSIZE:
        raise ValueError(f"{text!r} is no type: write f32[8,1024], with one of the dtypes {', '.join(ITEMSIZE)}")
    return TensorType(match[1], tuple(int(size) for size in match[2].split(",") if size))


def _budget(rest: str) -> list[int]:
    return [_bytes(rest)]


def _template(rest: str) -> list[Template]:
    name, _, layers = rest.strip().partition(" ")
    _names(name or "?", is_bare, _IDENTIFIER)
    return [Template(name, tuple(layer for part in _split(layers) for layer in _run(part)))]


def _run(part: str) -> tuple[str, ...]:
    """The names that `layers.0 .. layers.27`, or a single name, stands for."""
    ends = [end.strip() for end in part.split(" .. ")]
    _names(", ".join(ends), is_path, _PATHS)
    if len(ends) == 1:
        return (part,)
    words, others = ends[0].split("."), ends[-1].split(".")
    places = [i for i, (x, y) in enumerate(zip(words, others, strict=False)) if x != y]
    ends_count = len(places) == 1 and _counts(words[places[0]]) and _counts(others[places[0]])
    if len(ends) != 2 or len(words) != len(others) or not ends_count or int(words[places[0]]) > int(others[places[0]]):
        raise ValueError(
            f"{part!r} is no run: write two names that differ in one number, such as layers.0 .. layers.27"
        )
    at = places[0]
    numbers = range(int(words[at]), int(others[at]) + 1)
    return tuple(".".join([*words[:at], str(n), *words[at + 1 :]]) for n in numbers)


def _with_body(templates: Sequence[Template], code: str) -> list[Template]:
    """The last of `templates` with the body that the line declares."""
    match = _BODY.fullmatch(code)
    if not match or not is_path(match["name"]):
        raise ValueError(
            f"this is no declaration ({', '.join(DECLARATIONS)}) and no body such as fwd(f32[8]) -> f32[8]; "
            f"an op stands below the line {' or '.join(HALVES)}"
        )
    if not templates:
        raise ValueError("this body has no template: write 'template NAME  LAYERS' above it")
    inputs, outputs = (tuple(map(_type, _split(match[group] or ""))) for group in ("inputs", "outputs"))
    body = Body(match["name"], inputs, outputs, _bytes(match["bytes"]) if match["bytes"] else 0)
    last = templates[-1]
    return [Template(last.name, last.layers, (*last.bodies, body))]


def _slots(rest: str) -> list[Slot]:
    words = rest.split()
    if len(words) < 5 or words[-1] != "each":
        raise ValueError("slots are declared by names, role and size: write 'slots w0 w1  weights 32 MiB each'")
    *names, role = _names(", ".join(words[:-3]), is_bare, _IDENTIFIER)
    return [Slot(name, role, _bytes(" ".join(words[-3:-1]))) for name in names]


def _values(rest: str) -> list[Value]:
    parts = [part.partition(" ") for part in _split(rest)]
    _names(", ".join(name for name, _, _ in parts), is_bare, _IDENTIFIER)
    return [Value(name, _tensor(t)) for name, _, t in parts]


def _results(rest: str) -> tuple[str, ...]:
    return _names(rest, is_bare, _IDENTIFIER)


DECLARATIONS: dict[str, tuple[str, Callable[[str], Sequence[Any]]]] = {
    "budget": ("budget", _budget),
    "template": ("templates", _template),
    "slots": ("slots", _slots),
    "inputs": ("inputs", _values),
    "outputs": ("outputs", _results),
    "grads": ("grads", _values),
    "input_grads": ("input_grads", _results),
}
"""First word of a line -> the field of the schedule it adds to, and how the rest of the line is read."""
