"""What else the schedulers' backends ask for: roles, images, quotas, buckets, parameters, streams of logs. Plain records in the account.

SSM's parameters are kept by moto too, on the local server that containers see.
"""

from __future__ import annotations

import os
from typing import Any

from trainfleet.cloud import calls

from . import limits, storage  # noqa: F401 - what they answer is kept for all that is not ours
from .account import ANSWERS, Account, Refused, answers

ROLES = {
    "train": ["ecs-tasks.amazonaws.com", "sagemaker.amazonaws.com"],
    "train-execution": ["ecs-tasks.amazonaws.com"],
}


class Watched:
    """`account.watched`: what an account has for them; a test changes it."""

    def __init__(self, account: Account) -> None:
        self.trust = {
            name: list(services) for name, services in ROLES.items()
        }  # role → whom it trusts
        self.forbidden: set[str] = set()  # actions that no role may do
        self.bucket_region = account.region
        self.keys: dict[
            str, str
        ] = {}  # key → its state, or the code of a refusal; others are enabled
        self.quotas: dict[str, float] = {}  # name → value of SageMaker's
        account.watched = self  # type: ignore[attr-defined]


def watched(account: Account) -> Watched:
    return account.watched  # type: ignore[attr-defined,no-any-return]


def _before(service: str, operation: str) -> Any:
    """Puts an answer before the one that there is, which is given what is not ours."""
    other = ANSWERS[service, operation]

    def put(mine: Any) -> Any:
        def answer(account: Account, **request: Any) -> dict[str, Any]:
            found = mine(account, **request) if hasattr(account, "watched") else None
            return found if found is not None else other(account, **request)

        ANSWERS[service, operation] = answer
        return answer

    return put


@_before("iam", "SimulatePrincipalPolicy")
def _simulate(
    account: Account, PolicySourceArn: str, ActionNames: list[str], **_: Any
) -> dict[str, Any] | None:
    if PolicySourceArn.rpartition("/")[2] not in watched(account).trust:
        return None
    forbidden = watched(account).forbidden
    return {"EvaluationResults": [
        {"EvalActionName": action, "EvalDecision": "implicitDeny" if action in forbidden else "allowed"} for action in ActionNames
    ]}  # fmt: skip


@answers("kms", "DescribeKey")
def _key(account: Account, KeyId: str) -> dict[str, Any]:
    state = watched(account).keys.get(KeyId, "Enabled")
    if state.endswith("Exception"):
        raise Refused(state, f"User: me is not authorized to perform: kms:DescribeKey on {KeyId}")
    return {"KeyMetadata": {"KeyId": KeyId, "KeyState": state}}


@_before("iam", "GetRole")
def _role(account: Account, RoleName: str) -> dict[str, Any] | None:
    trust = watched(account).trust.get(RoleName)
    if trust is None:
        return None
    document = {
        "Version": "2012-10-17",
        "Statement": [
            {"Effect": "Allow", "Principal": {"Service": trust}, "Action": "sts:AssumeRole"}
        ],
    }
    return {"Role": {"RoleName": RoleName, "AssumeRolePolicyDocument": document}}


@_before("service-quotas", "ListServiceQuotas")
def _quotas(account: Account, ServiceCode: str, **_: Any) -> dict[str, Any] | None:
    if ServiceCode != "sagemaker":
        return None
    rows = enumerate(watched(account).quotas.items())
    return {
        "Quotas": [
            {
                "ServiceCode": ServiceCode,
                "QuotaName": name,
                "QuotaCode": f"L-{number:08X}",
                "Value": value,
            }
            for number, (name, value) in rows
        ]
    }


@answers("ecr", "BatchGetImage")
def _images(account: Account, **_: Any) -> dict[str, Any]:
    return {"images": []}  # of what is not ECR's nobody asks here


@_before("s3", "HeadBucket")
def _bucket(account: Account, Bucket: str) -> dict[str, Any]:
    return {"BucketRegion": watched(account).bucket_region}


def _too(account: Account, operation: str, **request: Any) -> None:
    """The same at moto, where containers ask, if it runs."""
    if "AWS_ENDPOINT_URL" in os.environ:
        calls.by_boto3(account.region, "ssm", operation, request)


@answers("ssm", "PutParameter")
def _put(account: Account, **request: Any) -> dict[str, Any]:
    before = account.things.get(request["Name"])
    if request.get("Overwrite") and request.get("Tags"):
        raise Refused("ValidationException", "tags and overwrite can't be used together")
    account.add(
        "parameter",
        request["Name"],
        {"Value": request["Value"], "Type": request["Type"]},
        before.tags if before else {},
    )
    _too(account, "PutParameter", **request)
    return {"Version": 1, "Tier": "Standard"}


@answers("ssm", "AddTagsToResource")
def _tag(account: Account, ResourceId: str, Tags: list[dict[str, str]], **_: Any) -> dict[str, Any]:
    account.things[ResourceId].tags |= {tag["Key"]: tag["Value"] for tag in Tags}
    return {}


@answers("ssm", "GetParametersByPath")
def _parameters(account: Account, Path: str, **_: Any) -> dict[str, Any]:
    found = [thing.id for thing in account.of("parameter") if thing.id.startswith(f"{Path}/")]
    return {"Parameters": [{"Name": name, "Type": "SecureString"} for name in found]}


@answers("ssm", "DeleteParameter")
def _forget(account: Account, Name: str) -> dict[str, Any]:
    if account.things.pop(Name, None) is None:
        raise Refused("ParameterNotFound", Name)
    _too(account, "DeleteParameter", Name=Name)
    return {}


_of_others = ANSWERS["ssm", "GetParameter"]


@answers("ssm", "GetParameter")
def _parameter(account: Account, **request: Any) -> dict[str, Any]:
    thing = account.things.get(request["Name"])
    if thing is None or thing.kind != "parameter":
        return _of_others(account, **request)
    return {"Parameter": {"Name": thing.id, "Value": thing.properties["Value"]}}
