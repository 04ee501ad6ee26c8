"""A run on a cluster with nodes that share a folder with this machine."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

from ...health.lease import Holder, is_held, is_renewed, led_already, read_holder
from ...process.processes import identity
from ...run.run_folder import Run
from ..run_storage import Here


class Shared(Here):
    """A run in the shared folder; `has_job` tells whether the engine has a job of it that has not
    ended.
    """

    # Lustre and NFS show other machines' writes some seconds later
    words, pace, lag = (" on the cluster", 1.0, 5.0)

    def __init__(self, run: Run, has_job: Callable[[], bool]) -> None:
        super().__init__(run)
        self.has_job = has_job

    def lead(self) -> None:
        """Raises BackendError while another launcher, on any machine, leads the run."""
        holder = read_holder(self.run.folder)
        if holder and _is_alive(self.run, holder):
            raise led_already(self.run.name, f"{self.run.folder}, launched on {holder.host}")

    def is_running(self) -> bool:
        holder = read_holder(self.run.folder)
        return (holder is not None and _is_alive(self.run, holder)) or self.has_job()


def _is_alive(run: Run, holder: Holder) -> bool:
    """Tells whether a launcher holds the lease: known at once on its own machine, elsewhere by its
    clock or its next renewal.
    """
    if holder.host == platform.node() and holder.pid != os.getpid() and not identity(holder.pid):
        return False
    return is_held(holder, time.time()) or is_renewed(run.folder)
