"""Backend interface and its declared capabilities. Code outside this package uses backends only
through this interface.

    refuse(config)        → (key, message) per unsupported setting; pure
    plan(job, without)    → Request: named artifacts that a user can read and run; excludes the
                            hosts in `without`
    submit(request)       → Handle: the only call that starts jobs; idempotent per request token
    status(handle)        → Status: cached; the backend sets the polling interval, so callers can
                            call it several times per second
    stop(handle, at_once) idempotent; by default, asks the nodes to finish critical work and exit.
                          With `at_once`, returns when no reachable node runs a process of the job
    find(run)             → Handle of any job that may still be running for the run; queries the
                            nodes instead of local state
    place(run)            → Place: gives this machine access to the run folder (run_storage.py)
    bill()                → Bill: the run's cost from setup to teardown; None if unknown
    machines()            → Machines: provisions and tears down the machines that jobs run on

Optional capabilities return an object, or None if the backend lacks them: head(), harm(),
purchase(), bake(), probe().
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ..config import Config, Refusals
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

# files in the run folder that contain the submitted job's handle and request
HANDLE = "handle.json"
REQUEST = "request.json"


Changes = tuple[Artifact, ...]  # requests and files of a change to machines


class Can(Enum):
    """Backend capabilities, from which the support table in docs/evidence is generated."""

    SHARED = "its nodes share the run folder; other backends use s3://"
    LEAVE_OUT = "hosts can be excluded from an attempt"
    EXAMINE = "make doctor checks its nodes, and every launch runs the preflight"
    MACHINES = "make setup creates its machines, and make clean checks that they are deleted"
    RETRIES = "the scheduler itself retries a job"
    OUTLIVES = "a job continues without the machine that launched it"
    IMAGE = "jobs run in a container image"
    FOLLOWS = "training is queued behind its compilation, and starts after the compilation succeeds"
    QUEUES = "make sweep starts all its runs at once, and they wait until machines are free"


class Phase(Enum):
    """Phase of a job. From RUNNING on, the job costs money and is monitored."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True)
class Status:
    """State of a job, as reported by its backend.

    reason    scheduler message that explains this state, mainly while the job is queued
    attempt   number of the scheduler's attempt, starting at 1
    exits     node → exit code in this attempt; empty if the scheduler will retry the job
    lost      node → why the node is unreachable
    hosts     machine of each node, if known
    leaves    whether a retry can exclude some of these hosts by name
    ended_by  user request that made the scheduler end the job, if the exit codes do not show
              whether the ranks saved
    silent    lost nodes that may still be running; their ranks' heartbeats decide
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
    """A submitted job, as plain data.

    Any process with access to the run folder or the account can use it to query, follow and stop
    the job. `id` is the scheduler's job ID, and `token` identifies the request. `hosts` lists the
    machine of each node if the plan selected the machines.
    """

    backend: Name
    id: Name
    token: Name
    nodes: Ranks
    hosts: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Probe:
    """Hardware report: readable lines, and facts by node name."""

    lines: tuple[str, ...]
    facts: Mapping[str, Facts]


@dataclass(frozen=True)
class Prospect:
    """Preview of `make setup`: the changes it would make, and what a plan can show before it runs.

    lines    readable description of the changes and their cost
    changes  the exact requests
    awaited  whether the service's resources do not exist yet, or the credentials to look them up
             are missing
    unasked  whether setup would create machines in an account that can't be queried, so the
             machines are unknown
    exact    whether job requests name no machines, so they are known before setup
    """

    lines: tuple[str, ...] = ()
    changes: Changes = ()
    awaited: bool = False
    unasked: bool = False
    exact: bool = False


class Machines(Protocol):
    """Machines that jobs run on.

    made            whether setup creates the machines, so they cost money until they are removed
    system          operating system of created machines, if setup installs software on them
                    (docker/platforms.lock.yaml)
    changes()       returns the changes that `apply` would make now, as artifacts
    apply()         creates all missing resources; returns the exit code of `make setup`
    left()          returns one line per remaining resource of this config; searches by tag only
    costing()       returns one line per resource that costs money and is deleted without
                    `purge`, and a last line with the total dollars per hour
    remove(purge)   removes the resources; `purge` includes those that contain data. `left` must
                    return an empty list afterwards
    prospect()      previews setup for `make plan`, given the run's hours and throughput (tokens
                    per second), if known
    """

    made: bool = False
    system: str = ""

    def changes(self) -> Changes: ...
    def apply(self) -> int: ...
    def left(self) -> list[str]: ...
    def remove(self, purge: bool) -> None: ...

    def costing(self) -> list[str]:
        return []

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        return Prospect()


# Purchases capacity in advance if its argument is set. Returns lines that describe the capacity,
# and whether it is usable now.
Purchase = Callable[[bool], tuple[list[str], bool]]


class Backend(Protocol):
    """Interface that launch/ and watch/ use to run jobs; the module docstring describes the
    methods.

    Backends subclass it. Optional capabilities return None by default.
    """

    name: str
    can: frozenset[Can]
    is_here: bool  # whether this machine simulates the nodes
    # source of each node's placement and of the scheduler's rules for nodes (node/placements.py)
    placement: PlacementSource
    tried_on: str  # what the tests run against, real or fake, for the support table
    # capabilities that tests cover only with a fake, for the support table
    pretended: Mapping[Can, str] = MappingProxyType({})
    # whether another machine launches jobs, and runs the commands typed here
    hands_over: bool = False
    # whether the user owns the machines, so that only the config describes them
    owned: bool = False
    inherits: tuple[str, ...] = ()  # environment variables that a job inherits from its submitter
    image_arguments: tuple[tuple[str, str], ...] = ()  # build arguments of the node images

    def __init__(self, config: Config) -> None: ...

    @staticmethod
    @abstractmethod
    def refuse(config: Config) -> Refusals: ...
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
        """Returns the scheduler's rules for a job's nodes."""
        return self.placement.terms

    @property
    def lingers(self) -> bool:
        """Returns whether a run may still be active on the nodes.

        False if there are no nodes.
        """
        return True

    def head(self) -> Head | None:
        """Returns the SSH hosts with their head, which runs forwarded commands.

        Returns None if the backend has no SSH hosts.
        """
        return None

    def harm(self) -> Head | None:
        """Returns the hosts whose links and head a rehearsal may disrupt, or None if other users
        depend on them.
        """
        return None

    def purchase(self) -> Purchase | None:
        """Returns a function that purchases capacity, or None if purchases are not supported."""
        return None

    def bake(self) -> Callable[[], int] | None:
        """Returns a function that creates an image for future machines, unless one with the same
        versions exists. The function returns the exit code of `make image`.

        Returns None if machines are not created from images.
        """
        return None

    def probe(self) -> Probe | None:
        """Returns the hardware that the nodes report.

        Returns None if no node can be queried, or if `make doctor` queries each node over SSH
        instead.
        """
        return None

    def learn(self, run: Run) -> None:
        """Records the host problems that the run's latest launch found."""

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        """Returns node → reason for each machine in `hosts` that does not respond.

        Returns an empty mapping if `status` already covers unreachable nodes.
        """
        return {}

    def cut_off(self, handle: Handle) -> str:
        """Returns this machine's name if it is cut off from the job's other hosts, otherwise "".

        Also returns "" if no other host can lead.
        """
        return ""


def save_job(run: Run, handle: Handle, request: Request) -> None:
    """Writes the job to the run folder, so that other processes can query, follow and stop it."""
    run_folder.write_json(run.folder / REQUEST, request.record())
    run_folder.write_json(run.folder / HANDLE, asdict(handle))


def load_job(run: Run) -> tuple[Handle, Request] | None:
    """Returns the run's latest submitted job, active or not, or None if no job was submitted.

    Raises:
        RunError: the files are malformed.
    """
    record = run_folder.read_json(run.folder / HANDLE)
    request = run_folder.read_json(run.folder / REQUEST)
    if record is None or request is None:
        return None
    try:
        handle = fit(Handle, record)
    except InputError as error:
        where = str(run.folder / HANDLE)
        raise RunError(
            "is not a valid job handle",
            where=where,
            why=f"{error.key}: {error.what}",
            next=f"run rm {where}, then make train",
        ) from error
    return handle, Request.of(request, str(run.folder / REQUEST))
