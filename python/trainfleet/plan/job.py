"""Backend-independent jobs (tokenize and train), their Neuron environment, and the requests that
backends build from them.

A request specifies exactly what will run. `make plan` prints it, and the launcher executes it.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ..config import Config
from ..config.derive import tokenizing
from ..config.limits import NATIVE, is_half, is_xla
from ..run import run_folder
from ..storage import s3
from ..trust.errors import InputError, RunError
from ..trust.validation import Count, Name, Pattern, Range, fit
from .fabric_environment import Setting, settings_of, values_of

Ranks = Annotated[int, Range(1, 2**20)]
Variable = Annotated[str, Pattern("[A-Za-z_][A-Za-z0-9_]{0,199}")]


@dataclass(frozen=True)
class Job:
    """A command, `module arguments`, that runs on every rank of every node.

    folder     run or dataset folder; logs go to its logs/
    torchrun   whether torchrun starts the ranks; otherwise, each node runs one plain process
    secrets    names of variables to pass to the nodes. Their values never appear in a job, request,
               log or process list
    launch     ID of this launch of the run; "" in a plan that is not launched
    attempt    attempt number within the launch, from 1
    image      container image, as registry/name:tag; "" to run in the nodes' own environment
    after      handle ID of the job that must succeed before this one starts; "" for none
    ahead      whether ranks only trace their programs, which are compiled after they exit
               (node/precompile.py)
    """

    kind: Name  # tokenize or train
    name: Name
    folder: Path
    nodes: Ranks
    ranks_per_node: Ranks
    module: Name
    arguments: tuple[str, ...]
    torchrun: bool
    port: Annotated[int, Range(0, 65535)] | None = None
    environment: Mapping[Variable, str] = field(default_factory=dict)
    secrets: tuple[Variable, ...] = ()
    launch: Name = ""
    attempt: Count = 1
    image: Name = ""
    after: Name = ""
    ahead: bool = False

    @property
    def beats(self) -> bool:
        """Returns whether the ranks send heartbeats and honor stop requests."""
        return self.torchrun and not self.ahead

    def record(self) -> dict[str, Any]:
        """Returns the job as a JSON record that `of` can parse."""
        return asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Job:
        """Parses a job from its JSON record. Raises InputError if the record is invalid."""
        return fit(cls, record)


def tokenize_job(config: Config) -> Job:
    """Returns the job that tokenizes the sources into data/<name>.

    Unit i runs on node i mod N, with one process per core.
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
    """Returns the config for the job's machines. Tokenizing and training may use different ones."""
    return tokenizing(config) if job.kind == "tokenize" else config


def train_job(config: Config) -> Job:
    """Returns the job that trains in runs/<name>, resuming from its latest checkpoint, if any."""
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
        neuron_environment(config),
        fleet.secrets,
        image=_image(config),
        ahead=is_recorded(config),
    )


def _image(config: Config) -> str:
    return "" if config.fleet.container == "none" else config.fleet.container


def neuron_settings(config: Config) -> tuple[Setting, ...]:
    """Returns the Neuron variables that ranks need in addition to the fabric's, if any."""
    return tuple(settings_of(_neuron_groups(config), cache=cache(config)))


def _neuron_groups(config: Config) -> Iterator[str]:
    if is_xla(config):
        yield from ("xla", *["xla compile only"] * config.train.compile_only)
        yield from ("xla half" if is_half(config) else "xla fp32", "xla runtime")
    elif config.fleet.platform == NATIVE:
        yield from (*["native cache"] * compiles_ahead(config), "native")


def neuron_environment(config: Config) -> dict[str, str]:
    """Returns the variables to set, with their values."""
    return values_of(neuron_settings(config))


def is_recorded(config: Config) -> bool:
    """Returns whether ranks only trace their programs, for neuron_parallel_compile to compile."""
    return is_xla(config) and config.train.compile_only


def compiles_ahead(config: Config) -> bool:
    """Returns whether a separate job fills the nodes' compile cache before training, because
    compilation is slow.
    """
    return is_xla(config) or (
        config.fleet.platform == NATIVE and not cache(config).startswith(s3.SCHEME)
    )


def cache(config: Config) -> str:
    """Returns the location of the nodes' compile cache: a folder, or s3://bucket/prefix if
    fleet.shared_folder is in S3.
    """
    shared, platform = config.fleet.shared_folder, config.fleet.platform
    if shared and shared.startswith(s3.SCHEME):
        return f"{shared.rstrip('/')}/compiled/{platform}"
    compiled = run_folder.COMPILED
    return f"{shared or compiled.parent.absolute()}/{compiled}/{platform}"


WIDTH = 120  # maximum line length of a script, except for longer words
INDENT = "  "


@dataclass(frozen=True)
class Artifact:
    """Named text that a backend submits verbatim, such as a node script or request body."""

    name: str
    text: str


@dataclass(frozen=True)
class Request:
    """Everything that a backend needs to run a job.

    `hosts` lists each node's machine, if known. `environment` applies only to this attempt, so it
    is not part of any artifact. Neither contains secrets, because the job contains only their
    names.
    """

    job: Job
    artifacts: tuple[Artifact, ...]
    hosts: tuple[Name, ...] = ()
    environment: Mapping[Variable, str] = field(default_factory=dict)

    @property
    def token(self) -> str:
        """Returns a 16-digit hex hash that identifies the attempt and its launch."""
        text = json.dumps(
            [self.job.record(), [asdict(artifact) for artifact in self.artifacts], self.hosts]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def logs(self) -> tuple[Path, ...]:
        """Returns the node logs, in node order."""
        return tuple(run_folder.node_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def engine_logs(self) -> tuple[Path, ...]:
        """Returns the scheduler's per-node logs, in node order."""
        return tuple(run_folder.engine_log(self.job.folder, node) for node in range(self.job.nodes))

    @property
    def job_log(self) -> Path:
        """Returns the scheduler's job-level log."""
        return run_folder.job_log(self.job.folder)

    def host(self, node: int | None) -> str:
        """Returns a node's machine, or "" if unknown."""
        return self.hosts[node] if node is not None and node < len(self.hosts) else ""

    def placed(self, hosts: Sequence[str]) -> Request:
        """Returns the request with the scheduler's placement, unless it already has hosts."""
        return self if self.hosts else replace(self, hosts=tuple(hosts))

    def with_environment(self, environment: Mapping[str, str]) -> Request:
        """Returns the request with additional variables for every node."""
        return replace(self, environment={**self.environment, **environment})

    def record(self) -> dict[str, Any]:
        """Returns the request as a JSON record that `of` can parse."""
        return asdict(self) | {"job": self.job.record()}

    @classmethod
    def of(cls, record: Mapping[str, Any], where: str) -> Request:
        """Parses a request from its JSON record. `where` is the record's source, for messages.

        Raises:
            RunError: the record is invalid.
        """
        try:
            return fit(cls, record)
        except InputError as error:
            why, then = f"{error.key}: {error.what}", f"run rm {where}, then make train"
            raise RunError("is not a request for a job", where=where, why=why, next=then) from error


def script(
    heading: Iterable[str], folder: Path | str, environment: Mapping[str, str], words: Sequence[str]
) -> str:
    """Returns a shell script that execs the command `words` in `folder`.

    Users can also read the script and run it by hand.
    """
    comments = [f"# {' '.join(line.split())}" for line in heading]
    settings = [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())
    ]
    command = fold(["exec", *map(shlex.quote, words)], WIDTH)
    return "\n".join(
        ["#!/bin/sh", *comments, f"cd {shlex.quote(str(folder))} || exit", *settings, *command, ""]
    )


def fold(words: Sequence[str], width: int) -> Iterator[str]:
    """Wraps a shell command at `width` columns, and yields its lines."""
    line = words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > width:
            yield line + " \\"
            line = INDENT + word
        else:
            line += f" {word}"
    yield line
