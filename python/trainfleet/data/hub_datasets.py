"""Hugging Face datasets as sources, streamed by the `datasets` library. config/addresses.py defines
their address format.

A dataset may read only its own files. If its README.md refers to files in another folder or
repository, or on a server, it is rejected before any of those files is requested. The files that
the library resolves are checked again before they are read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ..config.addresses import HubDataset, dataset_of
from ..process.install_paths import installing
from ..trust import untrusted_input
from ..trust.errors import DataError, InputError
from ..trust.untrusted_input import printable, shortened
from .source_files import SourceFile

# Files that describe a dataset. The second one takes precedence.
DESCRIPTIONS = ("README.md", ".huggingface.yaml")
LARGEST = 16 * untrusted_input.MEBIBYTE  # maximum size of a description file, in bytes
MOST = 10**6  # maximum values in a description; a dataset with 2,000 languages has 50,000
NAMING = ("data_files", "data_dir")  # keys that name files in a description's configurations
OFFLINE = "retry with a network connection, or use a folder with the dataset's files: hf:///folder"


def list_shards(source: str) -> list[SourceFile]:
    """Lists a dataset's shards, which can be read in parallel. Shard sizes are estimated by
    dividing the dataset size evenly.
    """
    dataset = open_dataset(source)
    count = int(dataset.num_shards)
    total = dataset.info.download_size or dataset.info.dataset_size or count
    return [
        SourceFile(
            f"{source}#{i}/{count}", max(int(total) // count, 1), str(dataset.info.version or "")
        )
        for i in range(count)
    ]


def open_dataset(source: str) -> Any:
    """Opens the split that `source` specifies, for streaming. Raises DataError if the library is
    missing or can't open the split.
    """
    os.environ["USE_TORCH"] = "0"  # keeps the library from importing torch, even in `make plan`
    try:
        import datasets
    except ImportError as error:
        what = "can't be read without the package datasets"
        raise DataError(what, where=source, why=str(error), next=installing("data")) from error
    # The library prints each of its retries; the error that follows states the cause.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        found = dataset_of(source)
        _require_own_names(found, source)
        builder = datasets.load_dataset_builder(found.name, found.config, revision=found.revision)
        _require_own(builder, found, source)
        return builder.as_streaming_dataset(split=found.split)
    except DataError:
        raise
    except InputError as error:
        raise DataError(
            error.what, where=error.where or source, next="correct data.sources"
        ) from error
    except Exception as error:  # The hub, the network and dataset code may raise any error.
        why = f"{type(error).__name__}: {error}"
        remedy = OFFLINE if isinstance(error, ConnectionError) else "correct data.sources"
        raise DataError(
            "can't be opened as a Hugging Face dataset", where=source, why=why, next=remedy
        ) from error


def _require_own_names(found: HubDataset, source: str) -> None:
    """Raises DataError if a dataset's description refers to files elsewhere. Must run before the
    dataset is opened, because opening it would already contact other servers.
    """
    base = (
        str(Path(found.name).resolve())
        if _is_folder(found)
        else f"hf://datasets/{found.name}@{found.revision or 'main'}"
    )
    for pattern in chain.from_iterable(map(_names, _descriptions(found))):
        whole = (
            pattern if "://" in pattern or pattern.startswith(("/", "~")) else f"{base}/{pattern}"
        )
        if not _is_own(whole, found):
            raise _elsewhere(pattern, source)


def _names(path: Path) -> Iterator[str]:
    """Yields the file names in a description's configurations. Parses the description in the same
    way as the library.

    Raises InputError if aliases expand to so many values that the library would never finish.
    """
    from huggingface_hub import DatasetCard

    text = untrusted_input.read_text(path, LARGEST)
    found = vars(DatasetCard(text).data) if path.suffix == ".md" else yaml.safe_load(text) or {}
    if _size(found, {}) > MOST:
        raise InputError(
            f"has more than {MOST:,} values after its aliases are expanded", where=str(path)
        )
    content = found.get("configs")
    for config in content if isinstance(content, list) else ():
        yield from _texts([config.get(key) for key in NAMING])


def _descriptions(found: HubDataset) -> Iterator[Path]:
    """Yields a dataset's existing description files."""
    for name in DESCRIPTIONS:
        path = (
            Path(found.name, name)
            if _is_folder(found)
            else _fetched(found.name, name, found.revision)
        )
        if path and path.is_file():
            yield path


@cache  # called once per shard, because each shard opens the dataset
def _fetched(repository: str, name: str, revision: str | None) -> Path | None:
    """Returns the cached copy of a file on the Hub, or None if the download fails. In that case,
    the library reports the reason later.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    with suppress(EntryNotFoundError, HfHubHTTPError, OSError):
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
    return None


def _size(value: Any, known: dict[int, int]) -> int:
    """Counts all values nested in a YAML value, with aliases expanded.

    A recursive value counts as more than MOST.
    """
    if id(value) not in known:
        known[id(value)] = MOST + 1
        known[id(value)] = 1 + sum(_size(one, known) for one in _inner(value))
    return known[id(value)]


def _texts(value: Any) -> Iterator[str]:
    """Yields every string in a YAML value, at any depth."""
    if isinstance(value, str):
        yield value
    for inner in _inner(value):
        yield from _texts(inner)


def _inner(value: Any) -> Iterable[Any]:
    """Returns the direct children of a YAML value."""
    return (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple | set)
        else ()
    )


def _is_folder(found: HubDataset) -> bool:
    return found.name.startswith(("/", "."))


def _require_own(builder: Any, found: HubDataset, source: str) -> None:
    """Raises DataError if a file is outside the dataset's folder or repository, even through a
    link, or belongs to another revision.
    """
    files = [file for files in (builder.config.data_files or {}).values() for file in files]
    for file in files:
        if not _is_own(file, found) or (
            "://" not in file and not _is_own(str(Path(file).resolve()), found)
        ):
            raise _elsewhere(file, source)
    revisions = {file.partition("@")[2].partition("/")[0]: file for file in files if "://" in file}
    if len(revisions) > 1:
        raise _elsewhere(
            next(file for revision, file in revisions.items() if revision != builder.hash), source
        )


def _is_own(file: str, found: HubDataset) -> bool:
    """Returns whether a path or URL is in the dataset's folder or repository."""
    if _is_folder(found):
        folder = Path(found.name).resolve()
        # In the Hub's cache, a revision's files are links into blobs/.
        cached = folder.parent.name == "snapshots"
        roots = (folder, folder.parents[1] / "blobs") if cached else (folder,)
        return (
            "://" not in file
            and ".." not in Path(file).parts
            and any(map(Path(file).is_relative_to, roots))
        )
    owner = "" if "/" in found.name else r"([\w.-]+/)?"
    return (
        bool(re.match(rf"hf://datasets/{owner}{re.escape(found.name)}@", file))
        and ".." not in file
        and "::" not in file
    )


def _elsewhere(file: str, source: str) -> DataError:
    why = f"the file is {shortened(printable(file), 255)}"
    return DataError(
        "refers to a file outside the dataset",
        where=source,
        why=why,
        next="correct its README.md, or remove this source",
    )
