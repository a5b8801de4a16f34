"""A random forward in the making: its statements, its variables, and eager PyTorch that tries each new one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST = 4096
"""Elements that a tensor may have."""


@dataclass
class Out:
    """A result that is no registered pytree."""

    first: Any
    second: Any = None


NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "Out": Out}
NO_CHOICE = (IndexError, KeyError, AttributeError, RuntimeError, ValueError, TypeError, NotImplementedError)


class Scope:
    """A forward in the making: its statements, and its variables at two sizes."""

    def __init__(self, rng: random.Random, arguments: Sequence[dict[str, Any]], width: int, names: dict[str, Any]):
        self.rng, self.width, self.names = rng, width, names
        self.self = nn.Module()
        self.arguments = arguments
        self.inits: list[str] = []
        self.body: list[str] = []
        self.pending: list[str] = []
        self.count = 0
        self.envs: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        """Runs all statements again."""
        self.envs = []
        for a in self.arguments:
            env: dict[str, Any] = {"self": self.self}
            for n, v in a.items():
                env[n] = v * 1 if isinstance(v, Tensor) and v.is_floating_point() else v
            self.envs.append(env)
            for statement in self.body:
                exec(statement, self.names, env)

    # what there is

    def tensors(self, fits: Callable[[Tensor], bool]) -> list[str]:
        return [n for n, v in self.envs[0].items() if isinstance(v, Tensor) and fits(v)]

    def pick(self, fits: Callable[[Tensor], bool] = lambda t: True) -> str:
        found = self.tensors(fits)
        return self.rng.choice(found[-4:] if self.rng.random() < 0.6 else found)

    def floats(self, dims: int = 0, least: int = 1) -> str:
        return self.pick(lambda t: t.is_floating_point() and (t.dim() == dims if dims else t.dim() >= least))

    def like(self, name: str) -> str:
        """A tensor of the same shape at both sizes, another one if there is one."""
        shapes = [env[name].shape for env in self.envs]
        found = [
            n for n in self.tensors(torch.is_floating_point)
            if [env[n].shape for env in self.envs] == shapes and n != name
        ]  # fmt: skip
        return self.rng.choice(found or [name])

    def shape(self, name: str) -> list[int | None]:
        """Sizes; None for one that differs."""
        a, b = (env[name].shape for env in self.envs)
        return [m if m == n else None for m, n in zip(a, b, strict=True)]

    def last(self, name: str) -> int:
        if (size := self.shape(name)[-1]) is None:
            raise ValueError("this size is not fixed")
        return size

    # what is new

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def member(self, expression: str) -> str:
        """A member of the module that is made with this expression; now and then one that there is already."""
        same = [line.split(" = ")[0] for line in self.inits if line.endswith(f" = {expression}")]
        if same and self.rng.random() < 0.4:
            return self.rng.choice(same)
        self.count += 1
        self.pending.append(f"self.m{self.count} = {expression}")
        return f"self.m{self.count}"

    def buffer(self, value: str) -> str:
        self.count += 1
        self.pending.append(f"self.register_buffer('b{self.count}', {value})")
        return f"self.b{self.count}"

    def add(self, statement: str) -> bool:
        """Takes the statement in, if it runs at both sizes and a gradient can still flow."""
        pending, self.pending = self.pending, []
        before = len(self.inits)
        try:
            for line in pending:
                exec(line, self.names, {"self": self.self})
            for env in self.envs:
                exec(statement, self.names, env)
                if any(isinstance(v, Tensor) and v.numel() > LARGEST for v in env.values()):
                    raise ValueError("too large")
            if "_(" in statement or "] = " in statement or "= " not in statement or "+=" in statement:
                self.differentiate()
        except NO_CHOICE:
            for line in pending:
                name = line.split(" = ")[0].removeprefix("self.") if " = " in line else line.split("'")[1]
                with contextlib.suppress(AttributeError):
                    delattr(self.self, name)
            self.restart()
            return False
        self.inits[before:] = pending
        self.body.append(statement)
        return True

    def differentiate(self) -> None:
        for env in self.envs:
            found = [v for v in env.values() if isinstance(v, Tensor) and v.requires_grad and v.numel()]
            found = [v for v in found if v.is_floating_point()]
            if found:
                total = sum((v.float().sum() for v in found), torch.zeros(()))
                for p in self.self.parameters():
                    p.requires_grad_()
                torch.autograd.grad(total, list(self.self.parameters()), allow_unused=True, retain_graph=True)

    def grow(self, count: int, proposals: Sequence[Callable[[Scope], str]]) -> None:
        tries = 0
        goal = len(self.body) + count
        while len(self.body) < goal and tries < 20 * count:
            tries += 1
            self.pending = []
            try:
                statement = self.rng.choice(proposals)(self)
            except NO_CHOICE:
                continue
            self.add(statement)

    def number(self) -> str:
        return self.rng.choice(["0.5", "2", "-1.5", "3", "0.1", "1"])
