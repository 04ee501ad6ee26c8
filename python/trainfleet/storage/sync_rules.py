"""Rules for run folder files that are copied between machines, their changes since the last copy,
and writes of the copies.

Incoming content is not trusted. Only files with these names are written, up to their maximum sizes.
Symbolic links below the run folder are never followed.

`python -m trainfleet.storage.sync_rules FOLDER < KNOWN` prints the changes in a run folder as JSON.
KNOWN describes the receiver's copies as {path: [size, time, inode]}. If a file has only grown, just
the new bytes are sent. A replaced file is sent in full. Only files that match KINDS are sent, and
the receiver rejects all others (hosts/mirror.py). Runs once per second, so this module needs only
the standard library to start quickly.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """Returns a file's maximum bytes to copy, or None if the file is not copied."""
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
        with contextlib.suppress(FileExistsError):  # a file, for which opening the path fails
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


MOST = 8 << 20  # maximum bytes per response; the next response continues from there
Known = dict[str, tuple[int, float, int]]


def changes(folder: Path, known: Known) -> dict[str, Any]:
    """Returns one response for the receiver.

    `files` is {path: [offset, size, time, inode, data]}, and `paths` lists all files. `whole` means
    that the receiver is up to date after this response. `now` is this machine's time.
    """
    untrusted_input.seal(folder)
    files, paths, room = {}, [], MOST
    for path, name, most in _files(folder):
        stat = path.stat()
        number = stat.st_ino % 2**63  # the receiver reads signed integers
        there = min(stat.st_size, most)
        paths.append(name)
        size, stamp, inode = known.get(name, (0, 0.0, 0))
        if (there, stat.st_mtime, number) == (size, stamp, inode) or room <= 0:
            continue
        # a time of 0.0 marks a file that is only partially sent
        goes_on = name.endswith(GROWING) or stamp == 0.0
        offset = size if goes_on and there >= size and number == inode else 0
        with open(path, "rb", opener=untrusted_input.opener) as file:
            file.seek(offset)
            data = file.read(min(room, most - offset))
        room -= len(data)
        ended = offset + len(data)
        whole = stat.st_mtime if ended >= there else 0.0
        files[name] = [
            offset,
            ended,
            whole,
            number,
            base64.b85encode(zlib.compress(data)).decode(),
        ]
    return {"files": files, "paths": paths, "whole": room > 0, "now": time.time()}


def _files(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Yields the path, name and size limit of at most FILES files."""
    count = 0
    for path in _listed(folder):
        name = str(path.relative_to(folder))
        most = limit(name)
        if (
            most is None
            or path.is_symlink()
            or not path.is_file()
            or (path.stat().st_size > most and not name.endswith(GROWING))
        ):
            continue
        count += 1
        if count > FILES:
            return
        yield path, name, most


def _listed(folder: Path) -> Iterator[Path]:
    """Yields the files in the folder and the entries of its immediate subfolders."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        yield from sorted(path.iterdir()) if path.is_dir() else [path]


if __name__ == "__main__":
    print(
        json.dumps(
            changes(
                Path(sys.argv[1]),
                {name: tuple(known) for name, known in json.load(sys.stdin).items()},
            )
        )
    )
