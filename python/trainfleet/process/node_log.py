"""Node log with the time and author of each line. While the disk is not writable, lines are kept in
memory. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
import time
from collections import deque
from pathlib import Path

from ..trust.redaction import hide_bytes
from ..trust.untrusted_input import opener

# errno values that mean that the client has lost its file server
AWAY = (
    errno.ESTALE,
    errno.EIO,
    errno.ENOTCONN,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESHUTDOWN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
)
KEPT = 1 << 20  # maximum size of the lines waiting to be written, in bytes
TRY_EVERY = 1.0  # seconds between write attempts
_RANKED = re.compile(rb"^(rank \d+) \| ?")


class Log:
    """Node log that never blocks or fails the process whose output it logs. Lines that can't be
    written are kept in memory. If too many are waiting, the oldest lines are dropped.

    `echo` is a file descriptor that also receives each line, until a write to it fails.
    """

    def __init__(self, path: Path, echo: int | None = None) -> None:
        self.path, self.echo = path, echo
        self.waiting = deque[bytes]()
        self.size = self.lost = 0  # bytes of waiting lines; number of dropped lines
        self.file: io.FileIO | None = None
        self.failed: float | None = None  # when writes started to fail
        self.tried, self.why = 0.0, ""
        # whether the last write failed because the file server was unreachable
        self.severed = False

    def write(self, line: bytes) -> None:
        """Writes a line. Failed writes are retried at most every TRY_EVERY seconds."""
        if self.echo is not None:
            try:
                os.write(self.echo, line)
            except OSError:
                self.echo = None
        self.waiting.append(line)
        self.size += len(line)
        while self.size > KEPT:
            self.size -= len(self.waiting.popleft())
            self.lost += 1
        if self.failed is None or time.monotonic() - self.tried > TRY_EVERY:
            self._flush()

    def note(self, who: str, text: str, when: float | None = None) -> None:
        """Writes a timestamped line from an author other than the command."""
        self.write(stamp(f"{text}\n".encode(), when, who))

    def close(self) -> bool:
        """Flushes and closes the file. Returns whether it contains all lines."""
        self._flush()
        if self.file is not None:
            self.file.close()
            self.file = None  # reopened by the next line
        return not self.waiting

    def _flush(self) -> None:
        self.tried = time.monotonic()
        try:
            self._write_all()
        except OSError as error:
            self._fail(error)
            return
        if self.failed is not None:
            seconds, self.failed = time.monotonic() - self.failed, None
            self.note(
                "node",
                f"could not write this log for {seconds:.0f} s ({self.why}); {self.lost} lines "
                "are lost",
            )

    def _write_all(self) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0, opener=opener)  # noqa: SIM115 - it stays open
        while self.waiting:
            line = self.waiting[0]
            done = self.file.write(line)
            self.size -= done
            self.waiting[0] = line[done:]  # a full disk may accept only part of a line
            if done == len(line):
                self.waiting.popleft()

    def _fail(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            if self.file is not None:
                self.file.close()
        self.file, self.severed = None, error.errno in AWAY
        if self.failed is None:
            self.failed, self.why = self.tried, error.strerror or str(error)
            with contextlib.suppress(OSError):
                print(
                    f"can't write {self.path}: {self.why}; the process continues without this log",
                    file=sys.stderr,
                    flush=True,
                )


def say(log: Path, words: str, who: str = "node") -> None:
    """Appends a line to a node's log from a process other than its supervisor. Also safe in signal
    handlers, which may interrupt another write.
    """
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab", buffering=0, opener=opener) as file:
            file.write(stamp(f"{words}\n".encode(), who=who))


def stamp(line: bytes, when: float | None = None, who: str = "agent") -> bytes:
    """Formats a line as `rank 0 12:03:44.123 | text`: author, time (defaults to now) and text.
    Masks secrets.

    If the line starts with a rank, the rank becomes its author.
    """
    now = time.time() if when is None else when
    clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    match = _RANKED.match(line)
    author, text = (
        (match[1], hide_bytes(line[match.end() :])) if match else (who.encode(), hide_bytes(line))
    )
    return author.ljust(7) + b" " + clock.encode() + b" | " + text
