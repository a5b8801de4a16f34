"""What `step_time.py` makes of its measurements: the bound, the table, the comparison with an earlier run.

A row is what a JSON line holds: what was asked for, and either figures or `failed`, which says why there are none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

Span = tuple[str, str, float, float]
"""(label, lane, start, end) of an op that ran, in seconds."""

KEYS = ("system", "model", "batch", "micro", "sequence", "memory")
"""What two rows must share to be compared."""

CONDITIONS = ("clip", "update", "backend", "host_memory", "skip_logits", "device", "torch")
"""What is said of two compared rows where it differs."""

LEAST = 0.95
"""The ratio of tok/s to an earlier run's under which a system has become slower."""


def lane_seconds(trace: Sequence[Span], steps: int) -> dict[str, float]:
    """Seconds a step in which each lane has something to do."""
    found: dict[str, float] = {}
    for _, lane, start, end in trace:
        found[lane] = found.get(lane, 0.0) + (end - start) / steps
    return found


def bounded(trace: Sequence[Span], steps: int, clips: bool) -> tuple[str, float]:
    """The lane, or the chain, that bounds a step, and its seconds: the largest of `compute`, `link` (the busier of the
    two directions), `host` and, where gradients are clipped and states are on the host, `clip`."""
    busy = {"compute": 0.0, "h2d": 0.0, "d2h": 0.0, "host": 0.0} | lane_seconds(trace, steps)
    bounds = {"compute": busy["compute"], "link": max(busy["h2d"], busy["d2h"]), "host": busy["host"]}
    if clips and any(lane == "host" and label.startswith("upd") for label, lane, _, _ in trace):
        backward = [s for s in trace if s[1] == "compute" and s[0].startswith(("bwd", "acc"))]
        bounds["clip"] = sum(lane_seconds(backward, steps).values()) + busy["host"]
    name = max(bounds, key=lambda b: bounds[b])
    return name, bounds[name]


def parsed(lines: Iterable[str]) -> list[Row]:
    """The rows among these lines."""
    return [json.loads(line) for line in lines if line.startswith('{"system": ')]


def apart(row: Row, other: Row) -> float:
    """The largest difference between two runs' losses of a step; NaN where one is."""
    gaps = [abs(a - b) for a, b in zip(row["losses"], other["losses"], strict=True)]
    return next((g for g in gaps if g != g), max(gaps))


COLUMNS = {
    "system": lambda r: r["system"],
    "step s": lambda r: f"{r['step_s']:.3f}",
    "fwd+bwd s": lambda r: f"{r['fwd_bwd_s']:.3f}",
    "tok/s": lambda r: f"{r['tokens_s']:,}",
    "TFLOP/s": lambda r: f"{r['tflops_6nt']:.1f}",
    "of peak": lambda r: f"{r['peak_share']:.1%}" if "peak_share" in r else "-",
    "bound": lambda r: f"{r['bound']} {r['bound_s']:.3f} s" if "bound" in r else "-",
    "bound/step": lambda r: f"{r['bound_share']:.0%}" if "bound" in r else "-",
    "device GiB": lambda r: f"{r['device_gib']:.2f}",
    "host GiB": lambda r: f"{r['host_gib']:.1f}",
    "host B/param": lambda r: f"{r['host_bytes']:.2f}",
    "first loss": lambda r: f"{r['losses'][0]:.4f}",
    "last loss": lambda r: f"{r['losses'][-1]:.4f}",
}


def table(rows: Sequence[Row]) -> str:
    """The rows as text, those without figures with the reason; then each peer's tok/s and losses against megatrain's
    (`ours / its` over 1: megatrain is faster)."""
    ours = next((r for r in rows if r["system"] == "megatrain" and "failed" not in r), None)
    head = [*COLUMNS, "ours / its"]
    body: list[list[str]] = []
    for r in rows:
        if "failed" in r:
            body.append([r["system"], f"failed: {r['failed']}"])
            continue
        ratio = f"{ours['tokens_s'] / r['tokens_s']:.2f}" if ours and r is not ours else "-"
        body.append([*(str(show(r)) for show in COLUMNS.values()), ratio])
    whole = [head, *(cells for cells in body if len(cells) == len(head))]
    widths = [max(len(c[i]) for c in whole) for i in range(len(head))]
    widths[0] = max(len(r["system"]) for r in [*rows, {"system": head[0]}])
    lines = [
        "  ".join([c[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(c[1:], widths[1 : len(c)], strict=True))])
        for c in [head, *body]
    ]
    peers = [r for r in rows if ours and r is not ours and "failed" not in r]
    lines += [
        f"largest difference between the losses of a step, megatrain and {r['system']}: {apart(ours, r):.4f}"
        for r in peers
        if ours
    ]
    return "\n".join(lines)


def against(rows: Sequence[Row], earlier: Sequence[Row]) -> tuple[str, bool]:
    """tok/s of these rows beside those of the same system and sizes (`KEYS`) in an earlier run, the last of them where
    there are several; and whether none has become slower (`LEAST`).  One that gives no figures any more has."""
    then = {tuple(r.get(k) for k in KEYS): r for r in earlier if "tokens_s" in r}
    pairs = [(r, then[key]) for r in rows if (key := tuple(r.get(k) for k in KEYS)) in then]
    lines: list[str] = []
    good = True
    for now, old in pairs:
        ratio = now.get("tokens_s", 0) / old["tokens_s"]
        good = good and ratio >= LEAST
        line = f"{now['system']}: {old['tokens_s']:,} tok/s then ({old.get('date', 'no date')})"
        line += f", {now['tokens_s']:,} now, ratio {ratio:.2f}" if "tokens_s" in now else f", now {now['failed']}"
        changed = [f"{c} {old.get(c)} -> {now.get(c)}" for c in CONDITIONS if old.get(c) != now.get(c)]
        lines.append(line + f" (other conditions: {', '.join(changed)})" * bool(changed) + " SLOWER" * (ratio < LEAST))
    return "\n".join(lines or ["no earlier row is of the same system, model, batch, micro, sequence and memory"]), good
