"""Waiting for AWS: one hook, so that tests wait by the clock of their fake account."""

from __future__ import annotations

import time
from collections.abc import Callable

sleep: Callable[[float], None] = time.sleep
now: Callable[[], float] = time.time


def pause(seconds: float) -> None:
    """Waits `seconds` seconds."""
    sleep(seconds)


def moment() -> float:
    """Seconds since 1970."""
    return now()
