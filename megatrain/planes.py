"""Which tensors of a module share a host plane, and which of its children are layers.  Read off the module tree
alone, so that every capture of a model agrees."""

from __future__ import annotations

from torch import nn


def layer_paths(model: nn.Module) -> tuple[str, ...]:
    """Dotted paths of the children of repeated containers (`model.layers.3`), in tree order, outermost containers only.

    A repeated container is a ModuleList or a Sequential with two or more children that hold parameters, in a Sequential
    each child with its own; children without parameters belong to no layer of their own."""
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if repeated(child):
                found.extend(f"{here}.{n}" for n, c in child.named_children() if holds_parameters(c))
            else:
                visit(here, child)

    if repeated(model):
        return tuple(n for n, c in model.named_children() if holds_parameters(c))
    visit("", model)
    return tuple(found)


def part_paths(model: nn.Module) -> tuple[str, ...]:
    """Dotted paths of the modules that together hold all but what their ancestors hold themselves: the layers, and of
    what lies outside them the outermost modules that are called."""
    layers = layer_paths(model)
    found: list[str] = []

    def visit(path: str, module: nn.Module) -> None:
        inner = not path or any(layer.startswith(f"{path}.") for layer in layers)
        called = type(module).forward is not nn.Module.forward
        if path in layers or (called and not inner):
            found.append(path)
            return
        for name, child in module.named_children():
            if next(iter([*child.parameters(), *child.buffers()]), None) is not None:
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return tuple(found)


def layer_of(model: nn.Module) -> dict[str, str]:
    """Dotted path of each child of a repeated container -> the layer it belongs to: itself, or for a child without
    parameters (an activation in a Sequential) the layer before it."""
    layers = layer_paths(model)
    found = {path: path for path in layers}
    for container in dict.fromkeys(path.rpartition(".")[0] for path in layers):
        last = ""
        for name, _ in model.get_submodule(container).named_children():
            path = f"{container}.{name}" if container else name
            last = path if path in found else last
            if last:
                found[path] = last
    return found


def repeated(module: nn.Module) -> bool:
    """Whether the module is a container of layers."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    return sum(map(holds_parameters, module.children())) >= 2


def holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def planes_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Plane name -> canonical dotted names of its parameters and buffers, for the whole model.

    Each layer has a plane of its own (`model.layers.3.w`); what lies outside the layers is grouped by module, as
    coarsely as an eighth of the model allows, whole subtrees first."""
    layers = set(layer_paths(model))
    total = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    planes: dict[str, list[str]] = {}
    taken: set[int] = set()

    def take(plane: str, names: list[str], tensors: list[object]) -> None:
        for name, t in zip(names, tensors, strict=True):
            if t is not None and id(t) not in taken:
                taken.add(id(t))
                planes.setdefault(plane, []).append(name)

    def subtree(path: str, module: nn.Module) -> None:
        named = [*module.named_parameters(path), *module.named_buffers(path)]
        take(f"{path}.w" if path else "model.w", [n for n, _ in named], [t for _, t in named])

    def visit(path: str, module: nn.Module) -> None:
        if path in layers:
            return subtree(path, module)
        prefix = f"{path}." if path else ""
        holders = [(n, c) for n, c in module.named_children() if next(c.parameters(), None) is not None]
        inner = any(layer.startswith(prefix) for layer in layers)
        size = sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])
        if not inner and (len(holders) < 2 or size * 8 <= total):
            return subtree(path, module)
        own = [*module._parameters.items(), *module._buffers.items()]
        take(f"{prefix}own.w", [prefix + n for n, _ in own], [t for _, t in own])
        for name, child in module.named_children():
            visit(prefix + name, child)

    visit("", model)
    return {plane: tuple(names) for plane, names in planes.items()}
