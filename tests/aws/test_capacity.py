"""Capacity that is bought ahead: offers are priced, bought only when asked, within the limit, and never twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from aws.account import Account
from aws.fleets import fleet
from aws.validation import problems_of
from aws.world import aws
from trainfleet.cloud import calls
from trainfleet.cloud.calls import ONCE, Calls
from trainfleet.cloud.capacity import Blocks, whole_hours
from trainfleet.config import Config
from trainfleet.trust.errors import CloudError, ConfigError


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    found = Account()
    with aws(found):
        yield found


def seller() -> Any:
    config: Config = fleet()
    return Blocks(replace(config, fleet=replace(config.fleet, nodes=2)), Calls("us-east-1"), 20.0)


def bought(account: Account) -> list[dict[str, Any]]:
    for service, operation, request in account.calls:
        assert problems_of(service, operation, request) == [], (operation, request)
    return [
        request for _, operation, request in account.calls if operation == "PurchaseCapacityBlock"
    ]


def test_offers_are_shown_with_start_hours_and_price_and_nothing_is_bought(
    account: Account,
) -> None:
    held, said = seller().find_or_buy(1000.0, may_buy=False)
    assert held is None and not bought(account)
    assert "24 h  $96.00" in said[1] and "24 h  $144.00" in said[2] and "YES=1" in said[-1], (
        "the cheapest first"
    )
    assert "more than budget.max_usd leaves" in seller().find_or_buy(100.0, may_buy=False)[1][2]


def test_the_cheapest_that_fits_is_bought_once_and_found_again(account: Account) -> None:
    held, said = seller().find_or_buy(100.0, may_buy=True)
    (request,) = bought(account)
    assert (
        held and held.state in ("scheduled", "payment-pending") and "bought for $96.00" in said[-1]
    )
    tags = request["TagSpecifications"][0]["Tags"]
    assert {"Key": "trainfleet:config", "Value": seller().config.name} in tags
    account.sleep(100)
    again, said = seller().find_or_buy(100.0, may_buy=True)
    assert (
        again
        and again.id == held.id
        and again.usd == 96.0
        and len(bought(account)) == 1
        and held.id in said[0]
    )


def test_nothing_is_bought_over_the_limit_or_without_one(account: Account) -> None:
    with pytest.raises(
        ConfigError, match=r"\$95.00 is left for a .*, but the cheapest costs \$96.00"
    ):
        seller().find_or_buy(95.0, may_buy=True)
    with pytest.raises(ConfigError, match="is bought only within a limit"):
        seller().find_or_buy(None, may_buy=True)
    assert not bought(account)


def test_a_purchase_whose_answer_is_lost_is_not_sent_again(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(
        region: str, service: str, operation: str, request: dict[str, Any]
    ) -> dict[str, Any]:
        answer = account.respond(region, service, operation, request)
        if operation in ONCE:
            raise EndpointConnectionError(endpoint_url="https://there")
        return answer

    monkeypatch.setattr(calls, "send", losing)
    held, _ = seller().find_or_buy(100.0, may_buy=True)
    assert held and len(bought(account)) == 1


def test_a_purchase_that_is_refused_says_why(account: Account) -> None:
    account.denied.add("ec2:PurchaseCapacityBlock")
    with pytest.raises(CloudError, match=r"not authorized|may not"):
        seller().find_or_buy(100.0, may_buy=True)


def test_boto3_sends_a_purchase_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: dict[str, int] = {}

    class Client:
        def __getattr__(self, name: str) -> Any:
            return lambda **request: {}

    def client(region: str, service: str, tries: int) -> Client:
        tried[service] = tries
        return Client()

    monkeypatch.setattr(calls, "_client", client)
    for service, operation in (("ec2", ONCE[0]), ("sts", "GetCallerIdentity")):
        calls.by_boto3("us-east-1", service, operation, {})
    assert tried == {"ec2": 1, "sts": calls.TRIES}


def test_a_block_lasts_whole_days_and_then_weeks() -> None:
    assert whole_hours(20) == 24 and whole_hours(23.8) == 48, (
        "its instances are ended half an hour early"
    )
    assert whole_hours(14 * 24 - 1) == 14 * 24 and whole_hours(14 * 24) == 21 * 24
    with pytest.raises(ConfigError, match="the longest lasts 182 days"):
        whole_hours(183 * 24)


def test_configs_of_one_fleet_have_one_block(account: Account) -> None:
    config: Config = fleet(share_fleet_of="pool")
    held, _ = Blocks(config, Calls("us-east-1"), 20.0).find_or_buy(100.0, may_buy=True)
    again, _ = Blocks(replace(config, name="another"), Calls("us-east-1"), 20.0).find_or_buy(
        100.0, may_buy=True
    )
    assert held and again == held and len(bought(account)) == 1
