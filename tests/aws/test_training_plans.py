"""SageMaker's training plans: shown with start, hours and price, bought once with YES=1 within the budget, and used by jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import get_session

from aws.account import Account
from aws.validation import problems_of
from trainfleet.backends import backend_of, terms_of
from trainfleet.backends.node_script import bodies
from trainfleet.backends.sagemaker import SageMaker
from trainfleet.cli.fleet import setup
from trainfleet.cloud.capacity import PLAN_TYPES
from trainfleet.config import Config, Settings, load
from trainfleet.plan.job import Request, train_job
from trainfleet.trust.errors import BackendError, ConfigError

FLEET = {"backend": "sagemaker", "nodes": 2, "instance_type": "p5.48xlarge", "shared_folder": "s3://bucket/some",
         "container": "registry.example/trainfleet:cuda", "aws": {"region": "us-east-1"}}  # fmt: skip


def write(limit: float | None = 1000.0, **own: Any) -> Config:
    document = {"name": "planned", "fleet": FLEET | {"sagemaker": {"role": "arn:aws:iam::111122223333:role/train", "plan_hours": 20} | own},
                "budget": {"max_usd": limit}, "train": {"global_batch_size": 16},
                "data": {"tokenized_path": "s3://bucket/data", "sources": ["s3://bucket/text"]}, "checkpoint": {"path": "s3://bucket/checkpoints"}}  # fmt: skip
    Path("config.yaml").write_text(yaml.safe_dump(document))
    return load(Settings(Path("config.yaml"), "", {}), terms_of)[0]


@pytest.fixture
def typed(account: Account, capsys: pytest.CaptureFixture[str]) -> Any:
    def make(verb: Any = setup, **variables: str) -> tuple[int, str]:
        backend_of.cache_clear()
        code = verb({"CONFIG": "config.yaml", **variables}, 0.0)
        return code, capsys.readouterr().out

    return make


def bought(account: Account) -> list[dict[str, Any]]:
    for service, operation, request in account.calls:
        assert problems_of(service, operation, request) == [], (operation, request)
    return [request for _, operation, request in account.calls if operation == "CreateTrainingPlan"]


def planned(config: Config) -> tuple[SageMaker, Request]:
    backend = SageMaker(config)
    return backend, backend.plan(train_job(config), {})


def test_setup_shows_what_is_offered_and_buys_nothing_without_yes(
    account: Account, typed: Any
) -> None:
    write()
    code, words = typed()
    assert code == 1 and "training plans on offer" in words and "24 h  $96.00  us-east-1a" in words
    assert "24 h  $144.00" in words and "$48.00" not in words, (
        "an offer in two pieces is none for a run"
    )
    assert (
        "next: make setup YES=1 buys the first that budget.max_usd allows" in words
        and not bought(account)
    )


def test_a_plan_is_bought_once_and_jobs_run_on_it_at_its_hour(account: Account, typed: Any) -> None:
    config = write()
    backend, request = planned(config)
    assert "TrainingPlanArn" not in bodies(request)[0]["ResourceConfig"]
    with pytest.raises(BackendError, match="the job has no training plan yet"):
        backend.submit(request)
    code, words = typed(YES="1")
    (plan,) = account.of("training-plan")
    assert (
        code == 1
        and "bought for $96.00" in words
        and "its machines are there from 2026-09-23 " in words
    )
    assert (
        plan.properties["name"].startswith("trainfleet-planned-20260923")
        and plan.tags["trainfleet:config"] == "planned"
    )
    account.sleep(3600)
    code, words = typed(YES="1")
    assert (
        code == 1 and f"training plan {plan.id}: scheduled" in words and len(bought(account)) == 1
    )
    account.sleep(2 * 86400)
    code, words = typed()
    assert code == 0 and "active" in words and len(bought(account)) == 1
    _, request = planned(config)
    (body,) = bodies(request)
    assert body["ResourceConfig"]["TrainingPlanArn"] == plan.id
    assert not problems_of("sagemaker", "CreateTrainingJob", {"TrainingJobName": "x"} | body)
    account.sleep(86400)
    assert typed()[0] == 1 and SageMaker(config).ahead.held is None, "it has ended"  # type: ignore[union-attr]


def test_its_price_counts_once_in_place_of_the_hours(account: Account, typed: Any) -> None:
    config = write()
    bill = SageMaker(config).bill()
    assert (
        bill
        and bill.paid * 2 == 96.0
        and "cheapest training plan of 24 h on offer" in bill.paid_for
    )
    on_demand = SageMaker(write(plan_hours=None)).bill()
    assert on_demand and bill.hour(2) < on_demand.hour(2) / 100, "the disks alone"
    write()
    typed(YES="1")
    paid = SageMaker(config).bill()
    assert paid and paid.paid * 2 == 96.0 and "training-plan/trainfleet-planned" in paid.paid_for


def test_nothing_is_bought_beyond_the_budget_or_without_one(account: Account, typed: Any) -> None:
    write(90.0)
    with pytest.raises(
        ConfigError, match=r"is left for a training plan, but the cheapest costs \$96.00"
    ):
        typed(YES="1")
    write(None)
    with pytest.raises(ConfigError, match="a training plan is bought only within a limit"):
        typed(YES="1")
    assert not bought(account)


@pytest.mark.parametrize(
    ("own", "fleet", "text"),
    [
        (
            {"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"},
            {},
            "training_plan already names a plan",
        ),
        ({}, {"spot": True}, "reserved capacity, not spot"),
        ({}, {"instance_type": "g5.48xlarge"}, "AWS sells no training plan for ml.g5.48xlarge"),
        ({"warm_pool_minutes": 5}, {}, "does not apply to a training plan"),
    ],
)
def test_what_keeps_a_plan_from_being_bought_is_refused(
    own: dict[str, Any],
    fleet: dict[str, Any],
    text: str,
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in fleet.items():
        monkeypatch.setitem(FLEET, key, value)
    with pytest.raises(ConfigError, match=text):
        write(**own)


def test_the_types_are_those_of_sagemaker_s_own_model() -> None:
    shape = get_session().get_service_model("sagemaker").shape_for("ReservedCapacityInstanceType")
    assert {f"ml.{name}" for name in PLAN_TYPES} == set(shape.enum) - {"ml.p6e-gb200.36xlarge"}, (
        "of ARM's processors"
    )


def test_clean_says_that_a_plan_stays(
    account: Account, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    typed(YES="1")
    SageMaker(write()).machines().remove(purge=True)
    (plan,) = account.of("training-plan")
    assert f"kept training plan {plan.id}" in capsys.readouterr().out
