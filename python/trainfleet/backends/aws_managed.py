"""Shared parts of the AWS Batch and SageMaker backends: polling and stopping jobs through the
service's API, and the machines that the service launches.

The entrypoint writes each node's log to S3, next to the checkpoints. This log is preferred, because
it is complete and only seconds old. If a node fails before its entrypoint starts, or can't write to
S3, only the service has its output. That output goes to logs/engine-<i>.log.

Secrets are passed by reference, because requests must not contain secret values. If
fleet.secret_arns maps a name in fleet.secrets to an ARN, the job uses that ARN. All other values
are read on the launching machine and stored in SSM as the SecureString /trainfleet/<config>/<NAME>.
`make clean` deletes them.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..cloud import calls, checks, clock, cloudformation, plan_text, spending
from ..cloud.calls import CODES, Calls, region_of
from ..cloud.capacity import NOTHING, Paid, PrepaidCapacity
from ..cloud.checks import Check
from ..cloud.discovery import known
from ..cloud.prices import Prices, by_table, in_region
from ..cloud.scheduler_template import SchedulerStack
from ..cloud.spending import Spending
from ..cloud.template_inputs import own_tags, pairs
from ..config import Config, Refusals
from ..config.goodput import saving_of
from ..plan.estimate import Bill
from ..plan.job import Job
from ..run import records, run_folder
from ..run.run_folder import Run
from ..storage import s3, sync_rules
from ..trust.errors import BackendError, CloudError, NotAsked
from . import supported_keys
from .base import Backend, Can, Changes, Handle, Prospect, Status
from .ec2_machines import Stacked, say
from .node_script import Body, values_of
from .run_storage import Place, bucket_of, unpacked, unshared

LONGEST = 4096  # maximum size of a standard-tier SSM parameter in bytes


def folder(config: Config) -> str:
    """Returns the name prefix of the config's SSM parameters."""
    return f"/trainfleet/{config.fleet_name}"


def references(config: Config, names: Iterable[str]) -> dict[str, str]:
    """Maps each secret to its ARN or SSM parameter name. `keep` creates the SSM parameters."""
    given = dict(entry.split("=", 1) for entry in config.fleet.secret_arns)
    return {name: given.get(name) or f"{folder(config)}/{name}" for name in names}


def keep(calls: Calls, config: Config, names: Iterable[str]) -> None:
    """Stores all secrets without an ARN in SSM.

    Raises BackendError if a value is not set on this machine or is too long.
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
        # PutParameter rejects Tags combined with Overwrite
        calls("ssm", "AddTagsToResource", ResourceType="Parameter", ResourceId=where, Tags=marks)


PATIENCE = 30.0  # seconds after container start before reading the service's console output
OBJECT = re.compile(r".+/node-(\d{1,9})\.log(?:/[^/]+)?")


@dataclass(frozen=True)
class Console:
    """Location of the containers' output in CloudWatch Logs: one log group, one stream per node.

    `began` is the Unix time at which the containers of the latest attempt started.
    """

    began: float
    ended: bool
    group: str
    streams: Mapping[int, str]


@dataclass
class Consoles:
    """Downloads console output for nodes without a log in S3.

    Each call fetches only new lines.
    """

    calls: Calls
    tokens: dict[str, str] = field(default_factory=dict)  # stream name → read position

    def bring(self, console: Console | None, folder: Path, address: str) -> None:
        """Appends new console lines to the engine logs in `folder`, for nodes without a log in S3.

        `folder` is a run folder or dataset folder, and the local copy of `address` in S3.

        Raises:
            CloudError, S3Error: a service does not respond or denies access.
        """
        if console is None or not (console.ended or s3.clock(address) - console.began > PATIENCE):
            return
        spoke = self._spoke(console, address)
        for node, stream in console.streams.items():
            log = run_folder.engine_log(folder, node)
            if node in spoke:
                log.unlink(missing_ok=True)
                continue
            size = records.size_of(log) if stream in self.tokens else 0
            lines, self.tokens[stream] = calls.read_log(
                self.calls, console.group, stream, self.tokens.get(stream, "")
            )
            if lines or not size:
                text = "".join(f"{line}\n" for line in lines)
                sync_rules.write(folder, str(log.relative_to(folder)), size, text.encode())

    def _spoke(self, console: Console, address: str) -> set[int]:
        """Returns the nodes whose logs in S3 have grown since the containers started."""
        found = s3.list_objects(f"{address}/logs/node-")
        since = int(console.began)  # S3 timestamps have one-second resolution
        return {
            int(match[1])
            for one in found
            if one.modified >= since and (match := OBJECT.fullmatch(one.address))
        }


# prefix of the status reason for jobs that a user had the service terminate
ON_REQUEST = "ended on request"
PACE = 3.0  # polling interval in seconds
LATER = CODES["unanswered"] | CODES["throttled"] | CODES["expired"]


class Hosted(Backend):
    """Base class for managed services that run jobs in container images on nodes without a shared
    disk.

    The run folder is in S3 (run_storage.py).
    """

    name: str
    title: str  # AWS's name for the service
    gone: float  # maximum seconds from a stop request until the job ends
    can = frozenset({Can.RETRIES, Can.OUTLIVES, Can.IMAGE, Can.MACHINES, Can.QUEUES})
    is_here, tried_on = False, "real nodes, fake AWS"

    def __init__(self, config: Config) -> None:
        self.config = config
        # token → time and result of the last poll
        self._seen: dict[str, tuple[float, Status]] = {}
        self._has_job: tuple[float, bool] = (0.0, False)

    @property
    def calls(self) -> Calls:
        return Calls(region_of(self.config))

    @classmethod
    def lacks(cls, config: Config) -> Refusals:
        """Yields an error for each setting that neither service supports."""
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
        """Queries the job's status from the service. Returns ENDED if the job does not exist."""

    @abstractmethod
    def end(self, handle: Handle) -> str:
        """Asks the service to stop the job, which sends SIGTERM to its nodes.

        Returns a command that shows the job's state.
        """

    @abstractmethod
    def console(self, handle: Handle) -> Console | None:
        """Returns where the containers' output is, or None if the containers have not started."""

    def status(self, handle: Handle) -> Status:
        """Returns the job's status, which is at most `pace` seconds old, or the last known one if
        the service does not respond.
        """
        when, status = self._seen.get(handle.token, (0.0, None))
        if status and (status.ended or 0 <= clock.now() - when < self.pace(handle)):
            return status
        try:
            status = self.look(handle)
        except CloudError as error:
            # The job continues although the service is out of reach or a login has expired.
            if status is None or not (isinstance(error, NotAsked) or error.code in LATER):
                raise
        self._seen[handle.token] = clock.now(), status
        return status

    def pace(self, handle: Handle) -> float:
        """Returns the job's polling interval in seconds."""
        return PACE

    def stop(self, handle: Handle, at_once: bool) -> None:
        """Stops the job.

        The service sends SIGTERM, so that ranks can save, and SIGKILL later. With `at_once`, waits
        until the job has ended.

        Raises:
            BackendError: the job is still active after `gone` seconds.
        """
        if not handle.id or self.status(handle).ended:
            return
        then = self.end(handle)
        self._seen.pop(handle.token, None)
        until = clock.now() + self.gone
        while at_once and not self.status(handle).ended:
            if clock.now() > until:
                raise BackendError(
                    "the job has not ended yet",
                    where=f"{self.name} {handle.id}",
                    why=f"it was asked to stop {self.gone:.0f} s ago",
                    next=then,
                )
            clock.sleep(PACE / 4)

    def has_job(self, run: Run) -> bool:
        """Returns whether the run has an active job in the service, as of at most PACE
        seconds ago.
        """
        when, seen = self._has_job
        if not 0 <= clock.now() - when < PACE:
            seen = not self.status(self.find(run)).ended
            self._has_job = clock.now(), seen
        return seen

    def require(self, config: Config, job: Job, *chosen: Check) -> None:
        """Raises CloudError if the job could not run, for example because a bucket is in another
        region.
        """
        sized = replace(config, fleet=replace(config.fleet, nodes=job.nodes))
        inputs = known(config, self.calls, self.name)[0]
        checks.require(
            sized,
            self.calls,
            inputs,
            (*chosen, checks.buckets),
            "the job can't run with this config",
        )

    @abstractmethod
    def costs(self, config: Config, prices: Prices) -> Spending:
        """Returns the cost of running a job on the config's nodes."""

    def stopping(self, grace: float) -> list[str]:
        """Returns `make plan` lines comparing the checkpoint save time to the `grace` seconds
        before SIGKILL.
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
        """Returns the bill, or None if a price is unknown.

        Uses the built-in price table, and queries the Pricing API for machines that are not in the
        table.
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


Costs = Callable[[Config, Prices], spending.Spending]
# placeholder in a request body → stack output that replaces it
OUTPUTS = {"${JobRole}": "JobRole", "${ExecutionRole}": "ExecutionRole", "${LogGroup}": "LogGroup"}
JOB_ROLE, EXECUTION_ROLE, LOG_GROUP = OUTPUTS


def filled(cloud: SchedulerStack, body: Body) -> Body:
    """Replaces placeholders in a request body with stack outputs.

    Raises CloudError if the body contains placeholders but the stack does not exist.
    """
    text = json.dumps(body)
    wanted = [name for name in OUTPUTS if name in text]
    found = cloud.outputs() if wanted else {}
    for name in wanted:
        text = text.replace(name, found[OUTPUTS[name]])
    filled: Body = json.loads(text)
    return filled


def priced(
    costs: spending.Spending, nodes: int, prices: Prices, hours: float | None, paid: Paid = NOTHING
) -> Iterator[str]:
    """Yields the two cost tables of a service: per hour, and from setup to teardown."""
    yield from ("dollars an hour, while a job runs", *spending.describe(costs.rows, hours))
    if prices.trouble:
        yield f"  the Pricing API is unavailable: {prices.trouble}"
    yield from spending.describe_whole(paid.on(costs.bill(nodes)), nodes, hours)


class ManagedMachines(Stacked):
    """Machines (base.py) that a managed service launches for each job.

    `needed`: whether a stack must provide resources that the config does not name. `costs`: returns
    a job's cost at the given prices. `notes`: returns extra lines for the plan. `ahead`: prepaid
    capacity.
    """

    def __init__(
        self,
        config: Config,
        engine: str,
        needed: bool,
        costs: Costs,
        notes: Callable[[], list[str]] = lambda: [],
        ahead: PrepaidCapacity | None = None,
    ) -> None:
        self.own = SchedulerStack(config, engine)
        super().__init__(self.own)
        self.config = config
        self.needed = needed
        self.costs = costs
        self.notes = notes
        self.ahead = ahead

    def changes(self) -> Changes:
        return super().changes() if self.needed else ()

    def is_there(self) -> bool:
        """Returns whether the stack is ready for jobs. False without credentials."""
        try:
            return not self.needed or bool(self.own.outputs())
        except CloudError:
            return False

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        """Returns the lines for the plan.

        If AWS denies a request, the account section reports only that error.
        """
        prices = in_region(self.config)
        account = ["account: you provide the queue and roles, so setup creates nothing"]
        changes: Changes = ()
        try:
            if self.needed:
                found, changes = self.foreseen, self.changes()
                account = [
                    f"stack {self.cloud.stack.name}",
                    *cloudformation.describe(found.changes, not found.before),
                    "",
                    *plan_text.account(self.config, self.own.calls, found.inputs, found.unasked),
                ]
                prices = by_table() if found.unasked else prices
        except CloudError as error:
            prices, account = by_table(), [f"account: not checked: {error.what}"]
        lines = (*self.notes(), "", *self._costs(prices, hours), "", *account)
        return Prospect(lines, changes, awaited=not self.is_there(), exact=True)

    def _costs(self, prices: Prices, hours: float | None) -> Iterator[str]:
        config, paid = self.config, NOTHING
        if self.ahead:
            config, paid = self.ahead.paid_config(), self.ahead.paid()
        yield from priced(self.costs(config, prices), config.fleet.nodes, prices, hours, paid)

    def remove(self, purge: bool) -> None:
        super().remove(purge)
        if self.ahead:
            self.ahead.say_what_stays(say)

    def apply(self) -> int:
        if self.needed:
            self.make()
            print("ready; each job starts and stops its machines")
        else:
            print("nothing to set up: you provide the queue and roles")
        print(
            "next: run make push, then make train"
            if self.config.fleet.container == "build"
            else "next: make train"
        )
        return 0
