"""Where the ranks are when none gets on: their stacks, which they leave when they are asked to, and the one that is elsewhere.

heartbeats/dump            asks every rank, by being new, for its stacks
logs/stacks-rank-<r>.txt   where it leaves them
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

from . import door
from .beats import FOLDER
from .errors import InputError

DUMP = "dump"
_RANK = re.compile("[0-9]{1,9}")
MOST = 1 << 16  # bytes that are read of a rank's stacks, from their end: the main thread is printed last


def ask(folder: Path) -> None:
    """Every rank that still runs writes its stacks within two beats (heartbeat.EVERY)."""
    path = folder / FOLDER / DUMP
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(time.time()))


def asked(folder: Path) -> str:
    """When stacks were asked for last; empty when they never were."""
    try:
        return door.read_text(folder / FOLDER / DUMP, door.KIBIBYTE)
    except (FileNotFoundError, InputError):
        return ""


def dump(folder: Path, rank: int) -> None:
    """Leaves the Python stacks of all threads of this process."""
    path = folder / "logs" / f"stacks-rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


class Stacks:
    """The stacks that ranks write after `since` (unix time); each file is read once."""

    def __init__(self, folder: Path, since: float) -> None:
        self.folder, self.since = folder / "logs", since
        self.found: dict[int, str] = {}

    def read(self) -> dict[int, str]:
        """All that are there by now, by rank."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                rank = entry.name.removeprefix("stacks-rank-").removesuffix(".txt")
                if entry.name.startswith("stacks-rank-") and _RANK.fullmatch(rank) and int(rank) not in self.found:
                    stat = entry.stat()
                    if stat.st_mtime >= self.since and stat.st_size:
                        with suppress(InputError):
                            self.found[int(rank)] = read_end(Path(entry.path), MOST)
        return self.found


def read_end(path: Path, most: int) -> str:
    """The last `most` bytes of a file as text."""
    with door.open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most).decode(errors="replace")


def odd_one(stacks: Mapping[int, str]) -> tuple[int, str] | None:
    """The one rank whose main thread is where no other's is, and where that is; None when there is no such single rank."""
    places = {rank: innermost(text) for rank, text in stacks.items()}
    counts = Counter(places.values())
    alone = [rank for rank, place in places.items() if place and counts[place] == 1]
    return (alone[0], places[alone[0]]) if len(alone) == 1 and len(places) > 2 else None


def innermost(stacks: str) -> str:
    """Where the main thread is, as `file.py:12 name`: it is the last that faulthandler prints."""
    threads = stacks.split("most recent call first):\n")
    frame = threads[-1].strip().splitlines()[0] if len(threads) > 1 else ""
    parts = frame.strip().split('"')
    if len(parts) < 3:
        return ""
    line = parts[2].removeprefix(", line ").replace(" in ", " ")
    return f"{Path(parts[1]).name}:{line}"
