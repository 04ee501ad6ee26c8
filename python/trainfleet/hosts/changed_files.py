"""Prints the changes in a run folder as JSON: `python -m trainfleet.hosts.changed_files FOLDER <
KNOWN`.

KNOWN describes the receiver's copies as {path: [size, time, inode]}. If a file has only grown, just
the new bytes are sent. A replaced file is sent in full. Only files that match sync_rules.KINDS are
sent, and the receiver rejects all others (mirror.py). Runs once per second, so it imports only the
standard library to start quickly.
"""

from __future__ import annotations

import base64
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..storage.sync_rules import FILES, GROWING, limit
from ..trust import untrusted_input

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
        there = min(stat.st_size, most)
        paths.append(name)
        size, stamp, inode = known.get(name, (0, 0.0, 0))
        if (there, stat.st_mtime, stat.st_ino) == (size, stamp, inode) or room <= 0:
            continue
        # a time of 0.0 marks a file that is only partially sent
        goes_on = name.endswith(GROWING) or stamp == 0.0
        offset = size if goes_on and there >= size and stat.st_ino == inode else 0
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
            stat.st_ino,
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
