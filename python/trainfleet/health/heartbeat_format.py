"""Heartbeat format: the contents of a heartbeat, and the file with the heartbeats of a node's
ranks.

heartbeats/node-<i>   a header, and a row of numbers per rank; one of the node's ranks replaces the
                      file once a second (health/heartbeat.py)

The format is binary, because a launcher reads the files of all nodes once a second
(tests/bench/bench_fleet.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from ..process.file_systems import replace_file
from ..trust import untrusted_input

FOLDER = "heartbeats"
MOST = 1 << 16  # maximum bytes to read from a node's file; a heartbeat has 50
RANKS = 1 << 20  # maximum number of ranks per run: fleet.nodes times fleet.ranks_per_node
# A heartbeat stores its phase as an index into this tuple.
PHASES = ("start", "load", "compile", "step", "validate", "checkpoint", "end", "conclude")


class Beat(NamedTuple):
    """Heartbeat of one rank.

    `phase_seconds` is the time spent in the current step and phase, measured by the rank's clock.
    """

    rank: int
    node: int
    pid: int
    attempt: int
    phase: str
    step: int
    phase_seconds: float
    time: float
    step_seconds: float = 0.0  # duration of the latest completed step
    # Time per step that the rank spends on its own work, excluding waits for other ranks; 0 if
    # unknown.
    busy_seconds: float = 0.0


MAGIC = b"TFB2"
HEAD = struct.Struct("<4sII")  # MAGIC, node, attempt
ROW = struct.Struct("<IIHQ4d")  # rank, pid, phase, step, and the four times


def stage(beat: Beat) -> str:
    """Returns a heartbeat's position as text: `step 12`, or the name of another phase."""
    return f"step {beat.step}" if beat.phase == "step" else beat.phase


def write_beats(folder: Path, node: int, attempt: int, beats: Iterable[Beat]) -> None:
    """Replaces a node's heartbeat file atomically.

    fsync is skipped, because heartbeats are useless after a power failure.
    """
    path = folder / FOLDER / f"node-{node}"
    path.parent.mkdir(parents=True, exist_ok=True)
    renew_file(path, pack(node, attempt, beats))


def pack(node: int, attempt: int, beats: Iterable[Beat]) -> bytes:
    """Packs heartbeats into the format that `parse` reads."""
    rows = (
        ROW.pack(beat.rank, beat.pid, PHASES.index(beat.phase), beat.step, *beat[6:])
        for beat in beats
    )
    return HEAD.pack(MAGIC, node, attempt) + b"".join(rows)


def renew_file(path: Path, content: bytes) -> None:
    """Replaces a heartbeat or lease file.

    If the disk is full, overwrites the file in place, which needs no space. The content must
    therefore have the same length as before, or be text in which trailing blanks are harmless.
    """
    try:
        replace_file(path, content)
    except OSError:
        with open(path, "r+b", opener=untrusted_input.opener) as file:
            file.write(content.ljust(os.fstat(file.fileno()).st_size))


class Beats:
    """Poller for the heartbeats of one attempt.

    An unchanged file costs one stat call.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self.folder = folder / FOLDER
        self.attempt = attempt
        # modification time, size and inode of each file when last read
        self.known: dict[str, tuple[int, int, int]] = {}

    def new(self) -> dict[int, Beat]:
        """Returns the latest heartbeats from the nodes' files that changed since the last call."""
        found: dict[int, Beat] = {}
        with suppress(OSError), ExitStack() as opened:
            folder = untrusted_input.opener(str(self.folder), os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            for entry in opened.enter_context(os.scandir(folder)):
                if entry.name.startswith("node-"):
                    # On a file system without atomic rename, the file may be missing while it is
                    # replaced.
                    with suppress(OSError):
                        self._take(folder, entry, found)
        return found

    def _take(self, folder: int, entry: os.DirEntry[str], found: dict[int, Beat]) -> None:
        stat = entry.stat(follow_symlinks=False)
        stamp = stat.st_mtime_ns, stat.st_size, stat.st_ino
        if self.known.get(entry.name) == stamp:
            return
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        # os.read takes a third of the time of a file object
        descriptor = os.open(entry.name, flags, dir_fd=folder)
        try:
            beats = parse(os.read(descriptor, MOST), self.attempt)
        finally:
            os.close(descriptor)
        self.known[entry.name] = stamp
        for beat in beats:
            found[beat.rank] = beat


def parse(text: bytes, attempt: int) -> list[Beat]:
    """Parses a node's heartbeat file.

    Returns [] if the file is damaged or belongs to another attempt.
    """
    try:
        magic, node, found = HEAD.unpack_from(text)
        if magic != MAGIC or found != attempt:
            return []
        return [
            tuple.__new__(Beat, (rank, node, pid, attempt, PHASES[phase], step, *times))
            for rank, pid, phase, step, *times in ROW.iter_unpack(text[HEAD.size :])
            if isfinite(sum(times)) and rank < RANKS
        ]
    except (struct.error, IndexError):
        return []


def newest_step(folder: Path, attempt: int) -> int:
    """Returns the latest step of node 0's ranks, or 0 before the first step."""
    try:
        with open(folder / FOLDER / "node-0", "rb", opener=untrusted_input.opener) as file:
            return max(
                (beat.step for beat in parse(file.read(MOST), attempt) if beat.phase == "step"),
                default=0,
            )
    except OSError:
        return 0


def read_beats(folder: Path, attempt: int) -> dict[int, Beat]:
    """Returns the latest heartbeat of every rank in an attempt."""
    return Beats(folder, attempt).new()
