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


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """(dotted name of the module or of what is taken from it, the statement) for each import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def imported(path: Path) -> set[str]:
    """The modules of megatrain that the file imports: `order`, `passes.plan`, or `passes` for the package itself."""
    found: set[str] = set()
    for name, _ in imports(path):
        parts = name.split(".")
        if parts[0] == "megatrain":
            found.add(".".join(parts[1:3]) if parts[1:2] == ["passes"] and len(parts) > 3 else ".".join(parts[1:2]))
    return found


def test_the_public_names_are_these() -> None:
    assert sorted(megatrain.__all__) == [
        "DEFAULT_PASSES",
        "Op",
        "Pass",
        "Program",
        "Schedule",
        "compile",
        "parse",
        "place_waits",
        "schedule",
        "show",
        "stats",
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
    readers = {f.name for f in FILES if any(name in ENVIRONMENT for name in attributes(f))}
    assert readers <= {"settings.py", "demo.py"}, "read the environment in megatrain/settings.py"
    demo = (ROOT / "megatrain" / "demo.py").read_text()
    assert demo.count("environ") == demo.count("os.environ.update(added)") + demo.count("del os.environ[name]") + 2


ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}


def attributes(path: Path) -> Iterator[str]:
    """Every `a.b` in the file, and every name taken from a module by import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
    yield from (name for name, _ in imports(path))
