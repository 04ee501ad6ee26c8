"""The contract of a backend: a few small classes and its declared capabilities, all that the rest
of the program knows of it.

refuse(config)           what it can't do of what the config asks: (key, message) each; pure
plan(job, without)       → Request: named artifacts that can be read and run by hand; without the
                         hosts that are named
submit(request)          → Handle: the only call that starts anything; submitting a token twice is
                         submitting once
status(handle)           → Status: cheap, at the backend's own pace behind a cache; may be asked
                         several times a second
stop(handle, at_once)    idempotent. Not at once: the nodes are asked to finish what must not be
                         half done, then to leave.
                         At once: when it returns, nothing of the job runs on any node that can be
                             reached
find(run)                → Handle of whatever may still run under the run's name: found on the
                         nodes, and not by local state
place(run)               → Place: how the run's folder comes here (run_storage.py)
bill()                   → Bill: what a run costs from set-up to teardown; None if that is unknown
machines()               → Machines: what jobs run on, made ready and taken down again

What only some can do is an object that a backend hands out, or None: head(), harm(), purchase(),
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
from ..node.placement import Seating, Terms
from ..plan.bill import Bill
from ..plan.job import Job, Ranks
from ..plan.request import Artifact, Request
from ..run import run_folder
from ..run.run_folder import Run
from ..trust.errors import InputError, RunError
from ..trust.validation import Name, fit
from .run_storage import Place

if TYPE_CHECKING:
    from .head import Head

# what a fault of a rehearsal may need: links of the nodes' own, and a head
LINKS, OWN_HEAD = ("links", "head")
# in the run folder: what runs, and what was submitted for it
HANDLE, REQUEST = ("handle.json", "request.json")


class Can(Enum):
    """What a backend can do; the support table of docs/evidence is generated from these."""

    SHARED = "its nodes see one run folder; elsewhere that goes through s3://"
    LEAVE_OUT = "hosts can be left out of an attempt"
    EXAMINE = "make doctor examines its nodes, and a launch passes the gate"
    MACHINES = "make setup makes its machines, and make clean proves them gone"
    RETRIES = "the engine itself starts further attempts"
    OUTLIVES = "a job continues without the machine that launched it"
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
    exits     node → exit code of its part in this attempt; none while the engine will retry by
              itself
    lost      node → why it can't be reached any more
    hosts     the machines by node, where they are known
    leaves    whether another attempt can leave some of those out, by these names
    ended_by  what ended it, if a user had the engine end it and no exit code shows whether the
              ranks had saved
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
    """A submitted job, as plain data: with the run folder or the account, any process can query,
    follow and stop it.

    `id` is the engine's name for it, `token` the request's. `hosts`: the machines by node, where
    the plan chose them.
    """

    backend: Name
    id: Name
    token: Name
    nodes: Ranks
    hosts: tuple[Name, ...] = ()


@dataclass(frozen=True)
class Probe:
    """What was found out about the nodes: in words, and the facts of those that were looked at, by
    name.
    """

    lines: tuple[str, ...]
    facts: Mapping[str, Facts]


@dataclass(frozen=True)
class Prospect:
    """What `make setup` would do to machines, and what a plan can know before it has.

    lines    what would change and what it costs, in words
    changes  the very requests
    awaited  what setup makes for an engine is not there yet, or there are no credentials to ask for
             it
    unasked  machines would be made in an account that can't be asked, so that none of them is known
    exact    a job's request names no machine, so it is known before there are any
    """

    lines: tuple[str, ...] = ()
    changes: tuple[Artifact, ...] = ()
    awaited: bool = False
    unasked: bool = False
    exact: bool = False


class Machines(Protocol):
    """What jobs run on.

    made           whether setup makes them, so that they cost money until they are removed
    system         what they run, where setup installs something on those that it makes
                   (docker/stack.lock.yaml)
    changes()      what `apply` would do now, as artifacts; none when all is as it should be
    apply()        does what is missing now; the exit code of `make setup`
    left()         what there is of ours, found by tag alone: one line each
    costing()      what of that costs money and goes without a purge: one line each, then dollars an
                   hour
    remove(purge)  takes it down; `purge`: what holds data too. Afterwards `left` is the proof
    prospect()     what setup would do, for `make plan`, given the run's hours and tokens a second
                   where they are known
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
    """Machines that are bought ahead."""

    def obtain(self, may_buy: bool) -> tuple[list[str], bool]:
        """What there is, bought now if that may be; and whether it can be used now."""
        ...


class JobSteps(Protocol):
    """An engine that runs a command beside the ranks of a job. `lacking`: what faults need and is
    not there, and why.
    """

    folder: str
    interpreter: str
    where: str
    lacking: Mapping[str, str]

    def require(self) -> None:
        """Raises ConfigError where no command can be run so, from here."""
        ...

    def run_beside(self, handle: Handle, node: int, words: Sequence[str]) -> str | None:
        """What a command says on a node of a job; None where the job is not on so many nodes."""
        ...

    def jobs_in(self, folder: Path) -> list[str]:
        """The jobs of a folder that are in the queue."""
        ...

    def guard(self, folder: Path, remove: str) -> str:
        """A shell's words: once the input ends they end the folder's jobs, and `remove` it unless a
        word came before.
        """
        ...


@dataclass(frozen=True)
class Harm:
    """How a rehearsal reaches the processes that it breaks: over SSH, by an engine's steps, or else
    on this machine.
    """

    head: Head | None = None
    steps: JobSteps | None = None


class Bake(Protocol):
    """Machines of which one can become the image that the next are made from."""

    def make(self) -> int:
        """Makes the image, unless there is one with these versions; the exit code of `make
        image`.
        """
        ...


class Backend(Protocol):
    """What launch/ and watch/ need of the place where a job runs; the module's docstring says what
    each call guarantees.

    A backend is a class of this one. What only some can do has a default here, by which the others
    can't.
    """

    name: str
    can: frozenset[Can]
    is_here: bool  # this machine is its nodes
    # how its nodes know which of them they are, and what it does with them (node/placements/)
    seat: Seating
    tried_on: str  # what carries it in the tests, which the README's table says: real, or a fake
    # beside that, what stands in for something in a row of the table
    pretended: Mapping[Can, str] = MappingProxyType({})
    # its jobs are launched from a machine of its own, to which commands typed here hand over
    hands_over: bool = False
    owned: bool = False  # its machines are somebody's, who alone can tell what they are
    inherits: tuple[
        str, ...
    ] = ()  # the variables that a job gets of the environment in which it is submitted
    image_arguments: tuple[
        tuple[str, str], ...
    ] = ()  # of the build of an image that its nodes can run

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
        """What its engine does with the nodes of a job."""
        return self.seat.terms

    @property
    def lingers(self) -> bool:
        """Whether a run may be at work on its nodes; not where there are none yet."""
        return True

    def head(self) -> Head | None:
        """The hosts that are reached by SSH, and the one to which commands are handed; None where
        there are none.
        """
        return None

    def harm(self) -> Harm | None:
        """How a rehearsal reaches the processes of a job; None where nothing can."""
        return None

    def purchase(self) -> Purchase | None:
        """What buys its machines ahead; None where nothing is to be bought."""
        return None

    def bake(self) -> Bake | None:
        """What makes an image of one of its nodes; None where machines are not made from one."""
        return None

    def probe(self) -> Probe | None:
        """What its nodes have, as they say themselves; None where none can be asked, or make doctor
        asks each.
        """
        return None

    def learn(self, run: Run) -> None:
        """Keeps what the newest launch of a run has found against hosts."""

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        """The nodes of a job on these machines that do not answer now, with why; none where
        `status` tells them already.
        """
        return {}

    def cut_off(self, handle: Handle) -> str:
        """This machine's name among a job's hosts, where it reaches no other and another can lead
        in its place; else "".
        """
        return ""


def save_job(run: Run, handle: Handle, request: Request) -> None:
    """Writes to the run folder what another process needs to query this job, follow it and stop
    it.
    """
    run_folder.write_json(run.folder / REQUEST, request.record())
    run_folder.write_json(run.folder / HANDLE, asdict(handle))


def load_job(run: Run) -> tuple[Handle, Request] | None:
    """The last job that was submitted for the run, whether or not it still runs; None before the
    first.

    Raises:
        RunError: the files are not as `keep` leaves them.
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
        why, then = f"{error.key}: {error.what}", f"rm {where}; make train"
        raise RunError("is not the handle of a job", where=where, why=why, next=then) from error
    return handle, Request.of(request, str(run.folder / REQUEST))
