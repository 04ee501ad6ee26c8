"""Where source bytes are: on this machine's file systems, in the interpreter's library, or in S3 (storage/s3.py).

A file is identified by its path, its size and a version (modification time, or ETag), so that one which changes while it is read
is noticed instead of read half old and half new.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from ..storage import s3, s3_streams
from ..trust.errors import DataError, TrainfleetError
from ..trust.spelling import suggest
from ..trust.untrusted_input import shortened

STDLIB = "stdlib"
BUFFER = 2**18  # bytes: at the default of 8 KiB, reading lines costs three times as much
BESIDE = 1000  # names in a folder among which one that was misspelt is looked for
SKIPPED = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class SourceFile:
    """One source file as it was when the work was planned."""

    path: str
    size: int
    version: str


def is_stdlib(path: str) -> bool:
    return path == STDLIB or path.startswith(f"{STDLIB}:")


def is_remote(path: str) -> bool:
    return path.startswith(s3.SCHEME)


def list_files(source: str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """The files of one source, sorted; of a folder those with a known suffix. DataError when there is nothing to read."""
    if is_stdlib(source):
        return [SourceFile(f"{STDLIB}:{path}", size, "") for path, size in _walk(_library(), (".py",))]
    try:
        if is_remote(source):
            found = _objects(source, suffixes)
        elif Path(source).is_dir():
            found = [stat(str(Path(source) / path)) for path, _ in _walk(Path(source), suffixes)]
        else:
            return [stat(path) for path in _match(source, suffixes)]
    except TrainfleetError:
        raise
    except (OSError, ValueError) as error:  # no name that a file can have
        raise unreadable(shortened(source, 255), getattr(error, "strerror", None) or str(error)) from error
    if not found:
        raise unreadable(source, f"it holds no {', '.join(suffixes)} file")
    return found


def left_out(source: str, suffixes: tuple[str, ...]) -> dict[str, int]:
    """How many files of a folder are not read, by suffix."""
    if is_stdlib(source) or is_remote(source) or not Path(source).is_dir():
        return {}
    names = [path for path, _ in _walk(Path(source), ("",)) if not path.endswith(suffixes)]
    return dict(Counter(Path(name).suffix or "without a suffix" for name in names).most_common(4))


def stat(path: str) -> SourceFile:
    """Size and version of one file now. DataError when it is gone or may not be read."""
    if is_remote(path):
        if (found := s3.stat(path)) is None:
            raise unreadable(path, "there is no such object")
        return SourceFile(found.address, found.size, found.version)
    try:
        status = _local(path).stat()
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error
    return SourceFile(path, status.st_size, "" if is_stdlib(path) else str(status.st_mtime_ns))


def open_file(file: SourceFile, start: int = 0) -> BinaryIO:
    """A buffered stream of a file's bytes from `start` on; seekable, and `tell` counts from the file's beginning."""
    if is_remote(file.path):
        return s3_streams.open_object(s3.Object(file.path, file.size, file.version), start)
    try:
        stream = open(_local(file.path), "rb", buffering=BUFFER)  # noqa: SIM115  the caller closes it
    except OSError as error:
        raise unreadable(file.path, error.strerror or str(error)) from error
    stream.seek(start)
    return stream


def check_unchanged(file: SourceFile) -> None:
    """DataError when a file is not the one that was planned."""
    now = stat(file.path)
    if now != file:
        what = "size" if now.size != file.size else "time of change" if not is_remote(file.path) else "ETag"
        remedy = "wait until nothing writes to it, then run make tokenize again"
        raise DataError("changed after the work was planned", where=file.path, why=f"it has another {what}", next=remedy)


def unreadable(where: str, why: str) -> DataError:
    return DataError("can't be read as a source", where=where, why=why, next="correct data.sources in the config")


def _local(path: str) -> Path:
    return _library() / path.removeprefix(f"{STDLIB}:") if is_stdlib(path) else Path(path)


def _objects(source: str, suffixes: tuple[str, ...]) -> list[SourceFile]:
    """The objects below a prefix that have a known suffix, or the one object of that name."""
    listed = [SourceFile(found.address, found.size, found.version) for found in s3.list_objects(source)]
    found = [file for file in listed if file.path.endswith(suffixes)]
    return [file for file in found if file.path == source] or [
        file for file in found if file.path.startswith(f"{source.rstrip('/')}/")
    ]


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _walk(folder: Path, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Relative path and size of the files below a folder, without hidden ones and installed packages."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED]
        for name in names:
            path = Path(root, name)
            if name.endswith(suffixes) and not name.startswith(".") and path.is_file():
                found.append((path.relative_to(folder).as_posix(), path.stat().st_size))
    return sorted(found)


def _absence(path: Path) -> str:
    """Why a path is no file: what it is, where its link leads, or the name beside it that was meant."""
    if path.exists():
        return "is a pipe, a socket or a device, not a file"
    if path.is_symlink():
        return f"its link leads to {shortened(str(path.readlink()), 255)}, where nothing is"
    if path.parts[:1] == ("~",):
        return "there is no such file or folder: ~ is a shell's word; write the path out"
    beside = islice(path.parent.iterdir(), BESIDE) if path.parent.is_dir() else ()
    return f"there is no such file or folder{suggest(path.name, [other.name for other in beside])}"


def _match(source: str, suffixes: tuple[str, ...]) -> list[str]:
    """The files that a path or a glob names."""
    exists: Callable[[str], bool] = lambda path: Path(path).is_file()  # noqa: E731
    if not glob.has_magic(source) or exists(source):
        if not exists(source):
            raise unreadable(source, _absence(Path(source)))
        matches = [source]
    elif not (matches := sorted(filter(exists, glob.glob(source, recursive=True)))):  # noqa: PTH207  absolute patterns too
        raise unreadable(source, "no file matches this pattern")
    for path in matches:
        if not path.endswith(suffixes):
            raise unreadable(path, f"only {', '.join(suffixes)} files are read")
    return matches
