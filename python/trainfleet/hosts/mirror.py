"""Copies a fleet's files to this machine over SSH: the small files of a run folder as they change,
and complete folders of large files.

The node runs `find` for names, sizes and times, and `dd` for new bytes. SFTP needs a round trip per
request, which makes it several times slower over long distances (tests/bench/LOG.md).

Nodes are untrusted, so each response is fully validated before it is applied. Only files that match
sync_rules.KINDS are copied to a run folder, within their size limits. Symbolic links below the run
folder are never followed. A node therefore can't change files outside the run folder, or files that
it does not own.

A folder of large files is downloaded completely or not at all, with a progress bar. File and folder
names must be plain, files must not exceed their announced sizes, and all of them must fit on this
disk. They are written only to the new folder.
"""

from __future__ import annotations

import base64
import io
import os
import re
import shlex
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..run.run_folder import unwritable
from ..storage import sync_rules
from ..storage.sync_rules import FILES, GROWING, NAME, limit
from ..trust.errors import BackendError
from ..trust.safe_output import unguarded
from .host_results import Host, HostFailure, Implausible, Result, implausible, settled
from .transport import Transport

TIMEOUT = 30.0
TOTAL = 64 << 30  # maximum total size of a run folder's small files, in bytes
MOST = 8 << 20  # maximum bytes per piece; a response contains less than twice as many
PIECE_COST = 16 << 10  # extra bytes to count per piece, because each piece starts a process
LISTING_TIMEOUT = 60.0
# prints size, modification time, inode and name of each file, and then the node's time
LIST = "find . -ignore_readdir_race -maxdepth {} -type f -printf '%s %T@ %i %P\\0'"
CLOCK = "date +%s.%N"
BYTES = "bs=1M iflag=skip_bytes,count_bytes status=none"
LINE = re.compile(r"([0-9]{1,16}) (-?[0-9]{1,10}\.[0-9]{1,10}) ([0-9]{1,20}) (.+)", re.DOTALL)


class FileState(NamedTuple):
    """State of a node's file or of its copy. The `stamp` of an incomplete copy is 0.0."""

    size: int = 0
    stamp: float = 0.0  # modification time
    inode: int = 0


class Piece(NamedTuple):
    """Bytes of a file to copy. `batch` numbers the response that contains them."""

    name: str
    start: int
    length: int
    batch: int


@dataclass
class Mirror:
    """Local copy of a run folder on the fleet.

    `shared` is the fleet's shared folder. `here` is the run folder's path, both locally and within
    `shared`.
    """

    transport: Transport
    shared: str
    here: Path
    known: dict[str, FileState] = field(default_factory=dict)  # files that this mirror has copied

    def refresh(self, host: Host) -> float | HostFailure:
        """Copies new data from `host`, deletes files that were deleted there, and returns the
        host's time.

        Raises:
            RunError: the run folder is not writable, or contains a symbolic link in place of a
                file.
        """
        here = shlex.quote(str(self.here))
        command = f"if [ -d {here} ]; then cd {here} && {LIST.format(2)}; fi && {CLOCK}"
        answer = self._ask(host, command)
        try:
            if isinstance(answer, HostFailure):
                return answer
            found, now = read_listing(answer.stdout)
            there = _mirrored(found)
            self._forget_lost()
            for _, batch in groupby(self._changes(there), lambda piece: piece.batch):
                if failure := self._copy(host, list(batch), there):
                    return failure
        except Implausible as error:
            return implausible(error, "a list of changed files")
        for name in set(self.known) - set(there):
            sync_rules.remove(self.here, name)
            self.known.pop(name)
        return now

    def _ask(self, host: Host, command: str, stdin: str = "") -> Result | HostFailure:
        words = f"cd {shlex.quote(self.shared)} && {command}"
        return settled(self.transport.ask(host, words, stdin=stdin, timeout=TIMEOUT))

    def _forget_lost(self) -> None:
        """Forgets files that are missing or truncated locally, so that they are copied again."""
        for name, copy in list(self.known.items()):
            try:
                here = os.lstat(self.here / name)
                kept = stat.S_ISREG(here.st_mode) and here.st_size >= copy.size
            except OSError:
                kept = False
            if not kept:
                del self.known[name]

    def _changes(self, there: Mapping[str, FileState]) -> Iterator[Piece]:
        """Yields the pieces of new and changed files. For a file that has only grown, yields only
        its new bytes.
        """
        total = 0
        for name, found in there.items():
            copy = self.known.get(name, FileState())
            if copy == found:
                continue
            grows = name.endswith(GROWING) or copy.stamp == 0.0
            same = copy.inode == found.inode and copy.size <= found.size
            begin = copy.size if grows and same else 0
            for start in range(begin, max(found.size, begin + 1), MOST):
                length = min(MOST, found.size - start)
                yield Piece(name, start, length, total // MOST)
                total += length + PIECE_COST

    def _copy(
        self, host: Host, batch: list[Piece], there: Mapping[str, FileState]
    ) -> HostFailure | None:
        script = "".join(
            # the names match sync_rules.KINDS, so they need no quotes
            f"dd if={piece.name} skip={piece.start} count={piece.length} {BYTES}\n"
            for piece in batch
        )
        packed = f"cd {shlex.quote(str(self.here))} && sh | gzip -1 | base64 -w 0"
        answer = self._ask(host, packed, script)
        if isinstance(answer, HostFailure):
            return answer
        size = sum(piece.length for piece in batch)
        data = io.BytesIO(_unpack(answer.stdout, size))
        # a file that shrank after it was listed is copied again by the next refresh
        if data.getbuffer().nbytes == size:
            sync_rules.require_room(self.here, size)
            for piece in batch:
                self._take(piece, data.read(piece.length), there[piece.name])
        return None

    def _take(self, piece: Piece, data: bytes, found: FileState) -> None:
        copy, end = self.known.pop(piece.name, FileState()), piece.start + piece.length
        if piece.start not in (0, copy.size):
            return
        stamp = found.stamp if end == found.size else 0.0
        # if the file was deleted locally, the next refresh copies it again
        with suppress(FileNotFoundError):
            sync_rules.write(self.here, piece.name, piece.start, data, stamp)
            self.known[piece.name] = FileState(end, stamp, found.inode)


def read_listing(text: str) -> tuple[dict[str, FileState], float]:
    """Parses the output of LIST and CLOCK into the files by name, and the node's time.

    Raises Implausible if it is malformed.
    """
    found: dict[str, FileState] = {}
    *lines, end = text.split("\0")
    for line in lines:
        match = LINE.fullmatch(line)
        if not match:
            raise Implausible(f"unexpected line {line[:80]!a}")
        found[match[4]] = FileState(int(match[1]), float(match[2]), int(match[3]))
    if not re.fullmatch(r"[0-9]{1,10}\.[0-9]{9}\n", end):
        raise Implausible(f"{end[:80]!a} is not a time")
    return found, float(end)


def _mirrored(found: Mapping[str, FileState]) -> dict[str, FileState]:
    """Returns the files to copy to a run folder. Growing files are copied only up to their size
    limit.
    """
    there = {
        name: state._replace(size=min(state.size, most))
        for name, state in found.items()
        if (most := limit(name)) is not None and (state.size <= most or name.endswith(GROWING))
    }
    if len(there) > FILES or sum(state.size for state in there.values()) > TOTAL:
        raise Implausible(f"more than {FILES:,} small files or {TOTAL >> 30} GiB")
    return there


def _unpack(packed: str, size: int) -> bytes:
    """Decompresses a response of at most `size` bytes. Raises Implausible if it is invalid."""
    try:
        stream = zlib.decompressobj(31)  # gzip
        data = stream.decompress(base64.b64decode(packed, validate=True), size + 1)
    except (ValueError, zlib.error) as error:
        raise Implausible(f"can't decompress it: {error}") from error
    if len(data) > size or not stream.eof or stream.unused_data:
        raise Implausible(f"it has more than {size:,} bytes")
    return data


MOST_FILES, MOST_BYTES = 10_000, 1 << 50
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
                28, f"the disk has no space for a download of {sum(sizes.values()) / 1e9:.1f} GB"
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
    command = f"cd {shlex.quote(there)} && {LIST.format(4)} && {CLOCK}"
    answer = settled(transport.ask(host, command, timeout=LISTING_TIMEOUT))
    if isinstance(answer, HostFailure):
        raise BackendError(str(answer), where=f"{host.name}:{there}", next="make doctor")
    try:
        return read_sizes(answer.stdout)
    except Implausible as error:
        raise BackendError(
            implausible(error, "a list of files").message, where=host.name, next="check that host"
        ) from error


def read_sizes(text: str) -> dict[str, int]:
    """Parses a listing into file → size in bytes, ordered by name.

    Raises Implausible if it is malformed, or has unexpected names, or too many files or bytes.
    """
    sizes = {name: state.size for name, state in sorted(read_listing(text)[0].items())}
    for name in sizes:
        if not re.fullmatch(rf"{NAME}(/{NAME}){{0,2}}", name):
            raise Implausible(f"unexpected name {name[:80]!a}")
    if len(sizes) > MOST_FILES or sum(sizes.values()) > MOST_BYTES:
        raise Implausible("it has more files or bytes than any model")
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
