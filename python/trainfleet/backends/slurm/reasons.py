"""Slurm's reasons in plain words: why a job waits, how it ended, why it was refused (reasons.yaml,
with its sources).
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
# slurm.schedmd.com/squeue.html, JOB STATE CODES. What is none of these has ended.
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
    """Why Slurm takes no job: in words, and by which key of fleet.slurm; "" where it is none of the
    config's.
    """

    means: str
    key: str


@functools.cache
def _table() -> dict[str, Any]:
    return dict(read_table(FILE))


def is_for_nodes(reason: str) -> bool:
    """Whether a job waits for nodes that are not fit."""
    return reason.startswith(("ReqNodeNotAvail", "Nodes required", "NodeDown"))


def why_waiting(reason: str) -> str:
    """`(Resources): it is the next one ...; next: ...`; a reason that no entry knows as it is."""
    known = _table()["reasons"]
    name = max((name for name in known if reason.startswith(name)), key=len, default=None)
    if name is None:
        return f"({reason}): Slurm's word, which slurm.schedmd.com/job_reason_codes.html explains"
    return f"({reason}): {known[name]['means']}; next: {known[name]['do']}"


def why_refused(said: str) -> SbatchRefusal | None:
    """What a message of sbatch, squeue or scontrol means; None for one that no entry knows."""
    for entry in _table()["refusals"]:
        if re.search(entry["says"], said):
            return SbatchRefusal(entry["means"], entry["key"])
    return None
