"""The wall (host/sandbox.py) around a process that reads a config's sources and tokenizer, or the dataset that was made of
them."""

from __future__ import annotations

import atexit
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from ..config.hub_addresses import HUB, dataset_of
from ..config.types import Data
from ..config.vocabulary import TRAINED, folder_named
from ..host import sandbox
from ..run import run_folder
from .source_files import is_remote, is_stdlib
from .sources import require_there

HUB_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")  # variables that say where they are


def enclose(data: Data, reads: Iterable[Path], writes: Iterable[Path]) -> list[str]:
    """Puts up the wall, with the sources and the tokenizer to read; what of it this machine lacks.

    What lies in S3 or on the Hub this process reads from there as it goes: then it keeps the network, and its other walls.
    """
    require_there(data)
    tokenizer = [] if data.tokenizer == TRAINED else [folder_named(data)]  # is fetched now, if it is on the Hub
    places = [place for source in data.mixture for place in _places(source.path)]
    written = [*writes, *_caches(data, next(iter(writes), None))]
    return sandbox.confine([*reads, *map(_whole, tokenizer), *places], written, needs_network(data))


def enclose_dataset(data: Data) -> list[str]:
    """Puts up the wall around a process that reads the dataset alone; of one in S3 it keeps what it has read in its folder."""
    folder = run_folder.DATA / data.name
    return sandbox.confine([folder], [folder] if data.store else [], network=bool(data.store))


def needs_network(data: Data) -> bool:
    """Whether what reads sources does so from S3 or the Hub, or writes the dataset to S3."""
    return bool(data.store) or any(is_remote(source.path) or _is_on_the_hub(source.path) for source in data.mixture)


def _is_on_the_hub(source: str) -> bool:
    return source.startswith(HUB) and not dataset_of(source).name.startswith(("/", "."))


def _places(source: str) -> Iterator[Path]:
    """The folders and files of this machine that a source is read from; a file that is a link may lie anywhere."""
    if is_stdlib(source) or is_remote(source) or _is_on_the_hub(source):
        return
    path = Path(dataset_of(source).name if source.startswith(HUB) else source)
    if glob.has_magic(str(path)) and not path.exists():
        path = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
    yield _whole(path)
    for folder, _, names in os.walk(path):
        yield from (target.resolve() for name in names if (target := Path(folder, name)).is_symlink())


def _whole(path: Path) -> Path:
    """A path, or for a revision in the Hub's cache, where all is links, the repository's folder."""
    folder = path if path.is_dir() else path.parent
    return folder.parents[1] if folder.parent.name == "snapshots" else path


def _caches(data: Data, beside: Path | None) -> list[Path]:
    """Where the library `datasets` writes: a folder that goes at the end and, for what is on the Hub, the Hub's cache."""
    if not any(source.path.startswith(HUB) for source in data.mixture):
        return []
    scratch = tempfile.mkdtemp(prefix="library-", dir=beside)
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    os.environ["TMPDIR"] = scratch
    os.environ["USE_TORCH"] = "0"  # with torch the library keeps a number in /dev/shm, outside of the wall
    if not any(_is_on_the_hub(source.path) for source in data.mixture):
        os.environ["HF_HOME"] = scratch
        return [Path(scratch)]
    caches = [Path(os.environ[name]) for name in HUB_CACHES if os.environ.get(name)] or [Path.home() / ".cache/huggingface"]
    for cache in caches:
        cache.mkdir(parents=True, exist_ok=True)
    return [Path(scratch), *caches]
