"""A job, the work that every backend runs. Tokenizing and training are both jobs, so every backend
can run both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

from ..config import Config
from ..config.tokenizing import tokenizing
from ..run import run_folder
from ..trust.validation import Count, Name, Pattern, Range, fit
from . import neuron_environment

Ranks = Annotated[int, Range(1, 2**20)]
Variable = Annotated[str, Pattern("[A-Za-z_][A-Za-z0-9_]{0,199}")]

# fields that jobs in run folders of earlier versions lack
LATER = {"image": "", "after": "", "ahead": False}


class JobRecord(TypedDict):
    """A job as a JSON record."""

    kind: Name
    name: Name
    folder: Name
    nodes: Ranks
    ranks_per_node: Ranks
    module: Name
    arguments: list[str]
    torchrun: bool
    port: Annotated[int, Range(0, 65535)] | None
    environment: dict[Variable, str]
    secrets: list[Variable]
    launch: Name
    attempt: Count
    image: Name
    after: Name
    ahead: bool


@dataclass(frozen=True)
class Job:
    """Runs `module arguments` on every rank of every node. Its output goes to logs/ in `folder`,
    the run's or the dataset's.

    torchrun   whether ranks meet through torchrun; otherwise one plain process per node does its
        share
    secrets    names of variables with values that the nodes get; no job, request, log or process
        list
               has the values
    launch     the id of this launch of the run; "" in a plan that is only shown
    attempt    counts the attempts of a launch, from 1
    image      its container image, as registry/name:tag; "" for the nodes' own environment
    after      the handle's id of the job that must succeed before this one begins; "" for no job
    ahead      whether its ranks only record their computation, which is compiled after they
               have exited (node/precompile.py)
    """

    kind: str  # tokenize or train
    name: str
    folder: Path
    nodes: int
    ranks_per_node: int
    module: str
    arguments: tuple[str, ...]
    torchrun: bool
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    launch: str = ""
    attempt: int = 1
    image: str = ""
    after: str = ""
    ahead: bool = False

    @property
    def beats(self) -> bool:
        """Tells whether its ranks send heartbeats while they run, and obey the request to stop."""
        return self.torchrun and not self.ahead

    def record(self) -> dict[str, Any]:
        """Returns the job as a JSON record, which `of` reads."""
        return asdict(self) | {
            "folder": str(self.folder),
            "arguments": list(self.arguments),
            "secrets": list(self.secrets),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Job:
        """Returns the job of a record. InputError if the record is not a job."""
        fields: dict[str, Any] = dict(fit(JobRecord, {**LATER, **record}))
        fields |= {
            "folder": Path(fields["folder"]),
            "arguments": tuple(fields["arguments"]),
            "secrets": tuple(fields["secrets"]),
        }
        return cls(**{name: fields[name] for name in JobRecord.__annotations__})


def tokenize_job(config: Config) -> Job:
    """Turns the sources into data/<name>: node i mod N tokenizes unit i, with one process per
    core.
    """
    folder, arguments = (
        run_folder.DATA / config.data.name,
        (str(run_folder.run_of(config.name).config),),
    )
    return Job(
        "tokenize",
        config.data.name,
        folder,
        tokenizing(config).fleet.nodes,
        1,
        "trainfleet.data",
        arguments,
        False,
        secrets=config.fleet.secrets,
        image=_image(config),
    )


def on_its_machines(config: Config, job: Job) -> Config:
    """Returns the config for the job's machines: tokenizing may run on other machines than
    training.
    """
    return tokenizing(config) if job.kind == "tokenize" else config


def train_job(config: Config) -> Job:
    """Trains in runs/<name>, from its newest checkpoint if there is one."""
    run, fleet = run_folder.run_of(config.name), config.fleet
    return Job(
        "train",
        config.name,
        run.folder,
        fleet.nodes,
        fleet.ranks_per_node,
        "trainfleet.engine",
        (str(run.folder),),
        True,
        fleet.rendezvous_port,
        neuron_environment.environment(config),
        fleet.secrets,
        image=_image(config),
        ahead=neuron_environment.is_recorded(config),
    )


def _image(config: Config) -> str:
    return "" if config.fleet.container == "none" else config.fleet.container
