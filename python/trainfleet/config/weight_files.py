"""Finds a Hugging Face folder's weight files, and checks their headers before a launch."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypedDict

from safetensors import SafetensorError, safe_open

from ..trust import untrusted_input
from ..trust.errors import RunError, TrainfleetError
from ..trust.validation import Pattern, fit
from .conversion import told
from .families import FAMILIES, Family
from .huggingface_config import CONFIG
from .sizes import count_parameters
from .types import Model

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 64 * untrusted_input.MEBIBYTE
FLOATS = ("F64", "F32", "F16", "BF16")  # supported safetensors dtypes
# An encoder's output bias has two names. transformers 4 treats them as one tensor. transformers 5
# does so only if the weights are tied, and otherwise reads only the second.
BIASES = {
    "cls.predictions.bias": "cls.predictions.decoder.bias",
    "lm_head.bias": "lm_head.decoder.bias",
}
# names of a tied embedding's copies
_TIED = r"^lm_head\.weight$|^(cls\.predictions|lm_head)\.decoder\.weight$"
_SOURCE = _TIED + r"|(embed_tokens|wte|word_embeddings)\.weight$"
COMPARED = 2**16  # bytes of tied tensors to compare; enough, as fine-tuning changes every row
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h)\.([0-9]{1,6})\.")
SEEN = 64  # maximum number of files to open before a launch; large models have hundreds


class WeightIndex(TypedDict):
    """The part of an index file that is used, which maps weights to files in the same folder."""

    weight_map: dict[str, Annotated[str, Pattern(r"[A-Za-z0-9_.-]{1,255}")]]


def file_names(folder: Path) -> list[str]:
    """Returns the names of a folder's weight files."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    try:
        index = fit(
            WeightIndex,
            untrusted_input.read_json(folder / INDEX, LARGEST_INDEX),
            str(folder / INDEX),
            "download the folder again",
        )
    except FileNotFoundError as error:
        raise RunError(
            told(folder) or f"has neither {WEIGHTS} nor {INDEX}",
            where=str(folder),
            next="save it with transformers' save_pretrained, which writes safetensors",
        ) from error
    return sorted(set(index["weight_map"].values()))


def open_file(path: Path, framework: str) -> Any:
    """Opens a weight file, and validates its header against its size without reading weights."""
    try:
        untrusted_input.open_regular(path).close()
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        missing = "is missing" if not path.exists() else "can't be read as safetensors"
        raise RunError(
            missing,
            where=str(path),
            why=_other(path) or getattr(error, "strerror", None) or str(error),
            next="download the folder again",
        ) from error


def require(folder: Path, model: Model) -> None:
    """Raises RunError if a folder's weight file headers don't match the model."""
    require_tied(folder, model)
    sizes = _look(folder)
    if model.module:
        return  # its parameter names are known only once a rank has built the module
    family = FAMILIES[model.family]
    left_out = family.folder.ignored + (f"|{_TIED}" if model.tie_word_embeddings else "")
    require_no_others(
        folder, [name for name in sizes if not re.search(f"{left_out}|{_own(family)}", name)]
    )
    if len(file_names(folder)) > SEEN:
        return  # not all headers were read; ranks detect mismatches anyway
    layers = {int(found[1]) for name in sizes if (found := _LAYER.search(name))}
    if len(layers) != model.layers:
        raise _other_model(folder, f"{len(layers)} layers", f"{model.layers}")
    sizes |= {name: sizes[other] for name, other in BIASES.items() if other in sizes}
    numbers = sum(math.prod(size) for name, size in sizes.items() if not re.search(left_out, name))
    if numbers != (wanted := count_parameters(model)):
        raise _other_model(folder, f"{numbers:,} parameters", f"{wanted:,}")


def unused(folder: Path, model: Model) -> str:
    """Summarizes the weights that no model of the family uses, or returns ""."""
    names = set(_look(folder))
    found = {name for name in names if re.search(FAMILIES[model.family].folder.ignored, name)}
    for name, other in BIASES.items():
        if other in names and (name not in names or not model.tie_word_embeddings):
            found = found - {other} | {name} & names
    return some(found)


def some(names: Collection[str]) -> str:
    """Formats the number of weights and the first few names."""
    if not names:
        return ""
    return (
        f"{len(names):,} weight{'s' * (len(names) > 1)}: "
        f"{', '.join(sorted(names)[:4])}{', ...' * (len(names) > 4)}"
    )


def require_no_others(folder: Path, names: Collection[str]) -> None:
    """Raises RunError if any names are given, because the model would drop these weights."""
    if names:
        raise RunError(
            "has weights that the model does not have",
            where=str(folder),
            why=some(names),
            next="use the folder of a model without these parts",
        )


def _own(family: Family) -> str:
    """Returns a pattern that matches the family's weight names."""
    form = family.folder
    parts = [
        form.own,
        *form.heads.values(),
        *(name.rstrip(".") for ours, name in form.names.items() if ours != "layers."),
    ]
    kinds = "weight" if family.rotary and not family.biases else "weight|bias|gamma|beta"
    return rf"(^|\.)({'|'.join(parts)})(\.({kinds}))?$"


def _look(folder: Path) -> dict[str, list[int]]:
    """Returns the shape of each weight in a folder's first SEEN files."""
    return {
        key: size
        for name in file_names(folder)[:SEEN]
        for key, size in _sizes(folder / name).items()
    }


def require_tied(folder: Path, model: Model) -> None:
    """Raises RunError if a tied output layer differs from the embedding.

    transformers 5 unties weights that differ.
    """
    beginnings = dict[str, bytes]()
    for path in (folder / name for name in file_names(folder) if model.tie_word_embeddings):
        with open_file(path, "numpy") as file:
            keys = [key for key in file.keys() if re.search(_SOURCE, key)]  # noqa: SIM118 - not a dict
        beginnings |= {key: _beginning(path, key) for key in keys}
    if len({*beginnings.values()}) > 1:
        raise RunError(
            "has an output layer that differs from its embedding",
            where=str(folder),
            why=f"{' and '.join(sorted(beginnings))} differ, but {CONFIG} has "
            "tie_word_embeddings: true",
            next=f"set tie_word_embeddings to false in its {CONFIG} (model.tie_word_embeddings: "
            "false here) to keep both",
        )


def _beginning(path: Path, key: str) -> bytes:
    """Reads a tensor's first bytes. The file's header must already be validated."""
    with untrusted_input.open_regular(path) as stream:
        size = int.from_bytes(stream.read(8), "little")
        first, last = (
            8 + size + offset for offset in json.loads(stream.read(size))[key]["data_offsets"]
        )
        stream.seek(first)
        return stream.read(min(COMPARED, last - first))


def _sizes(path: Path) -> dict[str, list[int]]:
    """Returns the shape of each tensor in a file.

    Raises:
        RunError: the file has no tensors, or has weights of an unsupported dtype.
    """
    with open_file(path, "numpy") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        kinds = {key: part.get_dtype() for key, part in slices.items()}
        if other := next(
            (
                f"{key} is {kind}"
                for key, kind in kinds.items()
                if kind not in FLOATS and "weight" in key
            ),
            None,
        ):
            raise RunError(
                "has weights of an unsupported type",
                where=str(path),
                why=other,
                next="use a folder of unquantized weights",
            )
        if not kinds:
            raise RunError("has no weights", where=str(path), next="download the folder again")
        return {key: part.get_shape() for key, part in slices.items()}


def _other_model(folder: Path, there: str, here: str) -> RunError:
    return RunError(
        "has weights that do not match its model",
        where=str(folder),
        next="download the folder again",
        why=f"its weights have {there}, but the model's {CONFIG} needs {here}",
    )


def _other(path: Path) -> str:
    """Describes a file that is not safetensors by its first bytes, or returns ""."""
    with (
        contextlib.suppress(OSError, TrainfleetError),
        untrusted_input.open_regular(path) as stream,
    ):
        if found := untrusted_input.mistaken(stream.read(256).decode(errors="replace"), str(path)):
            return found.what
    return ""
