"""What PyTorch's users do between forward, backward and step, done to a compiled model and to its eager twin."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from twins import MODES, alike, bits, check, differing, same, state, twins

import megatrain

WORDS = 29


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tied embedding and head, an unused and a buffered part, labels and a mask that may be left out."""

    def __init__(self, depth: int = 3, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        if mask is not None:
            x = x * mask[..., None]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def ids(batch: int = 2, length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, *sizes: int, seed: int = 0) -> Tensor:
    x = ids(*sizes, seed=seed)
    return model(x, x)["loss"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def test_accumulates_over_backwards(mode: str) -> None:
    eager, ours = twins(Net, mode)

    def several(model: nn.Module) -> list[Tensor]:
        return [loss(model, seed=s).backward() or p.grad.clone() for s in range(3) for p in [model.embed.weight]]  # type: ignore

    alike(eager, ours, several)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_a_backward(mode: str, order: tuple[int, ...]) -> None:
    eager, ours = twins(lambda: Net(dropout=0.1), mode)

    def several(model: nn.Module) -> list[Tensor]:
        losses = [loss(model, seed=s) for s in range(3)]
        for i in order:
            losses[i].backward()
        return [x.detach() for x in losses]

    alike(eager, ours, several)


def test_one_loss_of_two_forwards() -> None:
    """Bitwise but for a tied weight: autograd adds each call's sum there, where eager adds use by use."""
    eager, ours = twins(Net)
    for model in (eager, ours):
        (loss(model, seed=1) * 2 + loss(model, seed=2)).backward()
    apart = differing(state(eager), state(ours))
    assert apart in ([], ["embed.weight.grad"])
    torch.testing.assert_close(eager.embed.weight.grad, ours.embed.weight.grad, rtol=1e-5, atol=1e-7)


def test_forward_without_backward_and_evaluation_between(mode: str) -> None:
    eager, ours = twins(lambda: Net(dropout=0.1), mode)

    def steps(model: nn.Module) -> Any:
        loss(model, seed=3)  # never used
        kept = loss(model, seed=4)
        with torch.no_grad():
            train = loss(model, 3, 5).clone()
            model.eval()
            seen = [loss(model, 3, 5, seed=5), model(ids())["logits"]]
            model.train()
        kept.backward()
        return [train, *seen, kept.detach()]

    alike(eager, ours, steps)
    assert megatrain.schedule(ours, "eval").backward == ()


def test_frozen_unused_and_tied(mode: str) -> None:
    eager, ours = twins(Net, mode)
    for model in (eager, ours):
        model.layers[1].requires_grad_(False)
    alike(eager, ours, lambda m: loss(m).backward())
    assert ours.layers[1].up.weight.grad is None and ours.unused.weight.grad is None
    for model in (eager, ours):
        model.layers[1].requires_grad_(True)
        model.embed.requires_grad_(False)
    alike(eager, ours, lambda m: loss(m).backward())
    for model in (eager, ours):
        model.requires_grad_(False)
    assert not alike(eager, ours, loss).requires_grad


def test_sizes_and_missing_arguments() -> None:
    eager, ours = twins(Net)
    for batch, length in ((2, 8), (3, 5), (1, 8), (2, 1), (1, 1), (4, 4)):
        alike(eager, ours, lambda m, b=batch, n=length: loss(m, b, n).backward())
    alike(eager, ours, lambda m: m(ids())["logits"].sum().backward())
    alike(eager, ours, lambda m: m(ids(), mask=(ids() > 3).float())["logits"].sum().backward())
    alike(eager, ours, lambda m: loss(m).backward())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid() if x.shape[1] > 4 else layer(x).tanh()
        return x


def test_a_model_that_branches_on_length() -> None:
    eager, ours = twins(Branching)
    for length in (3, 9, 4, 5, 8):
        alike(eager, ours, lambda m, n=length: m(torch.randn(2, n, 8)).sum().backward())


def test_a_step_between_forward_and_backward_raises() -> None:
    eager, ours = twins(Net)
    for model in (eager, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model).backward()
        late = loss(model)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
    alike(eager, ours, lambda m: loss(m).backward())


def test_gradients_that_somebody_holds() -> None:
    eager, ours = twins(Net)

    def steps(model: nn.Module) -> list[Any]:
        held = []
        for s in range(3):
            loss(model, seed=s).backward()
            held.append([p.grad for p in model.parameters()])
            model.zero_grad(set_to_none=s == 1)
        loss(model, seed=9).backward()
        return held

    alike(eager, ours, steps)
    alike(eager, ours, lambda m: torch.autograd.grad(loss(m), [m.embed.weight, m.layers[0].up.bias]))


def test_gradients_reach_the_plane_without_a_copy() -> None:
    _, ours = twins(Net)
    loss(ours).backward()
    runtime = ours.__dict__["_megatrain"].runtime
    start = runtime.gradients._made["layers.0.dw"][0][0].flat.data_ptr()
    assert ours.layers[0].norm.weight.grad.data_ptr() == start


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(optimizer: str) -> None:
    eager, ours = twins(Net)

    def steps(model: nn.Module) -> list[Tensor]:
        o = OPTIMIZERS[optimizer](model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)
        norms = []
        for s in range(4):
            loss(model, seed=s).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            o.step()
            schedule.step()
            o.zero_grad(set_to_none=s % 2 == 0)
        return norms

    alike(eager, ours, steps)


def test_averages_and_state_dicts(tmp_path: Any) -> None:
    eager, ours = twins(Net)
    for model in (eager, ours):
        average = copy.deepcopy(dict(model.named_parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for s in range(2):
            loss(model, seed=s).backward()
            optimizer.step()
            optimizer.zero_grad()
            for n, p in model.named_parameters():
                average[n].detach().lerp_(p.detach(), 0.5)
        model.load_state_dict(average, strict=False)
    alike(eager, ours, lambda m: loss(m).backward())
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert same(dict(eager.state_dict()), dict(saved))
    save_file({n: t for n, t in ours.state_dict().items() if n != "head.weight"}, tmp_path / "a.safetensors")
    again = load_file(tmp_path / "a.safetensors") | {"head.weight": saved["embed.weight"]}
    for model in (eager, ours):
        model.load_state_dict({n: t * 0.5 for n, t in again.items()})
    alike(eager, ours, lambda m: loss(m).backward())


def test_assigned_and_replaced_parameters(caplog: pytest.LogCaptureFixture) -> None:
    eager, ours = twins(Net)
    alike(eager, ours, lambda m: loss(m).backward())
    with caplog.at_level(logging.WARNING, "megatrain"):
        for model in (eager, ours):
            model.load_state_dict({n: t.detach() * 2 for n, t in model.state_dict().items()}, assign=True)
            model.embed.weight = model.head.weight
            model.layers[1].up.weight = nn.Parameter(torch.full_like(model.layers[1].up.weight, 0.25))
        alike(eager, ours, lambda m: loss(m).backward())
        for model in (eager, ours):
            model.layers.append(copy.deepcopy(model.layers[0]))
        alike(eager, ours, lambda m: loss(m).backward())
    lines = [r.message for r in caplog.records if "laying out" in r.message]
    assert len(lines) == 2 and "was replaced" in lines[0] and "a module was added to layers" in lines[1]


def test_copies_are_eager() -> None:
    eager, ours = twins(Net)
    loss(ours).backward()
    ours.zero_grad()
    for made in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert made.__dict__["_megatrain"] is None
        made.embed.weight.data.mul_(2)
        other = copy.deepcopy(eager)
        other.embed.weight.data.mul_(2)
        alike(other, made, lambda m: loss(m).backward())
        assert megatrain.compile(copy.deepcopy(made), device="cpu") is not made
    alike(eager, ours, lambda m: loss(m).backward())


def test_other_dtypes_and_devices() -> None:
    eager, ours = twins(Net)
    assert ours.to("cpu") is ours
    with pytest.raises((RuntimeError, AssertionError)):
        ours.cuda()
    with pytest.raises(ValueError, match="cannot move to meta: its parameters live on the host"):
        ours.to("meta")
    for model in (eager, ours):
        model.bfloat16()
    alike(eager, ours, lambda m: loss(m).backward())
    for model in (eager, ours):
        model.zero_grad()
        model.double()
    alike(eager, ours, lambda m: loss(m).backward())


def test_inputs_that_require_grad(mode: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    eager, ours = twins(make, mode)

    def steps(model: nn.Module) -> Tensor | None:
        x = torch.randn(4, 8, requires_grad=True)
        (model(x) * 2 + x).sum().backward()
        return x.grad

    alike(eager, ours, steps)
    for model in (eager, ours):
        model.requires_grad_(False)
    alike(eager, ours, steps)


def test_statistics_of_batch_norm(mode: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True)) for _ in range(3)))

    eager, ours = twins(make, mode)
    for _ in range(2):
        alike(eager, ours, lambda m: m(torch.randn(6, 8)).square().sum().backward())
    alike(eager, ours, lambda m: [m(torch.randn(6, 8)), m(torch.randn(6, 8))][1].sum().backward())
    for model in (eager, ours):
        model.eval()
    alike(eager, ours, lambda m: m(torch.randn(6, 8)).sum().backward())


def test_dropout_under_a_budget_that_spills() -> None:
    def make() -> nn.Module:
        return Net(depth=5, width=16, dropout=0.3)

    eager, ours = twins(make)
    loss(ours, 64, 32).backward()
    full = megatrain.stats(ours).planned_peak
    small = megatrain.compile(copy.deepcopy(eager), device="cpu", memory=full - 3 * 64 * 32 * 16 * 4)
    alike(eager, small, lambda m: [loss(m, 64, 32, seed=s).backward() for s in range(2)])
    assert any(op.label.startswith("spill") for op in megatrain.schedule(small).forward)


def test_compiling_twice() -> None:
    model = Net()
    assert megatrain.compile(megatrain.compile(model, device="cpu"), device="cpu") is model
    with pytest.raises(ValueError, match=r"compiled already, with .*: compile a copy for other options"):
        megatrain.compile(model, device="cpu", memory="1GiB")
    with pytest.raises(ValueError, match="layers is compiled already: compile either the whole model or its part"):
        outer = nn.ModuleDict({"layers": model})
        megatrain.compile(outer, device="cpu")


def test_part_of_a_model_is_compiled() -> None:
    eager, ours = twins(Net)
    wrapped = [nn.Sequential(m) for m in (eager, ours)]
    for w in wrapped:
        w.register_module("extra", None)
    alike(eager, ours, lambda m: nn.Sequential(m)(ids())["logits"].sum().backward())
    check(eager, ours)
    assert bits(eager.embed.weight).equal(bits(ours.embed.weight))


@pytest.mark.parametrize("optimizer", ["adagrad", "adam-foreach"])
def test_an_optimizer_made_before_compiling(optimizer: str) -> None:
    """Its state and the gradients of the eager steps stay."""
    torch.manual_seed(0)
    eager = Net()
    ours = copy.deepcopy(eager)
    for model in (eager, ours):
        o = OPTIMIZERS[optimizer](model.parameters())
        for s in range(3):
            if s == 1 and model is ours:
                megatrain.compile(model, device="cpu")
            loss(model, seed=s).backward()
            o.step()
    check(eager, ours)


def with_lbfgs(model: Any) -> Tensor:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value.item()

    return torch.tensor(optimizer.step(closure))


def with_a_scaler(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # pyright: ignore[reportCallIssue]
    for s in range(2):
        scaler.scale(loss(model, seed=s)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def with_averaged_weights(model: Any) -> Tensor:
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for s in range(2):
        loss(model, seed=s).backward()
        optimizer.step()
        average.update_parameters(model)
    return average(ids())["logits"].detach()


def with_weights_as_one_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    loss(model).backward()


def for_some_weights_only(model: Any) -> None:
    loss(model).backward(inputs=[model.layers[1].up.weight])


@pytest.mark.parametrize(
    "how",
    [
        with_lbfgs, with_a_scaler, with_averaged_weights, with_weights_as_one_vector, for_some_weights_only,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_trained(how: Any) -> None:
    eager, ours = twins(Net)
    alike(eager, ours, how)


def test_what_is_done_with_results(mode: str) -> None:
    eager, ours = twins(Net, mode)

    def written(model: nn.Module) -> Tensor:
        logits = model(ids())["logits"]
        logits.mul_(2)
        logits += 1
        logits.square().sum().backward()
        return logits.detach()

    def watched(model: nn.Module) -> list[Tensor | None]:
        seen: list[Tensor | None] = []
        logits = model(ids())["logits"]
        logits.retain_grad()
        logits.register_hook(lambda g: seen.append(g.clone()))
        logits.exp().sum().backward()
        return [*seen, logits.grad]

    def evaluated_in_a_hook(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []

        def evaluate(_: Tensor) -> None:
            with torch.no_grad():
                seen.append(loss(model, seed=7))

        value = loss(model)
        value.register_hook(evaluate)
        value.backward()
        return seen

    for do in (written, watched, evaluated_in_a_hook):
        alike(eager, ours, do)


def test_frozen_layers_with_dropout(mode: str) -> None:
    """A random body without a backward has no generator state to record."""
    eager, ours = twins(lambda: Net(dropout=0.2), mode)
    for model in (eager, ours):
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    alike(eager, ours, lambda m: loss(m).backward())


def test_evaluated_in_several_threads() -> None:
    eager, ours = twins(Net)
    expected = eager(ids())["logits"].detach()
    with torch.no_grad():
        ours(ids())
    wrong: list[object] = []

    def evaluate() -> None:
        with torch.no_grad():
            wrong.extend(i for i in range(10) if not same(ours(ids())["logits"], expected))

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
