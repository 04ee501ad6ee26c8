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
def blocks(
    account: Account, CapacityDurationHours: int, InstanceType: str, InstanceCount: int, **_: Any
) -> dict[str, Any]:
    if CapacityDurationHours % 24 or CapacityDurationHours > 182 * 24:
        raise Refused(
            "InvalidParameterValue", "CapacityDurationHours is no duration of a capacity block"
        )
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
def buy_block(
    account: Account, CapacityBlockOfferingId: str, TagSpecifications: Any, **_: Any
) -> dict[str, Any]:
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


@answers("sagemaker", "SearchTrainingPlanOfferings")
def plans(
    account: Account, InstanceType: str, InstanceCount: int, DurationHours: int, **_: Any
) -> dict[str, Any]:
    rows = [
        {"TrainingPlanOfferingId": f"tpo-{number}", "TargetResources": ["training-job"], "DurationHours": DurationHours,
         "UpfrontFee": str(fee(DurationHours, InstanceCount, number)), "CurrencyCode": "USD", "ReservedCapacityOfferings": [
             {"InstanceType": InstanceType, "InstanceCount": InstanceCount, "AvailabilityZone": account.zones[0],
              "DurationHours": DurationHours, "StartTime": moment(account.now + number * DAY + gap),
              "EndTime": moment(account.now + number * DAY + DurationHours * 3600 + gap)} for gap in gaps]}
        for number, gaps in ((1, (0.0,)), (2, (0.0,)), (3, (0.0, 9 * DAY)))
    ]  # fmt: skip
    account.sold |= {row["TrainingPlanOfferingId"]: row for row in rows}
    return {"TrainingPlanOfferings": rows}


@answers("sagemaker", "CreateTrainingPlan")
def buy_plan(
    account: Account, TrainingPlanName: str, TrainingPlanOfferingId: str, Tags: Any
) -> dict[str, Any]:
    if (offer := account.sold.get(TrainingPlanOfferingId)) is None:
        raise Refused("ResourceNotFound", "there is no such offering")
    arn = f"arn:aws:sagemaker:{account.region}:{account.number}:training-plan/{TrainingPlanName}"
    if arn in account.things:
        raise Refused("ResourceInUse", f"{TrainingPlanName} already exists")
    (piece,) = offer["ReservedCapacityOfferings"]
    thing = account.add("training-plan", arn, {"name": TrainingPlanName, "fee": offer["UpfrontFee"], **piece},
                        {tag["Key"]: tag["Value"] for tag in Tags})  # fmt: skip
    thing.state = "Pending"
    for state, when in (
        ("Scheduled", account.now + PAYS),
        ("Active", piece["StartTime"].timestamp()),
        ("Expired", piece["EndTime"].timestamp()),
    ):
        account.later(when - account.moment, functools.partial(setattr, thing, "state", state))
    return {"TrainingPlanArn": arn}


@answers("sagemaker", "ListTrainingPlans")
def list_plans(account: Account, **_: Any) -> dict[str, Any]:
    rows = [{"TrainingPlanArn": one.id, "TrainingPlanName": one.properties["name"], "Status": one.state, "UpfrontFee": one.properties["fee"],
             "StartTime": one.properties["StartTime"], "EndTime": one.properties["EndTime"], "CurrencyCode": "USD"}
            for one in account.of("training-plan")]  # fmt: skip
    return {"TrainingPlanSummaries": rows}
