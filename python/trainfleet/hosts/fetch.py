"""Downloads a folder of large files from a host, completely or not at all, with a progress bar.

The host is not trusted: files and folders must have plain names, no file may exceed its announced
size, all must fit on this disk, and nothing is written outside the new folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..run.run_folder import unwritable
from ..storage.sync_rules import NAME
from ..trust.errors import BackendError
from ..trust.safe_output import unguarded
from .host_results import Host, HostFailure, Implausible, implausible, settled
from .transport import Transport

MOST_FILES, MOST_BYTES = 10_000, 1 << 50
TIMEOUT = 60.0
Advance = Callable[[int], object]


def fetch(transport: Transport, host: Host, there: str, here: Path) -> dict[str, int]:
    """Downloads the files of the folder `there`; returns file → bytes. `here` is new, and appears
    only when all files are complete.

    Raises:
        BackendError: the host has no such folder, its answer is implausible, or the link was lost.
        RunError: this disk has no room for it.
    """
    sizes = listing(transport, host, there)
    part = here.with_name(f".{here.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        if sum(sizes.values()) > shutil.disk_usage(part).free:
            raise OSError(
                28, f"{sum(sizes.values()) / 1e9:.1f} GB must be downloaded, and the disk is full"
            )
        bring_all(transport, host, there, part, sizes)
        part.rename(here)
    except OSError as error:
        raise unwritable(here, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sizes


def listing(transport: Transport, host: Host, there: str) -> dict[str, int]:
    """Returns the files of a folder on a host with their bytes."""
    command = f"cd {shlex.quote(there)} && find . -type f -printf '%s %P\\n' | sort -k 2"
    answer = settled(transport.ask(host, command, timeout=TIMEOUT))
    if isinstance(answer, HostFailure):
        raise BackendError(str(answer), where=f"{host.name}:{there}", next="make doctor")
    try:
        return read_listing(answer.stdout)
    except Implausible as error:
        raise BackendError(
            implausible(error, "a list of files").message, where=host.name, next="check that host"
        ) from error


def read_listing(text: str) -> dict[str, int]:
    """Parses the output of `find` into file → bytes; Implausible for any other text, or for names
    that no such folder has.
    """
    sizes: dict[str, int] = {}
    for line in filter(None, text.split("\n")):
        match = re.fullmatch(rf"([0-9]{{1,16}}) ({NAME}(/{NAME}){{0,2}})", line)
        if not match or match[2] in sizes or len(sizes) >= MOST_FILES:
            raise Implausible(f"the line {line[:80]!a}")
        sizes[match[2]] = int(match[1])
    if sum(sizes.values()) > MOST_BYTES:
        raise Implausible("more bytes than any model has")
    return sizes


def bring_all(
    transport: Transport, host: Host, there: str, part: Path, sizes: dict[str, int]
) -> None:
    """Downloads into the new folder `part`, with a progress bar on a terminal."""
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
    """Writes a file of a host to `file`; BackendError if the host sends more or fewer bytes than it
    announced, or the link is lost.
    """
    complaints: list[bytes] = []

    def take(data: bytes) -> None:
        if file.tell() + len(data) > size:
            raise BackendError(
                "is longer than the host announced, so it may be changing",
                where=f"{host.name}:{path}",
                next="check that host",
            )
        file.write(data)
        advance(len(data))

    code = transport.stream(
        host, f"exec cat -- {shlex.quote(path)}", out=take, err=complaints.append
    )
    if isinstance(code, HostFailure):
        raise BackendError(str(code), where=host.name, next="the same command again")
    if code or file.tell() != size:
        why = (
            b"".join(complaints).decode(errors="replace").strip()
            or f"{file.tell():,} of {size:,} bytes arrived"
        )
        raise BackendError(
            "did not arrive complete",
            where=f"{host.name}:{path}",
            why=why,
            next="the same command again",
        )
