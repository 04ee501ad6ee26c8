"""The contract of a backend: a few small classes and its declared capabilities. The rest of the
program knows nothing else about a backend.

refuse(config)           → (key, message) for each setting of the config that it can't do; pure
plan(job, without)       → Request: named artifacts that a user can read and run; without the named
                         hosts
submit(request)          → Handle: the only call that starts anything; submitting a token twice
                         starts one job
status(handle)           → Status: cheap, at the backend's own pace behind a cache; may be called
                         several times a second
stop(handle, at_once)    idempotent. Not at once: asks the nodes to finish critical work, then to
                         exit. At once: when it returns, no process of the job runs on any node that
                         can be reached
find(run)                → Handle of any job that may still run under the run's name: found on the
                         nodes, not in local state
place(run)               → Place: how the run's folder arrives here (run_storage.py)
bill()                   → Bill: the cost of a run from set-up to teardown; None if unknown
machines()               → Machines: the machines of jobs, set up and taken down again

An ability that only some backends have is an object that they return, or None: head(), harm(),
purchase(), bake(), probe().
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ..config import Config
from ..hosts.facts import Facts
from ..node.placement import PlacementSource, Terms
from ..plan.estimate import Bill
from ..plan.job import Artifact, Job, Ranks, Request
from ..run import run_folder
from ..run.run_folder import Run
from ..trust.errors import InputError, RunError
from ..trust.validation import Name, fit
from .run_storage import Place

if TYPE_CHECKING:
    from .head import Head

# needs of a rehearsal's faults: links that carry only the job, and a head
LINKS, OWN_HEAD = ("links", "head")
# in the run folder: the submitted job, and its request
HANDLE, REQUEST = ("handle.json", "request.json")


class Can(Enum):
    """The abilities of a backend; the support table of docs/evidence is generated from these."""

    SHARED = "its nodes see one run folder; elsewhere that goes through s3://"
    LEAVE_OUT = "hosts can be excluded from an attempt"
    EXAMINE = "make doctor examines its nodes, and every launch passes the preflight"
    MACHINES = "make setup makes its machines, and make clean checks that they are gone"
    RETRIES = "the scheduler itself starts further attempts"
    OUTLIVES = "a job continues without the machine that launched it"
    IMAGE = "jobs run in an image"
    FOLLOWS = "training is queued behind its compilation, and begins when that has succeeded"


class Phase(Enum):
    """The phase of a job. From RUNNING on, it costs money and is watched."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Status:
    """The state of a job, as its backend sees it.

    reason    the scheduler's own words for its state, most useful while it is queued
    attempt   the number of the scheduler's attempt, from 1
    exits     node → exit code of its part in this attempt; empty while the scheduler will retry
    lost      node → why it can't be reached any more
    hosts     the machines by node, if known
    leaves    whether another attempt can exclude some of those, by these names
    ended_by  what ended it, if a user asked the scheduler to, and no exit code shows whether the
              ranks had saved
    silent    the lost nodes that may still be running: their ranks' heartbeats decide
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
    """A submitted job, as plain data: with the run folder or the account, any process can query,
    follow and stop it.

    `id` is the scheduler's name for it, `token` the request's. `hosts` are the machines by node, if
    the plan chose them.
    """

    backend: Name
    id: Name
    token: Name
    nodes: Ranks
    hosts: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Findings about the nodes: in words, and the facts of the examined ones, by name."""

    lines: tuple[str, ...]
    facts: Mapping[str, Facts]


@dataclass(frozen=True)
class Prospect:
    """The changes that `make setup` would make to machines, and what a plan can know before that.

    lines    the changes and their cost, in words
    changes  the exact requests
    awaited  whether setup still has to make the service's resources, or no credentials are
             available to ask for them
    unasked  whether machines would be made in an account that can't be asked, so no machine is
        known
    exact    whether a job's request names no machine, so it is known before there are any
    """

    lines: tuple[str, ...] = ()
    changes: tuple[Artifact, ...] = ()
    awaited: bool = False
    unasked: bool = False
    exact: bool = False


class Machines(Protocol):
    """The machines that jobs run on.

    made           whether setup makes them, so that they cost money until they are removed
    system         their operating system, if setup installs something on machines that it makes
                   (docker/platforms.lock.yaml)
    changes()      returns the artifacts of what `apply` would do now; empty if nothing is missing
    apply()        makes what is missing; returns the exit code of `make setup`
    left()         returns one line for each resource of this config, found only by tag
    costing()      returns one line for each of these that costs money and goes without a purge,
        then
                   dollars per hour
    remove(purge)  takes them down; with `purge` also those that hold data. Then `left` must be
        empty
    prospect()     returns what setup would do, for `make plan`, given the run's hours and tokens
        per
                   second if known
    """

    made: bool = False
    system: str = ""

    def changes(self) -> tuple[Artifact, ...]: ...
    def apply(self) -> int: ...
    def left(self) -> list[str]: ...
    def remove(self, purge: bool) -> None: ...

    def costing(self) -> list[str]:
        return []

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        return Prospect()


class Purchase(Protocol):
    """Machines that are bought in advance."""

    def obtain(self, may_buy: bool) -> tuple[list[str], bool]:
        """Buys capacity if `may_buy`; returns lines about it, and whether it can be used now."""
        ...


class JobSteps(Protocol):
    """A scheduler that can run a command next to the ranks of a job. `lacking` names the needs of
    faults that it can't meet, and why.
    """

    folder: str
    interpreter: str
    where: str
    lacking: Mapping[str, str]

    def require(self) -> None:
        """Raises ConfigError if no such command can run from here."""
        ...

    def run_beside(self, handle: Handle, node: int, words: Sequence[str]) -> str | None:
        """Returns a command's output on a node of a job; None if the job has no such node."""
        ...

    def jobs_in(self, folder: Path) -> list[str]:
        """Returns the jobs of a folder that are in the queue."""
        ...

    def guard(self, folder: Path, remove: str) -> str:
        """Returns a shell script that ends the folder's jobs when its input ends, and runs `remove`
        unless it has read a word.
        """
        ...


@dataclass(frozen=True)
class Harm:
    """The way in which a rehearsal reaches the processes that it breaks: over SSH, by a scheduler's
    steps, or else on this machine.
    """

    head: Head | None = None
    steps: JobSteps | None = None


class Bake(Protocol):
    """Machines of which one can become the image of the next ones."""

    def make(self) -> int:
        """Makes the image, unless one with these versions exists; returns the exit code of `make
        image`.
        """
        ...


class Backend(Protocol):
    """The interface that launch/ and watch/ use for the place where a job runs; the module's
    docstring describes each call.

    A backend is a subclass. Each ability that only some backends have has a default here: None.
    """

    name: str
    can: frozenset[Can]
    is_here: bool  # this machine is its nodes
    # how its nodes learn their placement, and how it treats them (node/placements/)
    placement: PlacementSource
    tried_on: str  # what it runs on in the tests, for the support table: real, or a fake
    # fakes of single rows of the support table
    pretended: Mapping[Can, str] = MappingProxyType({})
    # its jobs are launched from another machine, which takes over commands typed here
    hands_over: bool = False
    owned: bool = False  # its machines are the user's, so only the config can describe them
    inherits: tuple[
        str, ...
    ] = ()  # variables that a job gets from the environment in which it is submitted
    image_arguments: tuple[tuple[str, str], ...] = ()  # build arguments of an image for its nodes

    def __init__(self, config: Config) -> None: ...

    @staticmethod
    @abstractmethod
    def refuse(config: Config) -> Iterator[tuple[str, str]]: ...
    @abstractmethod
    def plan(self, job: Job, without: Mapping[str, str]) -> Request: ...
    @abstractmethod
    def submit(self, request: Request) -> Handle: ...
    @abstractmethod
    def status(self, handle: Handle) -> Status: ...
    @abstractmethod
    def stop(self, handle: Handle, at_once: bool) -> None: ...
    @abstractmethod
    def find(self, run: Run) -> Handle: ...
    @abstractmethod
    def place(self, run: Run) -> Place: ...
    @abstractmethod
    def bill(self) -> Bill | None: ...
    @abstractmethod
    def machines(self) -> Machines: ...

    @property
    def terms(self) -> Terms:
        """Returns how its scheduler treats the nodes of a job."""
        return self.placement.terms

    @property
    def lingers(self) -> bool:
        """Tells whether a run may be running on its nodes; False while it has no nodes."""
        return True

    def head(self) -> Head | None:
        """Returns the hosts that are reached by SSH, with the head that takes over commands; None
        without such hosts.
        """
        return None

    def harm(self) -> Harm | None:
        """Returns how a rehearsal reaches the processes of a job; None if it can't."""
        return None

    def purchase(self) -> Purchase | None:
        """Returns the object that buys its machines in advance; None if it buys none."""
        return None

    def bake(self) -> Bake | None:
        """Returns the object that makes an image of one of its nodes; None if machines are not made
        from images.
        """
        return None

    def probe(self) -> Probe | None:
        """Returns its nodes' own reports of their hardware; None if no node can be asked, or make
        doctor asks each.
        """
        return None

    def learn(self, run: Run) -> None:
        """Keeps the findings of a run's newest launch against hosts."""

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        """Returns the nodes of a job on these machines that do not answer now, with why; empty if
        `status` already reports them.
        """
        return {}

    def cut_off(self, handle: Handle) -> str:
        """Returns this machine's name among a job's hosts if it reaches no other one, and another
        can lead in its place; else "".
        """
        return ""


def save_job(run: Run, handle: Handle, request: Request) -> None:
    """Writes the job to the run folder, so that another process can query, follow and stop it."""
    run_folder.write_json(run.folder / REQUEST, request.record())
    run_folder.write_json(run.folder / HANDLE, asdict(handle))


def load_job(run: Run) -> tuple[Handle, Request] | None:
    """Returns the last job that was submitted for the run, running or not; None before the first.

    Raises:
        RunError: the files are malformed.
    """
    record, request = (
        run_folder.read_json(run.folder / HANDLE),
        run_folder.read_json(run.folder / REQUEST),
    )
    if record is None or request is None:
        return None
    try:
        handle = fit(Handle, record)
    except InputError as error:
        where = str(run.folder / HANDLE)
        why, then = f"{error.key}: {error.what}", f"run rm {where}, then make train"
        raise RunError("is not the handle of a job", where=where, why=why, next=then) from error
    return handle, Request.of(request, str(run.folder / REQUEST))
