"""SageMaker backend: runs each job as one training job, on hosts without a shared disk. The run
folder is in S3 (run_storage.py).

The job name contains the request token. SageMaker rejects duplicate names, so submitting a request
twice starts only one job. SageMaker reports only one exit code per job, so the entrypoint writes
the failed host and the reason to /opt/ml/output/failure, which SageMaker reports as FailureReason.

Tested: requests against botocore's models, and a fake of SageMaker that runs real containers
(tests/aws/sagemaker.py). Not tested: SageMaker itself, EFA in containers, and managed spot
training.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from ..cloud import checks, quotas, scheduler_template
from ..cloud.calls import Json, log_streams, passing
from ..cloud.capacity import TrainingPlans
from ..cloud.prices import Prices
from ..cloud.resource_types import ENDED, LOGS
from ..cloud.spending import Spending, of_sagemaker
from ..cloud.template_inputs import slug
from ..config import Config, Refusals
from ..data.manifest import ITEM_BYTES, find
from ..node.placements import SAGEMAKER as PLACEMENT
from ..plan.estimate import Bill
from ..plan.job import Job, Request
from ..run.run_folder import Run
from ..storage.s3_sync_agent import BUCKET
from ..trust.errors import BackendError, CloudError, S3Error
from . import aws_managed, sagemaker_request
from .aws_managed import JOB_ROLE, ON_REQUEST, Console, Hosted, ManagedMachines, filled
from .base import Handle, Phase, Purchase, Status
from .node_script import TOKEN, artifact, bodies

GONE = 600.0  # seconds that a stopped job may take to end: SIGTERM, 120 s, SIGKILL, and the upload
NAME = 46  # maximum characters of the run name in a job name, which is limited to 63
PHASES = {
    state: phase
    for phase, states in {
        Phase.QUEUED: "Pending Starting Interrupted LaunchingMLInstances",
        Phase.STARTING: "Restarting PreparingTrainingStack Downloading DownloadingTrainingImage",
        Phase.RUNNING: "Training Uploading Updating",
        Phase.STOPPING: "Stopping",
    }.items()
    for state in states.split()
}
WORDS = {
    "Pending": "waiting for reserved or free machines",
    "Starting": "requesting machines",
    "LaunchingMLInstances": "starting machines",
    "PreparingTrainingStack": "preparing machines",
    "Downloading": "copying the dataset to each node",
    "DownloadingTrainingImage": "pulling the image",
    "Interrupted": "AWS reclaimed the spot machines; the job restarts when others are free",
    "Restarting": "SageMaker is restarting the job on other machines",
    "Stopping": "the ranks are saving and exiting",
    "MaxRuntimeExceeded": "the job reached fleet.sagemaker.max_hours",
    "MaxWaitTimeExceeded": "no spot machines were free within fleet.sagemaker.wait_hours",
}
AGAIN = ("Interrupted", "Restarting")
EXIT = re.compile(r"exit code:? ([0-9]{1,9})\b", re.IGNORECASE)
NODE = re.compile(r"\bnode ([0-9]{1,9})\b")
STREAM = re.compile(r"[^/]+/algo-(\d{1,9})-\d+")  # log stream name: <job>/algo-<host>-<seconds>
STOP = "StopTrainingJob"
OF_THE_ENGINE = ("MaxRuntimeExceeded", "MaxWaitTimeExceeded")
# SageMaker has no queue: it refuses a job while other jobs use the quota (API_CreateTrainingJob),
# so the launcher submits the job again later.
TRY_EVERY = 20.0  # seconds between submissions
IN_USE = re.compile("ResourceLimitExceeded.*current utilization of [1-9]", re.DOTALL)
FULL = "ResourceLimitExceeded: other jobs use the quota; it is submitted again when they end"


class SageMaker(Hosted):
    """Backend for SageMaker training jobs (base.py)."""

    name, title, gone, placement = "sagemaker", "SageMaker", GONE, PLACEMENT
    # only root can write to /opt/ml, SageMaker's input and output folder
    image_arguments = (("RUN_AS", "root"),)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._refused = dict[str, Request]()  # token → request to submit again

    @functools.cached_property
    def ahead(self) -> TrainingPlans | None:
        """Returns the training plan that `make setup` finds, purchases and uses, or None if the
        config requests none.
        """
        hours = self.config.fleet.sagemaker.plan_hours
        return None if hours is None else TrainingPlans(self.config, self.calls, hours)

    @property
    def placed(self) -> Config:
        """Returns the config, with the training plan if one was purchased for it."""
        return self.ahead.placed() if self.ahead else self.config

    def purchase(self) -> Purchase | None:
        if (ahead := self.ahead) is None:
            return None
        return lambda may_buy: ahead.obtain(may_buy, self._whole(ahead.paid_config()))

    def bill(self) -> Bill | None:
        if self.ahead:
            return self.ahead.paid().on(self._whole(self.ahead.paid_config()))
        return super().bill()

    @staticmethod
    def refuse(config: Config) -> Refusals:
        yield from SageMaker.lacks(config)
        yield from sagemaker_request.refuse(config)

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """Returns the CreateTrainingJob request.

        Ignores `without`, because SageMaker selects the machines.
        """
        secrets = aws_managed.references(self.config, job.secrets)
        role = self.config.fleet.sagemaker.role or JOB_ROLE
        body = sagemaker_request.body(
            self.placed, job, job.image, secrets, role, size_of(self.config)
        )
        return Request(job, (artifact(1, "sagemaker", "CreateTrainingJob", body),))

    def submit(self, request: Request) -> Handle:
        """Submits a job after checking that it can run. While other jobs use the quota, `look`
        submits it again.

        If the request's token already has a job, returns that job instead.

        Raises:
            BackendError: the job can't run. The message says why.
        """
        name = f"{slug(self.config.name, NAME)}-{request.token}"
        try:
            self._create(request, name)
        except CloudError as error:
            if not IN_USE.match(error.why):
                raise
            self._refused[request.token] = request
        else:
            self._refused.pop(request.token, None)
        return Handle(self.name, name, request.token, request.job.nodes)

    def _create(self, request: Request, name: str) -> None:
        if self.ahead and not self.ahead.held:
            why = (
                "fleet.sagemaker.plan_hours is set; without a plan, you would pay On-Demand prices"
            )
            raise BackendError(
                "the job has no training plan yet",
                why=why,
                next="run make setup to see the offers",
            )
        if self._described(name) is not None:
            return
        (body,) = bodies(request)
        body = filled(self.machines().own, body)
        role = partial(
            checks.role,
            body["RoleArn"],
            "sagemaker.amazonaws.com",
            scheduler_template.of_a_training_job,
        )
        self.require(self.placed, request.job, checks.kms, role, quotas.training)
        aws_managed.keep(self.calls, self.config, request.job.secrets)
        body["Environment"] |= request.environment
        try:
            self.calls("sagemaker", "CreateTrainingJob", TrainingJobName=name, **body)
        except CloudError as error:
            if error.code != "ResourceInUse":
                raise
            # if the job exists, an earlier attempt succeeded, but its response was lost
            if self._described(name) is None:
                why = error.why
                raise BackendError(
                    "another job has this name",
                    where=name,
                    why=why,
                    next="set another name in config.yaml, or wait until that job is deleted",
                ) from error

    def _described(self, name: str) -> Json | None:
        """Returns SageMaker's record of a job, or None if the job does not exist."""
        try:
            return self.calls("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
        except CloudError as error:
            if (
                error.code in ("ValidationException", "ResourceNotFound")
                and "not found" in error.why.lower()
            ):
                return None
            raise

    def stop(self, handle: Handle, at_once: bool) -> None:
        if not self._refused.pop(handle.token, None):
            super().stop(handle, at_once)

    def pace(self, handle: Handle) -> float:
        return TRY_EVERY if handle.token in self._refused else super().pace(handle)

    def look(self, handle: Handle) -> Status:
        if request := self._refused.get(handle.token):
            self.submit(request)
        if handle.token in self._refused:
            return Status(Phase.QUEUED, FULL)
        record = (
            self._described(handle.id) if handle.id and handle.id.endswith(handle.token) else None
        )
        return status_of(record, handle.nodes) if record else Status(Phase.ENDED)

    def console(self, handle: Handle) -> Console | None:
        record = self._described(handle.id) if handle.id else None
        if record is None or "TrainingStartTime" not in record:
            return None
        newest: dict[int, str] = {}
        for name in log_streams(self.calls, LOGS, f"{handle.id}/algo-"):
            if match := STREAM.fullmatch(name):
                # after a restart, the newer stream has the higher number
                newest[int(match[1]) - 1] = max(name, newest.get(int(match[1]) - 1, ""))
        return Console(
            record["TrainingStartTime"].timestamp(),
            record["TrainingJobStatus"] in ENDED,
            LOGS,
            newest,
        )

    def end(self, handle: Handle) -> str:
        with passing("ValidationException"):  # raised if the job has already ended
            self.calls("sagemaker", STOP, TrainingJobName=handle.id)
        return f"aws sagemaker describe-training-job --training-job-name {handle.id}"

    def find(self, run: Run) -> Handle:
        """Returns the run's newest job.

        Ignores jobs of the same name with a different run folder, because they belong to other
        users.
        """
        start = slug(run.name, NAME)
        newest = {"NameContains": start, "SortBy": "CreationTime", "SortOrder": "Descending"}
        for job in self.calls.pages(
            "sagemaker", "ListTrainingJobs", "TrainingJobSummaries", **newest
        ):
            name = str(job["TrainingJobName"])
            record = (
                self._described(name)
                if re.fullmatch(rf"{re.escape(start)}-{TOKEN}", name)
                else None
            )
            if (
                record
                and record.get("Environment", {}).get(BUCKET) == self.config.fleet.shared_folder
            ):
                return Handle(
                    self.name, name, name[-16:], int(record["ResourceConfig"]["InstanceCount"])
                )
        return Handle(self.name, "", "", 0)

    def machines(self) -> ManagedMachines:
        def costs(config: Config, prices: Prices) -> Spending:
            return of_sagemaker(config, prices, sagemaker_request.disk_gib(config, size_of(config)))

        needed = not self.config.fleet.sagemaker.role
        return ManagedMachines(self.config, self.name, needed, costs, self._notes, self.ahead)

    def costs(self, config: Config, prices: Prices) -> Spending:
        """Returns the cost assuming the smallest disk, because the dataset size is unknown."""
        return of_sagemaker(config, prices, sagemaker_request.disk_gib(config, None))

    def _notes(self) -> list[str]:
        """Returns `make plan` lines that explain how nodes read the dataset and how a job is
        stopped.
        """
        channel = sagemaker_request.input_of(self.config, size_of(self.config))
        return [
            "",
            "data",
            f"  {channel.mode}, about {channel.seconds:.0f} s to the first batch: {channel.why}",
            "",
            "stop",
            *self.stopping(self.terms.grace),
        ]


def size_of(config: Config) -> int | None:
    """Returns the size of the stored dataset in bytes, or None if the dataset does not exist or S3
    can't be read.
    """
    manifest = None
    with suppress(S3Error):  # the plan works without the size
        manifest = find(config.data)
    return None if manifest is None else manifest.tokens * ITEM_BYTES[manifest.dtype]


def status_of(record: Json, nodes: int) -> Status:
    """Converts a DescribeTrainingJob response to a status."""
    state, second = record["TrainingJobStatus"], record.get("SecondaryStatus", "")
    transitions = record.get("SecondaryStatusTransitions", ())
    attempt = 1 + sum(entry["Status"] in AGAIN for entry in transitions)
    hosts = tuple(f"algo-{node + 1}" for node in range(nodes)) if transitions else ()
    if state not in ENDED:
        phase = Phase.STOPPING if state == "Stopping" else PHASES.get(second, Phase.STARTING)
        said = transitions[-1].get("StatusMessage", "") if transitions else ""
        return Status(phase, f"{second}: {WORDS.get(second, said) or said}", attempt, hosts=hosts)
    reason = record.get("FailureReason", "")
    if state == "Failed":
        return Status(Phase.ENDED, reason, attempt, exits_of(reason), hosts=hosts)
    if second in OF_THE_ENGINE:
        return Status(Phase.ENDED, f"{second}: {WORDS[second]}", attempt, {0: 143}, hosts=hosts)
    by = STOP if state == "Stopped" else ""
    said = by and f"{ON_REQUEST}: {by}"
    return Status(
        Phase.ENDED, said, attempt, dict.fromkeys(range(nodes), 0), hosts=hosts, ended_by=by
    )


def exits_of(reason: str) -> dict[int, int]:
    """Parses node → exit code from a failure reason.

    Assumes node 0 if the reason names no node.
    """
    node, code = NODE.search(reason), EXIT.search(reason)
    return {int(node[1]) if node else 0: int(code[1]) or 1 if code else 1}
