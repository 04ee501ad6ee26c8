"""Hugging Face datasets as sources, streamed through the `datasets` library. Their addresses:
config/hub_addresses.py.

A dataset reads its own files alone: what its README.md names elsewhere, in another folder, another
repository or on a server, is refused before anything is asked of it, and what the library has found
is looked at again before it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ..config.hub_addresses import HubDataset, dataset_of
from ..process.install_paths import installing
from ..trust import untrusted_input
from ..trust.errors import DataError, InputError
from ..trust.untrusted_input import printable, shortened
from .source_files import SourceFile

# of a dataset; the second counts, where both say something
DESCRIPTIONS = ("README.md", ".huggingface.yaml")
LARGEST = 16 * untrusted_input.MEBIBYTE  # of a description
MOST = 10**6  # values in a description: one of 2,000 languages has 50,000
NAMING = ("data_files", "data_dir")  # what a configuration in them names files with
OFFLINE = (
    "type it again where there is a network; or name a folder with the dataset's files: "
    "hf:///folder"
)


def list_shards(source: str) -> list[SourceFile]:
    """The dataset's own shards, which are what can be read side by side; sizes are its total over
    their number.
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
    """The split of a source, streamed. DataError when the library is missing, or whatever else
    keeps it from being opened.
    """
    os.environ["USE_TORCH"] = (
        "0"  # read by the library, which would load torch, also for `make plan`
    )
    try:
        import datasets
    except ImportError as error:
        what = "needs the package datasets to be read"
        raise DataError(what, where=source, why=str(error), next=installing("data")) from error
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
    except Exception as error:  # whatever the hub, the network or the dataset's own code raises
        why = f"{type(error).__name__}: {error}"
        remedy = OFFLINE if isinstance(error, ConnectionError) else "correct data.sources"
        raise DataError(
            "can't be opened as a Hugging Face dataset", where=source, why=why, next=remedy
        ) from error


def _require_own_names(found: HubDataset, source: str) -> None:
    """DataError where what describes a dataset names files elsewhere: to look there would already
    be a request to a server.
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
    """What the configurations in a description name files with; read as the library reads it, with
    the same parser.

    InputError when its aliases expand to so much that the library would never end.
    """
    from huggingface_hub import DatasetCard

    text = untrusted_input.read_text(path, LARGEST)
    found = vars(DatasetCard(text).data) if path.suffix == ".md" else yaml.safe_load(text) or {}
    if _size(found, {}) > MOST:
        raise InputError(
            f"has more than {MOST:,} values with those that its aliases repeat", where=str(path)
        )
    content = found.get("configs")
    for config in content if isinstance(content, list) else ():
        yield from _texts([config.get(key) for key in NAMING])


def _descriptions(found: HubDataset) -> Iterator[Path]:
    """The files of a dataset that say which files it has."""
    for name in DESCRIPTIONS:
        path = (
            Path(found.name, name)
            if _is_folder(found)
            else _fetched(found.name, name, found.revision)
        )
        if path and path.is_file():
            yield path


@cache  # each shard opens its dataset
def _fetched(repository: str, name: str, revision: str | None) -> Path | None:
    """A file of the Hub's, in its cache. None of what it does not give: the library will say
    why.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    with suppress(EntryNotFoundError, HfHubHTTPError, OSError):
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
    return None


def _size(value: Any, known: dict[int, int]) -> int:
    """How many values a value of YAML has, each counted as often as aliases repeat it; one in
    itself has too many.
    """
    if id(value) not in known:
        known[id(value)] = MOST + 1
        known[id(value)] = 1 + sum(_size(one, known) for one in _inner(value))
    return known[id(value)]


def _texts(value: Any) -> Iterator[str]:
    """Each text in a value of YAML, at any depth."""
    if isinstance(value, str):
        yield value
    for inner in _inner(value):
        yield from _texts(inner)


def _inner(value: Any) -> Iterable[Any]:
    """The values in a value of YAML."""
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
    """DataError where a file of the dataset's lies elsewhere, also by a link, or is of another
    revision than the others.
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
    """Whether a path or a URL is below the dataset's folder, or in its repository."""
    if _is_folder(found):
        folder = Path(found.name).resolve()
        # of the Hub's cache, where a revision's files are links into blobs/
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
    why = f"it names {shortened(printable(file), 255)}"
    return DataError(
        "asks for a file that is not its own",
        where=source,
        why=why,
        next="correct its README.md, or leave it out",
    )
