"""What has changed in a folder: `python -m trainfleet.nodes.changes FOLDER < KNOWN` prints as JSON what another machine lacks.

KNOWN is {path: [size, time, inode]} of what that machine has. A file that only grew is sent from where it stopped; one that was
replaced is sent whole. Checkpoints stay where they are. Standard library only: it is started once a second.
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

# Of the run folder: what is large, what only its ranks need, and configs, which each side has of its own.
LEFT_OUT = {"checkpoints", "huggingface", "heartbeats", "config.yaml", "given.yaml", "launch.yaml", "lock"}
GROWING = (".log", ".jsonl")
MOST = 8 << 20  # bytes in one answer; the rest comes with the next
Known = dict[str, tuple[int, float, int]]


def changes(folder: Path, known: Known) -> dict[str, Any]:
    """{files: {path: [offset, size, time, inode, data]}, paths: all of them, whole: whether nothing is left, now: this clock}."""
    files, paths, room = {}, [], MOST
    for path in _files(folder):
        name, stat = str(path.relative_to(folder)), path.stat()
        paths.append(name)
        size, stamp, inode = known.get(name, (0, 0.0, 0))
        if (stat.st_size, stat.st_mtime, stat.st_ino) == (size, stamp, inode) or room <= 0:
            continue
        goes_on = name.endswith(GROWING) or stamp == 0.0  # the time of a file of which only a part was sent
        offset = size if goes_on and stat.st_size >= size and stat.st_ino == inode else 0
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(room)
        room -= len(data)
        ended = offset + len(data)
        whole = stat.st_mtime if ended >= stat.st_size else 0.0
        files[name] = [offset, ended, whole, stat.st_ino, base64.b85encode(zlib.compress(data)).decode()]
    return {"files": files, "paths": paths, "whole": room > 0, "now": time.time()}


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in LEFT_OUT and not path.name.startswith("."):
            yield from (part for part in ([path] if path.is_file() else sorted(path.rglob("*"))) if part.is_file())


if __name__ == "__main__":
    print(json.dumps(changes(Path(sys.argv[1]), {name: tuple(known) for name, known in json.load(sys.stdin).items()})))
