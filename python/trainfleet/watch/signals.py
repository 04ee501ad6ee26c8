"""Handles stop requests. Ctrl-C, SIGTERM or a closed terminal requests a clean stop, and a second
Ctrl-C stops at once.

Timeouts and service managers send a single SIGTERM to a process group, but it arrives twice because
make also forwards its own. When a terminal closes, both the kernel and the shell send SIGHUP. All
signals other than SIGINT therefore count as one request.
"""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Context manager that counts stop requests instead of letting them kill the process."""

    def __init__(self) -> None:
        # number of SIGINTs, and whether any other signal arrived
        self.pressed = 0
        self.signalled = False

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
