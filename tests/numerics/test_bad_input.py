"""Modules that nobody planned for: each trains as in eager, or one line says why not and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from twins import alike

import megatrain


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))


def changed(change: Callable[[nn.Sequential], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = net()
        change(model)
        return model

    return make


class Holding(nn.Module):
    """A linear layer, and another parameter or buffer that its result is made with."""

    def __init__(self, value: Tensor, use: Callable[[Tensor, Tensor], Tensor], trained: bool = False) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(8, 8), use
        self.value = nn.Parameter(value, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.linear(x), self.value)


def complex_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.view_as_real(x.to(w.dtype) @ w).sum(-1)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.float()


class Plain(torch.Tensor):
    """A tensor of another class, without data of its own."""


def plain(model: nn.Sequential) -> None:
    linear: Any = model[0]
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Plain))


class Int8(torch.Tensor):
    """Eight bits and a scale, in the manner of quantisation libraries."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Int8(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int8(args[0].codes, args[0].scale)
        whole = [a.codes.float() * a.scale if isinstance(a, Int8) else a for a in args]
        return func(*whole, **(kwargs or {}))


def quantised(model: nn.Sequential) -> None:
    linear: Any = model[0]
    scale = linear.weight.detach().abs().max() / 127
    codes = (linear.weight.detach() / scale).round().to(torch.int8)
    linear.weight = nn.Parameter(Int8(codes, scale), requires_grad=False)


def sharded(model: nn.Sequential) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def group() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WORKING: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": changed(lambda m: parametrizations.weight_norm(m[0])),
    "orthogonal": changed(lambda m: parametrizations.orthogonal(m[0])),
    "spectral_norm": changed(lambda m: parametrizations.spectral_norm(m[0])),
    "complex": lambda: Holding(torch.randn(8, 8, dtype=torch.complex64), complex_product, trained=True),
    "int8": lambda: Holding(torch.randint(-9, 9, (8, 8), dtype=torch.int8), product),
    "float8": lambda: Holding(torch.randn(8, 8).to(torch.float8_e4m3fn), product),
}


def steps(model: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses: list[Tensor] = []
    for seed in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("kind", WORKING)
def test_modules_that_train_as_in_eager(kind: str) -> None:
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(WORKING[kind]())
    alike(models[0], megatrain.compile(models[1], device="cpu"), steps)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", [nn.utils.weight_norm, plain], ids=["old_weight_norm", "subclass"])
def test_modules_that_cannot_be_copied(change: Any) -> None:
    losses: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = net()
        change(model[0] if change is nn.utils.weight_norm else model)
        if compiled:
            megatrain.compile(model, device="cpu")
        losses.append([loss for _ in range(4) for loss in steps(model)])
    assert all(map(torch.equal, *losses))


def test_a_model_of_torch_compile() -> None:
    eager = net()
    inner: Any = torch.compile(net(), backend="eager")
    inner.load_state_dict({f"_orig_mod.{n}": t for n, t in eager.state_dict().items()})
    ours = megatrain.compile(inner, device="cpu")
    x = torch.randn(3, 8)
    assert torch.equal(eager(x), ours(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), r"^0\.weight of a lazy module has no shape yet\n"),
        (lambda: Holding(torch.eye(8).to_sparse(), product), r"has layout torch\.sparse_coo: only strided tensors"),
        (changed(lambda m: m[0].to("meta")), r"^0\.weight is on meta: fill it first"),
        (changed(quantised), r"^0\.weight is a Int8, a tensor that holds others, which a flat plane cannot\n"),
        (lambda: torch.jit.script(net()), r"is a torch\.jit\.ScriptModule, which has no Python forward to capture\n"),
        (lambda: nn.DataParallel(net()), r"^this DataParallel is wrapped by DataParallel, which moves the same"),
    ],
    ids=["lazy", "sparse", "meta", "quantised", "script", "data_parallel"],
)
def test_modules_that_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=said):
        megatrain.compile(model, device="cpu")
    assert "_megatrain" not in model.__dict__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "inside"])
def test_wrapped_modules_are_refused(wrapper: str, group: Any) -> None:
    model: nn.Module = net()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif wrapper == "inside":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model), nn.Linear(8, 8))
    else:
        sharded(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is wrapped by \w+, which moves the same parameters as megatrain\n"):
        megatrain.compile(model, device="cpu")
