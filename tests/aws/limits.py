"""What the pretended account lets its user do and have: IAM's simulator, Service Quotas, prices, images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from .account import Account, Refused, answers
from .amis import AMIS
from .baked import images_of
from .storage import bucket

LUSTRE = "Lustre Scratch storage capacity"


@answers("iam", "SimulatePrincipalPolicy")
def simulate(
    account: Account, PolicySourceArn: str, ActionNames: list[str], ResourceArns: Iterable[str] = ("*",),
    ContextEntries: Iterable[Any] = (), **_: Any,
) -> dict[str, Any]:  # fmt: skip
    context = {entry["ContextKeyName"]: entry["ContextKeyValues"][0] for entry in ContextEntries}

    def decision(action: str) -> str:
        if action in account.denied:
            return "explicitDeny"
        may = (":user/" in PolicySourceArn and account.may) or (
            lambda *_: True
        )  # oracles/test_iam.py is of roles
        return (
            "allowed"
            if all(may(action, where, context) for where in ResourceArns)
            else "implicitDeny"
        )

    return {
        "EvaluationResults": [
            {"EvalActionName": action, "EvalDecision": decision(action)} for action in ActionNames
        ]
    }


@answers("service-quotas", "GetServiceQuota")
def quota(account: Account, ServiceCode: str, QuotaCode: str) -> dict[str, Any]:
    return {"Quota": {"QuotaCode": QuotaCode, "Value": account.quotas.get(QuotaCode, 10_000.0)}}


@answers("service-quotas", "ListServiceQuotas")
def quotas(account: Account, ServiceCode: str, **_: Any) -> dict[str, Any]:
    value = account.quotas.get(LUSTRE, 100_800.0)
    return {
        "Quotas": [{"QuotaName": LUSTRE, "QuotaCode": "L-0A1B2C3D", "Value": value}]
        if ServiceCode == "fsx"
        else []
    }


@answers("ec2", "GetEbsEncryptionByDefault")
def encrypts(account: Account) -> dict[str, Any]:
    return {"EbsEncryptionByDefault": bool(account.disk_key)}


@answers("ec2", "GetEbsDefaultKmsKeyId")
def disk_key(account: Account) -> dict[str, Any]:
    return {"KmsKeyId": account.disk_key or "alias/aws/ebs"}


@answers("s3", "HeadBucket")
def head_bucket(account: Account, Bucket: str) -> dict[str, Any]:
    try:
        bucket(account, Bucket)
    except Refused:
        raise Refused("404", "Not Found") from None  # a HEAD's answer has no body
    return {"BucketRegion": account.region}


@answers("pricing", "GetProducts")
def products(account: Account, **_: Any) -> dict[str, Any]:
    return {"FormatVersion": "aws_v1", "PriceList": []}


@answers("ec2", "DescribeSpotPriceHistory")
def spot_prices(account: Account, **_: Any) -> dict[str, Any]:
    return {"SpotPriceHistory": []}


@answers("ec2", "DescribeImages")
def images(account: Account, ImageIds: Iterable[str] = (), Filters: Iterable[Mapping[str, Any]] = (), Owners: Iterable[str] = (),
           IncludeDeprecated: bool = False, **_: Any) -> dict[str, Any]:  # fmt: skip
    """Images by id, whatever it is; by name and description those of amis.py that the region has."""
    gone = account.lacks_images if IncludeDeprecated else account.lacks_images | account.deprecated
    known = [{"ImageId": ami.id, "Name": ami.name, "Description": ami.description, "CreationDate": ami.date, "State": "available",
              "RootDeviceName": "/dev/sda1"} for pin, ami in AMIS.items() if pin not in gone]  # fmt: skip
    if "self" in Owners or not set(ImageIds).isdisjoint(account.things):
        return {"Images": images_of(account, ImageIds, Filters)}
    if ImageIds:
        return {
            "Images": [
                {"ImageId": image, "RootDeviceName": "/dev/sda1", "State": "available"}
                for image in ImageIds
            ]
        }
    wanted = {one["Name"].title(): one["Values"] for one in Filters}
    found = [
        row
        for row in known
        if all(any(fnmatchcase(row[key], one) for one in values) for key, values in wanted.items())
    ]
    return {"Images": found}
