"""Bad input gets a clear error, and loses nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import alike, twins

import megatrain
from megatrain.calls import CaptureError
from megatrain.passes import BudgetError
from megatrain.verify import VerifyError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, ids: Tensor, power: int = 1) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh() * power
        return x


IDS = torch.arange(12).reshape(3, 4)


def test_a_budget_too_small() -> None:
    eager, ours = twins(Net, memory=1000)
    with pytest.raises(BudgetError) as caught:
        ours(IDS)
    assert re.match(
        r"a device budget of 1000 B is too small for this model at these sizes: the smallest that works is \S+ KiB "
        r"\(\d weight slots?, inputs of \d of 6 layers on the host\)\ncompile with memory='\d+KiB' or more",
        str(caught.value),
    )
    smallest = caught.value.smallest
    eager, ours = twins(Net, memory=smallest)
    alike(eager, ours, lambda m: m(IDS).sum().backward())
    _, ours = twins(Net, memory=smallest - 1)
    with pytest.raises(BudgetError):
        ours(IDS)


@dataclass(frozen=True)
class Forgets(megatrain.Pass):
    """Loses the derivatives."""

    name, needs, gives = "forgets", "differentiated", "differentiated"

    def apply(self, program: megatrain.Program) -> megatrain.Program:
        return program.replace(derivatives={})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "lots"}, "memory='lots' is not a size: write it as '24GiB', '500MiB' or a number of bytes"),
        ({"memory": -1}, "memory=-1: a byte count must be positive; leave it out for no limit"),
        ({"backend": "magic"}, "backend='magic': there is 'eager'"),
        ({"device": "meta"}, "device='meta': megatrain runs on 'cuda' or 'cpu'"),
        (
            {"passes": ()},
            "the pipeline ends with a captured program; add the missing passes of megatrain.DEFAULT_PASSES",
        ),
        ({"passes": ("nothing",)}, "no pass is named 'nothing'; there are causal, differentiate, emit, fuse_loss,"),
        ({"passes": (*megatrain.DEFAULT_PASSES, "prune")}, "pass prune is in the pipeline twice: hoist, simplify,"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        megatrain.compile(Net(), **{"device": "cpu", **options})  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"^device='cuda': this machine has no CUDA device, .*; use 'cpu'$"):
        megatrain.compile(Net(), device="cuda")


def test_a_pass_that_breaks_an_invariant() -> None:
    passes = [q for p in megatrain.DEFAULT_PASSES for q in ([p, Forgets()] if p.name == "differentiate" else [p])]
    model = megatrain.compile(Net(), device="cpu", passes=passes)
    with pytest.raises(VerifyError, match=r"^after pass forgets, typed: template prologue was not differentiated"):
        model(IDS)


def test_a_second_backward_and_a_double_backward() -> None:
    _, ours = twins(Net)
    loss = ours(IDS).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"^backward through the same forward a second time: its values are gone"):
        loss.backward()
    loss = ours(IDS).sum()
    with pytest.raises(RuntimeError, match=r"^double backward \(create_graph=True\) through a compiled model"):
        torch.autograd.grad(loss, [ours.embed.weight], create_graph=True)


def test_a_parameter_moved_behind_the_back() -> None:
    _, ours = twins(Net)
    ours.layers[1].weight = nn.Parameter(ours.layers[1].weight.to("meta"))
    with pytest.raises(ValueError, match=r"layers\.1\.weight is on meta"):
        ours(IDS)


def test_parameters_on_meta() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"^embed\.weight is on meta: fill it first"):
        megatrain.compile(model, device="cpu")


def test_a_failure_in_a_lane_surfaces_with_its_line_and_harms_nothing() -> None:
    eager, ours = twins(Net)
    alike(eager, ours, lambda m: m(IDS).sum().backward())
    before = [p.detach().clone() for p in ours.parameters()]
    with pytest.raises(IndexError) as caught:
        ours(IDS + 100)
    assert any("in fwd_prologue compute" in " ".join(n.split()) for n in caught.value.__notes__)
    assert all(map(torch.equal, before, ours.parameters()))
    alike(eager, ours, lambda m: m(IDS).sum().backward())


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("label", ["refetch1", "bwd1", "grad1"])
def test_a_failed_backward_harms_nothing(label: str, error: BaseException) -> None:
    eager, ours = twins(Net)
    runtime = ours.__dict__["_megatrain"].runtime
    perform = runtime.perform

    def broken(op: Any, step: Any, frame: Any) -> None:
        if op.label == label:
            raise error
        perform(op, step, frame)

    loss = ours(IDS).sum()
    runtime.perform = broken
    with pytest.raises(type(error)):
        loss.backward()
    assert all(p.grad is None for p in ours.parameters())
    runtime.perform = perform
    alike(eager, ours, lambda m: m(IDS).sum().backward())


def test_too_many_captures_name_what_keeps_changing() -> None:
    _, ours = twins(Net)
    for power in range(8):
        ours(IDS, power=power + 2)
    with pytest.raises(CaptureError) as caught:
        ours(IDS, power=99)
    lines = str(caught.value).splitlines()
    assert lines[0] == "this model was captured 8 times and this call needs another; what keeps changing:"
    assert "  argument power is <class 'int'> 99" in lines and lines[-1].startswith("keep it constant between calls")


def test_questions_to_a_model_that_is_not_compiled() -> None:
    with pytest.raises(ValueError, match=r"^this Net is not compiled: call megatrain\.compile\(model\) first$"):
        megatrain.schedule(Net())
    model = megatrain.compile(Net(), device="cpu")
    with pytest.raises(ValueError, match=r"^no train schedule yet: call the model once, or compile it with example=$"):
        megatrain.schedule(model)
    with pytest.raises(ValueError, match=r"^kind='both': use 'train' or 'eval'$"):
        megatrain.schedule(model, "both")


def test_every_wait_of_a_generated_schedule_is_needed() -> None:
    _, ours = twins(Net)
    ours(IDS).sum().backward()
    s = megatrain.schedule(ours)
    megatrain.verify(s)
    count = 0
    for half, ops in s.halves():
        for i, op in enumerate(ops):
            for wait in op.after:
                fewer = megatrain.Op(op.label, op.verb, op.reads, op.writes, op.call, tuple(set(op.after) - {wait}))
                with pytest.raises(VerifyError, match=r"^race: "):
                    megatrain.verify(s.replace(**{half: (*ops[:i], fewer, *ops[i + 1 :])}))
                count += 1
    assert count > 40


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return self.layers[1](self.layers[0](y) + x)


def test_writing_into_arguments_that_others_see() -> None:
    _, ours = twins(Writes)
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"^forward writes into argument x, which shares memory with argument y\n"):
        ours(x, x)
    with pytest.raises(CaptureError, match=r"^forward writes into argument x, which shares memory with argument y\n"):
        ours(x, x[:])
    with pytest.raises(CaptureError, match=r"^forward writes into argument x, which requires a gradient\n"):
        ours(torch.randn(3, 4, requires_grad=True) * 2, x)


def test_functional_calls_are_eager() -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    found = []
    for model in (eager, ours):
        weights = {n: (p.detach() * 2).requires_grad_() for n, p in model.named_parameters()}
        torch.func.functional_call(model, weights, (x,)).sum().backward()
        found.append([w.grad for w in weights.values()])
    assert all(map(torch.equal, *found))
    alike(eager, ours, lambda m: m(x).sum().backward())


def test_functional_calls_leave_the_models_own_parameters() -> None:
    eager, ours = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.randn(3, 4)
    for model in (eager, ours):
        model(x).sum().backward()
        others: dict[str, Tensor] = {n: nn.Parameter(torch.zeros_like(p)) for n, p in model.named_parameters()}
        assert not torch.func.functional_call(model, others, (x,)).any()
    alike(eager, ours, lambda m: m(x).sum().backward())


def test_backward_under_vmap() -> None:
    model = megatrain.compile(nn.Sequential(nn.Linear(4, 4)), device="cpu")
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^vmap over the backward of a compiled model .* is not supported\n"):
        torch.autograd.grad(model(x), x, torch.eye(12).reshape(12, 3, 4), is_grads_batched=True)


def test_attributes_that_forward_does_not_read() -> None:
    model = megatrain.compile(Net(), device="cpu")
    for i in range(20):  # more often than a model may be captured
        model.seen = i  # type: ignore[assignment]
        model(IDS)
    assert len(model.__dict__["_megatrain"].whole.captures) == 1


def test_interrupted_in_a_body() -> None:
    """Ctrl-C in the middle of an op: raised in the caller with the line, and the next step is as ever."""
    eager, ours = twins(Net)
    alike(eager, ours, lambda m: m(IDS).sum().backward())
    made = next(m for found in ours.__dict__["_megatrain"].whole.captures.values() for m in found)
    executable = next(iter(made.executables.values()))
    name = next(op.call for op in executable.schedule.forward if op.label == "fwd2")
    body = executable.bodies[name]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    executable.bodies[name] = replace(body, code=interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        ours(IDS)
    assert " ".join(caught.value.__notes__[-1].split()).startswith("in fwd")
    executable.bodies[name] = body
    alike(eager, ours, lambda m: m(IDS).sum().backward())


def test_a_schedule_with_a_race() -> None:
    _, ours = twins(Net)
    ours(IDS).sum().backward()
    s = megatrain.schedule(ours)
    at = next(i for i, op in enumerate(s.forward) if op.label == "fetch2")
    fewer = replace(s.forward[at], after=tuple(w for w in s.forward[at].after if w != "fwd0"))
    with pytest.raises(VerifyError) as caught:
        megatrain.verify(s.replace(forward=(*s.forward[:at], fewer, *s.forward[at + 1 :])))
    lines = str(caught.value).splitlines()
    assert lines[0] == "race: fetch2 may overtake fwd0" and lines[-1] == "add 'after fwd0' to fetch2"
    assert [line.split()[0] for line in lines[1:-1]] == ["fwd0", "fetch2"]
