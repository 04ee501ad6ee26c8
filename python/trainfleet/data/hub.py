"""Hugging Face datasets as sources, streamed through the `datasets` library. Their addresses: config/hub.py.

A dataset reads its own files alone: what its README.md names elsewhere, in another folder, another repository or on a server, is
refused before anything is asked of it, and what the library has found is looked at again before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ..config.hub import Dataset, dataset_of
from ..door import printable, shortened
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
        with _own_files_alone(found, source):
            builder = datasets.load_dataset_builder(found.name, found.config, revision=found.revision)
        _require_own(builder, found, source)
        return builder.as_streaming_dataset(split=found.split)
    except DataError:
        raise
    except Exception as error:  # whatever the hub, the network or the dataset's own code raises
        why = f"{type(error).__name__}: {error}"
        remedy = OFFLINE if isinstance(error, ConnectionError) else "correct data.sources"
        raise DataError("can't be opened as a Hugging Face dataset", where=source, why=why, next=remedy) from error


@contextmanager
def _own_files_alone(found: Dataset, source: str) -> Iterator[None]:
    """The library looks for files nowhere but in the dataset: to look elsewhere would already be a request to a server."""
    from datasets import data_files

    resolve = data_files.resolve_pattern

    def resolved(pattern: str, base_path: str, *more: Any, **words: Any) -> list[str]:
        whole = pattern if "://" in pattern or pattern.startswith(("/", "~")) else f"{base_path}/{pattern}"
        if not _is_own(whole, found):
            raise _elsewhere(pattern, source)
        own: list[str] = resolve(pattern, base_path, *more, **words)
        return own

    with mock.patch.object(data_files, "resolve_pattern", resolved):
        yield


def _require_own(builder: Any, found: Dataset, source: str) -> None:
    """DataError where a file of the dataset's lies elsewhere, also by a link, or is of another revision than the others."""
    files = [file for files in (builder.config.data_files or {}).values() for file in files]
    for file in files:
        if not _is_own(file, found) or ("://" not in file and not _is_own(str(Path(file).resolve()), found)):
            raise _elsewhere(file, source)
    revisions = {file.partition("@")[2].partition("/")[0]: file for file in files if "://" in file}
    if len(revisions) > 1:
        raise _elsewhere(next(file for revision, file in revisions.items() if revision != builder.hash), source)


def _is_own(file: str, found: Dataset) -> bool:
    """Whether a path or a URL is below the dataset's folder, or in its repository."""
    if found.name.startswith(("/", ".")):
        folder = Path(found.name).resolve()
        cached = folder.parent.name == "snapshots"  # of the Hub's cache, where a revision's files are links into blobs/
        roots = (folder, folder.parents[1] / "blobs") if cached else (folder,)
        return "://" not in file and ".." not in Path(file).parts and any(map(Path(file).is_relative_to, roots))
    owner = "" if "/" in found.name else r"([\w.-]+/)?"
    return bool(re.match(rf"hf://datasets/{owner}{re.escape(found.name)}@", file)) and ".." not in file and "::" not in file


def _elsewhere(file: str, source: str) -> DataError:
    why = f"it names {shortened(printable(file), 255)}"
    return DataError("asks for a file that is not its own", where=source, why=why, next="correct its README.md, or leave it out")
