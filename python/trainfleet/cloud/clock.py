"""The time that waiting for AWS takes: one hook, so that tests wait at the pace of their pretended account."""

from __future__ import annotations

import time
from collections.abc import Callable

sleep: Callable[[float], None] = time.sleep
now: Callable[[], float] = time.time


def pause(seconds: float) -> None:
    """Waits so many seconds."""
    sleep(seconds)


def moment() -> float:
    """Seconds since 1970."""
    return now()
