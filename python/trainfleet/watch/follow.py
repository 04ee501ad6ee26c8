"""Carries a request out and stays with it: shows progress, passes stops on, and ends the rest when one node has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..backends.base import Backend, Status
from ..plan.request import Request
from .interrupts import Interrupts

POLL = 0.2  # seconds
FAILED_GRACE = 3.0  # seconds that the other nodes get, once one has failed, to say why they fail too


def carry_out(
    backend: Backend, request: Request, stop: Path, interrupts: Interrupts, show: Callable[[], None], say: Callable[[str], None]
) -> Status:
    """The job's final status; when this returns or raises, nothing of the job runs.

    `stop` is the file that asks training ranks to stop at a step boundary; plain nodes are asked by SIGTERM.
    """
    handle = backend.submit(request)
    try:
        return _stay(backend, handle, request, stop, interrupts, show, say)
    finally:
        backend.stop(handle)


def _stay(
    backend: Backend,
    handle: Any,
    request: Request,
    stop: Path,
    interrupts: Interrupts,
    show: Callable[[], None],
    say: Callable[[str], None],
) -> Status:
    asked, failed_at = False, None
    while (status := backend.status(handle)).running:
        show()
        if interrupts.count > 1:
            say("stopping now, as asked twice")
            backend.stop(handle)
            break
        if not asked and (interrupts.count or stop.exists()):
            asked = True
            say("stopping at the next step, with a checkpoint (Ctrl-C again: at once)" if request.job.torchrun else "stopping")
            stop.touch() if request.job.torchrun else backend.ask_to_stop(handle)
        if status.failed:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > FAILED_GRACE:
                backend.stop(handle)
        time.sleep(POLL)
    show()
    return backend.status(handle)
