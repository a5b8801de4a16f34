"""Step time of megatrain beside what else trains on one device: Qwen2-shaped models, random weights and tokens.

    python benchmarks/step_time.py --model 3.09b --batch 16 --memory 24GiB --systems megatrain,plain,fsdp2,deepspeed

`systems.py` says what each system is.  Each runs in a process of its own, one after the other, from the same weights
and tokens; one that fails, does not fit or is not installed gets a row that says why.  Prints a JSON line a system as
it ends, a table, the ratio of megatrain's tok/s to each peer's, and how far losses of a step are apart.

step       from the start of one to the start of the next, so that it holds what is left of the update before; the
           median leaves out the first two, which compile and take memory, and the last, which waits for all updates
TFLOP/s    6 x parameters x tokens: no attention, no recomputation; `of peak` divides by an 8192^3 bf16 matrix product,
           timed on the device before the systems (on the CPU by a small fp32 one)
device     peak of what PyTorch allocated from the first step on
host       peak RSS of the process; bytes a parameter are this less the RSS after CUDA has started and before the model
           exists
bound      of megatrain, from a trace of two more steps: the largest of `compute`, `link` (copies to the device or from
           it, whichever takes longer), `host`, each the seconds a step that the lane is busy; and, if gradients are
           clipped and states are on the host, `clip`: the backward's compute and the host lane one after the other, as
           no update can begin before the norm of all gradients is known, when the backward ends, and the next backward
           needs all updates.  `bound/step` is its share of the step

`--against FILE`: tok/s beside that of the same systems and sizes in FILE, JSON lines as printed here (other lines are
ignored); status 1 if one has less than 0.95 of it, or fails now.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rows import Row, against, parsed, table
from benchmarks.systems import SHAPES, SYSTEMS
from benchmarks.timing import failed, matrix_tflops, measured

MATRIX = "matrix"
"""What is measured before the systems, in their manner."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="megatrain,plain", help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--model", choices=SHAPES, default="0.49b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro", type=int, default=1, help="micro-batches a step, of --batch each")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm; 0 for none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", default=None, help="megatrain's device budget; all that is free unless given")
    parser.add_argument("--host-memory", default=None, help="host bytes for megatrain; all that is free unless given")
    parser.add_argument("--update", default="auto", help="megatrain.AdamW's update=")
    parser.add_argument("--backend", default=None, help="megatrain's backend=")
    parser.add_argument("--skip-logits", action="store_true", help="megatrain's skip_logits=")
    parser.add_argument("--trace", action="store_true", help="also tell how long each of megatrain's compute ops takes")
    parser.add_argument("--chrome", type=Path, help="write megatrain's traced steps there, for chrome://tracing")
    parser.add_argument("--show", action="store_true", help="print megatrain's schedule")
    parser.add_argument("--against", type=Path, help="JSON lines of an earlier run, to compare tok/s with")
    parser.add_argument("--here", action="store_true", help="run the one system in this process, for a profiler")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    known = {*SYSTEMS, MATRIX} if args.here else {*SYSTEMS}
    if unknown := [s for s in args.systems if s not in known]:
        parser.error(f"--systems: there is no {', '.join(unknown)}; there is {', '.join(SYSTEMS)}")
    if args.here and len(args.systems) > 1:
        parser.error("--here: give one system")
    return args


def here(name: str, args: argparse.Namespace) -> Row:
    """The row of one system, run in this process, whatever happens."""
    try:
        if name == MATRIX:
            row = dict(system=MATRIX, device=args.device, tflops=round(matrix_tflops(args.device), 3))
        else:
            row = measured(name, args)
    except ModuleNotFoundError as error:
        row = failed(name, args, str(error))
    except Exception as error:
        traceback.print_exc()
        row = failed(name, args, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    if args.device == "cuda" and torch.cuda.is_available():
        row["device"] = torch.cuda.get_device_name()
    return row


def isolated(name: str, args: argparse.Namespace) -> Row:
    """The row of one system, run in a process of its own.  What else that prints is passed on."""
    command = [sys.executable, "-u", "-W", "ignore::FutureWarning", __file__, *sys.argv[1:]]
    rows: list[Row] = []
    with subprocess.Popen([*command, "--systems", name, "--here"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if found := parsed([line]):
                rows += found
            else:
                print(line, end="", flush=True)
    code = process.returncode
    if rows:
        return rows[-1]
    why = f"ended by signal {-code}" + " (no host memory?)" * (code == -9) if code < 0 else f"ended with status {code}"
    return failed(name, args, why)


def main() -> None:
    args = options()
    if args.here:
        with suppress(OSError):  # where the host's memory ends, this process does, not the run
            Path("/proc/self/oom_score_adj").write_text("1000")
        print(json.dumps(here(args.systems[0], args)), flush=True)
        return
    earlier = parsed(args.against.read_text().splitlines()) if args.against else []
    matrix = isolated(MATRIX, args)
    print(json.dumps(matrix), flush=True)
    rows: list[Row] = []
    for name in args.systems:
        row = isolated(name, args)
        if "failed" not in row and "failed" not in matrix:
            row["peak_share"] = round(row["tflops_6nt"] / matrix["tflops"], 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows))
    if args.against:
        text, good = against(rows, earlier)
        print(text)
        sys.exit(not good)


if __name__ == "__main__":
    main()
