"""What is done between two passes: verifying, and writing the program down."""

from __future__ import annotations

import time
from pathlib import Path

from megatrain.pipeline import Pass
from megatrain.program import Program
from megatrain.rules import verify_program
from megatrain.show import show
from megatrain.verify import VerifyError


class Verify:
    """Raises VerifyError, naming the pass, where a pass returns a program that breaks a rule of its stage."""

    def __call__(self, p: Pass, program: Program) -> None:
        try:
            verify_program(program)
        except VerifyError as e:
            raise VerifyError(f"after pass {p}, {e.rule}", e.faults) from e


class Dump:
    """Writes `00-captured.txt`, `01-hoist.txt`, ... and a log with times and line counts into a folder; the programs of
    later captures go into sub-folders `2`, `3`, ..."""

    def __init__(self, folder: Path, program: Program):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "00-captured.txt").exists():
            n = 2
            while (folder / str(n)).exists():
                n += 1
            folder = folder / str(n)
            folder.mkdir()
        self.folder, self.count, self.clock = folder, 0, time.perf_counter()
        (folder / "log.txt").write_text("")
        self.write("captured", program)

    def __call__(self, p: Pass, program: Program) -> None:
        self.count += 1
        self.write(p.name, program)

    def write(self, name: str, program: Program) -> None:
        seconds = time.perf_counter() - self.clock
        text = show(program)
        (self.folder / f"{self.count:02}-{name}.txt").write_text(text)
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"{self.count:02} {name:<16} {seconds:8.3f} s {text.count(chr(10)):6} lines\n")
        self.clock = time.perf_counter()
