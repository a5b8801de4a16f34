"""The command line: in process, and once as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import megatrain
from megatrain.__main__ import main
from megatrain.offline import program_of

ROOT = Path(__file__).parents[2]
LLAMA = str(ROOT / "tests" / "golden" / "llama.json")

MODULE = """
import torch
from torch import nn

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor([2.0]))
    def forward(self, x, *, bias=None):
        y = self.b(self.a(x).relu()) * self.scale
        return y if bias is None else y + bias

def alone(): return Pair()
def with_tuple(): return Pair(), (torch.empty(4, 8),)
def with_dict(): return Pair(), {"x": torch.empty(4, 8), "bias": torch.empty(8)}
def with_tensor(): return Pair(), torch.empty(4, 8)
def number(): return 3
def broken(): raise RuntimeError("no such luck")
def needs(x): return x
def allocated():
    for t in Pair().state_dict().values():
        assert t.is_meta
    return with_tuple()
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x
def branches(): return Branches(), (torch.empty(4, 8),)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module of models."""
    (tmp_path / "cli_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    return "cli_models"


def ran(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    try:
        code = main(argv)
    except SystemExit as exit:
        code = int(str(exit.code))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_show_is_the_schedule_that_a_compiled_model_gets(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("train", "eval"):
        code, out, _ = ran(capsys, "show", f"{models}:with_tuple", "--memory", "1MiB", "--kind", kind)
        model, example = sys.modules[models].with_tuple()
        compiled = megatrain.compile(model.train(kind == "train"), device="cpu", memory="1MiB")
        with torch.set_grad_enabled(kind == "train"):
            compiled(*example)
        assert (code, out) == (0, f"{megatrain.show(megatrain.schedule(compiled, kind))}\n")


def test_a_model_on_the_host_and_one_on_meta_have_one_schedule(models: str) -> None:
    module = __import__(models)
    shown = [
        megatrain.show(program_of(model, (torch.empty(4, 8),), {}, memory="1MiB"))
        for model in (module.alone(), module.alone().to("meta"))
    ]
    assert shown[0] == shown[1]


def test_a_dict_gives_keyword_arguments(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "show", f"{models}:with_dict")
    assert code == 0 and "inputs x f32[4,8], bias f32[8]" in out


def test_models_are_built_on_meta(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "verify", f"{models}:allocated")[0] == 0


@pytest.mark.parametrize("stage", ["captured", "hoisted", "partitioned", "differentiated", "planned"])
def test_show_stops_at_a_stage(stage: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ran(capsys, "show", f"{models}:with_tuple", "--stage", stage)
    assert code == 0 and out.startswith(f"; {stage}\n")


def test_a_configuration_a_directory_and_a_type_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(Path(LLAMA).read_text())
    code, shown, _ = ran(capsys, "show", LLAMA, "--batch", "3", "--sequence", "48")
    assert code == 0 and "inputs input_ids i64[3,48], labels i64[3,48]" in shown
    assert ran(capsys, "show", str(tmp_path), "--batch", "3", "--sequence", "48") == (0, shown, "")
    code, out, err = ran(capsys, "show", "lama")
    assert (code, out) == (2, "")
    assert err.startswith(
        "megatrain: lama is no file, no package.module:callable and no model type of transformers; did"
    )


def test_an_encoder_and_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        '{"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}'
    )
    code, out, err = ran(capsys, "verify", str(tmp_path))
    assert (code, err) == (0, "") and out.startswith("ok: ")


def test_a_dump_is_shown_verified_and_compared(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(ran(capsys, "show", f"{models}:with_tuple")[1])
    b.write_text(ran(capsys, "show", f"{models}:with_tuple", "--kind", "eval")[1])
    assert ran(capsys, "show", str(a)) == (0, a.read_text(), "")
    assert ran(capsys, "diff", str(a), str(a)) == (0, "", "")
    code, out, _ = ran(capsys, "diff", str(a), str(b))
    assert code == 0 and "\n- backward\n" in out
    schedule = megatrain.parse(a.read_text())
    waits = sum(len(op.after) for op in schedule.ops)
    code, out, _ = ran(capsys, "verify", str(a))
    assert code == 0 and out.startswith(f"ok: {len(schedule.ops)} ops, {waits} waits, peak ")


def test_a_race_in_a_dump_is_told(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "a.txt"
    text = ran(capsys, "show", f"{models}:with_tuple")[1]
    wait = next(op for op in megatrain.parse(text).ops if op.verb == "compute").after[0]
    dump.write_text(text.replace(f"after {wait} ", " ", 1))
    code, out, err = ran(capsys, "verify", str(dump))
    assert (code, out) == (1, "") and f"may overtake {wait}" in err and f"add 'after {wait}'" in err


def test_what_is_no_dump_of_a_schedule_is_refused(
    models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, empty, noise = tmp_path / "01-hoist.txt", tmp_path / "empty.txt", tmp_path / "noise.bin"
    other.write_text(ran(capsys, "show", f"{models}:with_tuple", "--stage", "hoisted")[1])
    empty.write_text("")
    noise.write_bytes(b"\xff\xfe\x00")
    code, _, err = ran(capsys, "verify", str(other))
    assert code == 1 and err.startswith(f"megatrain: {other} is no dump of a schedule: line ")
    assert ran(capsys, "show", str(empty))[0::2] == (
        1, f"megatrain: {empty} holds no ops: name a dump of a scheduled program, such as 10-prune.txt\n",
    )  # fmt: skip
    code, _, err = ran(capsys, "show", str(noise))
    assert code == 2 and "not a text file" in err
    code, _, err = ran(capsys, "diff", str(empty), str(tmp_path / "none.txt"))
    assert code == 1 and "holds no ops" in err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nope/dir", "nope/dir: there is no such file or directory"),
        ("./config.json", "./config.json: there is no such file or directory"),
        ("tests", "tests has no config.json: name a Hugging Face model directory"),
        ("no_module_of_mine:f", "cannot import no_module_of_mine:f: ModuleNotFoundError: No module named"),
        ("cli_models:nothing", "cannot import cli_models:nothing: AttributeError: module"),
        (
            "cli_models:broken",
            "cli_models:broken failed with RuntimeError: no such luck\nname a function that takes no",
        ),
        ("cli_models:needs", "cli_models:needs failed with TypeError: "),
        ("cli_models:number", "cli_models:number returned int: return a torch.nn.Module, or (model, example)"),
        ("cli_models:with_tensor", "the example of cli_models:with_tensor is Tensor: give a tuple of positional or"),
        (
            "cli_models:alone",
            "cli_models:alone returned Pair alone, and what to call it with (x, bias) cannot be told\n",
        ),
    ],
)
def test_a_bad_source_gets_one_message(
    source: str, said: str, models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, err = ran(capsys, "show", source)
    assert (code, out) == (2, "") and err.startswith(f"megatrain: {said}")


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ((), 2, "the following arguments are required: COMMAND"),
        (("train",), 2, "invalid choice: 'train'"),
        (("show", "cli_models:with_tuple", "--stage", "done"), 2, "argument --stage: invalid choice: 'done'"),
        (("show", "cli_models:with_tuple", "--batch", "0"), 2, "argument --batch: '0' is not a number of 1 or more"),
        (("show", "cli_models:with_tuple", "--memory", "3x"), 2, "memory='3x' is not a size: write it as '24GiB'"),
        (("show", "cli_models:with_tuple", "--memory", "1KiB"), 1, "compile with memory='21KiB' or more"),
        (("show", "cli_models:branches"), 1, "cannot capture Branches.forward: "),
        (("diff", "nope.txt", "nope.txt"), 2, "nope.txt: No such file or directory: name a dump"),
    ],
)
def test_bad_usage_and_what_cannot_be(
    argv: tuple[str, ...], code: int, said: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = ran(capsys, *argv)
    assert (found, out) == (code, "") and said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, "show", f"{models}:with_tuple", "--device", "cuda")
    assert code == 1 and err.startswith("megatrain: device='cuda': this machine has no CUDA device")


def test_transformers_is_asked_for_where_it_is_needed(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert ran(capsys, "show", LLAMA) == (
        2, "", "megatrain: a Hugging Face model needs transformers: pip install 'megatrain[hf]'\n",
    )  # fmt: skip
    assert ran(capsys, "verify", f"{models}:with_tuple")[0] == 0


def test_a_compiled_model_has_a_schedule_already() -> None:
    model = megatrain.compile(nn.Linear(4, 4), device="cpu")
    with pytest.raises(ValueError, match=r"this Linear is compiled already: megatrain\.schedule\(model\)"):
        program_of(model, (torch.empty(2, 4),), {})


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="stage='done': there is captured, hoisted"):
        program_of(nn.Linear(4, 4), (torch.empty(2, 4),), {}, stage="done")


def test_as_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "megatrain", "show", "tests.golden.stack:stack", "--memory", "22MiB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    megatrain.verify(megatrain.parse(done.stdout))
