"""The pipeline, what users may put into it, and what each pass does: programs before and after, as text.

UPDATE_GOLDEN=1 rewrites the files in tests/golden.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import megatrain
from megatrain import DEFAULT_PASSES, Pass, Program
from megatrain.offline import program_of
from megatrain.passes import ALL, Emit, Hoist, Partition, Plan, Prefetch, Prune
from megatrain.pipeline import GraphPass, parse_pass, pipeline, registered, run, split
from megatrain.verify import VerifyError

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"
EXAMPLE = TESTS / "example_pass"


class Mlp(nn.Module):
    """Two equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(passes: tuple[Pass, ...] = DEFAULT_PASSES) -> Program:
    """The program of a training step of `Mlp` on a batch of four whose gradient is wanted."""
    return program_of(Mlp(), (torch.empty(4, 8, requires_grad=True),), {}, passes=passes)


# The pipeline


def test_the_default_order() -> None:
    assert [str(p) for p in DEFAULT_PASSES] == [
        "hoist", "simplify", "causal", "fuse_loss", "partition", "differentiate", "plan", "emit", "prefetch", "prune",
    ]  # fmt: skip
    assert pipeline(DEFAULT_PASSES) == DEFAULT_PASSES
    assert [[p.name for p in part] for part in split(DEFAULT_PASSES)] == [
        ["hoist", "simplify", "causal", "fuse_loss", "partition"],
        ["differentiate", "plan", "emit", "prefetch", "prune"],
    ]  # fmt: skip


@pytest.mark.parametrize("made", [cls() for cls in ALL] + [Plan(slots=3), Plan(slots=1, activations="keep")], ids=str)
def test_a_pass_is_its_text(made: Pass) -> None:
    assert parse_pass(str(made)) == made
    assert hash(parse_pass(str(made))) == hash(made)


def test_options_at_their_default_are_left_out() -> None:
    assert str(Plan()) == "plan"
    assert str(Plan(slots=3, activations="keep")) == "plan{slots=3,activations='keep'}"
    assert parse_pass(" plan{ activations='keep', slots=3 } ") == Plan(3, "keep")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "plam",
            "no pass is named 'plam'; there are causal, differentiate, emit, fuse_loss, hoist, partition, plan, "
            "prefetch, prune, simplify",
        ),
        ("plan{slot=2}", "pass plan has no option slot; it has activations, slots"),
        ("prune{by=2}", "pass prune has no option by; it has none"),
        ("plan(2)", "'plan(2)' is not a pass: write it as name or name{option=value,...}"),
        ("plan{slots=0}", "plan{slots=0}: at least one slot is needed"),
        ("plan{activations='drop'}", "plan{activations='drop'}: use 'recompute' or 'keep'"),
    ],
)
def test_a_text_that_is_no_pass(text: str, said: str) -> None:
    with pytest.raises(ValueError) as found:
        parse_pass(text)
    assert str(found.value) == said


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        (
            (*DEFAULT_PASSES, Prune()),
            "pass prune is in the pipeline twice: "
            "hoist, simplify, causal, fuse_loss, partition, differentiate, plan, emit, prefetch, prune, prune\n"
            "remove one",
        ),
        (
            (Hoist(), Plan()),
            "pass plan needs a differentiated program, but the passes before it (hoist) give a hoisted one\n"
            "put it behind a pass that gives differentiated, or start from (*megatrain.DEFAULT_PASSES, ...)",
        ),
        (
            (Emit(),),
            "pass emit needs a planned program, but the passes before it (none) give a captured one\n"
            "put it behind a pass that gives planned, or start from (*megatrain.DEFAULT_PASSES, ...)",
        ),
        (
            (Hoist(), Partition()),
            "the pipeline ends with a partitioned program; add the missing passes of megatrain.DEFAULT_PASSES",
        ),
        ((), "the pipeline ends with a captured program; add the missing passes of megatrain.DEFAULT_PASSES"),
    ],
)
def test_a_pipeline_that_cannot_be(passes: tuple[Pass, ...], said: str) -> None:
    with pytest.raises(ValueError) as found:
        megatrain.compile(nn.Linear(2, 2), device="cpu", passes=passes)
    assert str(found.value) == said


def test_names_are_passes() -> None:
    passes = ["plan{slots=1}" if p.name == "plan" else str(p) for p in DEFAULT_PASSES]
    assert [s.name for s in mlp(passes=pipeline(passes)).schedule.slots if s.role == "weights"] == ["w0"]


# Passes of users


def smooth(module: fx.GraphModule) -> fx.GraphModule:
    """Takes gelu for relu."""
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.gelu.default
    return module


def test_a_plain_function_works_on_the_captured_graph() -> None:
    torch.manual_seed(0)
    model = Mlp()
    eager = Mlp()
    eager.load_state_dict(model.state_dict())
    megatrain.compile(model, device="cpu", passes=(*DEFAULT_PASSES, smooth))
    x = torch.randn(4, 8)
    y = model(x)
    y.square().sum().backward()
    z = x
    for name in ("layers.0.0", "layers.1.0"):
        z = nn.functional.gelu(eager.get_submodule(name)(z))
    z.square().sum().backward()
    assert torch.equal(y, z)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_a_plain_function_that_returns_nothing() -> None:
    def forgetful(module: fx.GraphModule) -> None:
        pass

    with pytest.raises(ValueError, match=r"^pass forgetful returned NoneType: return a torch\.fx\.GraphModule$"):
        mlp(passes=pipeline((*DEFAULT_PASSES, forgetful)))  # type: ignore[arg-type]


def test_two_plain_functions_need_two_names() -> None:
    with pytest.raises(ValueError, match=r"^pass smooth is in the pipeline twice: smooth, smooth, hoist"):
        pipeline((GraphPass(smooth), *DEFAULT_PASSES, smooth))


@dataclass(frozen=True)
class Hasty(Pass):
    """Drops every wait."""

    name, needs, gives = "hasty", "scheduled", "scheduled"
    really: bool = False

    def apply(self, program: Program) -> Program:
        ops = tuple(megatrain.Op(op.label, op.verb, op.reads, op.writes, op.call) for op in program.schedule.forward)
        return program.replace(schedule=program.schedule.replace(forward=ops))


def test_a_pass_that_breaks_a_rule_is_named_with_it() -> None:
    with pytest.raises(VerifyError) as found:
        mlp(passes=(*DEFAULT_PASSES, Hasty(really=True)))
    assert str(found.value).splitlines()[0] == ("after pass hasty{really=True}, race: fwd0 may overtake fetch0")


def test_nothing_is_verified_where_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_VERIFY", "0")
    assert not any(op.after for op in mlp(passes=(*DEFAULT_PASSES, Hasty())).schedule.forward)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package, installed where this process finds it."""
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    if importlib.util.find_spec("setuptools") and importlib.util.find_spec("pip"):
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    else:
        written_by_hand(source, target)
    monkeypatch.syspath_prepend(target)
    registered.cache_clear()
    yield
    registered.cache_clear()
    sys.modules.pop("prefetch_later", None)


def written_by_hand(source: Path, target: Path) -> None:
    """What installing comes to, where there is no setuptools."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["megatrain.passes"]
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text(
        "\n".join(["[megatrain.passes]", *(f"{k} = {v}" for k, v in points.items())])
    )
    shutil.copy(source / "prefetch_later.py", target)


def test_a_pass_of_another_package(installed: None) -> None:
    later = parse_pass("prefetch-later{ahead=0}")
    assert str(later) == "prefetch-later{ahead=0}" and str(parse_pass("prefetch-later")) == "prefetch-later"
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(4, 8)
    expected = model(x)
    megatrain.compile(model, device="cpu", passes=(*DEFAULT_PASSES, later))
    assert torch.equal(model(x), expected)
    assert [op.label for op in megatrain.schedule(model).forward] == ["fetch0", "fwd0", "fetch1", "fwd1"]


def test_an_entry_point_that_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "source")
    (tmp_path / "source" / "prefetch_later.py").write_text("PrefetchLater = 3\n")
    written_by_hand(tmp_path / "source", tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    registered.cache_clear()
    with pytest.raises(ValueError, match=r"prefetch-later = prefetch_later:PrefetchLater is not a megatrain\.Pass"):
        parse_pass("hoist")
    sys.modules.pop("prefetch_later")


# Dumps


def test_a_dump_of_every_pass_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_DUMP", str(tmp_path / "dump"))
    program = mlp()
    names = ["captured", *(p.name for p in DEFAULT_PASSES)]
    files = [f"{i:02}-{name}.txt" for i, name in enumerate(names)]
    assert sorted(f.name for f in (tmp_path / "dump").iterdir()) == [*files, "log.txt"]
    assert megatrain.parse((tmp_path / "dump" / files[-1]).read_text()) == program.schedule
    log = [line.split() for line in (tmp_path / "dump" / "log.txt").read_text().splitlines()]
    assert [line[:2] for line in log] == [[f"{i:02}", name] for i, name in enumerate(names)]
    assert all(line[3] == "s" and line[5] == "lines" and float(line[2]) >= 0 for line in log)
    for line, file in zip(log, files, strict=True):
        assert int(line[4]) == (tmp_path / "dump" / file).read_text().count("\n")
    mlp()
    assert sorted(f.name for f in (tmp_path / "dump" / "2").iterdir()) == [*files, "log.txt"]


# What each pass does


def test_each_pass_on_a_two_layer_mlp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program after each pass, which is the one before the next."""
    monkeypatch.setenv("MEGATRAIN_DUMP", str(tmp_path))
    mlp()
    dumped = {f.name: f.read_text().rstrip("\n") + "\n" for f in tmp_path.glob("[0-9]*.txt")}
    if os.environ.get("UPDATE_GOLDEN") == "1":
        for name, text in dumped.items():
            (GOLDEN / f"mlp-{name}").write_text(text)
    assert dumped == {f.name.removeprefix("mlp-"): f.read_text() for f in GOLDEN.glob("mlp-*.txt")}


def after(p: Pass, text: str) -> str:
    """The text of the schedule that `p` makes of the one given as text, without derived facts."""
    made = run(Program(stage="scheduled", schedule=megatrain.parse(text)), [p])
    megatrain.verify(made.schedule)
    lines = megatrain.show(made.schedule).splitlines()
    return "\n".join(line.split(";")[0].rstrip() for line in lines if not line.startswith(";")) + "\n"


DECLARED = """\
template block  layers.0 .. layers.2
  fwd(f32[8], 1 KiB) -> f32[8]
slots w0 w1  weights 1 KiB each
inputs x0 f32[8]
outputs x3
forward
"""

IN_ORDER_OF_NEED = """\
fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1
fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w)
fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2
"""

AS_EARLY_AS_SLOTS_ALLOW = """\
fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
fetch2   prefetch  layers.2.w               -> w0           after fwd0, prev(layers.2.w)
fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1
fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2
"""

WITH_IDLE_OPS = """\
fetch0   prefetch  layers.0.w               -> w0           after prev(w0), prev(layers.0.w)
fwd0     compute   block.fwd(x0, w0)        -> x1           after fetch0
again0   prefetch  layers.0.w               -> w0
idle0    compute   block.fwd(x1, w0)        -> y1           after again0
fetch1   prefetch  layers.1.w               -> w1           after prev(w1), prev(layers.1.w)
fwd1     compute   block.fwd(x1, w1)        -> x2           after fetch1
fetch2   prefetch  layers.2.w               -> w0           after idle0, prev(layers.2.w)
fwd2     compute   block.fwd(x2, w0)        -> x3           after fetch2
idle2    prefetch  layers.1.w               -> w1
"""


def test_prefetch_issues_as_early_as_the_slots_allow() -> None:
    assert after(Prefetch(), DECLARED + IN_ORDER_OF_NEED) == DECLARED + AS_EARLY_AS_SLOTS_ALLOW


def test_prefetch_is_done_once() -> None:
    assert after(Prefetch(), DECLARED + AS_EARLY_AS_SLOTS_ALLOW) == DECLARED + AS_EARLY_AS_SLOTS_ALLOW


def test_prune_drops_what_nobody_reads() -> None:
    assert after(Prune(), DECLARED + WITH_IDLE_OPS) == DECLARED + IN_ORDER_OF_NEED


def test_prune_drops_slots_that_nobody_touches() -> None:
    spare = DECLARED.replace("slots w0 w1  weights", "slots w0 w1 w2  weights")
    assert after(Prune(), spare + IN_ORDER_OF_NEED) == DECLARED + IN_ORDER_OF_NEED
