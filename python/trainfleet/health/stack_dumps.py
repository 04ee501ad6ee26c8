"""Requests stack dumps of hanging ranks through the run folder, and searches them for the one rank
that is elsewhere.

heartbeats/dump            a new time in it requests a dump from every rank
logs/stacks-rank-<r>.txt   a rank's dump
"""

from __future__ import annotations

import faulthandler
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..trust import untrusted_input
from ..trust.errors import InputError
from .heartbeat_format import FOLDER

DUMP = "dump"
_RANK = re.compile("[0-9]{1,9}")
MOST = 1 << 16  # bytes read from the end of a dump: the main thread is printed last


def ask(folder: Path) -> None:
    """Requests a dump: every live rank writes it within two heartbeats (heartbeat.EVERY)."""
    path = folder / FOLDER / DUMP
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", opener=untrusted_input.opener) as file:
        file.write(str(time.time()))


def asked(folder: Path) -> str:
    """Returns the time of the last request as text; "" before the first."""
    try:
        return untrusted_input.read_text(folder / FOLDER / DUMP, untrusted_input.KIBIBYTE)
    except (FileNotFoundError, InputError):
        return ""


def dump(folder: Path, rank: int) -> None:
    """Writes the Python stacks of all threads of this process."""
    path = folder / "logs" / f"stacks-rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", opener=untrusted_input.opener) as file:
        faulthandler.dump_traceback(file, all_threads=True)


class Stacks:
    """The dumps that ranks write after `since` (unix time); each file is read once."""

    def __init__(self, folder: Path, since: float) -> None:
        self.folder, self.since = folder / "logs", since
        self.found: dict[int, str] = {}

    def read(self) -> dict[int, str]:
        """Returns the dumps so far, by rank."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                rank = entry.name.removeprefix("stacks-rank-").removesuffix(".txt")
                if (
                    entry.name.startswith("stacks-rank-")
                    and _RANK.fullmatch(rank)
                    and int(rank) not in self.found
                ):
                    stat = entry.stat()
                    if stat.st_mtime >= self.since and stat.st_size:
                        with suppress(InputError):
                            self.found[int(rank)] = read_end(Path(entry.path), MOST)
        return self.found


def read_end(path: Path, most: int) -> str:
    """Returns the last `most` bytes of a file as text."""
    with untrusted_input.open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most).decode(errors="replace")


def odd_one(stacks: Mapping[int, str]) -> tuple[int, str] | None:
    """Returns the only rank with a main thread at a different place from all others, and that
    place; None if not exactly one is.
    """
    frames = {rank: innermost(text) for rank, text in stacks.items()}
    counts = Counter(frames.values())
    alone = [rank for rank, frame in frames.items() if frame and counts[frame] == 1]
    return (alone[0], frames[alone[0]]) if len(alone) == 1 and len(frames) > 2 else None


def innermost(stacks: str) -> str:
    """Returns the main thread's innermost frame as `file.py:12 name`: faulthandler prints that
    thread last.
    """
    threads = stacks.split("most recent call first):\n")
    frame = threads[-1].strip().splitlines()[0] if len(threads) > 1 else ""
    parts = frame.strip().split('"')
    if len(parts) < 3:
        return ""
    line = parts[2].removeprefix(", line ").replace(" in ", " ")
    return f"{Path(parts[1]).name}:{line}"
