"""Mirrors the small files of a run folder on the fleet over SSH, as they change.

A node is not trusted: an answer is checked completely before any of it is applied. It may name only
the files of travel.KINDS, within their size limits, and may only append to the files here. No link
below the run folder is followed, not even one made during the check. So no answer changes files
outside the run folder, or files that are not the node's.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shlex
import shutil
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..run.run_folder import unwritable
from ..storage import sync_rules
from ..storage.sync_rules import FILES, limit
from .changed_files import MOST, Known
from .host_results import (
    Host,
    HostFailure,
    Implausible,
    implausible,
    is_whole_number,
    number,
    parse_json,
    settled,
)
from .transport import Transport

TIMEOUT = 30.0
TOTAL = 64 << 30  # most bytes of a run folder's small files
ROUNDS = TOTAL // MOST  # most answers to one refresh
SPARE = 1 << 30  # bytes of this disk that a fleet can't fill


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file, and the file's state there: the bytes begin at `offset` and reach its
    end.
    """

    offset: int
    data: bytes
    size: int
    stamp: float  # time of the file; 0.0 if more of it follows
    inode: int


@dataclass(frozen=True)
class News:
    """One validated answer: pieces by name, the names of all files, whether it is complete, the
    host's clock.
    """

    pieces: Mapping[str, FilePiece]
    names: frozenset[str]
    whole: bool
    now: float


@dataclass
class Mirror:
    """One run folder: `there`, under the fleet's shared folder, and `here`."""

    transport: Transport
    shared: str
    code: str
    python: str
    here: Path
    known: Known = field(default_factory=dict)  # files that this mirror has brought

    def refresh(self, host: Host) -> float | HostFailure:
        """Brings new data from `host` and removes files that were removed there. Returns the host's
        clock.

        Raises:
            RunError: the run folder can't be written, or has a link in the place of a file.
        """
        words = shlex.join(
            [
                "env",
                f"PYTHONPATH={self.code}/python",
                "PYTHONSAFEPATH=1",
                self.python,
                "-S",
                "-m",
                "trainfleet.hosts.changed_files",
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
                return implausible(error, "what a run folder has")
            self._take(news)
            if news.whole:
                return news.now
        return implausible(Implausible("no end"), "what a run folder has")

    def _forget_lost(self) -> None:
        """Forgets files that are missing or shorter here, so that they are sent again."""
        for name, (size, _, _) in list(self.known.items()):
            try:
                here = os.lstat(self.here / name)
                kept = stat.S_ISREG(here.st_mode) and here.st_size >= size
            except OSError:
                kept = False
            if not kept:
                del self.known[name]

    def _require_room(self, news: News) -> None:
        """Raises Implausible if the folder would exceed TOTAL, RunError if this disk has no room
        for the answer.
        """
        coming = sum(len(piece.data) for piece in news.pieces.values())
        sizes = {name: size for name, (size, _, _) in self.known.items()} | {
            n: p.size for n, p in news.pieces.items()
        }
        if sum(sizes.values()) > TOTAL:
            raise Implausible(f"more than {TOTAL >> 30} GiB of small files")
        disk = next(
            folder for folder in (self.here, *self.here.absolute().parents) if folder.is_dir()
        )
        if coming and shutil.disk_usage(disk).free - coming < SPARE:
            raise unwritable(
                self.here,
                OSError(errno.ENOSPC, f"less than {SPARE >> 30} GiB of this disk would be left"),
            )

    def _take(self, news: News) -> None:
        for name, piece in news.pieces.items():
            try:
                sync_rules.write(self.here, name, piece.offset, piece.data, piece.stamp)
            except FileNotFoundError:  # removed here in the meantime: the next refresh brings it
                self.known.pop(name, None)
            else:
                self.known[name] = (piece.size, piece.stamp, piece.inode)
        for name in set(self.known) - news.names:
            sync_rules.remove(self.here, name)
            self.known.pop(name)


def read_news(text: str, known: Known) -> News:
    """Parses a node's answer about a run folder, given the `known` files; Implausible if it can't
    be true.
    """
    record = parse_json(text)
    if not isinstance(record, dict) or record.keys() != {"files", "paths", "whole", "now"}:
        raise Implausible("not the four keys of an answer")
    files, paths, whole = record["files"], record["paths"], record["whole"]
    if not isinstance(files, dict) or not isinstance(paths, list) or not isinstance(whole, bool):
        raise Implausible("values of another type")
    if len(paths) > FILES or not all(isinstance(name, str) for name in paths):
        raise Implausible(f"more than {FILES} files, or names that are not text")
    names = frozenset(paths)
    if len(names) != len(paths) or not files.keys() <= names:
        raise Implausible("names that contradict each other")
    if strange := next((name for name in sorted(names) if limit(name) is None), None):
        raise Implausible(f"the name {strange[:100]!a}, which no file of a run folder has")
    room, pieces = MOST, {}
    for name, values in files.items():
        pieces[name] = _piece(name, values, known, room)
        room -= len(pieces[name].data)
    if not whole and room:
        raise Implausible("less data than an answer can have")
    return News(pieces, names, whole, number(record["now"], 0, 1 << 34))


def _piece(name: str, values: Any, known: Known, room: int) -> FilePiece:
    """Returns one file's part of an answer: it appends to the file here, or starts it again, within
    the size limit of such a file.
    """
    if not isinstance(values, list) or len(values) != 5:
        raise Implausible(f"no five values of {name}")
    offset, size, stamp, inode, packed = values
    most, here = limit(name) or 0, known.get(name, (0, 0.0, 0))[0]
    if not (
        is_whole_number(offset)
        and is_whole_number(size)
        and is_whole_number(inode)
        and isinstance(packed, str)
    ):
        raise Implausible(f"values of another type for {name}")
    if offset not in (0, here) or not 0 <= inode < 1 << 64:
        raise Implausible(f"bytes of {name} that do not follow the earlier ones")
    data = _unpack(name, packed, room)
    if size != offset + len(data) or size > most:
        raise Implausible(f"an impossible size of {name}")
    return FilePiece(offset, data, size, number(stamp, 0, 1 << 34), inode)


def _unpack(name: str, packed: str, room: int) -> bytes:
    """Returns the bytes of a piece; never unpacks more than `room` bytes."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b85decode(packed), room + 1)
    except (ValueError, zlib.error) as error:
        raise Implausible(f"bytes of {name} that can't be unpacked: {error}") from error
    if len(data) > room or not stream.eof or stream.unused_data:
        raise Implausible(f"more bytes of {name} than an answer has")
    return data
