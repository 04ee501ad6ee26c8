"""Clock for waiting on AWS. Tests replace `sleep` and `now` with fakes."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

sleep: Callable[[float], None] = time.sleep
now: Callable[[], float] = time.time  # Unix time


def utc() -> datetime:
    return datetime.fromtimestamp(now(), UTC)


def stamp() -> str:
    """Returns the current UTC time in ISO 8601 format, to the second."""
    return utc().isoformat(timespec="seconds")
