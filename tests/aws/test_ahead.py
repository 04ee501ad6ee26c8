"""A capacity block from the config on: shown, bought once with YES=1 within the budget, used at its hour, counted, and kept by clean."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.account import Account
from aws.fleets import fleet
from aws.validation import problems_of
from aws.world import said
from trainfleet.backends import backend_of, ec2_machines, terms_of
from trainfleet.backends.ec2 import Ec2, StackHosts
from trainfleet.backends.head import HEAD
from trainfleet.cli import plan as plan_verb
from trainfleet.cli.fleet import setup
from trainfleet.cloud.checks import refuse
from trainfleet.config import Config, Settings, load
from trainfleet.plan.estimate import PAID, Bill
from trainfleet.run.run_folder import Run, append_line
from trainfleet.trust.errors import ConfigError
from trainfleet.watch.budget import Budget

BLOCK = {"capacity": "block", "block_hours": 20}


def write(limit: float | None = 1000.0, **aws: Any) -> Config:
    """cloudy.yaml: two p5.48xlarge in a capacity block that is to be bought."""
    document = said(instance_type="p5.48xlarge", aws=BLOCK | aws)
    document |= {"budget": {"max_usd": limit}, "train": {"global_batch_size": 16}}
    Path("cloudy.yaml").write_text(yaml.safe_dump(document))
    return load(Settings(Path("cloudy.yaml"), "", {}), terms_of)[0]


@pytest.fixture
def typed(
    account: Account, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """`make setup` with these variables, up to the nodes themselves: its exit code, and what it said."""
    monkeypatch.setattr(ec2_machines.host_setup, "main", lambda config, **_: 0)
    monkeypatch.setattr(ec2_machines.Instances, "await_keys", lambda self, nodes: None)
    monkeypatch.setattr(ec2_machines.Instances, "bad", lambda self: set())
    monkeypatch.setattr(StackHosts, "located", property(lambda self: self.config))

    def make(**variables: str) -> tuple[int, str]:
        backend_of.cache_clear()  # another command
        code = setup({"CONFIG": "cloudy.yaml", **variables}, 0.0)
        return code, capsys.readouterr().out

    return make


def bought(account: Account) -> list[dict[str, Any]]:
    for service, operation, request in account.calls:
        assert problems_of(service, operation, request) == [], (operation, request)
    return [
        request for _, operation, request in account.calls if operation == "PurchaseCapacityBlock"
    ]


def test_setup_shows_what_is_offered_and_buys_nothing_without_yes(
    account: Account, typed: Any
) -> None:
    write()
    code, words = typed()
    assert (
        code == 1 and "24 h  $96.00  us-east-1b" in words and "24 h  $144.00  us-east-1a" in words
    )
    assert (
        "next: make setup YES=1 buys the first that budget.max_usd allows; AWS gives no refund"
        in words
    )
    assert not bought(account) and not account.stacks


def test_a_block_is_bought_once_and_its_nodes_are_made_in_it_at_its_hour(
    account: Account, typed: Any
) -> None:
    write()
    code, words = typed(YES="1")
    (block,) = account.of("capacity-reservation")
    assert (
        code == 1
        and "bought for $96.00" in words
        and "its machines are there from 2026-09-23 " in words
    )
    assert "next: run make setup then" in words and not account.stacks
    account.sleep(3600)
    code, words = typed(YES="1")
    assert (
        code == 1
        and f"capacity block {block.id}: scheduled, from 2026-09-23 " in words
        and "$96.00" in words
    )
    account.sleep(2 * 86400)
    code, words = typed()
    assert code == 0 and f"{block.id}: active" in words and len(bought(account)) == 1
    backend_of.cache_clear()
    cloud = Ec2(write()).cloud
    data = cloud.stack.template()["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": block.id}
    }
    assert (
        data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
        and "Placement" not in data
    )
    assert {node.zone for node in cloud.nodes()} == {"us-east-1b"}, "where the block is"
    assert cloud.ends() == block.properties["EndDate"].timestamp() - 1800


def test_when_it_has_ended_another_one_is_offered(account: Account, typed: Any) -> None:
    write()
    typed(YES="1")
    account.sleep(3 * 86400 - 1000)  # its instances are ended half an hour before it ends
    code, words = typed()
    assert code == 1 and "on offer" in words and "YES=1" in words


def test_only_offers_where_the_nodes_can_be_are_shown(account: Account, typed: Any) -> None:
    write(zones=["us-east-1a"])
    words = typed()[1]
    assert "us-east-1a" in words and "us-east-1b" not in words


def test_nothing_is_bought_beyond_what_the_budget_leaves_beside_all_else(
    account: Account, typed: Any
) -> None:
    config = write()
    rest = Ec2(config)._whole()
    assert rest and rest.rest > 0
    write(96.0 + rest.whole(2, 20) - 1.0)
    with pytest.raises(
        ConfigError, match=r"\$95.00 is left for a capacity block, but the cheapest costs \$96.00"
    ):
        typed(YES="1")
    assert not bought(account)
    write(96.0 + rest.whole(2, 20) + 1.0)
    assert "bought for $96.00" in typed(YES="1")[1]


def test_its_price_is_in_the_plan_before_and_after_it_is_bought(
    account: Account, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan() -> str:
        backend_of.cache_clear()
        assert plan_verb.plan({"CONFIG": "cloudy.yaml"}, 0.0) == 0
        return capsys.readouterr().out

    write(4000.0)
    assert "96.00  the cheapest capacity block of 24 h on offer; make setup buys it with YES=1" in (
        words := plan()
    )
    assert (
        "the nodes have no capacity block yet\n    next: run make setup to see the offers" in words
    )
    account.no_credentials = True
    assert "2,641.92  a capacity block of 24 h at the on-demand list price" in plan()
    account.no_credentials = False
    account.sold.clear()
    typed(YES="1")
    (block,) = account.of("capacity-reservation")
    assert (
        f"96.00  the capacity block {block.id}" in (words := plan())
        and "have no capacity block yet" not in words
    )
    write(90.0)
    with pytest.raises(
        ConfigError,
        match=f"the capacity block {block.id}, set-up and idle time are already estimated at",
    ):
        plan()


def test_its_price_counts_from_the_launch_on_also_where_the_head_counts(
    account: Account, typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write()
    typed(YES="1")
    bill = Ec2(config).bill()
    assert bill and bill.paid == 48.0, "of each node"
    monkeypatch.setenv(HEAD, "1")
    monkeypatch.setenv(PAID, str(bill.paid))
    calls = len(account.calls)
    assert (
        replace(bill, paid_for="a capacity block") == Ec2(config).bill()
        and len(account.calls) == calls
    ), "the head asks nobody"
    run = Run(tmp_path / "runs/cloudy")
    run.folder.mkdir(parents=True)
    (run.folder / "events").mkdir()
    append_line(
        run.folder / "events/launcher.jsonl", {"time": time.time(), "event": "launched", "nodes": 2}
    )
    with_it, without = (
        Budget(run, config, one).spent(time.time()) for one in (bill, replace(bill, paid=0.0))
    )
    assert with_it - without == pytest.approx(96.0, abs=0.1)
    assert not Bill(0.0, paid=1.0).is_free


def test_clean_says_that_it_stays_paid_and_leaves_it_for_the_next_setup(
    account: Account, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write()
    typed(YES="1")
    account.sleep(2 * 86400)
    assert typed()[0] == 0
    backend_of.cache_clear()
    Ec2(write()).machines().remove(True)
    words = capsys.readouterr().out
    (block,) = account.of("capacity-reservation")
    assert (
        f"kept capacity block {block.id}: active" in words
        and "does not cancel or refund a capacity block" in words
    )
    assert "no resources of cloudy are left" in words
    assert typed()[0] == 0 and len(bought(account)) == 1


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (
            {},
            "fleet.aws.block_hours",
            "with fleet.aws.capacity on-demand no capacity block is bought; set null",
        ),
        (
            {"capacity": "block"},
            "fleet.aws.block_hours",
            "with fleet.aws.reservation no capacity block is bought; set null",
        ),
    ],
)
def test_hours_without_a_block_to_buy_are_refused(
    words: dict[str, Any], key: str, text: str
) -> None:
    assert text in dict(refuse(fleet(block_hours=20.0, **words)))[key]


def test_a_block_is_bought_within_a_limit_only(account: Account) -> None:
    with pytest.raises(
        ConfigError, match=r"budget\.max_usd: null: a capacity block is bought only within a limit"
    ):
        write(None)
