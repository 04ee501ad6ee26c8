"""Common part of the AWS Batch and SageMaker backends, which poll a job and stop it by an API
request.

The entrypoint's log in S3 is preferred, because it is complete, only seconds old, and next to the
checkpoints. If a node died before its entrypoint started or could not write to S3, only the service
has its output. Those lines go to logs/engine-<i>.log.

Secrets are passed by reference, because no request may contain a value. A name in fleet.secrets
with an ARN in fleet.secret_arns refers to that secret. Every other value is read on the launching
machine and stored in SSM as the SecureString /trainfleet/<config>/<NAME> until `make clean`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..cloud import checks, clock, log_streams
from ..cloud.calls import Calls, region_of
from ..cloud.checks import Check
from ..cloud.discovery import known
from ..cloud.prices import Prices, by_table, in_region
from ..cloud.spending import Spending
from ..cloud.template_inputs import own_tags, pairs
from ..config import Config
from ..config.goodput import saving_of
from ..plan.estimate import Bill
from ..plan.job import Job
from ..run import run_folder
from ..run.run_folder import Run
from ..storage import s3, sync_rules
from ..trust.errors import BackendError
from . import supported_keys
from .base import Backend, Can, Handle, Status
from .node_script import values_of
from .run_storage import Place
from .s3_run import bucket_of, unpacked, unshared

LONGEST = 4096  # most bytes of an SSM parameter in the standard tier


def folder(config: Config) -> str:
    """Returns the prefix of a config's SSM parameters."""
    return f"/trainfleet/{config.fleet_name}"


def references(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Returns the address of each secret's value by name. `keep` writes the values that are not
    stored yet.
    """
    given = dict(entry.split("=", 1) for entry in config.fleet.secret_arns)
    return {name: given.get(name) or f"{folder(config)}/{name}" for name in names}


def keep(calls: Calls, config: Config, names: Iterable[str]) -> None:
    """Writes the values of secrets without an ARN to SSM. Raises BackendError if a value is not set
    here or is too long.
    """
    own = {
        name: where for name, where in references(config, names).items() if where.startswith("/")
    }
    values = values_of(own)
    for name, where in own.items():
        if len(values[name].encode()) > LONGEST:
            raise BackendError(
                f"{name} is longer than SSM allows ({LONGEST} bytes)",
                where="fleet.secrets",
                next=f"store it in Secrets Manager, and set fleet.secret_arns: {name}=arn:...",
            )
        calls(
            "ssm",
            "PutParameter",
            Name=where,
            Value=values[name],
            Type="SecureString",
            Overwrite=True,
        )
        marks = pairs(own_tags(config.fleet_name))
        # PutParameter does not accept tags together with Overwrite.
        calls("ssm", "AddTagsToResource", ResourceType="Parameter", ResourceId=where, Tags=marks)


PATIENCE = 30.0  # seconds after a container's start before its console is read
OBJECT = re.compile(r".+/node-(\d{1,9})\.log(?:/[^/]+)?")


@dataclass(frozen=True)
class Console:
    """The service's record of the containers' output: a CloudWatch Logs group with one stream per
    node.

    `began` is the Unix time at which the containers of the newest attempt started.
    """

    began: float
    ended: bool
    group: str
    streams: Mapping[int, str]


@dataclass
class Consoles:
    """Downloader of console lines for nodes without a log. Each call downloads only new lines."""

    calls: Calls
    tokens: dict[str, str] = field(default_factory=dict)  # read position of each stream

    def bring(self, console: Console | None, folder: Path, address: str) -> None:
        """Downloads new lines to `folder`, which is at `address` in S3. The folder is the run's or
        the dataset's.

        Raises:
            CloudError, S3Error: a service does not answer, or denies access.
        """
        if console is None or not (console.ended or s3.clock(address) - console.began > PATIENCE):
            return
        spoke = self._spoke(console, address)
        for node, stream in console.streams.items():
            log = run_folder.engine_log(folder, node)
            if node in spoke:
                log.unlink(missing_ok=True)
                continue
            size = run_folder.size_of(log) if stream in self.tokens else 0
            lines, self.tokens[stream] = log_streams.read(
                self.calls, console.group, stream, self.tokens.get(stream, "")
            )
            if lines or not size:
                text = "".join(f"{line}\n" for line in lines)
                sync_rules.write(folder, str(log.relative_to(folder)), size, text.encode())

    def _spoke(self, console: Console, address: str) -> set[int]:
        """Returns the nodes with logs in S3 that have grown since the containers started."""
        found = s3.list_objects(f"{address}/logs/node-")
        since = int(console.began)  # S3's timestamps have whole seconds
        return {
            int(match[1])
            for one in found
            if one.modified >= since and (match := OBJECT.fullmatch(one.address))
        }


# prefix of a status reason: a user asked the service to end the job
ON_REQUEST = "ended on request"
PACE = 3.0  # seconds between two polls of a job


class Hosted(Backend):
    """Backend for a managed service that runs jobs in an image, on nodes without a shared disk. The
    run folder is in S3 (s3_run.py).
    """

    name: str
    title: str  # AWS's name for the service
    gone: float  # seconds for a job to end after a stop request
    can = frozenset({Can.RETRIES, Can.OUTLIVES, Can.IMAGE, Can.MACHINES})
    is_here, tried_on = False, "real nodes, fake AWS"

    def __init__(self, config: Config) -> None:
        self.config = config
        # time and result of the last poll, by token
        self._seen: dict[str, tuple[float, Status]] = {}
        self._has_job: tuple[float, bool] = (0.0, False)

    @property
    def calls(self) -> Calls:
        return Calls(region_of(self.config))

    @classmethod
    def lacks(cls, config: Config) -> Iterator[tuple[str, str]]:
        """Yields the settings that both services refuse."""
        yield from supported_keys.refuse(config)
        yield from unshared(config)
        yield from unpacked(config)
        if config.fleet.instance_type is None:
            yield (
                "fleet.instance_type",
                f"{cls.title} needs an instance type, such as p4d.24xlarge",
            )

    @abstractmethod
    def look(self, handle: Handle) -> Status:
        """Returns the job's status from the service; ENDED if the service has no such job."""

    @abstractmethod
    def end(self, handle: Handle) -> str:
        """Asks the service to stop the job, which sends SIGTERM to the job's nodes. Returns a
        command that shows the job's state.
        """

    @abstractmethod
    def console(self, handle: Handle) -> Console | None:
        """Returns the service's record of the containers' output; None before the containers
        start.
        """

    def status(self, handle: Handle) -> Status:
        """Returns the job's status from the service, at most `pace` seconds old."""
        when, status = self._seen.get(handle.token, (0.0, None))
        if status and (status.ended or 0 <= clock.now() - when < self.pace(handle)):
            return status
        status = self.look(handle)
        self._seen[handle.token] = clock.now(), status
        return status

    def pace(self, handle: Handle) -> float:
        """Returns the seconds between two polls of a job."""
        return PACE

    def stop(self, handle: Handle, at_once: bool) -> None:
        """Makes the service send SIGTERM to all nodes, so that ranks save and exit, and later
        SIGKILL to the remaining processes. With `at_once`, waits for the job to end.

        Raises:
            BackendError: the job has not ended after `gone` seconds.
        """
        if not handle.id or self.look(handle).ended:
            return
        then = self.end(handle)
        self._seen.pop(handle.token, None)
        until = clock.now() + self.gone
        while at_once and not self.status(handle).ended:
            if clock.now() > until:
                why = f"it was asked to stop {self.gone:.0f} s ago"
                raise BackendError(
                    "the job has not ended yet",
                    where=f"{self.name} {handle.id}",
                    why=why,
                    next=then,
                )
            clock.sleep(PACE / 4)

    def has_job(self, run: Run) -> bool:
        """Tells whether the service has an unfinished job of the run, from a poll at most PACE
        seconds old.
        """
        when, seen = self._has_job
        if not 0 <= clock.now() - when < PACE:
            seen = not self.status(self.find(run)).ended
            self._has_job = clock.now(), seen
        return seen

    def require(self, config: Config, job: Job, *chosen: Check) -> None:
        """Raises CloudError if the job could not run, or if a bucket is in another region."""
        sized = replace(config, fleet=replace(config.fleet, nodes=job.nodes))
        inputs = known(config, self.calls, self.name)[0]
        what = "the job can't run with this config"
        checks.require(sized, self.calls, inputs, (*chosen, checks.buckets), what)

    @abstractmethod
    def costs(self, config: Config, prices: Prices) -> Spending:
        """Returns the cost of a job on the config's nodes."""

    def stopping(self, grace: float) -> list[str]:
        """Returns lines for `make plan` that report whether ranks can save within `grace` seconds
        if the service ends the job.
        """
        saving, every = saving_of(self.config), self.config.checkpoint.every
        leaves = (
            f"if {self.title} stops the job, ranks have {grace:.0f} s to save; saving takes "
            f"about {saving:.0f} s"
        )
        if saving < grace:
            return [f"  {leaves}"]
        return [
            f"  warning: {leaves}",
            f"  the job would resume from the last checkpoint (checkpoint.every: {every}); make "
            "stop saves first",
        ]

    def bill(self) -> Bill | None:
        """Returns the bill, priced from the built-in table or, for other machines, from the Pricing
        API if it answers.
        """
        return self._whole(self.config)

    def _whole(self, config: Config) -> Bill | None:
        nodes = config.fleet.nodes
        return self.costs(config, by_table()).bill(nodes) or self.costs(
            config, in_region(config)
        ).bill(nodes)

    def place(self, run: Run) -> Place:
        consoles = Consoles(self.calls)

        def bring(folder: Path, address: str) -> None:
            consoles.bring(self.console(self.find(run)), folder, address)

        return bucket_of(self.config, run, lambda: self.has_job(run), bring)
