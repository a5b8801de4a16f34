"""Statements that a random forward may be made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from growing import Scope

Propose = Callable[[Scope], str]


def filled(template: str, **parts: Any) -> str:
    """The template with its capital letters replaced."""
    return re.sub(r"\b(NEW|[A-Z])(?=[a-z]?\b)", lambda m: str(parts[m[1]]) if m[1] in parts else m[1], template)


def plain(template: str, weight: int = 1, dims: int = 0, least: int = 1) -> list[Propose]:
    """`NEW`: a new name; `X`: a float tensor; `Y`: one like it; `K`: a number; `D`: a dimension; `L`: the last size."""

    def propose(s: Scope) -> str:
        x = s.floats(dims, least)
        parts = {"NEW": s.new(), "X": x, "Y": s.like(x), "K": s.number()}
        last = s.shape(x)[-1]
        parts["L"] = f"{x}.shape[-1]" if last is None else str(last)
        parts["D"] = str(s.rng.randrange(-1, s.envs[0][x].dim()))
        return filled(template, **parts)

    return [propose] * weight


def module(template: str, call: str = "NEW = M(X)", weight: int = 1, dims: int = 0) -> list[Propose]:
    """`M`: a member; `N`: an odd width."""

    def propose(s: Scope) -> str:
        x = s.floats(dims)
        expression = filled(template, L=s.last(x), N=s.rng.choice([1, 3, 7, s.width]))
        return filled(call, NEW=s.new(), M=s.member(expression), X=x)

    return [propose] * weight


def parameter(template: str, call: str, weight: int = 1) -> list[Propose]:
    return module(f"nn.Parameter(torch.randn({template}))", call, weight)


def convolution(s: Scope) -> str:
    x = s.floats(3)
    width = s.last(x)
    groups = s.rng.choice([1, width])
    m = s.member(f"nn.Conv1d({width}, {width}, 3, padding={s.rng.choice([1, 2])}, groups={groups})")
    return f"{s.new()} = {m}({x}.transpose(1, 2)).transpose(1, 2)"


def normalized(s: Scope) -> str:
    x = s.floats(3)
    width = s.last(x)
    kind = s.rng.choice([f"nn.BatchNorm1d({width})", f"nn.GroupNorm(1, {width})"])
    return f"{s.new()} = {s.member(kind)}({x}.transpose(1, 2)).transpose(1, 2)"


def attention(s: Scope) -> str:
    x = s.floats(3)
    width = s.last(x)
    heads = s.rng.choice([h for h in (1, 2, 3, 4) if width % h == 0])
    m = s.member(f"nn.Linear({width}, {3 * width}, bias=False)")
    q, k, v, o = s.new(), s.new(), s.new(), s.new()
    causal = s.rng.choice(["", ", is_causal=True", ", dropout_p=0.1 if self.training else 0.0"])
    split = f".unflatten(-1, ({heads}, -1)).transpose(1, 2)"
    return (
        f"{q}, {k}, {v} = {m}({x}).chunk(3, -1)\n"
        f"{o} = F.scaled_dot_product_attention({q}{split}, {k}{split}, {v}{split}{causal}).transpose(1, 2).flatten(2)"
    )


def running(s: Scope) -> str:
    """A statistic in a buffer."""
    x = s.floats()
    b = s.buffer(s.rng.choice(["torch.zeros(())", f"torch.ones({s.last(x)})"]))
    value = f"{x}.detach().float().mean()"
    write = s.rng.choice(
        [
            f"{b}.lerp_({value}, 0.1)",
            f"{b}.mul_(0.9).add_({value} * 0.1)",
            f"{b}.copy_({b} * 0.5 + {value})",
            f"{b} += {value}",
        ]
    )
    use = s.rng.choice([f"\n{s.new()} = {x} * {b}", f"\n{s.new()} = {x} - {b}.clone()", ""])
    guard = s.rng.choice(["with torch.no_grad():\n    ", "if self.training:\n    ", ""])
    if s.rng.random() < 0.3:
        return f"{s.new()} = {x} + {b}.clone()\n{guard}{write}{use}"
    return f"{guard}{write}{use}"


def counter(s: Scope) -> str:
    b = s.buffer("torch.zeros((), dtype=torch.long)")
    x = s.floats()
    use = s.rng.choice(["", f"\n{s.new()} = {x} / {b}", f"\n{s.new()} = {b}.clone()", f"\n{s.new()} = {x} * ({b} % 2)"])
    return s.rng.choice([f"{b} += 1", f"{b}.add_(1)", f"{b}.add_({x}.shape[0])"]) + use


def embedding(s: Scope) -> str:
    ids = s.pick(lambda t: t.dtype == torch.long and t.dim() in (1, 2))
    m = s.member(f"nn.Embedding(11, {s.rng.choice([s.width, 3, 1])}{s.rng.choice(['', ', padding_idx=0'])})")
    return f"{s.new()} = {m}({ids} % 11)"


def integers(s: Scope) -> str:
    i = s.pick(lambda t: not t.is_floating_point())
    x = s.floats()
    return s.rng.choice([
        f"{s.new()} = {i} + 1",
        f"{s.new()} = {i}.float().mean()",
        f"{s.new()} = {i}.to({x}.dtype) * 0.1",
        f"{s.new()} = {i} == {i}.flatten()[0]",
        f"{s.new()} = {i}.cumsum(0)",
    ])  # fmt: skip


def masked(s: Scope) -> str:
    x = s.floats()
    y = s.like(x)
    mask = s.rng.choice([f"({y} > 0)", f"(torch.arange({x}.shape[0]) % 2 == 0).view(-1, *[1] * {len(s.shape(x)) - 1})"])
    return s.rng.choice([
        f"{s.new()} = {x}.masked_fill({mask}, {s.number()})",
        f"{s.new()} = torch.where({mask}, {x}, {y} * 0.5)",
        f"{s.new()} = {x} * {mask}",
        f"{x}.masked_fill_({mask}, 0.0)",
        f"{s.new()} = {mask}",
    ])  # fmt: skip


def scalars(s: Scope) -> str:
    x = s.floats()
    n = s.new()
    number = f"{x}.shape[{s.rng.choice([0, -1])}] {s.rng.choice(['* 0.5', '+ 1', '** -0.5', '// 2 + 1'])}"
    return f"{n} = {number}\n{s.new()} = {x} {s.rng.choice('*/+')} {n}"


def listed(s: Scope) -> str:
    x = s.floats()
    m = s.member(f"nn.ParameterList([nn.Parameter(torch.randn({s.last(x)})) for _ in range(3)])")
    v = s.new()
    return f"{v} = {x}\nfor p in {m}:\n    {v} = {s.rng.choice([f'{v} * p', f'{v} + p.tanh()', f'torch.sin({v} + p)'])}"


def repeated(s: Scope) -> str:
    """A module called twice, or a small container."""
    x = s.floats()
    n = s.last(x)
    m = s.member(s.rng.choice([
        f"nn.Linear({n}, {n})",
        f"nn.Sequential(nn.Linear({n}, 3), nn.ReLU(inplace=True), nn.Linear(3, {n}))",
        f"nn.Sequential(nn.LayerNorm({n}), nn.Dropout(0.2), nn.Linear({n}, {n}))",
    ]))  # fmt: skip
    return s.rng.choice([f"{s.new()} = {m}({m}({x}).tanh())", f"{s.new()} = {m}({x}) + {m}({x} * 2)"])


def conditional(s: Scope) -> str:
    x = s.floats()
    v = s.new()
    test = s.rng.choice(["self.training", f"{x}.shape[0] > 3", f"{x}.dim() == 3", f"{x}.shape[-1] == 1"])
    return (
        f"{v} = {x} * 2\nif {test}:\n    {v} = {s.rng.choice([f'{v}.sin()', f'{v} + {s.like(x)}', f'{v}.mul_(0.5)'])}"
    )


def guarded(s: Scope) -> str:
    x, v = s.floats(), s.new()
    y = s.like(x)
    inner = s.rng.choice(
        [f"{v} = {x}.softmax(-1)", f"{v} = {x} * {y}", f"{v} = F.dropout({x}, 0.5)", f"{v} = {x}.abs().mean()"]
    )
    return f"with torch.no_grad():\n    {inner}\n{s.new()} = {x} * {v}"


def sliced_write(s: Scope) -> str:
    x = s.floats(least=2)
    y = s.like(x)
    at = s.rng.choice(["[:, :1]", "[..., 0]", "[0]", "[:, ::2]", "[..., 1:]", "[-1:]"])
    value = s.rng.choice(["0", f"{y}{at} * 2", "1.5", f"{y}{at}.detach()"])
    return s.rng.choice([
        f"{x}{at} = {value}",
        f"{x}{at} += {s.number()}",
        f"{x}{at}.mul_(0.5)",
        f"{x}{at}.copy_({y}{at})",
        f"{v} = {x}{at}\n{v}.add_(1)\n{s.new()} = {v} * 2" if (v := s.new()) else "",
        f"{v} = {x}.clone()\n{v}{at} = {value}",
        f"{v} = torch.zeros_like({x})\n{v}{at} = {y}{at}",
        f"{v} = torch.zeros({x}.shape)\n{v}{at} = {y}{at}",
    ])  # fmt: skip


def joined(s: Scope) -> str:
    x = s.floats()
    y = s.like(x)
    return f"{s.new()} = " + s.rng.choice([
        f"torch.cat([{x}, {y}], -1)",
        f"torch.cat([{x}, {y}], 0)",
        f"torch.stack([{x}, {y}], {s.rng.choice([0, 1, -1])})",
        f"torch.stack([{x}, {y}]).mean(0)",
        f"sum([{x}, {y}, {y}])",
    ])  # fmt: skip


def parted(s: Scope) -> str:
    x = s.floats()
    n = s.last(x)
    a, b = s.new(), s.new()
    if n < 2:
        return f"{a}, {b} = {x}, {x}.clone()"
    k = s.rng.randrange(1, n)
    half = f"{a}, {b} = {x}.chunk(2, -1)"
    cut = f"{a}, {b} = {x}.split([{k}, {n - k}], -1)"
    return s.rng.choice([half, cut, f"{a}, {b} = torch.tensor_split({x}, [{k}], -1)"]) + s.rng.choice(
        ["", f"\n{b}.add_(1)", f"\n{s.new()} = {a} * {b}[..., :1]"]
    )


def returned_parameter(s: Scope) -> str:
    n = s.rng.choice([n for n, _ in s.self.named_parameters() if "." not in n])
    return f"{s.new()} = self.{n}" + s.rng.choice(["", ".view(-1)", " * 2", ".detach()", "[:1]", ".t()"])


def multiplied(s: Scope) -> str:
    x = s.floats(3)
    return f"{s.new()} = " + s.rng.choice([
        f"torch.bmm({x}, {x}.transpose(1, 2)).softmax(-1) @ {x}",
        f"torch.einsum('btd,bsd->bts', {x}, {x}).tanh() @ {x}",
        f"torch.einsum('btd,bte->bde', {x}, {x})",
        f"torch.baddbmm({x}, torch.bmm({x}, {x}.transpose(1, 2)), {x}, alpha=0.1)",
    ])  # fmt: skip


def drawn(s: Scope) -> str:
    x = s.floats()
    return f"{s.new()} = " + s.rng.choice([
        f"{x} + torch.randn_like({x})", f"{x} * torch.rand({x}.shape)",
        f"{x} * torch.bernoulli(torch.full({x}.shape, 0.5))",
        f"F.dropout({x}, 0.3, self.training)", f"F.dropout({x}, 0.3)", f"{x} + torch.empty({x}.shape).uniform_(-1, 1)",
        f"{x}[torch.randperm({x}.shape[0])]", f"F.dropout({x} * 1, 0.2, self.training, inplace=True)",
    ])  # fmt: skip


PROPOSALS: list[Propose] = [
    *plain("NEW = X.tanh()", 2),
    *plain("NEW = F.gelu(X)"),
    *plain("NEW = F.silu(X)"),
    *plain("NEW = X.relu()"),
    *plain("NEW = X.sigmoid() * Y", 2),
    *plain("NEW = X + Y", 3),
    *plain("NEW = X * K"),
    *plain("NEW = X - Y * K"),
    *plain("NEW = X.softmax(D)"),
    *plain("NEW = X.cumsum(D)"),
    *plain("NEW = F.layer_norm(X, (L,))"),
    *plain("NEW = X - X.mean(D, keepdim=True)"),
    *plain("NEW = X.clamp(-1, 1)"),
    *plain("NEW = X.flip(0)"),
    *plain("NEW = X.roll(1, D)"),
    *plain("NEW = X.detach()"),
    *plain("NEW = X.detach() * Y"),
    *plain("NEW = X.double().sin().to(X.dtype)"),
    *plain("NEW = X.to(torch.bfloat16).to(X.dtype)"),
    *plain("NEW = X.float()"),
    *plain("NEW = X.clone()"),
    *plain("NEW = X.contiguous()"),
    *plain("NEW = X"),
    *plain("X.relu_()", 2),
    *plain("X.add_(Y)"),
    *plain("X.mul_(K)", 2),
    *plain("X.add_(1)"),
    *plain("X.tanh_()"),
    *plain("X += Y"),
    *plain("X *= 0.5"),
    *plain("X.clamp_(-2, 2)"),
    *plain("X.copy_(Y * 2)"),
    *plain("X.zero_()"),
    *plain("NEW = F.relu(X, inplace=True)"),
    *plain("NEW = X.add_(K)"),
    *plain("NEW = X.view(-1)\nNEW.mul_(0.5)"),
    *plain("NEW = X.detach()\nNEW.mul_(0.9)"),
    *plain("with torch.no_grad():\n    X.mul_(0.9)"),
    *plain("NEW = X.transpose(0, -1)"),
    *plain("NEW = X.transpose(-1, -2)", least=2),
    *plain("NEW = X.flatten(0, 1)", least=2),
    *plain("NEW = X.reshape(-1, L)"),
    *plain("NEW = X.unsqueeze(D)"),
    *plain("NEW = X.squeeze()"),
    *plain("NEW = X[..., None].expand(*X.shape, 2)"),
    *plain("NEW = X[:, :2]", least=2),
    *plain("NEW = X[..., ::2]"),
    *plain("NEW = X[0]", least=2),
    *plain("NEW = X[..., -1]"),
    *plain("NEW = X.narrow(0, 0, 1)"),
    *plain("NEW = X.view_as(Y)"),
    *plain("NEW = X.expand_as(Y)"),
    *plain("NEW = X.permute(2, 0, 1)", dims=3),
    *plain("NEW = X.mean()"),
    *plain("NEW = X.sum(D)", 2),
    *plain("NEW = X.square().mean(D)"),
    *plain("NEW = X.amax(D)"),
    *plain("NEW, NEWi = X.max(D)"),
    *plain("NEW, NEWi = X.sort(D)"),
    *plain("NEW, NEWi = X.topk(1, D)"),
    *plain("NEW = X.argmax(D)"),
    *plain("NEW = X > 0"),
    *plain("NEW = X.logsumexp(D)"),
    *plain("NEW = X.norm(dim=D)"),
    *plain("NEW = X.var(D)"),
    *plain("NEW = X.unbind(D)[0]"),
    *plain("NEW = X.index_select(0, torch.arange(1))"),
    *plain("NEW = X.gather(D, torch.zeros_like(X, dtype=torch.long))"),
    *plain("NEW = F.pad(X, (1, 0))[..., :-1]"),
    *plain("NEW = X + torch.arange(X.shape[0] if X.dim() == 1 else X.shape[1]).to(X.dtype).view(-1, 1)", dims=3),
    *plain("NEW = X.new_zeros(X.shape) + Y"),
    *plain("NEW = torch.full_like(X, K)"),
    *plain("NEW = torch.tril(X)", least=2),
    *plain("NEW = X * torch.tensor(K)"),
    *plain("NEW = X + torch.tensor([K])"),
    *plain("NEW = X.tanh()\ndel NEW\nNEW = X * 2"),
    *plain("NEW = X.repeat_interleave(2, 0)"),
    *plain("NEW = X.repeat(*[1] * (X.dim() - 1), 2)"),
    *plain("NEW = X.unfold(-1, 1, 1).squeeze(-1)"),
    *plain("NEW = X.diagonal(dim1=-2, dim2=-1)", least=2),
    *plain("NEW = torch.addcmul(X, Y, X, value=0.1)"),
    *plain("NEW = torch.lerp(X, Y, 0.3)"),
    *plain("NEW = torch.outer(X, X)", dims=1),
    *plain("NEW = (X, Y)\nNEW = NEW[0] * NEW[1]"),
    *plain("NEW = {'a': X, 'b': Y}\nNEW = NEW['a'] - NEW['b']"),
    *plain("NEW = F.one_hot(X.argmax(-1), L).to(X.dtype) * X", least=2),
    *plain("NEW = X.scatter_add(0, torch.zeros_like(X, dtype=torch.long), Y)"),
    *plain("NEW = X.index_add(0, torch.arange(X.shape[0]), Y)"),
    *plain("NEW = torch.chunk(X, 2, D)[0]"),
    *plain("NEW = X.swapaxes(0, -1).sin_()"),
    *plain("NEW = (X * 1).unsqueeze(0).squeeze_(0)"),
    *plain("NEW = X.masked_fill(Y.isnan(), 0.0)"),
    *plain("NEW = X.add(Y, alpha=2)"),
    *module("nn.Linear(L, N)", weight=5),
    *module("nn.Linear(L, L, bias=False)", weight=3),
    *module("nn.LayerNorm(L)", weight=2),
    *module("nn.RMSNorm(L)", weight=2),
    *module("nn.Dropout(0.3)", weight=2),
    *module("nn.Dropout(0.2, inplace=True)"),
    *module("nn.Sequential(nn.Linear(L, N), nn.GELU(), nn.Linear(N, N))", weight=2),
    *module("nn.Linear(L, 1)", "NEW = M(X).sigmoid() * X"),
    *module("nn.Linear(L, L)", "NEW = X + M(X)", 3),
    *module("nn.Linear(L, L)", "NEW = F.linear(X, M.weight.t())"),
    *module("nn.PReLU()"),
    *module("nn.Linear(L, L)", "NEW = F.linear(X, M.weight * 0.5, M.bias)"),
    *module("nn.ReLU(inplace=True)", "NEW = M(X * 1)"),
    *module("nn.Bilinear(L, L, N)", "NEW = M(X, X)"),
    *module("nn.Identity()"),
    *module("nn.Linear(L, L)", "NEW = M(X)\nNEW += X\nNEW.relu_()", 2),
    *plain("NEW = X.type_as(Y)"),
    *plain("NEW = X.type_as(Y)\nNEW.mul_(0.5)"),
    *plain("NEW = torch.einsum('...d->...d', X)\nNEW.add_(1)"),
    *plain("NEW, NEWb = torch.broadcast_tensors(X, Y)\nNEW.mul_(0.5)"),
    *plain("NEW = torch.atleast_2d(X)\nNEW.mul_(2)"),
    *plain("NEW = X.sum_to_size(X.shape)\nNEW.mul_(0.7)"),
    *plain("NEW = X.to(X.dtype)\nNEW.add_(1)"),
    *plain("NEW = X.movedim(0, -1)"),
    *module("nn.GRU(L, N, batch_first=True)", "NEW, NEWh = M(X)", dims=3),
    *parameter("L", "NEW = X * M", 3),
    *parameter("1", "NEW = X + M"),
    *parameter("L, N", "NEW = X @ M", 2),
    *parameter("()", "NEW = M * X"),
    *parameter("L", "NEW = X + M.clone().mul_(0.5)"),
    *parameter("L", "NEW = M"),
    *parameter("L", "NEW = X * M.detach()"),
    *parameter("3, L", "NEW = X @ M.t() @ M"),
    *parameter("2, L", "NEWa, NEW = M\nNEW = X * NEWa + NEW"),
    *parameter("L", "NEW = X + F.dropout(M, 0.5)"),
    *[convolution] * 2,
    *[normalized] * 3,
    *[attention] * 3,
    *[running] * 4,
    *[counter] * 2,
    *[embedding] * 2,
    *[integers] * 3,
    *[masked] * 4,
    *[scalars] * 3,
    *[listed] * 2,
    *[repeated] * 3,
    *[conditional] * 3,
    *[guarded] * 3,
    *[sliced_write] * 6,
    *[joined] * 4,
    *[parted] * 4,
    *[returned_parameter],
    *[multiplied] * 3,
    *[drawn] * 4,
]
