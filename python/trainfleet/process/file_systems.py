"""Fallbacks for file systems that lack an operation, such as locks on a Lustre file system mounted
without `flock`.

`hold` creates a folder on a node's own disk or in its memory that exists as long as a process uses
it. The process holds a lock on the folder, which the kernel releases when the process ends for any
reason. The next process that creates such a folder, in any container on the node, removes those of
killed processes. On disks without locks, these leftovers remain.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from ..trust import untrusted_input

# errno values that report an operation as unsupported by the file system (flock(2), fsync(2)).
# ENOLCK comes from NFS without a lock daemon.
LACKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
MEMORY, TEMPORARY = Path("/dev/shm"), Path("/tmp")  # folders local to this machine
_told = set[int]()  # file systems without locks that have already been reported


def offered(operation: Callable[[], object], *lacks: int) -> bool:
    """Runs an operation and returns whether the file system supports it. Raises OSError if a
    supported operation fails.

    `lacks` lists additional errno values that mean "not supported".
    """
    try:
        operation()
    except OSError as error:
        if error.errno not in LACKS | {*lacks}:
            raise
        return False
    return True


def replace_file(path: Path, content: bytes, durable: bool = False) -> None:
    """Replaces a file atomically, even if several processes replace it at once.

    If `durable`, the new content is on the disk before it replaces the old one.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(part, "xb", opener=untrusted_input.opener) as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:  # including a signal that stops the process during the write
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def name_once(part: Path, path: Path) -> None:
    """Gives a complete file a second name. Raises FileExistsError if the name is taken, so if
    several processes race for it, only one succeeds.
    """
    # FAT and some FUSE file systems do not support hard links.
    if offered(lambda: os.link(part, path), errno.EPERM):
        return
    with (
        untrusted_input.open_regular(part) as whole,
        open(path, "xb", opener=untrusted_input.opener) as file,
    ):
        file.write(whole.read())
        file.flush()
        os.fsync(file.fileno())


def lock(file: int | IO[Any], how: int) -> bool:
    """Acquires a lock and returns whether the file system supports locks. Raises BlockingIOError if
    another process holds the lock.
    """
    return offered(lambda: fcntl.flock(file, how))


def take_lock(path: Path) -> TextIO:
    """Opens, locks and returns a lock file. Raises BlockingIOError if another process holds the
    lock.

    If the file system does not support locks, locks a file on this machine instead. Exclusion
    between machines then relies on a lease (health/lease.py).
    """
    file, has_locks = _locked(path)
    if has_locks:
        return file
    file.close()
    _tell(path.parent)
    return _locked(_stand_in(path))[0]


def look(folder: Path) -> None:
    """Prints a note if a folder's file system does not support locks."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if not lock(file, fcntl.LOCK_EX):
            _tell(folder)


def _tell(folder: Path) -> None:
    if (device := folder.stat().st_dev) not in _told:
        _told.add(device)
        what = "has no locks: one machine uses a local lock file, several machines use a lease"
        then = "mount it with `-o flock` to get them"
        print(
            f"note: the file system of {folder.absolute()} {what}; on Lustre, {then}",
            flush=True,
        )


def _locked(path: Path) -> tuple[TextIO, bool]:
    file = open(path, "a+", encoding="utf-8", opener=untrusted_input.opener)  # noqa: SIM115 - it stays open: it is the lock
    try:
        return file, lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise


def is_locked(path: Path) -> bool:
    """Returns whether a process on this machine holds the lock."""
    for one in (path, _stand_in(path)):
        try:
            with untrusted_input.open_regular(one) as file:
                if lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB):
                    return False
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
    return False


def _stand_in(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    return (MEMORY if MEMORY.is_dir() else TEMPORARY) / f"trainfleet-lock-{os.getuid()}-{key}"


def hold(folder: Path) -> int:
    """Creates and locks a folder. The folder remains as long as the returned descriptor is open."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process removed the folder
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            lock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.lstat()):
                    return descriptor
            os.close(descriptor)


def sweep(folders: Iterable[Path]) -> None:
    """Removes this user's folders that no process holds."""
    for folder in folders:
        # held by a process, owned by another user, or already gone
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
