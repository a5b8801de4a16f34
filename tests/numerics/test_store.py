"""Host state: planes, layouts, leases, and a model moved into them in place."""

import copy
import gc
import io
import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from megatrain import host
from megatrain.host import ALIGN, PAGE, GradientPlanes, HostBuffer, layout_of
from megatrain.store import adopt

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


class Net(nn.Module):
    """A convolution in channels_last, a tied pair, a frozen bias, buffers: one of them 0-dim, one not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril(), persistent=False)


PLANES = {
    "conv.w": ["conv.weight", "conv.bias"],
    "rest.w": ["embed.weight", "head.bias", "norm.weight", "norm.bias"],
    "rest.b": ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mask"],
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(-1).view(torch.uint8)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=8))
def test_layout(specs):
    layout = layout_of((f"p{i}", dtype, shape) for i, (dtype, shape) in enumerate(specs))
    assert layout.bytes % PAGE == 0
    end = 0
    for e in layout.entries:
        assert e.offset % ALIGN == 0 and end <= e.offset < end + ALIGN
        end = e.offset + e.nbytes
    assert end <= layout.bytes < end + PAGE


def test_layout_of_nothing():
    assert layout_of([]) == host.Layout((), 0)
    assert HostBuffer(0).tensors(layout_of([])) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=8))
def test_slot_views_and_host_tensors_agree(specs):
    """What is written through the host tensors is what a device slot's views show after one copy of the plane."""
    layout = layout_of((f"p{i}", dtype, shape) for i, (dtype, shape) in enumerate(specs))
    buffer = HostBuffer(layout.bytes)
    assert not buffer.flat.any() and buffer.flat.numel() == buffer.bytes == layout.bytes
    slot = torch.empty(layout.bytes + PAGE, dtype=torch.uint8)
    tensors = buffer.tensors(layout)
    for t in tensors:
        if t.numel():
            t.copy_(torch.randint(0, 2, t.shape).to(t.dtype))
    slot[: layout.bytes].copy_(buffer.flat, non_blocking=True)
    for (dtype, shape), t, view in zip(specs, tensors, layout.views(slot), strict=True):
        assert t.dtype == view.dtype == dtype and t.shape == view.shape == shape
        assert t.is_contiguous() and view.is_contiguous()
        assert t.untyped_storage().nbytes() == t.numel() * dtype.itemsize
        assert torch.equal(bits(t), bits(view))


def test_stride_goes_through_a_slot():
    conv = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = layout_of([("bias", torch.float32, (3,)), ("conv", torch.float32, conv.shape, conv.stride())])
    buffer = HostBuffer(layout.bytes)
    buffer.tensors(layout)[1].copy_(conv)
    view = layout.views(buffer.flat.clone())[1]
    assert view.stride() == conv.stride() and torch.equal(view, conv)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_does_not_write_into_the_parent():
    buffer = HostBuffer(PAGE)
    pid = os.fork()
    if not pid:
        buffer.flat.numpy()[0] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    assert buffer.flat[0] == 0


def test_refused_pinning_warns_once():
    if torch.cuda.is_available():
        pytest.skip("pinning is not refused here")
    host.warn_pageable.cache_clear()
    with pytest.warns(RuntimeWarning, match="refused to pin"):
        buffer = HostBuffer(PAGE, pin=True)
    assert not buffer.pinned
    HostBuffer(PAGE, pin=True)  # a second warning would be an error here


def test_pieces_are_unregistered_when_the_memory_goes(monkeypatch):
    registered: list[tuple[int, int]] = []

    class Cudart:
        def cudaHostUnregister(self, address):
            registered[:] = [piece for piece in registered if piece[0] != address]

    monkeypatch.setattr(host, "REGISTER_BYTES", 2 * PAGE)
    monkeypatch.setattr(host, "register_piece", lambda *piece: registered.append(piece) or True)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    buffer = HostBuffer(5 * PAGE, pin=True)
    (t,) = buffer.tensors(layout_of([("w", torch.float32, (8,))]))
    start = buffer.flat.data_ptr()
    assert buffer.pinned and start % PAGE == 0
    assert registered == [(start, 2 * PAGE), (start + 2 * PAGE, 2 * PAGE), (start + 4 * PAGE, PAGE)]
    del buffer
    assert len(registered) == 3, "a tensor still uses the memory"
    del t
    assert registered == []


LAYOUT = layout_of([("w", torch.float32, (4,)), ("b", torch.float32, (2,))])


def leased() -> tuple[HostBuffer, list[torch.Tensor], weakref.ref]:
    buffer = HostBuffer(LAYOUT.bytes)
    lease = buffer.lease()
    return buffer, buffer.tensors(LAYOUT, lease), weakref.ref(lease)


@pytest.mark.parametrize("alias", [lambda t: t, torch.detach, lambda t: t[1:], lambda t: t.numpy(), lambda t: t.data])
def test_lease_lives_as_long_as_any_alias(alias):
    buffer, tensors, lease = leased()
    last = alias(tensors[1])
    del tensors
    assert lease() is not None
    del last
    gc.collect()
    assert lease() is None and buffer.flat.sum() == 0


class Give(torch.autograd.Function):
    """Gives the gradients it finds in `box`, which it empties."""

    @staticmethod
    def forward(ctx, box, *ps):
        ctx.box = box
        return sum(p.sum() for p in ps)

    @staticmethod
    def backward(ctx, *grad_outputs):
        given, ctx.box[:] = tuple(ctx.box), []
        return None, *given


def test_lease_lives_in_grad():
    _, box, lease = leased()
    address = box[0].data_ptr()
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    Give.apply(box, *params).backward()
    assert params[0].grad.data_ptr() == address, "autograd adopts the view without a copy"
    params[0].grad = None
    assert lease() is not None
    params[1].grad = None
    gc.collect()
    assert lease() is None


def test_gradient_planes_accumulate_as_eager_does():
    """Whether and when the user drops .grad, sums are right; a dropped plane is used again, a held one is not."""
    planes = GradientPlanes()
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]

    def backward(value: float) -> HostBuffer:
        buffer, box = planes.take("layers.0.dw", LAYOUT)
        buffer.flat.view(torch.float32).fill_(value)
        Give.apply(box, *params).backward()
        return buffer

    first = backward(1.0)
    second = backward(2.0)
    third = backward(4.0)
    assert second is not first and third is second, "the second was added to the first, then free again"
    assert [p.grad.unique().item() for p in params] == [7.0, 7.0]
    params[0].grad = None
    assert backward(8.0) is second, "the other .grad still is in the first"
    assert [p.grad.unique().item() for p in params] == [8.0, 15.0]
    for p in params:
        p.grad = None
    gc.collect()
    assert backward(1.0) is first
    assert planes.take("layers.1.dw", LAYOUT)[0] not in (first, second)
    assert planes.take("layers.1.dw", layout_of([("w", torch.float32, (PAGE,))]))[0].bytes == 4 * PAGE


def test_adopt_keeps_what_the_user_holds():
    model = Net()
    model.head.weight.register_hook(lambda g: g)
    model.conv.bias.grad = torch.ones(4)
    model.norm.weight.data.mul_(3)
    before = everything(model)
    values = {name: t.detach().clone() for name, t in before.items()}
    facts = {name: (t.stride(), t.requires_grad, t._version, t.grad, t._backward_hooks) for name, t in before.items()}
    s = adopt(model, PLANES)
    after = everything(model)
    assert all(after[name] is before[name] for name in before) and list(after) == list(before)
    for name, t in after.items():
        assert torch.equal(t, values[name])
        assert (t.stride(), t.requires_grad, t._version, t.grad, t._backward_hooks) == facts[name]
    assert model.head.weight is model.embed.weight and isinstance(model.head.weight, nn.Parameter)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for plane, names in PLANES.items():
        assert [e.name for e in s.layouts[plane].entries] == names
        for view, name in zip(s.layouts[plane].views(s.planes[plane].flat), names, strict=True):
            assert view.data_ptr() == after[name].data_ptr() and torch.equal(view, values[name])
    assert s.changed(model) == ""


def test_adopted_models_save_small():
    model = nn.Linear(256, 256)
    adopt(model, {"w": ["weight", "bias"]})
    out = io.BytesIO()
    torch.save(model.bias, out)
    assert len(out.getvalue()) < 4096


def test_adopted_models_save_as_safetensors(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    adopt(model, {"w": list(everything(model))})
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(loaded[name], t) for name, t in model.state_dict().items())


def test_adopted_models_train_as_before():
    plain, moved = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)) for _ in range(2))
    moved.load_state_dict(plain.state_dict())
    s = adopt(moved, {"w": list(everything(moved))})
    for model in (plain, moved):
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(0)
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            opt.step()
            opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), moved.state_dict().values(), strict=True))
    assert s.changed(moved) == ""
    copied = copy.deepcopy(moved).state_dict()
    assert all(torch.equal(copied[name], t) for name, t in moved.state_dict().items())


def test_gaps_become_contiguous():
    model = nn.Module()
    model.w = nn.Parameter(torch.arange(12.0).view(3, 4)[:, :2])
    model.t = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.register_buffer("e", torch.ones(1).expand(4))
    model.register_buffer("none", torch.empty(0, 3))
    adopt(model, {"w": ["w", "t", "e", "none"]})
    now = everything(model)
    assert now["w"].is_contiguous() and now["w"].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert now["t"].stride() == (1, 3) and now["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert now["e"].is_contiguous() and now["e"].tolist() == [1] * 4
    assert now["none"].shape == (0, 3)


def test_adopting_again_moves_only_what_left():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(a, b)
    planes = {f"layers.{i}.w": [f"{i}.weight", f"{i}.bias"] for i in range(2)}
    s = adopt(model, planes)
    x, y = a.weight.detach().clone(), b.weight.detach().clone()
    addresses = [p.data_ptr() for p in model.parameters()]
    a.weight.data, b.weight.data = b.weight.data, a.weight.data  # swapped, in the planes
    assert s.changed(model) == "0.weight was given other memory"
    again = adopt(model, planes, old=s)
    assert torch.equal(a.weight, y) and torch.equal(b.weight, x)
    assert [p.data_ptr() for p in model.parameters()] != addresses
    once_more = adopt(model, planes, old=again)
    assert once_more.planes == again.planes
    for p in model.parameters():
        p.data = p.data.clone()  # nothing lies in the planes any more
    assert adopt(model, planes, old=once_more).planes == again.planes
    assert again.changed(model) == ""


def test_a_replaced_parameter_keeps_its_memory():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(a, b)
    planes = {f"layers.{i}.w": [f"{i}.weight", f"{i}.bias"] for i in range(2)}
    s = adopt(model, planes)
    bias, before = a.bias, a.bias.detach().clone()
    x, y = a.weight.detach().clone(), b.weight.detach().clone()
    a.bias = nn.Parameter(torch.full((3,), 5.0))
    assert s.changed(model) == "0.bias was replaced"
    again = adopt(model, planes, old=s)
    assert again.planes["layers.1.w"] is s.planes["layers.1.w"]
    assert torch.equal(bias, before)
    assert torch.equal(a.weight, x) and torch.equal(b.weight, y) and a.bias.tolist() == [5] * 3
    assert again.changed(model) == ""


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["0.weight", "1.weight"], "1.weight is on meta: fill it first"),
        (["0.weight", "0.wieght"], "0.wieght is not a parameter or buffer of this Sequential"),
        (["7.weight"], "7.weight is not a parameter or buffer of this Sequential"),
        (["0.weight", "2.weight"], "0.weight and 2.weight are one tensor"),
        (["0.weight", "3.weight"], "0.weight and 3.weight share memory"),
    ],
)
def test_what_cannot_be_adopted(names, error):
    a, b, c, d = (nn.Linear(2, 2, device=device) for device in ("cpu", "meta", "cpu", "cpu"))
    model = nn.Sequential(a, b, c, d)
    c.weight = a.weight
    d.weight.data = a.weight.data
    address = a.weight.data_ptr()
    with pytest.raises(ValueError, match=error):
        adopt(model, {"w": names})
    assert a.weight.data_ptr() == address


def replace_parameter(m: Net) -> None:
    m.conv.bias = nn.Parameter(m.conv.bias.detach().clone())


def transpose(m: Net) -> None:
    m.embed.weight.data = m.embed.weight.data.t()


def add_module(m: Net) -> None:
    m.norm.extra = nn.Identity()


def remove_buffer(m: Net) -> None:
    del m.mask


def replace_module(m: Net) -> None:
    m.conv = nn.Conv2d(3, 4, 3)


def free_memory(m: Net) -> None:
    m.norm.bias.data = m.norm.bias.data.clone()


def none(m: Net) -> None:
    m.head.bias = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replace_parameter, "conv.bias was replaced"),
        (transpose, "embed.weight has another shape now, [4, 10], or stride, (1, 4)"),
        (lambda m: m.head.register_parameter("scale", None), "a parameter was added to head"),
        (lambda m: m.register_buffer("more", torch.ones(1)), "a buffer was added to the model"),
        (remove_buffer, "a buffer was removed from the model"),
        (add_module, "a module was added to norm"),
        (replace_module, "conv was replaced"),
        (free_memory, "norm.bias was given other memory"),
        (none, "head.bias was replaced"),
        (lambda m: m.bfloat16(), "norm.running_mean was replaced"),
        (lambda m: m.load_state_dict(m.state_dict()), ""),
        (lambda m: m.eval().requires_grad_(False), ""),
    ],
)
def test_changed(change, reason):
    model = Net()
    s = adopt(model, PLANES)
    change(model)
    assert s.changed(model) == reason


def test_changed_dtype_and_device():
    model = nn.Linear(2, 2)
    s = adopt(model, {"w": ["weight", "bias"]})
    assert s.changed(nn.Linear(2, 2)) == "this Linear is not the model that was adopted"
    model.bfloat16()
    assert s.changed(model) == "weight is torch.bfloat16 now, not torch.float32"
