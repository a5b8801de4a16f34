"""What a model cannot be traced for: where that is, why, and which of its children is called whole instead."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from megatrain.planes import layer_paths
from megatrain.watching import Refused


def check_traced(exported: Any) -> None:
    """Raises Refused for nodes that schedules cannot hold."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            where = _model_line(node)
            if str(node.target) == "aten.embedding.default" and len(node.args) > 4 and node.args[4]:
                raise Refused(f"sparse gradients are not supported{where}", "create the embedding with sparse=False")
            if free_unbacked_symbols(node.meta.get("val")):
                raise Refused(
                    f"the size of a tensor depends on the data of another{where}",
                    "write this line so that sizes are known beforehand (torch.where, masks)",
                    whole=True,
                    path=module_path(node),
                )


def module_path(node: fx.Node) -> str:
    """The dotted path of the innermost module that made the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"@\d+", "", re.sub(r"^L\['self'\]\.?", "", stack[-1][0])) if stack else ""


def _model_line(node: fx.Node) -> str:
    """The innermost line of code outside torch that made the node, as export has noted it."""
    lines = str(node.meta.get("stack_trace", "")).splitlines()
    files = [i for i, line in enumerate(lines) if line.lstrip().startswith("File ")]
    own = [i for i in files if "/torch/" not in lines[i]]
    return "".join(f"\n  {line.strip()}" for line in lines[own[-1] : own[-1] + 2]) if own else ""


def passed(model: nn.Module, error: Exception) -> Iterator[tuple[str, nn.Module, str, int]]:
    """(path, module, file, line) of the model's frames in the error's traceback, outermost first."""
    paths = {id(m): n for n, m in model.named_modules()}
    for frame, line in traceback.walk_tb(error.__traceback__):
        first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
        owner = frame.f_locals.get(first)
        file = frame.f_code.co_filename
        if not isinstance(owner, nn.Module) or "torch/nn/modules/module.py" in file:
            continue
        if id(owner) in paths and frame.f_code.co_name != "__call__":
            yield paths[id(owner)], owner, file, line


def explained(model: nn.Module, error: Exception) -> str:
    """The innermost line of the model's code that the trace passed, the module it belongs to, the reason and the
    cure."""
    where = ""
    for path, owner, file, line in passed(model, error):
        source = linecache.getline(file, line).strip()
        where = f"\n  in {path or 'the model itself'} ({type(owner).__name__}), {file}:{line}\n    {source}"
    head = f"cannot capture {type(model).__name__}.forward: "
    if isinstance(error, Refused):
        return f"{head}{error}{where}\n{error.cure}"
    return (
        f"{head}{reason(error)}{where}\n"
        "write this line without a branch or a Python value that depends on the data of a tensor (torch.where, masks), "
        "or compile the parts of the model around it"
    )


def reason(error: Exception) -> str:
    """The error in a line."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if isinstance(error, Refused) else f"{type(error).__name__}: {first}"


def called_whole(error: Exception) -> bool:
    """Whether a module that does this trains as in eager if it is called as it is."""
    return not isinstance(error, Refused) or error.whole


def to_call_whole(model: nn.Module, error: Exception, whole: Mapping[str, str]) -> dict[str, str]:
    """The children to be called whole after this error, and why: the innermost that the trace was in, and all of its
    class.  Where those that are called whole already cannot be, what is around them.  Nothing where that would be the
    model itself, or what holds its layers."""
    if not called_whole(error) and not any(inside(path, whole) for path, *_ in passed(model, error)):
        return {}
    path = next((p for p in reversed([p for p, *_ in passed(model, error)])), "")
    path = getattr(error, "path", None) or path
    modules = dict(model.named_modules())
    while path and (inside(path, whole) or type(modules[path]).forward is nn.Module.forward):
        path = path.rpartition(".")[0]
    layers = layer_paths(model)
    if not path or any(layer.startswith(f"{path}.") for layer in layers):
        return {}
    alike = [p for p, m in modules.items() if type(m) is type(modules[path])]
    return {p: reason(error) for p in alike if not any(layer.startswith(f"{p}.") for layer in layers)}


def inside(path: str, whole: Mapping[str, str]) -> bool:
    return any(path == w or path.startswith(f"{w}.") for w in whole)
