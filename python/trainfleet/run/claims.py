"""Coordinates hosts through files in a shared folder: permanent claims on names, and files that are
rewritten in place.

A claim permanently assigns a name to one process on one host. Claims are created with link(2),
which is atomic on file servers and fails if the name exists. Over NFS, a lost reply to a successful
link makes the client retry, and the retry fails. The source file's link count therefore decides who
holds the claim (O_EXCL in open(2)). File locks are unsuitable, because a server may hold a dead
host's flock(2) for 90 s or more, and Lustre may be mounted without locking.

A file that is rewritten in place keeps its length, and readers reopen it for each read. Reopening
makes an NFS or Lustre client query the server. By contrast, a client may cache the old version of a
renamed file for seconds, and a directory listing for up to a minute.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..process import file_systems
from ..trust import untrusted_input
from .run_folder import make_folder, unwritable

ROOM = 512  # minimum size in bytes of a file that is rewritten in place


def rewrite(path: Path, text: str, durable: bool = False, start: int = 0) -> None:
    """Rewrites a file in place from byte `start`, padding it with spaces to preserve its length.
    Raises OSError on failure.

    With `durable`, the new content survives a power failure.
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
    """Creates a permanent file with the given text. Returns False if the name is already taken.

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
    """Lists folders to refresh an NFS client's cache.

    Otherwise, the client may not see a new file for up to a minute.
    """
    for folder in folders:
        with suppress(OSError):
            os.listdir(folder)  # noqa: PTH208 - names alone
