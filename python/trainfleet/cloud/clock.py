"""The clock for waiting on AWS: one hook, so that tests wait by the clock of their fake account."""

from __future__ import annotations

import time
from collections.abc import Callable

sleep: Callable[[float], None] = time.sleep
now: Callable[[], float] = time.time  # seconds since 1970
