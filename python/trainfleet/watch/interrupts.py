"""Requests to stop: Ctrl-C, SIGTERM and a closed terminal all mean a clean stop; a second one means at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts the requests that came since `with` began, instead of dying of them."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Interrupts:
        self._before = [signal.signal(number, self._count) for number in SIGNALS]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
