"""Files by which hosts that share a folder agree: names that one process can claim, and files that
are rewritten in place.

A claim gives a name to one process on one host, once and for all. It is a file, created by link(2),
which a file server carries out whole or not at all and refuses where the name exists. Over NFS the
answer to a link that was made can be lost, and the repeated request then fails as if another had
made it: the number of links of the file that was to be linked tells (open(2), under O_EXCL). A lock
would not do: flock(2) of a host that has died lives on at the server for 90 s and more, and Lustre
may be mounted without it.

A file that is rewritten in place has the same length each time, and readers open it again each
time: a client of NFS or Lustre then asks the server. One that were replaced (rename) could be
seen for seconds as it was, by a client that remembers where its name led; and a listing, for up to
a minute.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from ..process import file_systems
from ..trust import untrusted_input
from .run_folder import make_folder, unwritable

ROOM = 512  # bytes of a file that is rewritten in place, if its text is no longer


def rewrite(path: Path, text: str, durable: bool = False, start: int = 0) -> None:
    """Rewrites a file in place, from the byte `start`; blanks fill it up. `durable`: it outlives a
    power cut. OSError where it can't be written.
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
    """Creates a file with this text for good; False if there was one. RunError where it can't be
    written.
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
        os.fsync(file.fileno())  # a claim must outlive a power cut


def look_again(*folders: Path) -> None:
    """Lists folders: a client of NFS, which may remember for a minute that a name was not there,
    asks its server then.
    """
    for folder in folders:
        with suppress(OSError):
            os.listdir(folder)  # noqa: PTH208 - names alone
