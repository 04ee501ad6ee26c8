"""The contract of a backend: a few small classes and its declared capabilities, all that the rest of the program knows of it.

refuse(config)           what it can't do of what the config asks: (key, message) each; pure
plan(job, without)       → Request: named artifacts that can be read and run by hand; without the hosts that are named
submit(request)          → Handle: the only call that starts anything; submitting a token twice is submitting once
status(handle)           → Status: cheap, at the backend's own pace behind a cache; may be asked several times a second
stop(handle, at_once)    idempotent. Not at once: the nodes are asked to finish what must not be half done, then to leave.
                         At once: when it returns, nothing of the job runs on any node that can be reached
find(run)                → Handle of whatever may still run under the run's name: found on the nodes, and not by local state
place(run)               → Place: how the run's folder comes here (place.py)
bill()                   → Bill: what a run costs from set-up to teardown; None if that is unknown
machines()               → Machines: what jobs run on, made ready and taken down again
probe()                  → Probe: what its nodes have, as they say themselves; None where none can be asked, or doctor asks each
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from .. import runs
from ..config import Config
from ..errors import InputError, RunError
from ..nodes.facts import Facts
from ..plan.bill import Bill
from ..plan.job import Job, Ranks
from ..plan.request import Artifact, Request
from ..runs import Run
from ..shapes import Name, fit
from .place import Place

HANDLE, REQUEST = "handle.json", "request.json"  # in the run folder: what runs, and what was submitted for it


class Can(Enum):
    """What a backend can do; the README's support table is generated from these."""

    SHARED = "its nodes see one run folder; elsewhere that goes through s3://"
    LEAVE_OUT = "hosts can be left out of an attempt"
    EXAMINE = "make doctor examines its nodes, and a launch passes the gate"
    MACHINES = "make setup makes its machines, and make clean proves them gone"
    RETRIES = "the engine itself starts further attempts"
    OUTLIVES = "a job goes on without the machine that launched it"
    IMAGE = "jobs run in an image"
    FOLLOWS = "training is queued with what compiles for it, and begins once that has ended well"


class Phase(Enum):
    """The phase of a job. It costs money, and is watched, from RUNNING on."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Status:
    """The state of a job, as its backend sees it.

    reason    the engine's own words for why it is where it is; most wanted while it is queued
    attempt   which attempt of the engine's own this is, from 1
    exits     node → exit code of its part in this attempt; none while the engine will retry by itself
    lost      node → why it can't be reached any more
    hosts     the machines by node, where they are known
    leaves    whether another attempt can leave some of those out, by these names
    ended_by  what ended it, if a user had the engine end it and no exit code shows whether the ranks had saved
    silent    those of the lost that may still be at work: their ranks' heartbeats decide
    """

    phase: Phase
    reason: str = ""
    attempt: int = 1
    exits: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    leaves: bool = False
    silent: frozenset[int] = frozenset()
    ended_by: str = ""

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def failed(self) -> bool:
        return any(self.exits.values()) or bool(self.lost)


@dataclass(frozen=True)
class Handle:
    """A submitted job, as plain data: with the run folder or the account, any process can query, follow and stop it.

    `id` is the engine's name for it, `token` the request's. `hosts`: the machines by node, where the plan chose them.
    """

    backend: Name
    id: Name
    token: Name
    nodes: Ranks
    hosts: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What was found out about the nodes: in words, and the facts of those that were looked at, by name."""

    lines: tuple[str, ...]
    facts: Mapping[str, Facts]


class Machines(Protocol):
    """What jobs run on.

    changes()      what `apply` would do now, as artifacts; none when all is as it should be
    apply()        does what is missing now; the exit code of `make setup`
    left()         what there is of ours, found by tag alone: one line each
    remove(purge)  takes it down; `purge`: what holds data too. Afterwards `left` is the proof
    """

    def changes(self) -> tuple[Artifact, ...]: ...
    def apply(self) -> int: ...
    def left(self) -> list[str]: ...
    def remove(self, purge: bool) -> None: ...


@runtime_checkable
class Prospects(Protocol):
    """Machines of an engine: what `make setup` would change and what that costs, in words, and the very requests."""

    def prospect(self, hours: float | None) -> tuple[list[str], tuple[Artifact, ...]]: ...


@runtime_checkable
class BuysAhead(Protocol):
    """A backend whose machines may have to be bought ahead: `obtain` says what there is, and whether they can be used now."""

    def obtain(self, may_buy: bool) -> tuple[list[str], bool]: ...


class Backend(Protocol):
    """What launch/ and watch/ need of the place where a job runs; the module's docstring says what each call guarantees."""

    name: str
    can: frozenset[Can]
    is_here: bool  # this machine is its nodes
    hands_over: bool  # its jobs are launched from a machine of its own, to which commands typed here hand over
    tried_on: str  # what carries it in the tests, which the README's table says: real, or a fake

    @staticmethod
    def refuse(config: Config) -> Iterator[tuple[str, str]]: ...
    def plan(self, job: Job, without: Mapping[str, str]) -> Request: ...
    def submit(self, request: Request) -> Handle: ...
    def status(self, handle: Handle) -> Status: ...
    def stop(self, handle: Handle, at_once: bool) -> None: ...
    def find(self, run: Run) -> Handle: ...
    def place(self, run: Run) -> Place: ...
    def bill(self) -> Bill | None: ...
    def machines(self) -> Machines: ...
    def probe(self) -> Probe | None: ...


def save_job(run: Run, handle: Handle, request: Request) -> None:
    """Writes to the run folder what another process needs to query this job, follow it and stop it."""
    runs.write_json(run.folder / REQUEST, request.record())
    runs.write_json(run.folder / HANDLE, asdict(handle))


def load_job(run: Run) -> tuple[Handle, Request] | None:
    """The last job that was submitted for the run, whether or not it still runs; None before the first.

    Raises:
        RunError: the files are not as `keep` leaves them.
    """
    record, request = runs.read_json(run.folder / HANDLE), runs.read_json(run.folder / REQUEST)
    if record is None or request is None:
        return None
    try:
        handle = fit(Handle, record)
    except InputError as error:
        where = str(run.folder / HANDLE)
        why, next = f"{error.key}: {error.what}", f"rm {where}; make train"
        raise RunError("is not the handle of a job", where=where, why=why, next=next) from error
    return handle, Request.of(request, str(run.folder / REQUEST))
