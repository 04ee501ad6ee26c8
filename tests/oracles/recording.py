"""Makes the rows of cloud/permissions.yaml from what the pretended account was asked: `PYTHONPATH=python:tests python -m oracles.recording`.

Each article's recipe is planned, set up, listed, given a job, stopped and removed, once as it should go and once piece by piece.
What a row is for and done to is written by hand; its actions and their sources are not: a verb that sent it, or a type for which
CloudFormation does it (aws/identity.py). BESIDE has what no such verb shows. Rows of a cluster are AWS's own (test_permissions.py).
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import yaml

from aws import identity
from aws.account import ANSWERS, Account
from trainfleet.cloud.permissions import FILE

PUSH = 'ECR user guide, "IAM permissions for pushing an image"'
BESIDE = {  # source → what the five recipes' verbs do not show
    "a second setup: tests/aws/test_fleet.py": "cloudformation:UpdateStack GetTemplate ListStackResources ec2:StartInstances",
    "a clean in an update, an update of idle_minutes: tests/aws/test_fleet.py": "cloudformation:CancelUpdateStack ec2:CreateLaunchTemplateVersion",
    "tests/aws/test_ahead.py": "ec2:DescribeCapacityBlockOfferings PurchaseCapacityBlock DescribeCapacityReservations DescribeAvailabilityZones",
    "tests/aws/test_training_plans.py": "sagemaker:SearchTrainingPlanOfferings CreateTrainingPlan ListTrainingPlans UpdateTrainingJob",
    "an action that CreateTrainingPlan needs: SageMaker developer guide": "sagemaker:CreateReservedCapacity",
    "tests/aws/test_checks.py": "servicequotas:GetAWSDefaultServiceQuota ec2:DescribeSpotPriceHistory GetEbsDefaultKmsKeyId kms:DescribeKey",
    "tests/aws/test_crashes.py": "fsx:DeleteBackup logs:GetLogEvents DeleteLogStream s3:DeleteBucketPolicy",
    PUSH: "ecr:GetAuthorizationToken BatchCheckLayerAvailability InitiateLayerUpload UploadLayerPart CompleteLayerUpload PutImage",
    "python/trainfleet/images/ecr.py, repository.py": "ecr:CreateRepository DeleteRepository PutLifecyclePolicy TagResource ListImages "
                                                      "BatchGetImage GetDownloadUrlForLayer BatchDeleteImage",
    "python/trainfleet/storage/s3.py": "s3:GetObject PutObject DeleteObject DeleteObjectVersion AbortMultipartUpload",
    "aws ssm start-session: python/trainfleet/cloud/calls.py": "ssm:StartSession",
}  # fmt: skip
BY_ITSELF = ("iam:CreateServiceLinkedRole",)  # of which a policy has a statement with a condition


class Recording:
    """What an account was asked: action → the sources that did it, and on what."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.source = ""

    def may(self, action: str, resource: str, context: Mapping[str, str]) -> bool:
        self.asked[action][self.source].add(resource)
        return True

    @contextlib.contextmanager
    def on(self, account: Account) -> Iterator[Recording]:
        """Records what the account is asked from now on; `source` is the verb."""
        handle = identity.handle

        def handled(
            account: Account, stack: str, kind: str, what: str, properties: Mapping[str, Any]
        ) -> None:
            with mock.patch.object(self, "source", kind):
                handle(account, stack, kind, what, properties)

        def simulated(account: Account, ActionNames: list[str], **_: Any) -> dict[str, Any]:
            return {
                "EvaluationResults": [
                    {"EvalActionName": name, "EvalDecision": "allowed"} for name in ActionNames
                ]
            }

        account.may = self.may
        with (
            mock.patch.object(identity, "handle", handled),
            mock.patch.dict(ANSWERS, {("iam", "SimulatePrincipalPolicy"): simulated}),
        ):
            yield self

    def sources(self) -> dict[str, str]:
        """Action → its source: types before verbs, as they are exact."""
        found = {}
        for source, words in BESIDE.items():
            service = ""
            for word in words.split():
                service, _, name = word.rpartition(":") if ":" in word else (service, "", word)
                found[f"{service}:{name}"] = source
        for action, by in self.asked.items():
            types = sorted(one for one in by if "::" in one)
            found[action] = types[0] if types else f"make {', '.join(sorted(by))}"
        return {action: source for action, source in found.items() if action not in BY_ITSELF}


def made(text: str, sources: Mapping[str, str], asked: Mapping[str, Mapping[str, set[str]]]) -> str:
    """The file with each row's actions as recorded: what has no source goes, what no row has comes to the first that fits."""
    head, *rows = re.split(r"(?m)^(?=- for: )", text)
    parsed = [yaml.safe_load(row)[0] for row in rows]
    ours = [
        (number, row) for number, row in enumerate(parsed) if not row["for"].startswith("cluster")
    ]
    there = {
        f"{service}:{name}"
        for _, row in ours
        for service, names in row["actions"].items()
        for name in names
    }
    strays: dict[int, set[str]] = defaultdict(set)
    for action in sorted(set(sources) - there):
        on = {resource for places in asked.get(action, {}).values() for resource in places}
        looks = action.partition(":")[2].startswith(("Describe", "Get", "List"))
        fit = (
            number
            for number, row in ours
            if (looks or row["for"] != "looks") and _fits(row["to"], on)
        )
        strays[next(fit)].add(action)
    return head + "".join(
        text if row["for"].startswith("cluster") else _row(text, row, strays[number], sources)
        for number, (text, row) in enumerate(zip(rows, parsed, strict=True))
    )


def _fits(places: list[str], on: set[str]) -> bool:
    patterns = [re.sub(r"\{\w+\}|(?<=[/:-])x(?=/|$)", "*", place) for place in places]
    return all(any(fnmatchcase(resource, pattern) for pattern in patterns) for resource in on)


def _row(text: str, row: dict[str, Any], strays: set[str], sources: Mapping[str, str]) -> str:
    actions = [f"{service}:{name}" for service, names in row["actions"].items() for name in names]
    by_service: dict[str, list[str]] = defaultdict(list)
    for action in [*(one for one in actions if one in sources), *sorted(strays)]:
        service, _, name = action.partition(":")
        by_service[service].append(f"      {name}: '{sources[action]}'\n")
    kept = text[: text.index("  actions:\n")] + "  actions:\n"
    tail = "".join(
        line for line in text.splitlines(keepends=True) if line.startswith(("#", "\n"))
    )  # what is said of the next row
    return (
        kept
        + "".join(f"    {service}:\n{''.join(lines)}" for service, lines in by_service.items())
        + tail
    )


def main() -> None:
    from oracles.test_statements import recorded

    found = recorded()
    FILE.write_text(made(FILE.read_text(), found.sources(), found.asked))


if __name__ == "__main__":
    main()
