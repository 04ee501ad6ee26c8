"""Rules for run folder files that are copied between machines, and writes of the copies.

Incoming content is not trusted. Only files with these names are written, up to their maximum sizes.
Symbolic links below the run folder are never followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ..process import file_systems
from ..run.run_folder import unwritable
from ..trust import untrusted_input
from ..trust.errors import RunError

MIB = 1 << 20
NAME = r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,199}"
# Small files of a run folder → maximum bytes to copy. All other files stay on their machine:
# checkpoints, heartbeats, locks, and configs, which differ between machines. report.html stays too:
# each machine renders its own, because a browser executes it.
KINDS = {
    r"(results|search|head|standby|handle|request|scaling|rehearsal)\.json|scaling\.md": 16 * MIB,
    r"stop": 0,
    rf"(metrics|events|events/{NAME})\.jsonl": 1024 * MIB,
    rf"logs/{NAME}\.(log|txt)": 1024 * MIB,
    rf"plots/{NAME}\.png": 64 * MIB,
    rf"tensorboard/{NAME}": 1024 * MIB,
    rf"profile/{NAME}\.json(\.gz)?": 1024 * MIB,
}
# files that are truncated if they are too large; others are skipped instead
GROWING = (".log", ".jsonl")
FILES = 50_000  # maximum files per run folder
SPARE = 1 << 30  # bytes of this disk that always remain free


def limit(name: str) -> int | None:
    """Returns the size limit for copying a file, in bytes, or None if the file is not copied."""
    return next((most for pattern, most in KINDS.items() if re.fullmatch(pattern, name)), None)


def write(root: Path, name: str, offset: int, data: bytes, stamp: float | None = None) -> None:
    """Writes `data` to the file `name` below `root` at byte `offset`, and truncates the file after
    it.

    An offset of 0 replaces the file atomically. `stamp` is its modification time (unix).

    Raises:
        FileNotFoundError: the offset is not 0, and the file does not exist.
        RunError: the folder can't be written, or a link, folder or device already has that name.
    """
    with _below(root, name) as path:
        if offset:
            _fill(path, offset, data)
        else:
            file_systems.replace_file(path, data)
        if stamp is not None:
            file_systems.offered(lambda: os.utime(path, (stamp, stamp), follow_symlinks=False))


def require_room(root: Path, coming: int) -> None:
    """Raises RunError if less than SPARE of this disk would remain free after writing `coming`
    bytes.
    """
    disk = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    if coming and shutil.disk_usage(disk).free - coming < SPARE:
        raise unwritable(
            root,
            OSError(errno.ENOSPC, f"less than {SPARE >> 30} GiB of this disk would remain free"),
        )


def remove(root: Path, name: str) -> None:
    """Removes a file if it exists. Raises RunError as `write` does."""
    with _below(root, name) as path:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _below(root: Path, name: str) -> Iterator[Path]:
    """Yields the path of a run folder's file, after creating its folders.

    Only the run folder itself may be a symbolic link. Converts errors inside the `with` block.
    """
    untrusted_input.seal(root)
    path = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        untrusted_input.guarded(path)
        with contextlib.suppress(FileExistsError):  # opening the path fails later
            path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refused(path, error) from error


def _fill(path: Path, offset: int, data: bytes) -> None:
    with open(untrusted_input.opener(str(path), os.O_WRONLY), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.ELOOP, "it is not a plain file")
        file.seek(offset)
        file.write(data)
        file.truncate()


def _refused(path: Path, error: OSError) -> RunError:
    """Returns the error for an incoming file that can't be written here."""
    if untrusted_input.is_in_the_way(error):
        return RunError(
            "is not a plain file or folder; nothing was written to it",
            where=str(path),
            why="its path has a link, a folder or a device",
            next=f"ls -ld {path.parent} {path}",
        )
    return unwritable(path, error)
