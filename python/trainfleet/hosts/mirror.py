"""Mirrors the small files of a fleet's run folder over SSH as they change.

Nodes are untrusted, so each response is fully validated before it is applied. A response can only
name files that match sync_rules.KINDS, within their size limits, and can only append to them or
replace them. Symbolic links below the run folder are never followed. A node therefore can't change
files outside the run folder, or files that it does not own.

A folder of large files is downloaded completely or not at all, with a progress bar. File and folder
names must be plain, files must not exceed their announced sizes, and all of them must fit on this
disk. They are written only to the new folder.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..run.run_folder import unwritable
from ..storage import sync_rules
from ..storage.sync_rules import FILES, MOST, NAME, Known, limit
from ..trust.errors import BackendError
from ..trust.safe_output import unguarded
from ..trust.validation import Count, Moment
from .host_results import (
    Host,
    HostFailure,
    Implausible,
    fitted,
    implausible,
    settled,
)
from .transport import Transport

TIMEOUT = 30.0
TOTAL = 64 << 30  # maximum total size of a run folder's small files, in bytes
ROUNDS = TOTAL // MOST  # maximum responses per refresh


@dataclass(frozen=True)
class FilePiece:
    """Part of a file on the node, from byte `offset` to byte `size`."""

    offset: int
    data: bytes
    size: int
    stamp: float  # modification time, or 0.0 if more bytes follow
    inode: int


# offset, size, modification time, inode and compressed bytes of a file in a response
Packed = tuple[Count, Count, Moment, Count, str]


@dataclass(frozen=True)
class _Response:
    """Response of sync_rules.changes."""

    files: dict[str, Packed]
    paths: tuple[str, ...]
    whole: bool
    now: Moment


@dataclass(frozen=True)
class News:
    """Validated response.

    `names` lists all files on the node. `whole` means that the response is complete. `now` is the
    node's time.
    """

    pieces: Mapping[str, FilePiece]
    names: frozenset[str]
    whole: bool
    now: float


@dataclass
class Mirror:
    """Local copy of a run folder on the fleet.

    `shared` is the fleet's shared folder. `here` is the run folder's path, both locally and within
    `shared`.
    """

    transport: Transport
    shared: str
    code: str
    python: str
    here: Path
    known: Known = field(default_factory=dict)  # files that this mirror has copied

    def refresh(self, host: Host) -> float | HostFailure:
        """Copies new data from `host`, deletes files that were deleted there, and returns the
        host's time.

        Raises:
            RunError: the run folder is not writable, or contains a symbolic link in place of a
                file.
        """
        words = shlex.join(
            [
                "env",
                f"PYTHONPATH={self.code}/python",
                "PYTHONSAFEPATH=1",
                self.python,
                "-S",
                "-m",
                "trainfleet.storage.sync_rules",
                str(self.here),
            ]
        )
        command = f"cd {shlex.quote(self.shared)} && {words}"
        for _ in range(ROUNDS):
            self._forget_lost()
            answer = settled(
                self.transport.ask(host, command, stdin=json.dumps(self.known), timeout=TIMEOUT)
            )
            if isinstance(answer, HostFailure):
                return answer
            try:
                news = read_news(answer.stdout, self.known)
                self._require_room(news)
            except Implausible as error:
                return implausible(error, "a list of changed files")
            self._take(news)
            if news.whole:
                return news.now
        return implausible(Implausible("it does not end"), "a list of changed files")

    def _forget_lost(self) -> None:
        """Forgets files that are missing or truncated locally, so that the host resends them."""
        for name, (size, _, _) in list(self.known.items()):
            try:
                here = os.lstat(self.here / name)
                kept = stat.S_ISREG(here.st_mode) and here.st_size >= size
            except OSError:
                kept = False
            if not kept:
                del self.known[name]

    def _require_room(self, news: News) -> None:
        """Checks that a response fits on this disk.

        Raises Implausible if the folder would exceed TOTAL, or RunError if the disk is too full.
        """
        coming = sum(len(piece.data) for piece in news.pieces.values())
        sizes = {name: size for name, (size, _, _) in self.known.items()} | {
            n: p.size for n, p in news.pieces.items()
        }
        if sum(sizes.values()) > TOTAL:
            raise Implausible(f"more than {TOTAL >> 30} GiB of small files")
        sync_rules.require_room(self.here, coming)

    def _take(self, news: News) -> None:
        for name, piece in news.pieces.items():
            try:
                sync_rules.write(self.here, name, piece.offset, piece.data, piece.stamp)
            # the file was deleted locally, so the next refresh will copy it again
            except FileNotFoundError:
                self.known.pop(name, None)
            else:
                self.known[name] = (piece.size, piece.stamp, piece.inode)
        for name in set(self.known) - news.names:
            sync_rules.remove(self.here, name)
            self.known.pop(name)


def read_news(text: str, known: Known) -> News:
    """Parses and validates a node's response, given the files `known` here. Raises Implausible if
    it is invalid.
    """
    found = fitted(_Response, text)
    names = frozenset(found.paths)
    if not len(found.paths) == len(names) <= FILES or not found.files.keys() <= names:
        raise Implausible("the file names contradict each other")
    if strange := next((name for name in sorted(names) if limit(name) is None), None):
        raise Implausible(f"{strange[:100]!a} is not a file name of a run folder")
    room, pieces = MOST, {}
    for name, values in found.files.items():
        pieces[name] = _piece(name, values, known, room)
        room -= len(pieces[name].data)
    if not found.whole and room:
        raise Implausible("it is incomplete, but below the size limit")
    return News(pieces, names, found.whole, found.now)


def _piece(name: str, values: Packed, known: Known, room: int) -> FilePiece:
    """Validates one file in a response.

    The bytes must extend or replace the local copy, and the file must not exceed its size limit.
    """
    offset, size, stamp, inode, packed = values
    if offset not in (0, known.get(name, (0, 0.0, 0))[0]):
        raise Implausible(f"the bytes of {name} do not continue the local copy")
    data = _unpack(name, packed, room)
    if size != offset + len(data) or size > (limit(name) or 0):
        raise Implausible(f"{name} has an impossible size")
    return FilePiece(offset, data, size, stamp, inode)


def _unpack(name: str, packed: str, room: int) -> bytes:
    """Decompresses a file's bytes, but never more than `room` bytes."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b85decode(packed), room + 1)
    except (ValueError, zlib.error) as error:
        raise Implausible(f"can't decompress {name}: {error}") from error
    if len(data) > room or not stream.eof or stream.unused_data:
        raise Implausible(f"{name} has more bytes than an answer may have")
    return data


MOST_FILES, MOST_BYTES = 10_000, 1 << 50
LISTING_TIMEOUT = 60.0
Advance = Callable[[int], object]


def fetch(transport: Transport, host: Host, there: str, here: Path) -> dict[str, int]:
    """Downloads the folder `there` and returns file → size in bytes.

    `here` must not exist. It appears only once all files are complete.

    Raises:
        BackendError: the folder does not exist on the host, the response is implausible, or the
            connection was lost.
        RunError: the files do not fit on this disk.
    """
    sizes = listing(transport, host, there)
    part = here.with_name(f".{here.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        if sum(sizes.values()) > shutil.disk_usage(part).free:
            raise OSError(
                28, f"the disk has no room for a download of {sum(sizes.values()) / 1e9:.1f} GB"
            )
        bring_all(transport, host, there, part, sizes)
        part.rename(here)
    except OSError as error:
        raise unwritable(here, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sizes


def listing(transport: Transport, host: Host, there: str) -> dict[str, int]:
    """Returns file → size in bytes for a folder on a host."""
    answer = settled(
        transport.ask(
            host,
            f"cd {shlex.quote(there)} && find . -type f -printf '%s %P\\n' | sort -k 2",
            timeout=LISTING_TIMEOUT,
        )
    )
    if isinstance(answer, HostFailure):
        raise BackendError(str(answer), where=f"{host.name}:{there}", next="make doctor")
    try:
        return read_listing(answer.stdout)
    except Implausible as error:
        raise BackendError(
            implausible(error, "a list of files").message, where=host.name, next="check that host"
        ) from error


def read_listing(text: str) -> dict[str, int]:
    """Parses the output of `find` into file → size in bytes.

    Raises Implausible for malformed lines, unexpected names, or too many files or bytes.
    """
    sizes: dict[str, int] = {}
    for line in filter(None, text.split("\n")):
        match = re.fullmatch(rf"([0-9]{{1,16}}) ({NAME}(/{NAME}){{0,2}})", line)
        if not match or match[2] in sizes or len(sizes) >= MOST_FILES:
            raise Implausible(f"unexpected line {line[:80]!a}")
        sizes[match[2]] = int(match[1])
    if sum(sizes.values()) > MOST_BYTES:
        raise Implausible("the total size exceeds that of any model")
    return sizes


def bring_all(
    transport: Transport, host: Host, there: str, part: Path, sizes: dict[str, int]
) -> None:
    """Downloads the files to the new folder `part`. Displays a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(file=unguarded(sys.stdout))
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stdout.isatty()
    ) as bar:
        task = bar.add_task(f"from {host.name}", total=sum(sizes.values()))
        for name, size in sizes.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            with open(part / name, "xb") as file:
                bring(
                    transport,
                    host,
                    f"{there}/{name}",
                    file,
                    size,
                    lambda count: bar.advance(task, count),
                )


def bring(
    transport: Transport, host: Host, path: str, file: BinaryIO, size: int, advance: Advance
) -> None:
    """Downloads a file from a host to `file`.

    Raises BackendError if its size differs from the announced size, or the connection is lost.
    """
    complaints: list[bytes] = []

    def take(data: bytes) -> None:
        if file.tell() + len(data) > size:
            raise BackendError(
                "is longer than the host announced; the file may be changing",
                where=f"{host.name}:{path}",
                next="check that host",
            )
        file.write(data)
        advance(len(data))

    code = transport.stream(
        host, f"exec cat -- {shlex.quote(path)}", out=take, err=complaints.append
    )
    if isinstance(code, HostFailure):
        raise BackendError(str(code), where=host.name, next="run the same command again")
    if code or file.tell() != size:
        why = (
            b"".join(complaints).decode(errors="replace").strip()
            or f"received {file.tell():,} of {size:,} bytes"
        )
        raise BackendError(
            "was not downloaded completely",
            where=f"{host.name}:{path}",
            why=why,
            next="run the same command again",
        )
