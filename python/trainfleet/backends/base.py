"""The backend interface: a few small classes and the declared capabilities. The rest of the program
depends on nothing else.

refuse(config)           → (key, message) for each setting that the backend does not support; pure
plan(job, without)       → Request: named artifacts that a user can read and run; excludes the hosts
                         in `without`
submit(request)          → Handle: the only call that starts anything; submitting the same token
                         twice starts one job
status(handle)           → Status: cheap and cached; the backend polls at its own pace, so callers
                         may call it several times a second
stop(handle, at_once)    idempotent. Not at once: asks the nodes to finish critical work and exit.
                         At once: returns when no process of the job runs on any reachable node
find(run)                → Handle of any job that may still run under the run's name; checks the
                         nodes, not local state
place(run)               → Place: how the run's folder reaches this machine (run_storage.py)
bill()                   → Bill: the cost of a run from set-up to teardown; None if unknown
machines()               → Machines: sets up and tears down the machines that jobs run on

An optional ability is an object, or None if the backend lacks it: head(), harm(), purchase(),
bake(), probe().
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

# Requirements of injected faults: network links that carry only the job, and a head.
LINKS, OWN_HEAD = ("links", "head")
# Files in the run folder with the handle and the request of the submitted job.
HANDLE, REQUEST = ("handle.json", "request.json")


class Can(Enum):
    """Capabilities of a backend. The support table in docs/evidence is generated from them."""

    SHARED = "its nodes share the run folder; other backends use s3://"
    LEAVE_OUT = "hosts can be excluded from an attempt"
    EXAMINE = "make doctor checks its nodes, and every launch runs the preflight"
    MACHINES = "make setup creates its machines, and make clean checks that they are deleted"
    RETRIES = "the scheduler itself retries a job"
    OUTLIVES = "a job continues without the machine that launched it"
    IMAGE = "jobs run in a container image"
    FOLLOWS = "training is queued behind its compilation, and starts after the compilation succeeds"


class Phase(Enum):
    """Phase of a job. From RUNNING on, the job costs money and is watched."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Status:
    """State of a job, as its backend reports it.

    reason    the scheduler's message about this state, most useful while the job is queued
    attempt   number of the scheduler's attempt, from 1
    exits     node → exit code in this attempt; empty while the scheduler will retry
    lost      node → why the node is unreachable
    hosts     machine of each node, if known
    leaves    whether another attempt can exclude some of these hosts by name
    ended_by  the request with which a user made the scheduler end the job, if no exit code shows
              whether the ranks saved
    silent    lost nodes that may still be running; the heartbeats of their ranks decide
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
    """A submitted job as plain data. Any process with access to the run folder or the account can
    query, follow and stop the job.

    `id` is the scheduler's identifier, and `token` the request's. `hosts` lists the machine of each
    node if the plan chose the machines.
    """

    backend: Name
    id: Name
    token: Name
    nodes: Ranks
    hosts: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Findings about the nodes: readable lines, and the facts of the examined nodes by name."""

    lines: tuple[str, ...]
    facts: Mapping[str, Facts]


@dataclass(frozen=True)
class Prospect:
    """Changes that `make setup` would make, and what a plan can know before setup.

    lines    readable description of the changes and their cost
    changes  the exact requests
    awaited  whether setup must still create the service's resources, or credentials to check for
             them are missing
    unasked  whether setup would create machines in an account that can't be queried, so no machine
             is known
    exact    whether a job's request names no machine, so the request is known before setup
    """

    lines: tuple[str, ...] = ()
    changes: tuple[Artifact, ...] = ()
    awaited: bool = False
    unasked: bool = False
    exact: bool = False


class Machines(Protocol):
    """The machines that jobs run on.

    made           whether setup creates the machines, so they cost money until they are removed
    system         their operating system, if setup installs software on machines that it creates
                   (docker/platforms.lock.yaml)
    changes()      returns the changes that `apply` would make now, as artifacts; empty if none
    apply()        creates what is missing; returns the exit code of `make setup`
    left()         returns one line for each resource of this config; finds them only by tag
    costing()      returns one line for each resource that costs money and that a removal without
                   `purge` deletes, then a line with their dollars per hour
    remove(purge)  removes the resources; with `purge`, also those that hold data. Then `left` must
                   be empty
    prospect()     returns what setup would do, for `make plan`, given the run's hours and its
                   tokens per second if known
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
    """Capacity that is bought in advance."""

    def obtain(self, may_buy: bool) -> tuple[list[str], bool]:
        """Buys the capacity if `may_buy`. Returns lines that describe it, and whether it is usable
        now.
        """
        ...


class JobSteps(Protocol):
    """Interface to a scheduler that can run commands next to a job's ranks. `lacking` maps each
    fault requirement that the scheduler can't meet to the reason.
    """

    folder: str
    interpreter: str
    where: str
    lacking: Mapping[str, str]

    def require(self) -> None:
        """Raises ConfigError if this machine can't run such commands."""
        ...

    def run_beside(self, handle: Handle, node: int, words: Sequence[str]) -> str | None:
        """Returns a command's output on a node of a job; None if the job has no such node."""
        ...

    def jobs_in(self, folder: Path) -> list[str]:
        """Returns the jobs in the queue that belong to a folder."""
        ...

    def guard(self, folder: Path, remove: str) -> str:
        """Returns a shell script that cancels the folder's jobs when its standard input ends. The
        script then runs `remove`, unless it has read a word from its input.
        """
        ...


@dataclass(frozen=True)
class Harm:
    """Access of a rehearsal to the processes that it disrupts: over SSH, through a scheduler's
    steps, or else on this machine.
    """

    head: Head | None = None
    steps: JobSteps | None = None


class Bake(Protocol):
    """Machines that can be turned into an image for later machines."""

    def make(self) -> int:
        """Creates the image unless one with these versions exists. Returns the exit code of `make
        image`.
        """
        ...


class Backend(Protocol):
    """Interface through which launch/ and watch/ run jobs. The module's docstring describes each
    call.

    Backends subclass it. Optional abilities return None here by default.
    """

    name: str
    can: frozenset[Can]
    is_here: bool  # whether this machine simulates the nodes
    # How nodes learn their placement, and how the scheduler treats them (node/placements/).
    placement: PlacementSource
    tried_on: str  # what the tests run it on, real or fake, for the support table
    # Capabilities that the tests cover only with a fake, for the support table.
    pretended: Mapping[Can, str] = MappingProxyType({})
    # Whether another machine launches the jobs and takes over commands typed here.
    hands_over: bool = False
    owned: bool = False  # whether the user owns the machines, so only the config can describe them
    inherits: tuple[
        str, ...
    ] = ()  # variables that a job inherits from the environment that submits it
    image_arguments: tuple[tuple[str, str], ...] = ()  # build arguments of images for the nodes

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
        """Returns how the scheduler treats a job's nodes."""
        return self.placement.terms

    @property
    def lingers(self) -> bool:
        """Tells whether a run may be active on the nodes; False while there are no nodes."""
        return True

    def head(self) -> Head | None:
        """Returns the hosts that are reached over SSH and the head that takes over commands; None
        if the backend has no such hosts.
        """
        return None

    def harm(self) -> Harm | None:
        """Returns how a rehearsal reaches a job's processes; None if it can't reach them."""
        return None

    def purchase(self) -> Purchase | None:
        """Returns the object that buys machines in advance; None if the backend buys none."""
        return None

    def bake(self) -> Bake | None:
        """Returns the object that makes an image of a node; None if machines are not created from
        images.
        """
        return None

    def probe(self) -> Probe | None:
        """Returns the hardware that the nodes report. None if no node can be queried, or if make
        doctor queries each node itself.
        """
        return None

    def learn(self, run: Run) -> None:
        """Records the problems with hosts that a run's newest launch found."""

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        """Returns node → reason for each node on these machines that does not answer now. Empty if
        `status` already reports them.
        """
        return {}

    def cut_off(self, handle: Handle) -> str:
        """Returns this machine's name if it reaches no other host of the job and another host can
        lead instead; else "".
        """
        return ""


def save_job(run: Run, handle: Handle, request: Request) -> None:
    """Writes the job to the run folder, so that other processes can query, follow and stop it."""
    run_folder.write_json(run.folder / REQUEST, request.record())
    run_folder.write_json(run.folder / HANDLE, asdict(handle))


def load_job(run: Run) -> tuple[Handle, Request] | None:
    """Returns the run's most recently submitted job, running or not; None before the first.

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
        raise RunError("is not a valid job handle", where=where, why=why, next=then) from error
    return handle, Request.of(request, str(run.folder / REQUEST))
