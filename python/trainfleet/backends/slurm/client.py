"""Client for Slurm's commands, and the jobs that Slurm reports. One query covers all jobs of this
process, and is repeated as often as the jobs change.

squeue knows a job until some minutes after its end (MinJobAge). After that, sacct knows the job if
the cluster keeps accounting. If neither knows it, the files that the job left in its folder decide.
While slurmctld does not answer, jobs keep their last known state, because slurmctld may be
restarted while jobs run.

reasons.yaml explains in plain words why a job waits or was refused, and names its sources.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config.tables import read_table
from ...trust import untrusted_input
from ...trust.errors import BackendError
from ..base import Phase
from ..head import HEAD

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
    """Reason why Slurm refuses a job, in plain words, and the config key that causes it; "" if no
    key sets it.
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
    """Returns the explanation of a reason: `(Resources): it is the next one ...; next: ...`. For an
    unknown reason, refers to Slurm's documentation.
    """
    known = _table()["reasons"]
    name = max((name for name in known if reason.startswith(name)), key=len, default=None)
    if name is None:
        return f"({reason}): see slurm.schedmd.com/job_reason_codes.html"
    return f"({reason}): {known[name]['means']}; next: {known[name]['do']}"


def why_refused(said: str) -> SbatchRefusal | None:
    """Returns the meaning of a message from sbatch, squeue or scontrol; None if the message is
    unknown.
    """
    for entry in _table()["refusals"]:
        if re.search(entry["says"], said):
            return SbatchRefusal(entry["means"], entry["key"])
    return None


TIMEOUT = 60.0  # seconds for a command, because slurmctld is slow under many queries
# Seconds between two queries. The pause grows while the jobs do not change.
SHORTEST, LONGEST = 1.0, 15.0
SILENT = 60.0  # most seconds between two queries while slurmctld does not answer
# The reason and the comment are free text, which may contain `|`. So the reason is the last field,
# and the comment that `submit` writes contains no `|`.
FIELDS = ("JobID", "State", "RestartCnt", "NodeList", "Dependency", "Comment", "Reason")
CANCELLED, NO_REASON = "CANCELLED", "None"  # values that squeue prints
GONE = "GONE"  # the state of a job that neither squeue nor sacct knows
FORGOTTEN = re.compile(r"(?i)invalid job id")
COMMENT = "trainfleet"


@dataclass(frozen=True)
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    error: str


# Prefixes of variables by which a site or a user changes these commands, for example a squeue
# filter or a scancel prompt. options.py reads those of sbatch.
SAID = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_HINT")
# Variables of this process that every job needs.
GIVEN = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF")
CLUSTERS = "SLURM_CLUSTERS"  # read by all Slurm commands
Ask = Callable[[Sequence[str], str, Mapping[str, str] | None], Said]


def ask_here(
    words: Sequence[str], stdin: str = "", environment: Mapping[str, str] | None = None
) -> Said:
    """Runs a Slurm command on this machine. Passes only `environment` if it is given, and drops the
    variables in SAID.

    Raises:
        BackendError: the command does not exist, or does not answer.
    """
    if HEAD in os.environ:  # No login shell started this process, and profiles set Slurm's path
        words = ["bash", "-lc", as_asked(words, 'exec "$@"'), "bash", *words]
    elif shutil.which(words[0]) is None:
        why = "fleet.backend slurm needs Slurm's commands here, or on a machine in fleet.hosts"
        raise BackendError(
            f"{words[0]} is not in this machine's PATH",
            why=why,
            next="run module load slurm, or set fleet.hosts: [your login node]",
        )
    elif words[0] != "env":
        given = os.environ if environment is None else environment
        environment = {name: value for name, value in given.items() if not name.startswith(SAID)}
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"{words[0]} does not answer",
            why=f"no answer in {TIMEOUT:.0f} s",
            next="scontrol ping; sinfo",
        ) from error
    return Said(done.returncode, done.stdout, done.stderr)


def as_asked(words: Sequence[str], command: str) -> str:
    """Returns the bash command for these words, without the variables in SAID. Only `env` gets
    these variables, because it reports them.
    """
    return (
        command
        if words[0] == "env"
        else f"unset {' '.join(f'${{!{name}*}}' for name in SAID)}; {command}"
    )


@dataclass(frozen=True)
class SlurmJob:
    """A job, as squeue or sacct reports it."""

    id: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    dependency: str = ""  # afterok:7(unfulfilled)
    comment: str = ""


def parse(out: str) -> dict[str, SlurmJob]:
    """Parses squeue's output into jobs by id; skips malformed lines."""
    found = {}
    for line in out.splitlines():
        parts = line.strip().split("|", len(FIELDS) - 1)
        if len(parts) == len(FIELDS) and untrusted_input.whole(parts[0]):
            number, state, restarts, nodes, dependency, comment, reason = parts
            reason = reason.removesuffix("|")  # every field ends with |
            found[number] = SlurmJob(
                number,
                state,
                reason,
                untrusted_input.whole(restarts) or 0,
                nodes,
                dependency,
                comment,
            )
    return found


class SlurmClient:
    """Client for Slurm that runs commands with `ask`."""

    def __init__(self, ask: Ask = ask_here) -> None:
        self.ask = ask
        self.jobs: dict[str, SlurmJob] = {}  # last known state, by id
        self.watched: set[str] = set()
        self.next_look, self.pause = 0.0, SHORTEST
        self.trouble = ""
        # Nodes that accept no job, and the time at which this list expires.
        self.nodes, self.nodes_until = (dict[str, str](), 0.0)

    def run(self, *words: str) -> str:
        """Returns a command's output. Raises BackendError if the command fails, in plain words if
        its message is known.
        """
        said = self.ask(words, "", None)
        if said.code:
            raise refused(words[0], said.error or said.out)
        return said.out

    def sbatch(self, words: Sequence[str], script: str, environment: Mapping[str, str]) -> Said:
        """Runs sbatch on a script, with the same environment for submissions and tests."""
        given = {name: os.environ[name] for name in (*GIVEN, CLUSTERS) if name in os.environ}
        return self.ask(["sbatch", *words], script, {**given, **environment})

    def look(self, number: str) -> SlurmJob:
        """Returns the job's last known state, and queries Slurm again after a pause. Raises
        BackendError if slurmctld has never answered.
        """
        new = number not in self.watched
        self.watched.add(number)
        if new or time.monotonic() >= self.next_look:
            self._look()
        if number not in self.jobs:
            raise BackendError(
                f"the state of job {number} is unknown",
                why=self.trouble,
                next="run scontrol ping, then make status",
            )
        return self.jobs[number]

    def wake(self) -> None:
        """Makes the next `look` query Slurm without a pause."""
        self.next_look, self.pause = 0.0, SHORTEST

    def _look(self) -> None:
        before = {number: self.jobs.get(number) for number in self.watched}
        try:
            found = self.mine(self.watched)
            self.trouble = ""
        except BackendError as error:
            self.trouble = str(error)
            self.pause = min(2 * self.pause, SILENT)
            self.next_look = time.monotonic() + self.pause
            return
        self.jobs |= {
            number: self._whole(found[number]) if number in found else self._of_old(number)
            for number in self.watched
        }
        changed = any(self.jobs[number] != job for number, job in before.items())
        self.pause = SHORTEST if changed else min(1.5 * self.pause, LONGEST)
        self.next_look = time.monotonic() + self.pause

    def mine(self, numbers: set[str] | None = None) -> dict[str, SlurmJob]:
        """Returns squeue's report on these jobs, or on all jobs of this user."""
        which = ["--me"] if numbers is None else [f"--jobs={','.join(sorted(numbers))}"]
        form = ",".join(f"{name}:|" for name in FIELDS)
        said = self.ask(
            ["squeue", "--noheader", "--states=all", *which, f"--Format={form}"], "", None
        )
        # squeue fails if it has forgotten the only requested job, but not if several jobs are
        # requested.
        if said.code and not FORGOTTEN.search(said.error):
            raise refused("squeue", said.error)
        return parse(said.out)

    def unavailable(self, partitions: str = "") -> dict[str, str]:
        """Returns the nodes that accept no job, each with its state and the administrator's reason.
        Queries Slurm at most every LONGEST seconds.
        """
        if time.monotonic() >= self.nodes_until:
            which = [f"--partition={partitions}"] if partitions else []
            words = [
                "sinfo",
                "--noheader",
                "--Node",
                "--states=down,drain,fail,maint",
                *which,
                "--format=%N|%T|%E",
            ]
            rows = [
                line.strip().split("|", 2) for line in self.ask(words, "", None).out.splitlines()
            ]
            self.nodes = {row[0]: f"{row[1]}, {row[2]}" for row in rows if len(row) == 3}
            self.nodes_until = time.monotonic() + LONGEST
        return self.nodes

    def _whole(self, job: SlurmJob) -> SlurmJob:
        """Returns squeue's job with the user who cancelled it, because only accounting knows that
        user.
        """
        known = self.jobs.get(job.id)
        if job.state != CANCELLED or job.reason != NO_REASON:
            return job
        return (
            known
            if known and known.state == CANCELLED
            else replace(job, reason=self._of_old(job.id).reason or NO_REASON)
        )

    def _of_old(self, number: str) -> SlurmJob:
        """Returns the accounting record of a job that squeue has forgotten."""
        known = self.jobs.get(number)
        if known and known.state == GONE:
            return known
        said = self.ask(
            ["sacct", "-X", "-n", "-P", "-j", number, "-o", "JobID,State,NodeList"], "", None
        )
        rows = [line.split("|") for line in said.out.splitlines() if line.startswith(f"{number}|")]
        if said.code or not rows:  # the cluster keeps no accounting
            return SlurmJob(number, GONE)
        state, _, by = rows[-1][1].partition(" ")  # CANCELLED by 1000
        return SlurmJob(number, state, by, 0, rows[-1][2] if len(rows[-1]) > 2 else "")


def how_it_ended(job: SlurmJob) -> str:
    """Returns Slurm's reason for a job's end, as `slurm: job 7 CANCELLED by root`; "" if Slurm
    gives no reason.
    """
    if job.state in (WELL, "FAILED", GONE):
        return ""
    reason = re.sub(r"^by ([0-9]{1,10})$", lambda match: f"by {user_of(int(match[1]))}", job.reason)
    return " ".join(
        filter(None, ("slurm: job", job.id, job.state, reason if reason != NO_REASON else ""))
    )


def user_of(uid: int) -> str:
    """Returns the name of a user, or the uid if this machine does not know the user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"user {uid}"


def refused(command: str, said: str) -> BackendError:
    """Returns the error for a message from Slurm."""
    line = said.strip().partition("\n")[0] or "it printed nothing"
    known = why_refused(said)
    if known is None:
        return BackendError(f"{command} failed", why=line, next="sinfo; squeue --me")
    then = f"make plan SET='{known.key}=...'" if known.key else "scontrol ping; sinfo"
    return BackendError(known.means, where=known.key, why=line, next=then)


@dataclass(frozen=True)
class Partition:
    """A partition, as scontrol show partition reports it."""

    name: str
    is_default: bool
    is_up: bool
    most_minutes: int | None
    nodes: int


def read_partitions(out: str) -> list[Partition]:
    """Parses the partitions of `scontrol --oneliner show partition`."""
    lines = [line.split() for line in out.splitlines() if line.startswith("PartitionName=")]
    return [_partition(dict(word.partition("=")[::2] for word in words)) for words in lines]


def _partition(row: Mapping[str, str]) -> Partition:
    return Partition(
        row["PartitionName"],
        row.get("Default") == "YES",
        row.get("State", "UP") == "UP",
        minutes(row.get("MaxTime", "")),
        untrusted_input.whole(row.get("TotalNodes", "")) or 0,
    )


def minutes(text: str) -> int | None:
    """Parses a time limit into minutes: `1-00:30:00` gives 1470. Returns None for UNLIMITED and for
    other text.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    days, hours, minute, _ = (int(part or 0) for part in match.groups())
    return (24 * days + hours) * 60 + minute
