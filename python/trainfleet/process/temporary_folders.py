"""Makes folders on a node's own disk, or in its memory, that last as long as a process uses them.

A process holds a lock on the folder, which the kernel releases when the process ends for any
reason. The next process that makes such a folder, in any container of the node, removes the folders
of killed processes; on a disk without locks they stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from . import file_systems


def hold(folder: Path) -> int:
    """Makes and locks the folder; it stays as long as the returned descriptor is open."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process swept it
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            file_systems.lock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.lstat()):
                    return descriptor
            os.close(descriptor)


def sweep(folders: Iterable[Path]) -> None:
    """Removes those of this user's folders that no process holds."""
    for folder in folders:
        with suppress(OSError):  # held, another user's, or already gone
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
