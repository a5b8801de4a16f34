"""The command line: `megatrain demo | show | diff | verify`.

A SOURCE is a model (`package.module:callable`, a Hugging Face directory, its config.json, or a model type such as
`llama`) or a dump.  Models are built on `meta`: nothing of their size is allocated.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatrain.demo import run_demo
from megatrain.diff import diff_schedules
from megatrain.liveness import peak
from megatrain.offline import program_of
from megatrain.program import STAGES, Program
from megatrain.schedule import Schedule
from megatrain.settings import parse_bytes
from megatrain.show import show
from megatrain.source import UsageError, is_dump, model_of
from megatrain.text import parse_schedule, show_about
from megatrain.verify import verify_schedule

SOURCE = "package.module:callable (returns a model, or (model, example)), a Hugging Face directory or config.json, a \
transformers model type such as llama, or a dump"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 for what is wrong with a model or a dump, 2 for what is wrong with the command."""
    options = parser().parse_args(argv)
    try:
        return options.run(options)
    except BrokenPipeError:  # `megatrain show ... | head`; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="megatrain", description="Train models larger than the GPU.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small Llama in less memory than it needs, and compare with eager")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    demo.add_argument("--memory", help="the cap on the device, such as 28MiB")
    demo.add_argument("--steps", type=positive, help="optimizer steps")
    demo.add_argument(
        "--out", type=Path, default=Path("megatrain-demo"), help="the folder for schedule, dumps and trace"
    )
    demo.set_defaults(run=run_demo_command)

    shown = commands.add_parser("show", help="print a model's program or schedule, or a dump")
    shown.add_argument("--stage", choices=STAGES, default=STAGES[-1])
    add_source(shown)
    shown.set_defaults(run=run_show)

    verified = commands.add_parser("verify", help="prove that a schedule breaks no rule")
    add_source(verified)
    verified.set_defaults(run=run_verify, stage=STAGES[-1])

    diffed = commands.add_parser("diff", help="what changed from one dump to another")
    diffed.add_argument("a", metavar="A", help="a dump")
    diffed.add_argument("b", metavar="B", help="a dump")
    diffed.set_defaults(run=run_diff)
    return top


def add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", metavar="SOURCE", help=SOURCE)
    command.add_argument("--batch", type=positive, default=2, help="of a Hugging Face model; %(default)s")
    command.add_argument("--sequence", type=positive, default=128, help="of a Hugging Face model; %(default)s")
    command.add_argument("--memory", type=size, help="the cap on the device, such as 24GiB")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="%(default)s")
    command.add_argument("--kind", choices=("train", "eval"), default="train", help="%(default)s")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_demo_command(options: argparse.Namespace) -> int:
    return run_demo(device=options.device, memory=options.memory, steps=options.steps, out=options.out)


def run_show(options: argparse.Namespace) -> int:
    print(show(program(options)).rstrip("\n"))
    return 0


def run_verify(options: argparse.Namespace) -> int:
    found = program(options)
    schedule = found.schedule if isinstance(found, Program) else found
    verify_schedule(schedule)
    waits = sum(len(op.after) for op in schedule.ops)
    print(f"ok: {len(schedule.ops)} ops, {waits} waits, peak {show_about(peak(schedule))}")
    return 0


def run_diff(options: argparse.Namespace) -> int:
    a, b = (show(dump(path)) for path in (options.a, options.b))
    if changed := diff_schedules(a, b):
        print(changed)
    return 0


def program(options: argparse.Namespace) -> Program | Schedule:
    """What SOURCE and the options stand for."""
    if is_dump(options.source):
        return dump(options.source)
    model, args, kwargs = model_of(options.source, options.batch, options.sequence)
    training = options.kind == "train"
    with torch.set_grad_enabled(training):
        return program_of(
            model.train(training), args, kwargs, device=options.device, memory=options.memory, stage=options.stage
        )


def dump(path: str) -> Schedule:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"{path}: {reason}: name a dump, as `megatrain show` prints one") from error
    try:
        schedule = parse_schedule(text)
    except ValueError as error:
        raise ValueError(f"{path} is no dump of a schedule: {error}") from error
    if not schedule.ops:
        raise ValueError(f"{path} holds no ops: name a dump of a scheduled program, such as 10-prune.txt")
    return schedule


if __name__ == "__main__":
    sys.exit(main())
