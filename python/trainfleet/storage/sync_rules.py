"""Defines which files of a run folder are copied between machines, and writes them at their
destination.

Arriving content is not trusted. Only these names are written, each up to its largest size. No link
below the run folder is followed, not even one made in the meantime. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..process import file_systems
from ..run.run_folder import unwritable
from ..trust import untrusted_input
from ..trust.errors import RunError

MIB = 1 << 20
NAME = r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}"
# The small files of a run folder, and the most bytes that are copied of each. Everything else stays
# on its machine: checkpoints, heartbeats, locks, and configs, as each side has its own. Also
# report.html, which each side draws for itself, as a browser runs it.
KINDS = {
    r"(results|search|head|standby|handle|request|scaling|rehearsal)\.json|scaling\.md": 16 * MIB,
    r"stop": 0,
    rf"(metrics|events|events/{NAME})\.jsonl": 1024 * MIB,
    rf"logs/{NAME}\.(log|txt)": 1024 * MIB,
    rf"plots/{NAME}\.png": 64 * MIB,
    rf"tensorboard/{NAME}": 1024 * MIB,
    rf"profile/{NAME}\.json(\.gz)?": 1024 * MIB,
}
GROWING = (".log", ".jsonl")  # these are truncated if too large; others are then not sent
FILES = 50_000  # files of one run folder
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def limit(name: str) -> int | None:
    """Returns the most bytes that are copied of this file of a run folder; None if it is not
    copied.
    """
    return next((most for pattern, most in KINDS.items() if re.fullmatch(pattern, name)), None)


def write(root: Path, name: str, offset: int, data: bytes, stamp: float | None = None) -> None:
    """Ends the file `name` below `root` with `data` from byte `offset` on; 0 replaces the file.
    `stamp`: its time, unix.

    Raises:
        FileNotFoundError: it should be continued, and does not exist.
        RunError: the folder can't be written, or a link, a folder or a device is in the file's
            place.
    """
    with _folder_of(root, name) as (folder, last):
        if offset:
            _fill(
                os.open(last, os.O_WRONLY | os.O_NONBLOCK | FLAGS, dir_fd=folder),
                offset,
                data,
                stamp,
            )
            return
        temporary = f".{last[:200]}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        try:
            _fill(
                os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, 0o644, dir_fd=folder
                ),
                0,
                data,
                stamp,
            )
            os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise


def remove(root: Path, name: str) -> None:
    """Removes a file if it exists. Raises RunError like `write`."""
    with contextlib.suppress(FileNotFoundError), _folder_of(root, name) as (folder, last):
        os.unlink(last, dir_fd=folder)


@contextlib.contextmanager
def _folder_of(root: Path, name: str) -> Iterator[tuple[int, str]]:
    """Opens the folder of a file, creates it if needed, and returns it with the file's name in it.
    The run folder itself may be a link.
    """
    untrusted_input.seal(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with untrusted_input.folder_of(root / name, make=True) as (folder, last):
            assert folder is not None
            yield folder, last.name
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refused(root / name, error) from error


def _fill(descriptor: int, offset: int, data: bytes, stamp: float | None) -> None:
    with open(descriptor, "wb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.ELOOP, "it is not a plain file")
        file.seek(offset)
        file.write(data)
        file.truncate()
        file.flush()
        if stamp is not None:
            file_systems.offered(lambda: os.utime(descriptor, (stamp, stamp)))


def _refused(path: Path, error: OSError) -> RunError:
    """Returns the error for a file from elsewhere that can't be written here."""
    if untrusted_input.is_in_the_way(error):
        return RunError(
            "is not a plain file or folder; copied files are not written to it",
            where=str(path),
            why="a link, a folder or a device is in the way",
            next=f"ls -ld {path.parent} {path}",
        )
    return unwritable(path, error)
