"""Which architectures megatrain captures and trains with eager PyTorch's bits.

    python benchmarks/models.py --matrix
    python benchmarks/models.py --matrix --only llama,early_exit --dtype bf16 --json rows.json
    python benchmarks/models.py --row mixtral

`families.py` says what each is: tiny, with random weights.  Each row is a process of its own with a time limit, one
after the other: a copy of the model, and one compiled for the CPU with `backend="eager"` and no limit on memory,
take three steps of AdamW in training mode, on the same batches, of two sizes, from the same random state before each
forward.  Losses, gradients, parameters and buffers of each step are compared bit for bit.

captured   `graph`, `graph with opaque parts` (their classes), `layer by layer` (each part a graph of its own),
           `not captured`, or `eagerly`: it ran outside of any schedule; how many captures there were, if more than one
layers     those of the first capture, and its templates
equal      `bitwise`; or where the two differ first and by how much, as the largest difference in one tensor over the
           largest magnitude in it, in the losses and gradients of that step and in the parameters and buffers after the
           last; or why there is nothing to compare.  Where they differ, eager PyTorch trains a second time: if that
           differs too, because a kernel of PyTorch's adds in the order in which threads come, all is done again with
           `torch.use_deterministic_algorithms`, and the row says so
seconds    capture and the three compiled steps; in brackets those of the eager ones

`--row` prints one row as JSON, from this process, with the traceback of what failed.  `--json` writes all rows, with
the whole messages and megatrain's warnings.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import megatrain
from benchmarks.families import FAMILIES, Batch, Family
from megatrain.compiled import Compiled
from megatrain.effects import operation
from megatrain.opaque import Opaque

Row = dict[str, Any]
State = dict[str, Tensor | None]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONGEST = 240
"""Characters of a reason in the table."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--matrix", action="store_true", help="all rows, as a table")
    what.add_argument("--row", choices=FAMILIES, metavar="NAME", help="one row in this process, as JSON")
    parser.add_argument("--only", default=",".join(FAMILIES), help=f"some of {','.join(FAMILIES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--limit", type=float, default=120, help="seconds a row may take")
    parser.add_argument("--json", type=Path, help="a file for all rows")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := [n for n in args.only if n not in FAMILIES]:
        parser.error(f"--only: there is no {', '.join(unknown)}; there is {', '.join(FAMILIES)}")
    return args


# -- one row ----------------------------------------------------------------------------------------------------------


class Warned(logging.Handler):
    """Keeps megatrain's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def row(name: str, dtype: torch.dtype) -> Row:
    """What became of one architecture: see the module.  An error is a part of the row."""
    found: Row = dict(name=name, dtype=str(dtype).removeprefix("torch."))
    warned = Warned()
    logging.getLogger("megatrain").addHandler(warned)
    phase = "making the model"
    ours: nn.Module | None = None
    try:
        model, batches = made(FAMILIES[name], dtype)
        phase = "training it eagerly"
        start = time.perf_counter()
        expected = trained(copy.deepcopy(model), batches)
        found["eager_seconds"] = round(time.perf_counter() - start, 2)
        phase = "training it compiled"
        start = time.perf_counter()
        ours = megatrain.compile(copy.deepcopy(model), device="cpu", backend="eager")
        got = trained(ours, batches)
        found["seconds"] = round(time.perf_counter() - start, 2)
        found |= compared(expected, got)
        if not found["equal"] and not compared(expected, trained(copy.deepcopy(model), batches))["equal"]:
            with deterministic():
                ours = megatrain.compile(copy.deepcopy(model), device="cpu", backend="eager")
                got = trained(ours, batches)
                found |= dict(deterministic=True) | compared(trained(copy.deepcopy(model), batches), got)
    except Exception as error:
        traceback.print_exc()
        found |= dict(failed=reason(error), phase=phase, message=str(error), where=where(error))
    finally:
        logging.getLogger("megatrain").removeHandler(warned)
    return found | (captured(ours) if ours is not None else {}) | dict(warnings=warned.lines)


@contextmanager
def deterministic() -> Generator[None, None, None]:
    """Inside, PyTorch's kernels give the same bits every time, where they can."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def made(family: Family, dtype: torch.dtype) -> tuple[nn.Module, list[Batch]]:
    """The model in training mode, and a batch a step."""
    torch.manual_seed(0)
    model = family.make().to(dtype).train()
    torch.manual_seed(1)
    batches = [{k: cast(v, dtype) for k, v in family.batch(size).items()} for size in family.sizes]
    return model, batches


def cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def trained(model: nn.Module, batches: Sequence[Batch]) -> list[State]:
    """For each step the loss, gradients, parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    steps: list[State] = []
    for step, batch in enumerate(batches):
        torch.manual_seed(2 + step)
        loss = model(**batch)["loss"]
        loss.backward()
        seen: State = {"the loss": loss.detach().clone()}
        for n, p in model.named_parameters():
            seen[f"the gradient of {n}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        seen |= {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
        optimizer.zero_grad()
        steps.append(seen)
    return steps


def compared(expected: Sequence[State], found: Sequence[State]) -> Row:
    """Whether two trainings are one, bit for bit; else where they part, and how far apart they end."""
    finite = all(torch.isfinite(t).all() for step in expected for t in step.values() if t is not None)
    out: Row = dict(losses=[float(s["the loss"]) for s in expected if s["the loss"] is not None], finite=bool(finite))
    for n, (a, b) in enumerate(zip(expected, found, strict=True), 1):
        if different := [name for name in a if not same(a[name], b[name])]:
            nones = [name for name in different if (a[name] is None) != (b[name] is None)]
            first = f"{different[0]} of step {n}" + f" (None on one side: {len(nones)} of them)" * bool(nones)
            passing = {name for name in a if name.startswith("the ")}
            ends = apart(expected[-1], found[-1], a.keys() - passing)
            return out | dict(equal=False, first=first, begins=apart(a, b, passing), ends=ends)
    return out | dict(equal=True)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit, so that NaN equals itself and zero does not equal minus zero."""
    if a is None or b is None:
        return a is b
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def apart(a: State, b: State, names: Iterable[str]) -> float:
    """The largest difference in one of these tensors over the largest magnitude in it."""
    worst = 0.0
    for name in names:
        x, y = a[name], b[name]
        if x is None or y is None or not x.numel():
            continue
        x, y = x.double(), y.double()
        worst = max(worst, float((x - y).abs().max() / x.abs().max().clamp(min=1e-30)))
    return worst


def captured(model: nn.Module) -> Row:
    """How a compiled model was captured; nothing where it was not compiled."""
    state = model.__dict__.get("_megatrain")
    if not isinstance(state, Compiled):
        return {}
    whole = [m for same_key in state.whole.captures.values() for m in same_key]
    parts = [m for u in state.pieces.units.values() for same_key in u.captures.values() for m in same_key]
    made = whole or parts
    if not made:
        return dict(captured="not captured")
    targets = [operation(n)[0] for m in made for t in m.program.templates for n in t.graph.graph.nodes]
    opaque = list(dict.fromkeys(type(t.module).__name__ for t in targets if isinstance(t, Opaque)))
    how = "graph with opaque parts" if opaque else "graph"
    if state.whole.refused:
        return dict(captured="layer by layer", opaque=opaque, layers=len(state.pieces.units), templates=len(parts))
    program = made[0].program
    counts = dict(captures=len(made), layers=len(program.layers), templates=len(program.templates))
    return dict(captured=how if state.schedules else "eagerly", opaque=opaque, **counts)


def reason(error: BaseException) -> str:
    """The first line of an error, with its type unless it is megatrain's own."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if type(error).__module__.startswith("megatrain") else f"{type(error).__name__}: {first}"


def where(error: BaseException) -> str:
    """The line of the model that an error's text names, or else the innermost one it came through: file:line, text."""
    for text in (str(e) for e in causes(error)):
        if named := re.findall(r'File "([^"]+)", line (\d+).*(?:\n\s*(.*))?', text):
            path, number, line = named[-1]
            return f"{Path(path).name}:{number} {line}".strip()
    lines = [
        f"{Path(f.filename).name}:{f.lineno} {f.line or ''}".strip()
        for e in causes(error)
        for f in traceback.extract_tb(e.__traceback__)
        if not re.search(r"/torch/|/megatrain/|contextlib|benchmarks/models", f.filename)
    ]
    return lines[-1] if lines else ""


def causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


# -- all rows ---------------------------------------------------------------------------------------------------------


def isolated(name: str, args: argparse.Namespace) -> Row:
    """The row of one architecture, from a process of its own, whatever becomes of that."""
    command = [sys.executable, __file__, "--row", name, "--dtype", args.dtype]
    found: Row = dict(name=name, dtype=args.dtype)
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired as slow:
        return found | dict(failed=f"it took more than {args.limit:.0f} s", stderr=tail(slow.stderr))
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"name": ')]
    if rows:
        return json.loads(rows[-1]) | dict(whole_seconds=round(time.perf_counter() - start, 1))
    code = done.returncode
    why = f"its process ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with status {code}"
    return found | dict(failed=why, stderr=tail(done.stderr))


def tail(text: str | bytes | None) -> str:
    plain = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    return "\n".join(plain.splitlines()[-40:])


HEAD = ("architecture", "captured", "layers, templates", "equal to eager after three steps", "seconds")


def cells(found: Row) -> tuple[str, ...]:
    """A row of the table, in HEAD's order."""
    how = found.get("captured", "-")
    if found.get("captures", 1) > 1:
        how += f", {found['captures']} captures"
    if found.get("opaque"):
        how += f": {', '.join(found['opaque'])}"
    counts = f"{found['layers']}, {found['templates']}" if "layers" in found else "-"
    seconds = f"{found['seconds']:.1f} ({found['eager_seconds']:.1f})" if "seconds" in found else "-"
    return found["name"], how, counts, verdict(found), seconds


def verdict(found: Row) -> str:
    """The cell that says whether the two trainings were equal, or why they were not compared."""
    if "failed" in found:
        place = f" at {found['where']}" if found.get("where") else ""
        phase = f"{found['phase']}: " if found.get("phase") not in (None, "training it compiled") else ""
        text = f"{phase}{found['failed']}{place}"
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    odd = "" if found["finite"] else ", of which some are not finite"
    odd += ", with deterministic algorithms (without, eager differs from itself)" * found.get("deterministic", False)
    if found["equal"]:
        return f"bitwise{odd}"
    return f"within {found['begins']:.0e}, first {found['first']}; after three steps {found['ends']:.0e}{odd}"


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, and a count."""
    lines = [HEAD, tuple("---" for _ in HEAD), *map(cells, rows)]
    good = sum(bool(r.get("equal")) for r in rows)
    count = f"{good} of {len(rows)} bitwise; torch {torch.__version__}, transformers {transformers_version()}"
    return "\n".join([*("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines), "", count])


def transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def main() -> None:
    args = options()
    if args.row:
        warnings.simplefilter("ignore")
        print(json.dumps(row(args.row, DTYPES[args.dtype])), flush=True)
        return
    rows: list[Row] = []
    for name in args.only:
        rows.append(isolated(name, args))
        print(" | ".join(cells(rows[-1])), file=sys.stderr, flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
