"""Hugging Face datasets as sources, streamed through the `datasets` library.

hf://owner/name[@revision][/config][:split], hf://name[:split] for those without an owner, or hf:///local/folder[:split].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config.hub import HUB
from ..errors import DataError
from ..origin import installing
from .source_files import File


def list_shards(source: str) -> list[File]:
    """The dataset's own shards, which are what can be read side by side; sizes are its total over their number."""
    dataset = open_dataset(source)
    count = int(dataset.num_shards)
    total = dataset.info.download_size or dataset.info.dataset_size or count
    return [File(f"{source}#{i}/{count}", max(int(total) // count, 1), str(dataset.info.version or "")) for i in range(count)]


@dataclass(frozen=True)
class Dataset:
    """Which dataset of the hub, or which folder; None: the only configuration, the newest revision."""

    name: str
    config: str | None
    split: str
    revision: str | None


def dataset_of(source: str) -> Dataset:
    """What a source names.

    Raises:
        DataError: nothing, or more parts than a dataset has.
    """
    path, _, split = source.removeprefix(HUB).replace("?split=", ":").partition(":")
    if path.startswith(("/", ".")):
        return Dataset(path, None, split or "train", None)
    path, _, rest = path.partition("@")
    revision, _, config = rest.partition("/")
    parts = path.split("/")
    if len(parts) == 3 and not rest:
        *parts, config = parts
    if not all(parts) or len(parts) > 2:
        why = "it is hf://owner/name[@revision][/config][:split]"
        raise DataError("names no Hugging Face dataset", where=source, why=why, next="correct data.sources")
    return Dataset("/".join(parts), config or None, split or "train", revision or None)


def open_dataset(source: str) -> Any:
    """The split of a source, streamed. DataError when the library is missing, or whatever else keeps it from being opened."""
    try:
        import datasets
    except ImportError as error:
        what = "needs the package datasets to be read"
        raise DataError(what, where=source, why=str(error), next=installing("data")) from error
    found = dataset_of(source)
    try:
        return datasets.load_dataset(found.name, found.config, split=found.split, revision=found.revision, streaming=True)
    except Exception as error:  # whatever the hub, the network or the dataset's own code raises
        why = f"{type(error).__name__}: {error}"
        raise DataError(
            "can't be opened as a Hugging Face dataset", where=source, why=why, next="correct data.sources"
        ) from error
