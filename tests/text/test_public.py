"""What is public, how long files are, and who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "megatrain").glob("*.py"), *(ROOT / "passes").glob("*.py")])
PASSES = [f for f in FILES if f.parent.name == "passes" and f.stem != "__init__"]

RUNTIME = {"api", "compiled", "demo", "lanes", "offline", "runtime", "timeline"}
"""Modules that run schedules, or need those that do."""

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}


def imports(path: Path) -> Iterator[str]:
    """The dotted name of each module, or of what is taken from it, that the file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path: Path) -> set[str]:
    """The modules of megatrain that the file imports: `order`, `passes.plan`, or `passes` for the package itself."""
    found: set[str] = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "megatrain":
            found.add(".".join(parts[1:3]) if parts[1:2] == ["passes"] and len(parts) > 3 else ".".join(parts[1:2]))
    return found


def test_the_public_names_are_these() -> None:
    assert sorted(megatrain.__all__) == [
        "AdamW",
        "DEFAULT_PASSES",
        "Lion",
        "Op",
        "Pass",
        "Program",
        "SGD",
        "Schedule",
        "clip_grad_norm_",
        "compile",
        "parse",
        "place_waits",
        "plan",
        "schedule",
        "show",
        "stats",
        "synchronize",
        "verify",
    ]
    assert all(hasattr(megatrain, name) for name in megatrain.__all__)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_long_file_says_why(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring, "a file begins with a docstring"
    lines = text.count("\n")
    assert lines <= 400 or "over 400 lines" in docstring.lower(), (
        f"{lines} lines: shorten it, or say in its docstring why it is over 400 lines"
    )


@pytest.mark.parametrize("path", PASSES, ids=lambda path: path.stem)
def test_a_pass_imports_no_runtime_and_no_other_pass(path: Path) -> None:
    names = imported(path)
    assert not names & RUNTIME
    assert not {name for name in names if name.partition(".")[0] == "passes"}


@pytest.mark.parametrize("name", ["runtime", "lanes", "store", "bodies", "schedule", "liveness"])
def test_the_runtime_imports_no_pass(name: str) -> None:
    assert not {n for n in imported(ROOT / "megatrain" / f"{name}.py") if n.partition(".")[0] == "passes"}


def test_the_environment_is_read_in_settings_alone() -> None:
    readers = {path.name for path in FILES if ENVIRONMENT.intersection(names_in(path))}
    # The demo sets variables for the time of its run; settings.py reads them.
    assert readers - {"demo.py"} == {"settings.py"}


def names_in(path: Path) -> Iterator[str]:
    """Every `a.b` in the file, and every name that it imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
    yield from imports(path)
