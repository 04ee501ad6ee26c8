"""Explains Slurm's reasons in plain words: why a job waits, how it ended, why it was refused
(reasons.yaml, with its sources).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.tables import read_table
from ..base import Phase

FILE = Path(__file__).with_name("reasons.yaml")
# slurm.schedmd.com/squeue.html, JOB STATE CODES. A job in any other state has ended.
PHASES = {
    "PENDING": Phase.QUEUED,
    "REQUEUED": Phase.QUEUED,
    "REQUEUE_FED": Phase.QUEUED,
    "REQUEUE_HOLD": Phase.QUEUED,
    "SPECIAL_EXIT": Phase.QUEUED,
    "RESV_DEL_HOLD": Phase.QUEUED,
    "CONFIGURING": Phase.STARTING,
    "SUSPENDED": Phase.STARTING,
    "STOPPED": Phase.STARTING,
    "RESIZING": Phase.RUNNING,
    "RUNNING": Phase.RUNNING,
    "COMPLETING": Phase.STOPPING,
    "SIGNALING": Phase.RUNNING,
    "STAGE_OUT": Phase.STOPPING,
}
WELL = "COMPLETED"


@dataclass(frozen=True)
class SbatchRefusal:
    """The reason why Slurm refuses a job: in words, and the config's key for it; "" if no key sets
    it.
    """

    means: str
    key: str


@functools.cache
def _table() -> dict[str, Any]:
    return dict(read_table(FILE))


def is_for_nodes(reason: str) -> bool:
    """Tells whether a job waits for unavailable nodes."""
    return reason.startswith(("ReqNodeNotAvail", "Nodes required", "NodeDown"))


def why_waiting(reason: str) -> str:
    """Returns `(Resources): it is the next one ...; next: ...`; an unknown reason unchanged."""
    known = _table()["reasons"]
    name = max((name for name in known if reason.startswith(name)), key=len, default=None)
    if name is None:
        return f"({reason}): see slurm.schedmd.com/job_reason_codes.html"
    return f"({reason}): {known[name]['means']}; next: {known[name]['do']}"


def why_refused(said: str) -> SbatchRefusal | None:
    """Returns the meaning of a message of sbatch, squeue or scontrol; None for an unknown one."""
    for entry in _table()["refusals"]:
        if re.search(entry["says"], said):
            return SbatchRefusal(entry["means"], entry["key"])
    return None
