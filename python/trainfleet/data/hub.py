"""Hugging Face datasets as sources, streamed through the `datasets` library. Their addresses: config/hub.py."""

from __future__ import annotations

from typing import Any

from ..config.hub import dataset_of
from ..errors import DataError, InputError
from ..origin import installing
from .source_files import File

OFFLINE = "type it again where there is a network; or name a folder with the dataset's files: hf:///folder"


def list_shards(source: str) -> list[File]:
    """The dataset's own shards, which are what can be read side by side; sizes are its total over their number."""
    dataset = open_dataset(source)
    count = int(dataset.num_shards)
    total = dataset.info.download_size or dataset.info.dataset_size or count
    return [File(f"{source}#{i}/{count}", max(int(total) // count, 1), str(dataset.info.version or "")) for i in range(count)]


def open_dataset(source: str) -> Any:
    """The split of a source, streamed. DataError when the library is missing, or whatever else keeps it from being opened."""
    try:
        import datasets
    except ImportError as error:
        what = "needs the package datasets to be read"
        raise DataError(what, where=source, why=str(error), next=installing("data")) from error
    try:
        found = dataset_of(source)
    except InputError as error:
        raise DataError(error.what, where=source, next="correct data.sources") from error
    try:
        return datasets.load_dataset(found.name, found.config, split=found.split, revision=found.revision, streaming=True)
    except Exception as error:  # whatever the hub, the network or the dataset's own code raises
        why = f"{type(error).__name__}: {error}"
        remedy = OFFLINE if isinstance(error, ConnectionError) else "correct data.sources"
        raise DataError("can't be opened as a Hugging Face dataset", where=source, why=why, next=remedy) from error
