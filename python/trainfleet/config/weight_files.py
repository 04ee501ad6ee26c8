"""The files of a Hugging Face folder that hold weights: which they are, and what their headers tell before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict

from safetensors import SafetensorError, safe_open

from .. import door
from ..errors import RunError, TrainfleetError
from ..shapes import Pattern, fit

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 64 * door.MEBIBYTE
FLOATS = ("F64", "F32", "F16", "BF16")  # how safetensors calls the number formats that weights have
SEEN = 64  # files that are looked into before a launch: the largest models have some hundreds


class Index(TypedDict):
    """What is read of an index: which file has which weight; each lies in the folder itself."""

    weight_map: dict[str, Annotated[str, Pattern(r"[A-Za-z0-9_.-]{1,255}")]]


def file_names(folder: Path) -> list[str]:
    """The files of a folder that hold weights."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    try:
        index = fit(Index, door.read_json(folder / INDEX, LARGEST_INDEX), str(folder / INDEX), "download the folder again")
    except FileNotFoundError as error:
        remedy = "save it with transformers' save_pretrained, which writes safetensors"
        raise RunError(f"has neither {WEIGHTS} nor {INDEX}", where=str(folder), next=remedy) from error
    return sorted(set(index["weight_map"].values()))


def open_file(path: Path, framework: str) -> Any:
    """A file of weights, whose header has been compared with its size; nothing in it is read."""
    try:
        door.open_regular(path).close()
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        missing = "is missing" if not path.exists() else "can't be read as safetensors"
        raise RunError(missing, where=str(path), why=str(error), next="download the folder again") from error


def fault_of(folder: Path) -> str | None:
    """What is wrong with a folder's weights, as far as their headers tell; None where nothing is."""
    try:
        for name in file_names(folder)[:SEEN]:
            with open_file(folder / name, "numpy") as file:
                kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - it is no dict
            if other := next((f"{key} is {kind}" for key, kind in kinds.items() if kind not in FLOATS and "weight" in key), None):
                return f"{folder / name}: has weights of another kind: {other}"
            if not kinds:
                return f"{folder / name}: has no weights"
    except TrainfleetError as error:
        return f"{error.head}: {error.why}" if error.why else error.head
    return None
