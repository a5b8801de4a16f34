"""What a SOURCE of the command line stands for: a model on `meta` and the arguments of a call."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""(model, positional arguments, keyword arguments)."""


class UsageError(ValueError):
    """The command cannot be followed: says what to write instead."""


def is_dump(source: str) -> bool:
    """Whether the source is a file that holds no configuration."""
    return Path(source).is_file() and Path(source).suffix != ".json"


def model_of(source: str, batch: int, sequence: int) -> Call:
    """The model that `source` names, on `meta`, and a call of it; `batch` and `sequence` are the sizes for a model that
    comes without an example.  Never reaches the network.  Raises UsageError."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", source):
        return from_callable(source, batch, sequence)
    if Path(source).exists():
        return from_config(Path(source), batch, sequence)
    if re.search(r"[\\/.~]", source):
        raise UsageError(f"{source}: there is no such file or directory")
    return from_type(source, batch, sequence)


def from_callable(source: str, batch: int, sequence: int) -> Call:
    made = called(source)
    model, example = made if type(made) is tuple and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{source} returned {type(model).__name__}: return a torch.nn.Module, or (model, example)")
    if isinstance(example, dict):
        return model, (), example
    if isinstance(example, (tuple, list)):
        return model, tuple(example), {}
    if example is not None:
        raise UsageError(
            f"the example of {source} is {type(example).__name__}: "
            "give a tuple of positional or a dict of keyword arguments"
        )
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in parameters:
        return model, (), language_example(parameters, batch, sequence)
    raise UsageError(
        f"{source} returned {type(model).__name__} alone, and what to call it with ({', '.join(parameters)}) cannot be "
        "told\nreturn (model, example), where example is a tuple of positional or a dict of keyword arguments"
    )


def called(source: str) -> Any:
    """What the callable returns on `meta`."""
    path, _, name = source.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = importlib.import_module(path)
        for part in name.split("."):
            function = getattr(function, part)
    except Exception as error:  # a module may raise anything when it is imported
        raise UsageError(f"cannot import {source}: {type(error).__name__}: {error}") from error
    try:
        with torch.device("meta"):
            return function()
    except Exception as error:
        raise UsageError(
            f"{source} failed with {type(error).__name__}: {error}\n"
            "name a function that takes no arguments; it is called with torch.device('meta'), so what it must compute "
            "needs device='cpu'"
        ) from error


def from_config(path: Path, batch: int, sequence: int) -> Call:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path} has no config.json: name a Hugging Face model directory")
    transformers = imported()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:
        raise UsageError(f"{file}: {first_line(error)}") from error
    return from_transformers(transformers, config, batch, sequence)


def from_type(source: str, batch: int, sequence: int) -> Call:
    transformers = imported()
    known: Sequence[str] = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING)
    if source not in known:
        close = difflib.get_close_matches(source, known)
        raise UsageError(
            f"{source} is no file, no package.module:callable and no model type of transformers"
            + (f"; did you mean {' or '.join(close)}?" if close else "")
        )
    return from_transformers(transformers, transformers.AutoConfig.for_model(source), batch, sequence)


def from_transformers(transformers: Any, config: Any, batch: int, sequence: int) -> Call:
    made = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # a plain configuration has none, and shifting the labels asks for one
    try:
        with torch.device("meta"):
            model: nn.Module = made.from_config(config)
    except Exception as error:
        raise UsageError(
            f"transformers has no language model for {config.model_type}: {first_line(error)}\n"
            "name a function that returns (model, example) as package.module:callable"
        ) from error
    return model, (), language_example(inspect.signature(model.forward).parameters, batch, sequence)


def language_example(parameters: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Token ids, and labels where the model takes them, as tensors of their own (int64 [batch, sequence], on meta)."""
    taken = [name for name in ("input_ids", "labels") if name in parameters]
    return {name: torch.empty(batch, sequence, dtype=torch.int64, device="meta") for name in taken}


def imported() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("a Hugging Face model needs transformers: pip install 'megatrain[hf]'") from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
