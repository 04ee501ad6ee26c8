"""What the pretended account sells ahead: capacity blocks. A purchase is charged for each time that it comes.

Not seen at once: what was bought appears after `account.lag` seconds, as all that is new. `account.lost.add("PurchaseCapacityBlock")`
has the purchase done and its answer lost.
"""

from __future__ import annotations

import datetime
import functools
from typing import Any

from .account import Account, Refused, answers

DAY, PAYS = 86400.0, 60.0


def moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def fee(hours: int, count: int, number: int) -> float:
    """US dollars: the later an offer begins, the cheaper it is here."""
    return hours * count * (4.0 - number)


@answers("ec2", "DescribeCapacityBlockOfferings")
def blocks(account: Account, CapacityDurationHours: int, InstanceType: str, InstanceCount: int, **_: Any) -> dict[str, Any]:
    if CapacityDurationHours % 24 or CapacityDurationHours > 182 * 24:
        raise Refused("InvalidParameterValue", "CapacityDurationHours is no duration of a capacity block")
    rows = [
        {"CapacityBlockOfferingId": f"cbr-{number:017x}", "InstanceType": InstanceType, "InstanceCount": InstanceCount,
         "AvailabilityZone": zone, "StartDate": moment(account.now + number * DAY), "CurrencyCode": "USD",
         "EndDate": moment(account.now + number * DAY + CapacityDurationHours * 3600), "Tenancy": "default",
         "CapacityBlockDurationHours": CapacityDurationHours, "UpfrontFee": str(fee(CapacityDurationHours, InstanceCount, number))}
        for number, zone in enumerate(account.zones[:2], 1)
    ]  # fmt: skip
    account.sold |= {row["CapacityBlockOfferingId"]: row for row in rows}
    return {"CapacityBlockOfferings": rows}


@answers("ec2", "PurchaseCapacityBlock")
def buy_block(account: Account, CapacityBlockOfferingId: str, TagSpecifications: Any, **_: Any) -> dict[str, Any]:
    if (offer := account.sold.get(CapacityBlockOfferingId)) is None:
        raise Refused("InvalidCapacityBlockOfferingId.NotFound", "there is no such offering")
    tags = {one["Key"]: one["Value"] for spec in TagSpecifications for one in spec["Tags"]}
    found = {"ReservationType": "capacity-block", "StartDate": offer["StartDate"], "EndDate": offer["EndDate"],
             "InstanceType": offer["InstanceType"], "AvailabilityZone": offer["AvailabilityZone"],
             "TotalInstanceCount": offer["InstanceCount"], "AvailableInstanceCount": offer["InstanceCount"], "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}  # fmt: skip
    thing = account.add("capacity-reservation", account.new_id("cr-"), found, tags)
    thing.state = "payment-pending"
    for state, when in (
        ("scheduled", account.now + PAYS),
        ("active", found["StartDate"].timestamp()),
        ("expired", found["EndDate"].timestamp()),
    ):
        account.later(when - account.moment, functools.partial(setattr, thing, "state", state))
    return {"CapacityReservation": {"CapacityReservationId": thing.id, "State": "payment-pending"}}
