"""Handles requests to stop: Ctrl-C, SIGTERM and a closed terminal mean a clean stop; a second
Ctrl-C means at once.

One SIGTERM to a process group, as timeouts and service managers send it, arrives twice: make
forwards its own to us. A closed terminal's SIGHUP comes from the kernel and again from the shell.
So these count as one request, however often they arrive.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the requests that arrive within `with`, so that they do not kill the process."""

    def __init__(self) -> None:
        self.pressed, self.signalled = 0, False  # by Ctrl-C, and by another process

    @property
    def count(self) -> int:
        return self.pressed + self.signalled

    def __enter__(self) -> Interrupts:
        self._before = [signal.signal(number, self._count) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.pressed += 1
        else:
            self.signalled = True
