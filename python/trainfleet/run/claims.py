"""Coordinates hosts through files in a shared folder: claims on names, and files that are rewritten
in place.

A claim permanently assigns a name to one process on one host. It is a file that link(2) creates,
which is atomic on file servers and fails if the name exists. Over NFS, the reply to a successful
link may be lost, and the retry then fails. The link count of the source file therefore decides
(open(2), under O_EXCL). Locks are not suitable. The server keeps the flock(2) of a dead
host for 90 s or more, and Lustre may be mounted without locks.

A file that is rewritten in place keeps its length, and readers reopen it each time. The client of
NFS or Lustre then queries the server. A client may cache the old version of a renamed file for
seconds, and a listing for up to a minute.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..process import file_systems
from ..trust import untrusted_input
from .run_folder import make_folder, unwritable

ROOM = 512  # minimum bytes of a file that is rewritten in place


def rewrite(path: Path, text: str, durable: bool = False, start: int = 0) -> None:
    """Rewrites a file in place from byte `start`, padded with blanks. Raises OSError on failure.

    `durable` makes the new content survive a power failure.
    """
    content = text.encode()
    file = untrusted_input.opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
    try:
        os.pwrite(file, content.ljust(max(ROOM, os.fstat(file).st_size - start)), start)
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def claim(path: Path, text: str) -> bool:
    """Creates a permanent file with this text. Returns False if the name is already taken.

    Raises RunError if the file can't be written.
    """
    make_folder(path.parent)
    part = path.with_name(f".{secrets.token_hex(8)}")
    try:
        _write(part, text)
        with suppress(FileExistsError):
            file_systems.name_once(part, path)
            return True
        return part.stat().st_nlink == 2
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8", opener=untrusted_input.opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # A claim must survive a power failure.


def look_again(*folders: Path) -> None:
    """Lists folders, so that an NFS client updates its cache.

    Otherwise it may report for a minute that a new file does not exist.
    """
    for folder in folders:
        with suppress(OSError):
            os.listdir(folder)  # noqa: PTH208 - names alone
