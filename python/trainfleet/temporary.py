"""Folders on a node's own disk, or in its memory, that last as long as some process uses them.

A process holds a lock on the folder, which the kernel gives back however the process ends. What a kill has left is removed by the
next process that makes such a folder, in whatever container of the node it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def hold(folder: Path) -> int:
    """The lock of the folder, which is there now and stays as long as this descriptor is open."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # one who sweeps was faster
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.lstat()):
                    return descriptor
            os.close(descriptor)


def sweep(folders: Iterable[Path]) -> None:
    """Removes those of this user's that no process holds."""
    for folder in folders:
        with suppress(OSError):  # held, another user's, or gone meanwhile
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
