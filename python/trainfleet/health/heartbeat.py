"""Heartbeat of a rank: reports its position once a second, and follows instructions in the run
folder.

A node's ranks write their heartbeats to an in-memory folder on the node. Once a second, whichever
rank is first does the node's round: it collects all heartbeats into the node's only file in the run
folder (health/heartbeat_format.py), and reads the ranks' instructions. The run folder therefore has
one writer and one reader per node, even if a rank dies or hangs.

The instructions show whether the attempt has ended (health/fence.py), whether a stack dump is
requested (`asked`), and whether the launcher is gone (health/lease.py).

The training loop only reports its position (`heart.at("step", 12)`), which is a single assignment.
A stale heartbeat means that the process or its node is stopped or dead. If only the position is
stale, the process is running but makes no progress.

A launcher requests stack dumps from hung ranks, and looks for the one rank whose dump differs:

heartbeats/dump            a new time in this file requests a dump from every rank
logs/stacks-rank-<r>.txt   a rank's dump
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from ..process import file_systems
from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import fit
from . import fence, tcp_stats
from .fence import Attempt
from .heartbeat_format import FOLDER, Beat, pack, parse, write_beats
from .lease import Vacancy, newest_holder

EVERY = 1.0  # seconds between heartbeats
FENCED = fence.Fenced.exit_code  # exit code of a rank that belongs to an earlier attempt
LEASE_EVERY = 5.0  # seconds between polls of the launcher's lease
TO_LEAVE = 900.0  # seconds for ranks without a launcher to save and exit
MEMORY = Path("/dev/shm")  # in-memory file system, if it exists

DUMP = "dump"
_RANK = re.compile("[0-9]{1,9}")
MOST = 1 << 16  # bytes to read from the end of a dump, where faulthandler prints the main thread


@dataclass(frozen=True)
class Instructions:
    """Instructions for all ranks on a node, as last read from the run folder."""

    order: int = 0  # order of the newest attempt
    number: int = 0
    stacks: str = ""  # time of the latest request for stack dumps
    lease: Vacancy = field(default_factory=Vacancy)
    looked: float = 0.0  # monotonic time of the latest poll of the lease


class NodeMemory:
    """Files that a node's ranks share in memory. Each file is replaced atomically."""

    def __init__(self, folder: Path, node: int, order: int) -> None:
        self.folder = folder
        self.number = node
        self.shared = _memory(folder, node, order)
        self.lock = file_systems.hold(self.shared)

    def leave(self, beat: Beat) -> None:
        """Writes a rank's latest heartbeat."""
        file_systems.replace_file(
            self.shared / f"rank-{beat.rank}", pack(self.number, beat.attempt, [beat])
        )

    def is_due(self, name: str, seconds: float) -> bool:
        """Returns whether the task `name` has not been done on this node for `seconds`. If so, the
        caller must do it.
        """
        turn = self.shared / name
        with suppress(FileNotFoundError):
            if abs(time.time() - turn.stat().st_mtime) < seconds:
                return False
        turn.touch()
        return True

    def publish(self, attempt: int) -> list[Beat]:
        """Copies the heartbeats of this node's ranks to the run folder and returns them."""
        found: list[Beat] = []
        for path in self.shared.glob("rank-*"):
            with suppress(FileNotFoundError):
                found += parse(path.read_bytes(), attempt)
        if found:
            write_beats(self.folder, self.number, attempt, sorted(found))
        return found

    def record_links(self, attempt: int) -> None:
        """Records this node's link statistics in the run folder, if they are due."""
        if self.is_due("links", tcp_stats.EVERY):
            tcp_stats.write_links(self.folder, self.number, attempt)

    def write_instructions(self, orders: Instructions) -> None:
        file_systems.replace_file(self.shared / "orders", json.dumps(asdict(orders)).encode())

    def read_instructions(self) -> Instructions:
        """Returns the instructions that the node's ranks last fetched."""
        try:
            return fit(
                Instructions,
                untrusted_input.read_json(self.shared / "orders", untrusted_input.KIBIBYTE),
            )
        except (OSError, InputError):
            return Instructions()

    def forget(self) -> None:
        shutil.rmtree(self.shared, ignore_errors=True)
        os.close(self.lock)


class Heart:
    """Thread that sends a rank's heartbeat, from construction until `stop`."""

    def __init__(
        self, folder: Path, rank: int, node: int, order: int, patience: float = 0.0
    ) -> None:
        """Starts the thread.

        `order` is the launcher's number for this attempt. `patience` is how many seconds the rank
        may run without a launcher before `alone` is called; 0 means that it needs no launcher.
        """
        self.folder = folder
        self.rank = rank
        self.attempt = Attempt(order, order)
        # Before the process group exists, the attempt may still get a different number.
        self.met = False
        self.patience = patience
        self.alone: Callable[[float], None] = lambda seconds: None
        self.position: tuple[str, int, float] = ("start", 0, time.monotonic())
        self.took = self.busy = 0.0
        self.node = NodeMemory(folder, node, order)
        self._stacks = asked(folder)
        self._complained = self._orphaned = False
        self._end = threading.Event()
        # Send a heartbeat now, or another rank that finishes might conclude that all ranks have
        # finished.
        self._try(self._leave)
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int = 0) -> None:
        """Records the rank's current position. Costs about a microsecond."""
        before, now = self.position, time.monotonic()
        if phase == before[0] == "step":
            self.took = now - before[2]
        self.position = (phase, step, now)

    def meet(self, number: int) -> None:
        """Records that the ranks have joined the process group as attempt `number`
        (fence.enter).
        """
        self.attempt = Attempt(self.attempt.order, number)
        self.met = True

    def stop(self) -> None:
        """Sends the final heartbeat, after which silence is expected."""
        self.at("end", self.position[1])
        self._end.set()
        self._thread.join()
        self._try(self._last)

    def _run(self) -> None:
        while True:
            self._try(self._beat)
            self._obey(self.node.read_instructions())
            if self._end.wait(EVERY):
                return

    def _beat(self) -> None:
        self._leave()
        if self.node.is_due("round", 0.9 * EVERY):
            self.node.write_instructions(self._look(self.node.read_instructions()))
            self.node.publish(self.attempt.number)
            self.node.record_links(self.attempt.number)

    def _leave(self) -> None:
        phase, step, since = self.position
        self.node.leave(
            Beat(
                self.rank,
                self.node.number,
                os.getpid(),
                self.attempt.number,
                phase,
                step,
                round(time.monotonic() - since, 3),
                time.time(),
                round(self.took, 4),
                self.busy,
            )
        )

    def _last(self) -> None:
        self._leave()
        if all(beat.phase == "end" for beat in self.node.publish(self.attempt.number)):
            self.node.forget()

    def _look(self, before: Instructions) -> Instructions:
        """Reads the ranks' current instructions from the run folder."""
        newest, lease, looked = fence.current(self.folder), before.lease, before.looked
        if self.patience and time.monotonic() - looked >= LEASE_EVERY:
            lease = lease.look(newest_holder(self.folder), LEASE_EVERY)
            looked = time.monotonic()
        return Instructions(newest.order, newest.number, asked(self.folder), lease, looked)

    def _obey(self, orders: Instructions) -> None:
        newest = Attempt(orders.order, orders.number)
        if newest > self.attempt if self.met else newest.order > self.attempt.order:
            self._leave_for_good(
                f"attempt {self.attempt.number} ended while this rank was unreachable; it exits"
            )
        if orders.stacks and orders.stacks != self._stacks:
            self._stacks = orders.stacks
            self._try(lambda: dump(self.folder, self.rank))
        if self.patience and orders.lease.vacant >= self.patience:
            if not self._orphaned:
                self._orphaned = True
                self.alone(orders.lease.vacant)
            if orders.lease.vacant >= self.patience + TO_LEAVE:
                self._leave_for_good(
                    f"no launcher for {orders.lease.vacant:.0f} s, and this rank did not reach the "
                    "end of a step, where it could stop; it exits"
                )

    def _leave_for_good(self, words: str) -> None:
        with suppress(OSError):  # The rank must exit even if the log can't be written.
            print(words, file=sys.stderr)
        os._exit(FENCED)

    def _try(self, do: Callable[[], object]) -> None:
        """Calls a function that accesses the disk and reports only the first failure.

        A lost heartbeat must not end training.
        """
        try:
            do()
        except OSError as error:
            if not self._complained:
                self._complained = True
                with suppress(OSError):
                    print(f"no heartbeat could be written: {error}", file=sys.stderr)


def _memory(folder: Path, node: int, order: int) -> Path:
    """Returns the folder that the ranks of a node share.

    The folder is in memory and private to this user if possible, otherwise in the run folder.
    """
    root = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    own = root / f"trainfleet-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
            file_systems.sweep(own.iterdir())
            key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
            (shared := own / f"{key}-{node}-{order}").mkdir(exist_ok=True)
            return shared
    return folder / FOLDER / f".node-{node}-{order}"


def ask(folder: Path) -> None:
    """Requests stack dumps.

    Every live rank writes a dump within two heartbeats (heartbeat.EVERY).
    """
    with _created(folder / FOLDER / DUMP) as file:
        file.write(str(time.time()))


def _created(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "w", encoding="utf-8", opener=untrusted_input.opener)


def asked(folder: Path) -> str:
    """Returns the time of the latest request for stack dumps, or "" before the first."""
    try:
        return untrusted_input.read_text(folder / FOLDER / DUMP, untrusted_input.KIBIBYTE)
    except (FileNotFoundError, InputError):
        return ""


def dump(folder: Path, rank: int) -> None:
    """Writes the Python stacks of all threads in this process."""
    with _created(folder / "logs" / f"stacks-rank-{rank}.txt") as file:
        faulthandler.dump_traceback(file, all_threads=True)


class Stacks:
    """Stack dumps that ranks have written after `since` (Unix time). Each file is read once."""

    def __init__(self, folder: Path, since: float) -> None:
        self.folder = folder / "logs"
        self.since = since
        self.found: dict[int, str] = {}

    def read(self) -> dict[int, str]:
        """Returns all dumps so far, by rank."""
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
    """Returns the only rank whose main thread is in a different place from all others, and that
    place.

    Returns None unless exactly one rank differs.
    """
    frames = {rank: innermost(text) for rank, text in stacks.items()}
    counts = Counter(frames.values())
    alone = [rank for rank, frame in frames.items() if frame and counts[frame] == 1]
    return (alone[0], frames[alone[0]]) if len(alone) == 1 and len(frames) > 2 else None


def innermost(stacks: str) -> str:
    """Returns the main thread's innermost frame as `file.py:12 name`.

    faulthandler prints the main thread last.
    """
    threads = stacks.split("most recent call first):\n")
    frame = threads[-1].strip().splitlines()[0] if len(threads) > 1 else ""
    parts = frame.strip().split('"')
    if len(parts) < 3:
        return ""
    line = parts[2].removeprefix(", line ").replace(" in ", " ")
    return f"{Path(parts[1]).name}:{line}"
