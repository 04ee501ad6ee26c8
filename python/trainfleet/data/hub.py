"""Hugging Face datasets as sources, streamed through the `datasets` library: hf://name, hf://name:split or hf:///local/folder."""

from __future__ import annotations

from typing import Any

from ..errors import DataError
from .storage import File

HUB = "hf://"


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
        raise DataError(what, where=source, why=str(error), next="pip install datasets") from error
    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # whatever the hub, the network or the dataset's own code raises
        why = f"{type(error).__name__}: {error}"
        raise DataError(
            "can't be opened as a Hugging Face dataset", where=source, why=why, next="correct data.sources"
        ) from error
