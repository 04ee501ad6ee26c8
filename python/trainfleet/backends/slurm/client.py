"""Slurm client.

A single squeue query covers all jobs that this process watches, at an interval that adapts to how
often they change. squeue lists a job for a few minutes after it ends (MinJobAge). After that, sacct
still lists it if the cluster has accounting. Otherwise, the job's state is derived from the files
in its folder.

While slurmctld does not respond, jobs keep their last known state, because slurmctld can be
restarted while jobs run.

reasons.yaml contains plain-language explanations of Slurm's pending reasons and error messages,
with sources.
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
# slurm.schedmd.com/squeue.html, JOB STATE CODES; all other states mean that the job has ended
PHASES = {
    state: phase
    for phase, states in {
        Phase.QUEUED: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
        Phase.STARTING: "CONFIGURING SUSPENDED STOPPED",
        Phase.RUNNING: "RESIZING RUNNING SIGNALING",
        Phase.STOPPING: "COMPLETING STAGE_OUT",
    }.items()
    for state in states.split()
}
WELL = "COMPLETED"


@functools.cache
def _table() -> dict[str, Any]:
    return dict(read_table(FILE))


def is_for_nodes(reason: str) -> bool:
    """Returns whether the job is waiting for unavailable nodes."""
    return reason.startswith(("ReqNodeNotAvail", "Nodes required", "NodeDown"))


def why_waiting(reason: str) -> str:
    """Explains a pending reason: `(Resources): it is the next one ...; next: ...`.

    Points to Slurm's documentation if the reason is unknown.
    """
    known = _table()["reasons"]
    name = max((name for name in known if reason.startswith(name)), key=len, default=None)
    if name is None:
        return f"({reason}): see slurm.schedmd.com/job_reason_codes.html"
    return f"({reason}): {known[name]['means']}; next: {known[name]['do']}"


TIMEOUT = 60.0  # timeout per command in seconds; slurmctld is slow under heavy load
# bounds of the polling interval in seconds, which grows while no job changes
SHORTEST, LONGEST = 1.0, 15.0
SILENT = 60.0  # maximum polling interval in seconds while slurmctld does not respond
# Reason and Comment are free text and can contain `|`, so Reason is the last field, and `submit`
# never writes `|` to the comment.
FIELDS = ("JobID", "State", "RestartCnt", "NodeList", "Dependency", "Comment", "Reason")
# squeue's state of a cancelled job, and its value for a missing reason
CANCELLED, NO_REASON = "CANCELLED", "None"
GONE = "GONE"  # state of a job that neither squeue nor sacct lists
FORGOTTEN = re.compile(r"(?i)invalid job id")
COMMENT = "trainfleet"
MARK = "TRAINFLEET-OUTPUT"


@dataclass(frozen=True)
class Said:
    """Exit code and output of a command."""

    code: int
    out: str
    error: str


# Prefixes of environment variables with which sites and users change how Slurm commands behave,
# such as a squeue filter or a scancel prompt. sbatch.py reads sbatch's variables.
SAID = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_HINT")
# environment variables that every job inherits from this process
GIVEN = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SLURM_CONF")
CLUSTERS = "SLURM_CLUSTERS"  # applies to all Slurm commands
Ask = Callable[[Sequence[str], str, Mapping[str, str] | None], Said]


def ask_here(
    words: Sequence[str], stdin: str = "", environment: Mapping[str, str] | None = None
) -> Said:
    """Runs a Slurm command on this machine.

    `environment` defaults to this process's environment. Variables with a prefix in SAID are
    dropped.

    Raises:
        BackendError: the command does not exist, or times out.
    """
    if HEAD in os.environ:  # use a login shell, because a profile may add Slurm to PATH
        words = ["bash", "-lc", as_asked(words, 'exec "$@"'), "bash", *words]
    elif shutil.which(words[0]) is None:
        raise BackendError(
            f"{words[0]} is not in this machine's PATH",
            why="fleet.backend slurm needs Slurm's commands here, or on a machine in fleet.hosts",
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
            f"{words[0]} does not respond",
            why=f"no answer in {TIMEOUT:.0f} s",
            next="scontrol ping; sinfo",
        ) from error
    return Said(done.returncode, after_profile(done.stdout), done.stderr)


def as_asked(words: Sequence[str], command: str) -> str:
    """Returns the bash command that runs `words` without the variables that have a prefix in SAID.

    `env` still gets these variables, because its purpose is to print them.
    """
    unset = f"unset {' '.join(f'${{!{name}*}}' for name in SAID)}; " * (words[0] != "env")
    return f"{unset}echo {MARK}; {command}"


def after_profile(out: str) -> str:
    """Removes what a login profile printed before the output of a command from `as_asked`."""
    return out.rpartition(f"{MARK}\n")[2]


@dataclass(frozen=True)
class SlurmJob:
    """A job, as reported by squeue or sacct."""

    id: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    dependency: str = ""  # squeue's dependency, for example afterok:7(unfulfilled)
    comment: str = ""

    @property
    def ours(self) -> list[str]:
        """Parses the comment that `submit` wrote: mark, token, nodes, job folder, run folder.

        Returns an empty list for jobs that trainfleet did not submit.
        """
        words = self.comment.split(" ", 4)
        if len(words) == 5 and words[0] == COMMENT and untrusted_input.whole(words[2]):
            return words
        return []

    @property
    def token(self) -> str:
        """Returns the token of a trainfleet job, or "" for other jobs."""
        return "".join(self.ours[1:2])


def parse(out: str) -> dict[str, SlurmJob]:
    """Parses squeue's output into job ID → job. Skips malformed lines."""
    found = {}
    for line in out.splitlines():
        parts = line.strip().split("|", len(FIELDS) - 1)
        if len(parts) == len(FIELDS) and untrusted_input.whole(parts[0]):
            number, state, restarts, nodes, dependency, comment, reason = parts
            reason = reason.removesuffix("|")  # squeue ends every field with |
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
    """Slurm client that runs commands through `ask`."""

    def __init__(self, ask: Ask = ask_here) -> None:
        self.ask = ask
        self.jobs: dict[str, SlurmJob] = {}  # job ID → last known state
        self.watched: set[str] = set()
        self.next_look, self.pause = 0.0, SHORTEST
        self.trouble = ""
        # nodes that do not accept jobs, and the time at which this list expires
        self.nodes = dict[str, str]()
        self.nodes_until = 0.0

    def run(self, *words: str) -> str:
        """Runs a Slurm command and returns its stdout.

        Raises BackendError if the command fails, with an explanation if the error message is known.
        """
        said = self.ask(words, "", None)
        if said.code:
            raise refused(words[0], said.error or said.out)
        return said.out

    def sbatch(self, words: Sequence[str], script: str, environment: Mapping[str, str]) -> Said:
        """Runs sbatch with a script, in the same environment for submissions as for --test-only."""
        given = {name: os.environ[name] for name in (*GIVEN, CLUSTERS) if name in os.environ}
        return self.ask(["sbatch", *words], script, {**given, **environment})

    def look(self, number: str) -> SlurmJob:
        """Returns the job's last known state, after querying Slurm if the polling interval has
        elapsed.

        Raises BackendError if slurmctld has not responded yet.
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

    def expect(self, number: str) -> None:
        """Registers a job that was just submitted, in case the next query fails."""
        self.jobs[number] = SlurmJob(number, "PENDING", NO_REASON)
        self.wake()

    def wake(self) -> None:
        """Makes the next `look` query Slurm immediately."""
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
        """Returns squeue's report on the given jobs, or on all of the user's jobs."""
        which = ["--me"] if numbers is None else [f"--jobs={','.join(sorted(numbers))}"]
        form = ",".join(f"{name}:|" for name in FIELDS)
        said = self.ask(
            ["squeue", "--noheader", "--states=all", *which, f"--Format={form}"], "", None
        )
        # squeue fails if the only requested job has been purged, but not if several are requested
        if said.code and not FORGOTTEN.search(said.error):
            raise refused("squeue", said.error)
        return parse(said.out)

    def unavailable(self, partitions: str = "") -> dict[str, str]:
        """Returns node → state and reason for the nodes that do not accept jobs.

        Queries Slurm at most once per LONGEST seconds.
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
        """Adds the name of the user who cancelled a job, which only accounting records."""
        known = self.jobs.get(job.id)
        if job.state != CANCELLED or job.reason != NO_REASON:
            return job
        if known and known.state == CANCELLED:
            return known
        return replace(job, reason=self._of_old(job.id).reason or NO_REASON)

    def _of_old(self, number: str) -> SlurmJob:
        """Returns the accounting record of a job that squeue no longer lists."""
        known = self.jobs.get(number)
        if known and known.state == GONE:
            return known
        said = self.ask(
            ["sacct", "-X", "-n", "-P", "-j", number, "-o", "JobID,State,NodeList"], "", None
        )
        rows = [line.split("|") for line in said.out.splitlines() if line.startswith(f"{number}|")]
        if said.code or not rows:  # the cluster has no accounting
            return SlurmJob(number, GONE)
        state, _, by = rows[-1][1].partition(" ")  # the state may be `CANCELLED by 1000`
        return SlurmJob(number, state, by, 0, rows[-1][2] if len(rows[-1]) > 2 else "")


def how_it_ended(job: SlurmJob, start: int = 0) -> str:
    """Returns Slurm's reason for ending the job, such as `slurm: job 7 CANCELLED by root`.

    Returns "" if Slurm reports no reason. `start` is -1 if the job's script never began. slurmd
    fails such a job without a message, for example because it can't open the job's log.
    """
    if start < 0 and job.state == "FAILED":
        return (
            f"slurm: job {job.id} FAILED ({job.reason}) before its script began: its first node "
            "can't open the job's log in fleet.shared_folder"
        )
    if job.state in (WELL, "FAILED", GONE):
        return ""
    reason = re.sub(r"^by ([0-9]{1,10})$", lambda match: f"by {user_of(int(match[1]))}", job.reason)
    return " ".join(
        filter(None, ("slurm: job", job.id, job.state, reason if reason != NO_REASON else ""))
    )


def user_of(uid: int) -> str:
    """Returns the user's name, or the UID if this machine has no such user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return f"user {uid}"


def refused(command: str, said: str) -> BackendError:
    """Converts a Slurm error message to an exception, with an explanation if the message is known.

    Its `where` is the responsible config key, if any.
    """
    line = said.strip().partition("\n")[0] or "it printed nothing"
    for known in _table()["refusals"]:
        if re.search(known["says"], said):
            key = known["key"]
            return BackendError(
                known["means"],
                where=key,
                why=line,
                next=f"make plan SET='{key}=...'" if key else "scontrol ping; sinfo",
            )
    return BackendError(f"{command} failed", why=line, next="sinfo; squeue --me")


@dataclass(frozen=True)
class Partition:
    """A partition, as reported by `scontrol show partition`."""

    name: str
    is_default: bool
    is_up: bool
    most_minutes: int | None
    nodes: int


def read_partitions(out: str) -> list[Partition]:
    """Parses the output of `scontrol --oneliner show partition`."""
    lines = [line.split() for line in out.splitlines() if line.startswith("PartitionName=")]
    rows = [dict(word.partition("=")[::2] for word in words) for words in lines]
    return [
        Partition(
            row["PartitionName"],
            row.get("Default") == "YES",
            row.get("State", "UP") == "UP",
            minutes(row.get("MaxTime", "")),
            untrusted_input.whole(row.get("TotalNodes", "")) or 0,
        )
        for row in rows
    ]


def minutes(text: str) -> int | None:
    """Parses a time limit into minutes: `1-00:30:00` becomes 1470. Returns None for UNLIMITED or
    malformed text.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{1,9}):([0-9]{1,9})", text)
    if match is None:
        return None
    days, hours, minute, _ = (int(part or 0) for part in match.groups())
    return (24 * days + hours) * 60 + minute
