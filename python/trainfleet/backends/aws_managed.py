"""What AWS Batch and SageMaker have in common as backends: a job is polled, and stopped by a
request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..cloud import checks, clock
from ..cloud.calls import Calls
from ..cloud.checks import Check
from ..cloud.discovery import known
from ..cloud.prices import Prices, by_table, in_region
from ..cloud.region import region_of
from ..cloud.spending import Spending
from ..config import Config
from ..config.goodput import saving_of
from ..plan.bill import Bill
from ..plan.job import Job
from ..run.run_folder import Run
from ..trust.errors import BackendError
from . import supported_keys
from .base import Backend, Can, Handle, Status
from .container_logs import Console, Consoles
from .run_storage import Place
from .s3_run import bucket_of, unpacked, unshared

ON_REQUEST = "ended on request"  # in a status: a user has told the engine to end the job
PACE = 3.0  # seconds between two polls of a job


class Hosted(Backend):
    """An engine of AWS whose jobs run in an image, on nodes that share no disk: the run folder is
    in S3 (s3_run.py).
    """

    name: str
    title: str  # as AWS calls it
    gone: float  # seconds that a job gets to be gone once it is asked to stop
    can = frozenset({Can.RETRIES, Can.OUTLIVES, Can.IMAGE, Can.MACHINES})
    is_here, tried_on = False, "real nodes, fake AWS"

    def __init__(self, config: Config) -> None:
        self.config = config
        self._seen: dict[str, tuple[float, Status]] = {}  # by token: when, and how it was
        self._has_job: tuple[float, bool] = (0.0, False)

    @property
    def calls(self) -> Calls:
        return Calls(region_of(self.config))

    @classmethod
    def lacks(cls, config: Config) -> Iterator[tuple[str, str]]:
        """What each of them refuses of a config."""
        yield from supported_keys.refuse(config)
        yield from unshared(config)
        yield from unpacked(config)
        if config.fleet.instance_type is None:
            yield (
                "fleet.instance_type",
                f"{cls.title} must be told on which type of instance, such as p4d.24xlarge",
            )

    @abstractmethod
    def look(self, handle: Handle) -> Status:
        """How the engine sees the job now; ENDED where it has none."""

    @abstractmethod
    def end(self, handle: Handle) -> str:
        """Asks the engine to stop the job, upon which its nodes get SIGTERM; what to type to see
        how it is.
        """

    @abstractmethod
    def console(self, handle: Handle) -> Console | None:
        """Where the engine keeps what the job's containers print; None before they begin."""

    def status(self, handle: Handle) -> Status:
        """How the engine saw the job at the last look, which is at most `pace` old."""
        when, status = self._seen.get(handle.token, (0.0, None))
        if status and (status.ended or 0 <= clock.now() - when < self.pace(handle)):
            return status
        status = self.look(handle)
        self._seen[handle.token] = clock.now(), status
        return status

    def pace(self, handle: Handle) -> float:
        """Seconds between two polls of a job."""
        return PACE

    def stop(self, handle: Handle, at_once: bool) -> None:
        """SIGTERM to all nodes, upon which ranks save and leave, and SIGKILL to what is left; at
        once: and that is waited for.

        Raises:
            BackendError: the job is still there after `gone` seconds.
        """
        if not handle.id or self.look(handle).ended:
            return
        then = self.end(handle)
        self._seen.pop(handle.token, None)
        until = clock.now() + self.gone
        while at_once and not self.status(handle).ended:
            if clock.now() > until:
                why = f"{self.gone:.0f} s after it was asked to stop"
                raise BackendError(
                    "the job has not ended yet",
                    where=f"{self.name} {handle.id}",
                    why=why,
                    next=then,
                )
            clock.sleep(PACE / 4)

    def has_job(self, run: Run) -> bool:
        """Whether the engine has a job of the run that has not ended, as it was seen PACE ago at
        most.
        """
        when, seen = self._has_job
        if not 0 <= clock.now() - when < PACE:
            seen = not self.status(self.find(run)).ended
            self._has_job = clock.now(), seen
        return seen

    def require(self, config: Config, job: Job, *chosen: Check) -> None:
        """CloudError where a job could not run, or its nodes' buckets are elsewhere."""
        sized = replace(config, fleet=replace(config.fleet, nodes=job.nodes))
        inputs = known(config, self.calls, self.name)[0]
        what = "the job can't run as it is"
        checks.require(sized, self.calls, inputs, (*chosen, checks.buckets), what)

    @abstractmethod
    def costs(self, config: Config, prices: Prices) -> Spending:
        """What a job on the config's nodes costs."""

    def stopping(self, grace: float) -> list[str]:
        """What the engine's own end of a job leaves of it, for `make plan`: its nodes get `grace`
        seconds to save in.
        """
        saving, every = saving_of(self.config), self.config.checkpoint.every
        leaves = (
            f"where the engine ends it, {grace:.0f} s are left to save in; saving takes "
            f"about {saving:.0f} s"
        )
        if saving < grace:
            return [f"  {leaves}"]
        return [
            f"  warning: {leaves}",
            f"  so it goes on from the last checkpoint (checkpoint.every: {every}); make stop "
            "saves first",
        ]

    def bill(self) -> Bill | None:
        """By the table, and of what that does not have by the Pricing API, where it can be
        asked.
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
