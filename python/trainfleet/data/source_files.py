"""Lists and opens source files on this machine's file systems, in Python's standard library, or in
S3 (storage/s3.py).

A file is identified by its path, size and version (modification time or ETag), so that old and new
content is never mixed if the file changes while it is being read.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ..storage import s3
from ..storage.files import open_object
from ..trust.errors import DataError, TrainfleetError
from ..trust.spelling import suggest
from ..trust.untrusted_input import printable, shortened
from .format_table import (
    PYTHON,
    by_suffix,
    format_of,
    is_record,
    is_sidecar,
    passed_over,
    why_unread,
)

STDLIB = "stdlib"
LIBRARY = Path(sysconfig.get_path("stdlib"))
# Data source of the first run, and its only file, which scripts/stories.py writes
STORIES, STORY_FILE = "toy-stories", "toy-stories:.jsonl.gz"
BUFFER = 2**18  # in bytes; with the default of 8 KiB, reading lines takes three times as long
BESIDE = 1000  # maximum number of names in a folder to search for a similar one
KINDS = 20  # maximum kinds of unread files to list in a warning
EMPTY = "empty"


@dataclass(frozen=True)
class SourceFile:
    """Source file as found during planning."""

    path: str
    size: int
    version: str


# a source's files to read, and the number of skipped files per reason
Listing = tuple[list[SourceFile], Counter[str]]


def is_stdlib(path: str) -> bool:
    return path == STDLIB or path.startswith(f"{STDLIB}:")


def is_remote(path: str) -> bool:
    return path.startswith(s3.SCHEME)


def list_files(source: str) -> Listing:
    """Lists the files of one source to read, sorted by path, and the number of skipped files per
    reason. Raises DataError if none of the files can be read.
    """
    if is_stdlib(source):
        found = (file for file in _walk(LIBRARY) if isinstance(file, SourceFile) and file.size)
        sizes = {file.path: file.size for file in found if file.path.endswith(PYTHON)}
        names = {path: path.replace(f"{LIBRARY}/", f"{STDLIB}:", 1) for path in sorted(sizes)}
        return [SourceFile(name, sizes[path], "") for path, name in names.items()], Counter()
    if source == STORIES:
        return [stat(STORY_FILE)], Counter()
    files, unread = _sorted_out(_found(source))
    if not files:
        none = "it is empty" if {*unread} == {EMPTY} else f"it has no {', '.join(by_suffix())} file"
        raise unreadable(source, "; ".join([none, *told(source, unread)]))
    return files, unread


def _found(source: str) -> list[SourceFile | str]:
    """Returns each file of one source, or the reason why it is not read. Raises DataError if the
    source can't be listed.
    """
    try:
        if is_remote(source):
            return list(_objects(source))
        return list(_walk(Path(source)) if Path(source).is_dir() else _match(source))
    except TrainfleetError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        where = shortened(getattr(error, "filename", None) or source, 255)
        raise unreadable(where, getattr(error, "strerror", None) or str(error)) from error


def _sorted_out(found: list[SourceFile | str]) -> Listing:
    """Selects the files to read: skips empty files, and sidecars next to record files."""
    files = [file for file in found if isinstance(file, SourceFile)]
    records = any(is_record(file.path) for file in files)
    unread, read = Counter(why for why in found if isinstance(why, str)), list[SourceFile]()
    for file in files:
        if records and is_sidecar(file.path):
            unread[
                f"{printable(Path(file.path).name)} next to records (add it to data.sources to "
                "read it)"
            ] += 1
        elif file.size:
            read.append(file)
        else:
            unread[EMPTY] += 1
    return sorted(read, key=lambda file: file.path), unread


def told(where: str, unread: Counter[str]) -> list[str]:
    """Returns a warning with the number of unread files per reason, or an empty list if all files
    are read.
    """
    kinds = unread.most_common()
    shown = [f"{count:,} {kind}" for kind, count in kinds[:KINDS]]
    shown += [f"{len(kinds) - KINDS:,} more kinds"] if kinds[KINDS:] else []
    return [f"{where}: skipped files: {', '.join(shown)}"] if shown else []


def stat(path: str) -> SourceFile:
    """Returns a file's current size and version. Raises DataError if the file is missing or
    inaccessible.
    """
    if is_remote(path):
        if (found := s3.stat(path)) is None:
            raise unreadable(path, "the object does not exist")
        return SourceFile(found.address, found.size, found.version)
    try:
        status = _local(path).stat()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    version = "" if is_stdlib(path) or path == STORY_FILE else str(status.st_mtime_ns)
    return SourceFile(path, status.st_size, version)


def open_file(file: SourceFile, start: int = 0) -> BinaryIO:
    """Opens a buffered, seekable stream of a file's bytes, starting at `start`. `tell` counts from
    the beginning of the file.
    """
    if is_remote(file.path):
        return open_object(s3.Object(file.path, file.size, file.version), start)
    try:
        stream = open(_local(file.path), "rb", buffering=BUFFER)  # noqa: SIM115  the caller closes it
    except OSError as error:
        raise unreadable(file.path, error.strerror or str(error)) from error
    stream.seek(start)
    return stream


def check_unchanged(file: SourceFile) -> None:
    """Raises DataError if a file has changed since planning."""
    now = stat(file.path)
    if now != file:
        what = (
            "size"
            if now.size != file.size
            else "modification time"
            if not is_remote(file.path)
            else "ETag"
        )
        remedy = "wait until the file no longer changes, then run make tokenize again"
        raise DataError(
            "changed after the sources were listed",
            where=file.path,
            why=f"its {what} differs",
            next=remedy,
        )


def unreadable(where: str, why: str) -> DataError:
    return DataError(
        "can't be read as a source", where=where, why=why, next="correct data.sources in the config"
    )


def _local(path: str) -> Path:
    if path == STORY_FILE:
        return Path(__file__).with_name(path.replace(":", ""))
    return LIBRARY / path.removeprefix(f"{STDLIB}:") if is_stdlib(path) else Path(path)


def _objects(source: str) -> Iterator[SourceFile | str]:
    """Yields each object with this name or under this prefix, or the reason why it is not read."""
    folder = f"{source.rstrip('/')}/"
    for found in s3.list_objects(source):
        if found.address.startswith(folder) or (found.address == source and format_of(source)):
            file = SourceFile(found.address, found.size, found.version)
            yield (
                found.address != source and why_unread(found.address.removeprefix(folder))
            ) or file


def _walk(source: Path) -> Iterator[SourceFile | str]:
    """Yields each file under a folder, or the reason why it is not read."""
    tree = Path(os.path.realpath(source))  # directory tree that links may point into
    # In the Hub's cache, all files under snapshots/ are links.
    tree = tree.parents[1] if tree.parent.name == "snapshots" else tree
    for here, folders, names in os.walk(source, onerror=_raised):
        inner = {*folders}
        for name in (*folders, *names):
            path = Path(here, name)
            if path.is_symlink():
                yield passed_over(name) or _linked(path, Path(os.path.realpath(path)), tree)
            elif name not in inner:
                yield why_unread(name) or (
                    stat(str(path)) if path.is_file() else "pipe, socket or device"
                )
            elif why := passed_over(name):
                yield why
        folders[:] = [name for name in folders if not passed_over(name)]


def _linked(path: Path, real: Path, tree: Path) -> SourceFile | str:
    """Returns a link as a source file, or the reason why it is not read. A link is read only if its
    target is inside the source's tree and is not also read at its own path.
    """
    if not real.exists():
        return "link to a missing file"
    below = real.relative_to(tree).as_posix() if real.is_relative_to(tree) else ""
    if below and not (passed_over if real.is_dir() else why_unread)(below):
        return "link to a file that is read at its own path"
    if not below or real.is_dir():
        return (
            f"link to {shortened(printable(str(real)), 255)} (add that path to data.sources to "
            "read it)"
        )
    return why_unread(path.name) or stat(str(path))


def _raised(error: OSError) -> None:
    raise error


def _absence(path: Path) -> str:
    """Explains why a path is not a file: it is of another type, its link is broken, or it does not
    exist. Suggests a similar name in the folder.
    """
    if path.exists():
        return "it is a pipe, a socket or a device, not a file"
    if path.is_symlink():
        return f"it links to {shortened(str(path.readlink()), 255)}, which does not exist"
    if path.parts[:1] == ("~",):
        return "there is no such file or folder: ~ works only in a shell; write the full path"
    beside = islice(path.parent.iterdir(), BESIDE) if path.parent.is_dir() else ()
    return f"there is no such file or folder{suggest(path.name, [other.name for other in beside])}"


def _match(source: str) -> Iterator[SourceFile | str]:
    """Yields the files that match a path or a glob, or the reason why a match is not read."""
    if not glob.has_magic(source) or Path(source).is_file():
        matches = [source]
    elif not (matches := sorted(glob.glob(source, recursive=True))):  # noqa: PTH207  absolute patterns too
        raise unreadable(source, "no file matches this pattern")
    for path in matches:
        if not Path(path).is_file():
            if path == source:
                raise unreadable(source, _absence(Path(source)))
            yield "folder, pipe or device that the pattern matches"
        elif not format_of(path):
            raise unreadable(path, f"only {', '.join(by_suffix())} files are read")
        else:
            yield stat(path)
