"""Random small models, as source code: a seed gives classes that one can read, shorten and run.

A model is grown statement by statement.  Each one is proposed at random, and stays if eager PyTorch runs it at two
sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from growing import NAMES, NO_CHOICE, Scope
from random_parts import PROPOSALS
from torch import nn


@dataclass(frozen=True)
class Source:
    """A class: what it is given, what __init__ and forward do, what it returns."""

    name: str
    arguments: tuple[str, ...]
    inits: tuple[str, ...]
    body: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in self.inits]
        lines += [f"    def forward({', '.join(('self', *self.arguments))}):"]
        lines += [f"        {line}" for statement in self.body for line in statement.splitlines()]
        return "\n".join([*lines, f"        return {self.result}", ""])


@dataclass(frozen=True)
class Settings:
    """How a model is compiled and trained.  The defaults are the plainest."""

    mode: str = "recompute"
    squeeze: bool = False
    """The smallest budget that works."""
    memory: str = ""
    dtype: torch.dtype = torch.float32
    evaluate: bool = False
    """A call under eval and no_grad after each step."""
    micro: int = 1
    """Backwards before a step."""
    both: bool = False
    """Two forwards before a backward."""
    frozen: int = 0
    """Every how manieth parameter is frozen."""
    between: bool = False
    """A call under no_grad between a forward and its backward."""
    optimizer: str = "sgd"
    part: int = 0
    """0: the loss is made of all results; n: of every second, beginning with the n-th."""
    steps: int = 3
    measured: bool = False
    """The bytes on the device are counted, and are no more than planned."""
    delayed: bool = False
    """Each op of a lane begins a random while later."""
    seed: int = 0

    def __str__(self) -> str:
        plain = Settings()
        fields = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return f"Settings({', '.join(f'{n}={getattr(self, n)!r}' for n in fields)})"


@dataclass(frozen=True)
class Recipe:
    """A model and its inputs.  `inputs` are (name, expression) in terms of the sizes B and T."""

    classes: tuple[Source, ...]
    inputs: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[int, int], ...]
    grads: tuple[str, ...] = ()
    """Inputs that require a gradient."""

    def __str__(self) -> str:
        lines = "\n".join(f"{n} = {e}{'  # requires a gradient' * (n in self.grads)}" for n, e in self.inputs)
        return "\n".join([*map(str, self.classes), f"# B, T = {self.sizes}", lines])

    def make(self) -> nn.Module:
        names = {**NAMES}
        exec("\n".join(map(str, self.classes)), names)
        return names[self.classes[-1].name]()

    def arguments(self, step: int, dtype: torch.dtype) -> dict[str, Any]:
        """The inputs of a step, the same whenever they are made."""
        with torch.random.fork_rng():
            torch.manual_seed(step)
            return given(self.inputs, self.sizes[step % 2], dtype, self.grads)


def given(
    inputs: Sequence[tuple[str, str]], sizes: tuple[int, int], dtype: Any, grads: Sequence[str]
) -> dict[str, Any]:
    scope = {**NAMES, "B": sizes[0], "T": sizes[1], "dtype": dtype}
    found: dict[str, Any] = {}
    for name, expression in inputs:
        found[name] = eval(expression, scope, found)
        if name in grads:
            found[name].requires_grad_()
    return found


def random_model(seed: int) -> tuple[Recipe, Settings]:
    """The model of a seed, and how it is to be trained."""
    rng = random.Random(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _model(rng), _settings(rng, seed)


def _settings(rng: random.Random, seed: int) -> Settings:
    half = rng.random
    return Settings(
        mode=rng.choice(["recompute", "keep"]),
        squeeze=half() < 0.4,
        memory=rng.choice(["", "", "1GiB"]),
        dtype=torch.bfloat16 if half() < 0.25 else torch.float32,
        evaluate=half() < 0.35,
        micro=rng.choice([1, 1, 1, 2, 3]),
        both=half() < 0.2,
        frozen=rng.choice([0, 0, 0, 2, 3]),
        between=half() < 0.15,
        optimizer=rng.choice(["sgd", "sgd", "adamw", "megatrain"]),
        part=rng.choice([0, 0, 1, 2]),
        seed=seed,
        measured=half() < 0.25,
        delayed=half() < 0.25,
    )


def _model(rng: random.Random) -> Recipe:
    width = rng.choice([1, 3, 4, 7, 8])
    sizes = rng.choice(
        [((2, 5), (6, 9)), ((5, 2), (6, 3)), ((1, 6), (2, 5)), ((3, 1), (5, 1)), ((5, 6), (2, 3)), ((1, 1), (2, 2))]
    )
    plain = f"torch.randn(B, T, {width}, dtype=dtype)"
    x = rng.choice(
        [
            *[plain] * 4,
            f"torch.randn(T, B, {width}, dtype=dtype).transpose(0, 1)",
            f"torch.randn(B, {width}, T, dtype=dtype).transpose(1, 2)",
            f"torch.randn({width}, B, T, dtype=dtype).permute(1, 2, 0)",
        ]
    )
    inputs = (("x", x), *(i for i in _others(rng, plain).items() if rng.random() < 0.35))
    grads = tuple(n for n, e in inputs if n in "xy" and "randn" in e and rng.random() < 0.3)
    if any(e.startswith("x") for _, e in inputs[1:]):
        grads = ()
    arguments = [given(inputs, size, torch.float32, ()) for size in sizes]
    for a in arguments:
        a["x"] = a["x"].detach().requires_grad_()
    names = {**NAMES}
    block = _block(rng, width, sizes, names)
    exec(str(block), names)
    root = Scope(rng, arguments, width, names)
    root.add("x = x * 1") if rng.random() < 0.5 else None
    for name, _ in inputs[1:]:
        if rng.random() < 0.85:
            with contextlib.suppress(*NO_CHOICE):
                root.add(_used(rng, root, name, width))
    root.grow(rng.randrange(4), PROPOSALS)
    depth = rng.choice([1, 2, 3, 4])
    _layers(rng, root, depth)
    if depth > 1 and rng.random() < 0.25:
        _tie(rng, root)
    root.grow(rng.randrange(1, 6), PROPOSALS)
    if rng.random() < 0.2:
        root.inits.append("self.unused = nn.Linear(3, 2)")
    result = _result(rng, root)
    source = Source("Model", tuple(n for n, _ in inputs), tuple(root.inits), tuple(root.body), result)
    return Recipe((block, source), tuple(inputs), sizes, grads)


def _others(rng: random.Random, plain: str) -> dict[str, str]:
    """Inputs beside x."""
    y = [plain, "torch.randn(B, dtype=dtype)", "torch.randn(())", "torch.randn(1)", "x", "x.detach()"]
    more = ["{'a': torch.randn(B, T), 'b': [torch.randn(3), 2]}", "(torch.randn(B, T, 1), (0.5, torch.arange(B)))"]
    return {
        "y": rng.choice(y[: rng.choice([4, 4, 4, 6])]),
        "ids": "torch.randint(0, 11, (B, T))",
        "mask": "torch.rand(B, T) > 0.3",
        "scale": rng.choice(["0.5", "2", "True"]),
        "nothing": "None",
        "more": rng.choice(more),
    }


EACH = {
    "": ("", ""),
    "x = x * 0.5": ("", ""),
    "x.mul_(0.9)": ("", ""),
    "total = total + x.mean()": ("total = 0.0\n", "\nx = x + total"),
    "kept.append(x)": ("kept = []\n", "\nx = sum(kept)"),
    "x = x + skip": ("skip = x\n", ""),
}
"""What is done after each layer: what that needs before the loop and after it."""


def _layers(rng: random.Random, root: Scope, depth: int) -> None:
    """A stack of blocks and the loop over it."""
    many = f"nn.ModuleList(Block() for _ in range({depth}))"
    stack = rng.choice(
        [
            many,
            many,
            f"nn.Sequential(*[Block() for _ in range({depth})])",
            f"nn.ModuleList([Block()] * {depth})",
            "nn.ModuleDict({'a': Block(), 'b': Block()})",
        ]
    )
    each = rng.choice(["", "", *EACH])
    before, after = EACH[each]
    values = ".values()" if "Dict" in stack else ""
    loop = f"{before}for layer in self.layers{values}:\n    x = layer(x)" + (f"\n    {each}" if each else "") + after
    root.pending = [f"self.layers = {stack}"]
    if not root.add(loop):
        root.pending = [f"self.layers = {many}"]
        root.add("for layer in self.layers:\n    x = layer(x)")


def _used(rng: random.Random, s: Scope, name: str, width: int) -> str:
    if name == "y":
        return rng.choice(["x = x + y.sum()", "x = x + y", "y = y * 2\nx = x * y.mean()", "y.mul_(0.5)", "x = x * y"])
    if name == "ids":
        return f"x = x + {s.member(f'nn.Embedding(11, {width})')}(ids)"
    if name == "mask":
        return rng.choice(["x = x * mask[..., None]", "x = x.masked_fill(mask.unsqueeze(-1), 0.0)", "v0 = ~mask"])
    if name == "scale":
        return rng.choice(["x = x * scale", "if scale:\n    x = x + 1"])
    if name == "nothing":
        return "if nothing is None:\n    x = x * 1.5"
    return rng.choice(
        [
            "x = x + more['a'][..., None] * more['b'][1]",
            "v0 = more['b'][0]",
            "x = x + more[0] * more[1][0]",
            "v0 = more[1][1]",
        ]
    )


def _block(rng: random.Random, width: int, sizes: Sequence[tuple[int, int]], names: dict[str, Any]) -> Source:
    arguments = [{"x": torch.randn(*size, width).requires_grad_()} for size in sizes]
    s = Scope(rng, arguments, width, names)
    s.grow(rng.randrange(1, 8), PROPOSALS)
    with contextlib.suppress(*NO_CHOICE):
        h = s.rng.choice(s.tensors(lambda t: t.is_floating_point() and t.dim() == 3 and t.shape[:2] == sizes[0])[-3:])
        statement = f"x = x + {s.member(f'nn.Linear({s.last(h)}, {width})')}({h}).tanh()"
        if rng.random() < 0.2:
            statement = statement.replace("x = x +", "x +=")
        s.add(statement)
    s.pending = []
    shapes = [env["x"].shape for env in s.envs]
    found = [n for n in s.tensors(torch.is_floating_point) if [env[n].shape for env in s.envs] == shapes]
    result = "x" if rng.random() < 0.7 else rng.choice(found or ["x * 1"])
    return Source("Block", ("x",), tuple(s.inits), tuple(s.body), result)


def _tie(rng: random.Random, s: Scope) -> None:
    """One parameter for two layers."""
    modules = [n for n, _ in s.self.named_parameters() if n.startswith("layers.0.") and n.endswith("weight")]
    if not modules or "ModuleList(Block() for" not in "\n".join(s.inits):
        return
    owner, _, leaf = rng.choice(modules).removeprefix("layers.0.").rpartition(".")
    path = ".".join(filter(None, [owner, leaf]))
    if any(part.isdigit() for part in path.split(".")):
        return
    line = f"self.layers[-1].{path} = self.layers[0].{path}"
    exec(line, s.names, {"self": s.self})
    s.inits.append(line)
    s.restart()


def _result(rng: random.Random, s: Scope) -> str:
    tensors = s.tensors(lambda t: True)
    some = [rng.choice(tensors[-5:] if rng.random() < 0.7 else tensors) for _ in range(rng.randrange(1, 5))]
    if "x" in tensors and rng.random() < 0.5:
        some[0] = "x"
    others = [n for n, v in s.envs[0].items() if isinstance(v, (int, float)) or (v is None)]
    if others and rng.random() < 0.4:
        some.append(rng.choice(others))
    if rng.random() < 0.1:
        some.append(f"{some[0]}.detach()")
    if rng.random() < 0.1 and "x" in s.envs[0]:
        some.append("x.shape[0]")
    shapes = [
        lambda: some[0],
        lambda: f"{some[0]}.float().square().mean()",
        lambda: f"({', '.join(some)},)",
        lambda: f"[{', '.join(some)}]",
        lambda: "{" + ", ".join(f"'{'abcdefgh'[i]}': {n}" for i, n in enumerate(some)) + "}",
        lambda: f"Out({', '.join(some[:2])})",
        lambda: f"({some[0]}, {{'rest': [{', '.join(some[1:])}], 'none': None}})",
        lambda: f"({some[0]}, Out({some[-1]}, ({some[0]}, 'text')))",
    ]  # fmt: skip
    return rng.choice(shapes)()
