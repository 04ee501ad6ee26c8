"""Reads and writes weights as Hugging Face safetensors, and maps parameter names.

trainfleet's parameter names are the same in all families, so one plan and one optimizer fit all of
them. Hugging Face's names differ per family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..config.families import FAMILIES, Folder
from ..config.types import Model
from ..config.weight_files import (
    BIASES,
    FLOATS,
    INDEX,
    WEIGHTS,
    file_names,
    open_file,
    require_no_others,
    require_tied,
    some,
)
from ..trust.errors import RunError
from .network import Network

SHARD_BYTES = 5 * 10**9  # maximum file size in bytes, as in transformers


@dataclass(frozen=True)
class Counterpart:
    """Hugging Face tensor that stores one of our parameters.

    `turned` means that it is transposed. `parts` lists all our parameters that it concatenates, in
    order, and is empty if it stores only one.
    """

    name: str
    turned: bool = False
    parts: tuple[str, ...] = ()


def counterpart_of(family: str, ours: str) -> Counterpart:
    """Returns where Hugging Face folders of this family store a parameter."""
    folder = FAMILIES[family].folder
    for mine, theirs in folder.heads.items():
        if ours.startswith(mine):
            return Counterpart(ours.replace(mine, theirs, 1))
    name, parts = ours, tuple[str, ...]()
    for mine, theirs in folder.names.items():
        if f".{mine}" in f".{name}" and not (mine == "norm." and not name.startswith("norm.")):
            name = name.replace(mine, theirs, 1)
            parts = parts or _parts(folder, mine, ours)
            if mine.startswith(("embed", "norm.")):
                break
    matrix = ours.startswith("layers.") and ours.endswith("weight") and "layernorm" not in ours
    return Counterpart(f"{folder.trunk}.{name}", folder.turned and matrix, parts)


def _parts(folder: Folder, mine: str, ours: str) -> tuple[str, ...]:
    """Returns our parameters that share a tensor with this one, in order, or none."""
    shared = [other for other, theirs in folder.names.items() if theirs == folder.names[mine]]
    return tuple(ours.replace(mine, other, 1) for other in shared if shared[1:])


def outgoing(model: Network, family: str) -> dict[str, Tensor]:
    """Returns host tensors by Hugging Face name. A tied weight appears once, and an untied output
    layer's bias under two names.
    """
    named, found = dict(model.named_parameters()), dict[str, Tensor]()
    for ours in named:
        there = counterpart_of(family, ours)
        parts = [named[part].detach().cpu() for part in there.parts or (ours,)]
        whole = torch.cat(parts) if parts[1:] else parts[0]
        found[there.name] = (whole.T if there.turned else whole).contiguous()
    twice = {} if model.shape.tie_word_embeddings else BIASES
    return found | {other: found[name].clone() for name, other in twice.items() if name in found}


def save(model: Network, family: str, folder: Path) -> list[str]:
    """Writes the weights to a folder, as several files if they exceed SHARD_BYTES. Returns the file
    names. The files are byte-identical across calls.
    """
    tensors = dict(sorted(outgoing(model, family).items()))
    shards = _shards(tensors)
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WEIGHTS]
    where: dict[str, str] = {}
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    if len(shards) == 1:
        return files
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": where,
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*files, INDEX]


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards, size = [dict[str, Tensor]()], 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def load(folder: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Loads weights from a folder, keyed by trainfleet's names. `sizes` lists the parameters to
    load, for an entire model or a pipeline stage.

    Raises:
        RunError: a file or weight is missing, unexpected, or has the wrong size; the message names
            it.
    """
    require_tied(folder, shape)
    with ExitStack() as stack:
        files = [stack.enter_context(open_file(folder / name, "pt")) for name in file_names(folder)]
        return collect(files, folder, shape, sizes)


def collect(
    files: Iterable[Any], folder: Path, shape: Model, sizes: dict[str, torch.Size]
) -> dict[str, Tensor]:
    """Loads weights as `load` does, from open files or from objects with safetensors' methods keys,
    get_slice and get_tensor.
    """
    found = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - it is no dict
    names = {current(key, shape.family, found): (file, key) for key, file in found.items()}
    for name, other in BIASES.items():
        if other in names and (name not in names or not shape.tie_word_embeddings):
            names[name] = names.pop(other)
    refuse_others(folder, shape, set(names))
    return {
        ours: take(folder, names, counterpart_of(shape.family, ours), ours, sizes) for ours in sizes
    }


def current(key: str, family: str, keys: Iterable[str]) -> str:
    """Returns the name that current transformers versions use.

    Older files use the names gamma and beta, and older GPT-2 files lack the prefix.
    """
    prefix = f"{FAMILIES[family].folder.trunk}."
    if not any(other.startswith(prefix) for other in keys) and not key.startswith("lm_head"):
        key = prefix + key
    return key.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )


def refuse_others(folder: Path, shape: Model, present: set[str]) -> None:
    """Raises RunError unless a folder's weights exactly match a model of that shape."""
    from . import build

    with torch.device("meta"):
        model = build(shape)
    needed = {counterpart_of(shape.family, name).name for name, _ in model.named_parameters()}
    tied = {counterpart_of(shape.family, name).name for name in model.state_dict()} - needed
    missing, others = needed - present, present - needed - tied
    if missing:
        raise RunError(
            "lacks weights",
            where=str(folder),
            why=some(missing),
            next=f"set model.preset: {folder} to use its shape",
        )
    require_no_others(
        folder,
        {name for name in others if not re.search(FAMILIES[shape.family].folder.ignored, name)},
    )


def take(
    folder: Path,
    names: dict[str, tuple[Any, str]],
    wanted: Counterpart,
    ours: str,
    sizes: dict[str, torch.Size],
) -> Tensor:
    """Reads one parameter, and transposes it to trainfleet's layout if necessary."""
    (file, key), size = names[wanted.name], sizes[ours]
    there = file.get_slice(key)
    if len(there.get_shape()) != len(size) or there.get_dtype() not in FLOATS:
        why = (
            f"{key} is {there.get_dtype()} with shape {tuple(there.get_shape())}, but {ours} "
            f"needs floats with shape {tuple(size)}"
        )
        raise _wrong("type or shape", folder, why)
    value: Tensor = file.get_tensor(key)
    value = value.T if wanted.turned else value
    widths = [sizes[part][0] for part in wanted.parts]
    if widths and value.shape[0] == sum(widths):
        value = torch.split(value, widths)[wanted.parts.index(ours)]
    value = value.contiguous()
    if value.shape != size:
        why = f"{key} gives {ours} shape {tuple(value.shape)}, but the model needs {tuple(size)}"
        raise _wrong("shape", folder, why)
    return value


def _wrong(what: str, folder: Path, why: str) -> RunError:
    return RunError(
        f"has a weight with the wrong {what}",
        where=str(folder),
        why=why,
        next=f"set model.preset: {folder} to use its shape",
    )


def sizes_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in named}
