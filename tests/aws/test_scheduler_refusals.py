"""What keeps a job from AWS Batch or SageMaker is said before anything is sent, with the command that mends it; and why a job waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aws import batch as batch_service
from aws.account import Account
from aws.batch import Batch as Service
from aws.fleets import INPUTS
from aws.sagemaker import Job as Training
from aws.sagemaker import SageMaker as Trainings
from aws.test_scheduler_machines import scheduler_config
from aws.watchers import Watched
from aws.world import aws
from trainfleet.backends import BACKENDS
from trainfleet.backends.base import Phase
from trainfleet.backends.batch_request import CODES, QueueReasons
from trainfleet.cloud import scheduler_template
from trainfleet.cloud.calls import Calls
from trainfleet.config import Config
from trainfleet.launch import job_image
from trainfleet.plan.job import train_job
from trainfleet.trust.errors import BackendError, CloudError, ImageError

ROLE = f"arn:aws:iam::{Account.number}:role"
OWN = {
    "batch": {
        "batch": {
            "queue": "mine",
            "job_role": f"{ROLE}/train",
            "execution_role": f"{ROLE}/train-execution",
        }
    },
    "sagemaker": {"sagemaker": {"role": f"{ROLE}/train"}},
}


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THE_KEY", "x")
    monkeypatch.setattr("trainfleet.backends.sagemaker.size_of", lambda config: None)
    found = Account()
    Watched(found), Service(found, None), Trainings(found, None)  # type: ignore[arg-type]
    batch_service.service(found).queue_of_mine("mine", "c7i.8xlarge", 64)
    found.watched.quotas["ml.c7i.8xlarge for training job usage"] = 2  # type: ignore[attr-defined]
    with aws(found):
        yield found


def submit(config: Config) -> None:
    backend = BACKENDS[config.fleet.backend](config)
    backend.submit(backend.plan(train_job(config), {}))


def queue(**changes: Any) -> Callable[[Account], object]:
    return lambda account: account.things["mine"].properties.update(changes)


def environment(**changes: Any) -> Callable[[Account], object]:
    return lambda account: account.things["mine-ce"].properties.update(changes)


def watched(name: str, value: Any) -> Callable[[Account], object]:
    return lambda account: setattr(account.watched, name, value)  # type: ignore[attr-defined]


BAD: list[tuple[str, Callable[[Account], object], str, str]] = [
    ("batch", lambda account: account.things.pop("mine"), "mine: the job queue does not exist", "run make setup, or set fleet.batch.queue"),
    ("batch", queue(state="DISABLED"), "mine: the job queue is disabled", "update-job-queue --job-queue mine --state ENABLED"),
    ("batch", queue(status="INVALID", statusReason="no CE"), "mine: the job queue is invalid", "make setup"),
    ("batch", environment(status="INVALID", statusReason="CLIENT_ERROR - no such role"), "it is invalid: CLIENT_ERROR", "make setup"),
    ("batch", environment(state="DISABLED"), "mine-ce: it is disabled", "another fleet.batch.queue"),
    ("batch", environment(type="UNMANAGED"), "it is unmanaged", "another fleet.batch.queue"),
    ("batch", environment(computeResources={"type": "SPOT", "maxvCpus": 64, "instanceTypes": ["optimal"]}), "of type SPOT", "make setup"),
    ("batch", environment(computeResources={"type": "EC2", "maxvCpus": 64, "instanceTypes": ["p5"]}), "it has p5, but not c7i", "queue"),
    ("batch", environment(computeResources={"type": "EC2", "maxvCpus": 32, "instanceTypes": ["c7i"]}), "the queue allows 1", "NODES=1"),
    ("batch", watched("bucket_region", "eu-west-1"), "theirs is in eu-west-1, but the nodes are in us-east-1", "fleet.aws.region"),
    ("sagemaker", watched("bucket_region", "eu-west-1"), "theirs is in eu-west-1", "a bucket in us-east-1"),
    ("batch", watched("trust", {"train": ["ec2.amazonaws.com"]}), "the role does not trust ecs-tasks", "update-assume-role-policy"),
    ("sagemaker", watched("trust", {"train": ["ec2.amazonaws.com"]}), "the role does not trust sagemaker", "--role-name train"),
    ("sagemaker", watched("trust", {}), "the role does not exist", "run make setup"),
    ("batch", watched("forbidden", {"s3:PutObject"}), "the role lacks s3:PutObject", "allow it on arn:aws:s3:::theirs"),
    ("sagemaker", watched("quotas", {"ml.c7i.8xlarge for training job usage": 0}), "your quota 'ml.c7i.8xlarge for training job usage' is 0",
     "request-service-quota-increase --service-code sagemaker --quota-code L-00000000 --desired-value 2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "spoil", "what", "next"), BAD, ids=[f"{row[0]}-{row[2][:40]}" for row in BAD]
)
def test_what_could_not_run_is_said_before_anything_is_made(
    scheduler: str,
    spoil: Callable[[Account], object],
    what: str,
    next: str,
    account: Account,
    tmp_path: Path,
) -> None:
    config = scheduler_config(tmp_path, scheduler, **OWN[scheduler])
    spoil(account)
    with pytest.raises(CloudError, match="the job can't run with this config") as caught:
        submit(config)
    assert what in str(caught.value) and next in str(caught.value), str(caught.value)
    made = {operation for _, operation, _ in account.calls}
    assert not made & {"RegisterJobDefinition", "SubmitJob", "CreateTrainingJob", "PutParameter"}


def test_a_name_that_another_job_has_is_said(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't be looked at, as it is being deleted, and its name is not free yet."""
    config = scheduler_config(tmp_path, "sagemaker", **OWN["sagemaker"])
    backend = BACKENDS["sagemaker"](config)
    request = backend.plan(train_job(config), {})
    trainings = account.sagemaker  # type: ignore[attr-defined]
    trainings.jobs[f"cloudy-{request.token}"] = Training(f"cloudy-{request.token}", {})
    monkeypatch.setattr(backend, "_described", lambda name: None)
    with pytest.raises(BackendError, match="another job has this name") as caught:
        backend.submit(request)
    assert (
        "another name in config.yaml" in caught.value.next and "already exists" in caught.value.why
    )


def test_an_image_that_is_not_in_ecr_is_said_before_anything_is_sent(
    account: Account, tmp_path: Path
) -> None:
    image = f"{Account.number}.dkr.ecr.us-east-1.amazonaws.com/trainfleet:absent"
    with pytest.raises(ImageError, match="the image is not in the registry") as caught:
        job_image.make_ready(scheduler_config(tmp_path, "batch", container=image, **OWN["batch"]))
    assert caught.value.next == "make push" and "does not have this tag" in caught.value.why


def test_without_a_stack_it_is_said_that_setup_comes_first(
    account: Account, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match="nothing is set up for this config") as caught:
        submit(scheduler_config(tmp_path, "sagemaker"))
    assert caught.value.next == "make setup"


def test_warm_pools_have_a_quota_of_their_own(account: Account, tmp_path: Path) -> None:
    account.watched.quotas["ml.c7i.8xlarge for training warm pool usage"] = 0  # type: ignore[attr-defined]
    config = scheduler_config(
        tmp_path, "sagemaker", sagemaker=OWN["sagemaker"]["sagemaker"] | {"warm_pool_minutes": 10}
    )
    with pytest.raises(BackendError, match="training warm pool usage"):
        submit(config)


def test_a_job_for_which_others_leave_no_quota_waits_and_is_submitted_when_they_end(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfleet.backends.sagemaker.TRY_EVERY", 0.0)
    config = scheduler_config(tmp_path, "sagemaker", **OWN["sagemaker"])
    service = account.sagemaker  # type: ignore[attr-defined]
    other = service.jobs["other"] = Training("other", {"ResourceConfig": {"InstanceCount": 2}})
    backend = BACKENDS["sagemaker"](config)
    handles = [
        backend.submit(backend.plan(replace(train_job(config), launch=launch), {}))
        for launch in ("stopped", "waits")
    ]
    for handle in handles:
        status = backend.status(handle)
        assert status.phase is Phase.QUEUED and "other jobs use the quota" in status.reason
    backend.stop(handles[0], at_once=True)
    other.status = "Stopped"
    assert backend.look(handles[0]).ended  # type: ignore[attr-defined]
    assert "Starting" in backend.look(handles[1]).reason  # type: ignore[attr-defined]
    assert [*service.jobs] == ["other", handles[1].id]


THEIRS, OURS = (
    f"arn:aws:kms:us-east-1:{account}:key/0123abcd" for account in ("222233334444", Account.number)
)


@pytest.mark.parametrize(
    ("key", "state", "what", "next"),
    [
        (
            THEIRS,
            "AccessDeniedException",
            "the key of account 222233334444 is closed to your account",
            "allow your account in its policy",
        ),
        (OURS, "NotFoundException", "it does not exist", "set a key of us-east-1"),
        (OURS, "PendingDeletion", "the key is PendingDeletion", "or set another"),
        (OURS, "AccessDeniedException", "", ""),  # who may not look may still try
    ],
)
def test_a_key_that_can_t_be_used_is_said_before_a_job_is_made(
    key: str, state: str, what: str, next: str, account: Account, tmp_path: Path
) -> None:
    account.watched.keys[key] = state  # type: ignore[attr-defined]
    config = scheduler_config(
        tmp_path, "sagemaker", sagemaker=OWN["sagemaker"]["sagemaker"] | {"kms_key": key}
    )
    with pytest.raises(BackendError) if what else nullcontext() as caught:
        submit(config)
    if what:
        assert what in str(caught.value) and next in str(caught.value)  # type: ignore[union-attr]
        assert "CreateTrainingJob" not in {operation for _, operation, _ in account.calls}


ROLE_STATEMENTS = [("batch", "job_role", scheduler_template.statements), ("batch", "execution_role", scheduler_template.of_a_start),
                   ("sagemaker", "role", scheduler_template.of_a_training_job)]  # fmt: skip


@pytest.mark.parametrize(
    ("scheduler", "role", "statements"),
    ROLE_STATEMENTS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_any_statement_of_a_role_of_yours_a_job_is_refused_and_it_is_named(
    scheduler: str, role: str, statements: Any, account: Account, tmp_path: Path
) -> None:
    image = f"{Account.number}.dkr.ecr.us-east-1.amazonaws.com/trainfleet:x"
    config = scheduler_config(tmp_path, scheduler, container=image, **OWN[scheduler])
    wanted = list(statements(config, replace(INPUTS, account=Account.number, scheduler=scheduler)))
    for statement in wanted:
        account.watched.forbidden = set(statement["Action"])  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match="the role lacks") as caught:
            submit(config)
        assert all(name in str(caught.value) for name in statement["Action"]), statement
    assert len(wanted) == {"job_role": 3, "execution_role": 4, "role": 8}[role]
    assert not {operation for _, operation, _ in account.calls} & {"SubmitJob", "CreateTrainingJob"}


def test_who_may_not_look_may_still_try(account: Account, tmp_path: Path) -> None:
    account.denied |= {"iam:GetRole", "service-quotas:ListServiceQuotas", "s3:ListBucket"}
    submit(scheduler_config(tmp_path, "batch", **OWN["batch"]))
    assert ("batch", "SubmitJob") in {
        (service, operation) for service, operation, _ in account.calls
    }


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (queue(state="DISABLED"), "RUNNABLE: the queue mine is disabled; run aws batch update-job-queue"),
        (environment(status="INVALID", statusReason="CLIENT_ERROR - no role"), "RUNNABLE: the compute environment mine-ce is invalid: CLIENT_ERROR"),
        (environment(state="DISABLED"), "RUNNABLE: the compute environment mine-ce is disabled"),
        (lambda account: account.denied.add("batch:DescribeJobQueues"), "RUNNABLE: the reason is unknown: your credentials may not do batch:"),
        (lambda account: None, "RUNNABLE: machines are starting"),
    ],
)  # fmt: skip
def test_why_a_job_waits_is_looked_up(
    spoil: Callable[[Account], object], said: str, account: Account
) -> None:
    spoil(account)
    for name in ("mine", f"arn:aws:batch:us-east-1:{Account.number}:job-queue/mine"):
        found = QueueReasons(lambda: Calls("us-east-1"), name).why({"status": "RUNNABLE"})
        assert found.startswith(said.replace("queue mine is", f"queue {name} is"))


@pytest.mark.parametrize("code", CODES)
def test_batch_s_own_reasons_are_said_in_words(code: str, account: Account) -> None:
    waiting = QueueReasons(lambda: Calls("us-east-1"), "mine")
    said = waiting.why({"status": "RUNNABLE", "statusReason": f"{code} - and more"})
    assert said == f"RUNNABLE: {CODES[code]} ({code} - and more)" and not account.calls
    assert waiting.why({"status": "RUNNING"}) == ""
