"""Whether policy.json is enough: CloudFormation acts with the caller's permissions, and so does ParallelCluster's command.

What a resource needs to be made and removed is in aws/identity.py; the resources of a cluster, and what pcluster asks AWS, are
those of ParallelCluster 3.16.1 itself (pcluster_stack.py).
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from aws import identity
from aws.fleets import INPUTS
from aws.rules import TYPES
from oracles.iam_judge import Asked, judged, policy_of
from oracles.test_parallelcluster import python
from trainfleet.backends import terms_of
from trainfleet.backends.slurm import cluster_file
from trainfleet.cloud import scheduler_template, template
from trainfleet.cloud.permissions import LARGEST, documents, policy
from trainfleet.cloud.scheduler_template import NETWORK as CLUSTER
from trainfleet.cloud.template_inputs import Inputs, bucket_of, cluster_name, stack_name
from trainfleet.cloud.template_storage import log_group
from trainfleet.config import Config, Settings, load
from trainfleet.recipes import FOLDER

ARTICLES = (
    "bert-large-trn1-parallelcluster", "llama-2-7b-trn1-batch", "llama-2-7b-p4d-sagemaker", "roberta-large-p3dn-ec2",
    "trn1-single-node",
)  # fmt: skip
SOME = [
    pytest.param(name, marks=[] if name == ARTICLES[3] else [pytest.mark.thorough])
    for name in ARTICLES
]
NOT_OURS = {  # requests in pcluster's code that no cluster of ours leads to
    "efs:*", "kms:*", "secretsmanager:*", "ec2:describe_addresses", "fsx:describe_file_caches", "fsx:describe_volumes",
    "fsx:describe_storage_virtual_machines", "logs:get_log_events", "logs:describe_log_streams", "ec2:describe_image_attribute",
    "s3:generate_presigned_url", "sts:get_caller_identity",
}  # fmt: skip
SAME = {  # as boto3 calls it → as IAM does
    "s3:HeadBucket": "s3:ListBucket", "s3:HeadObject": "s3:GetObject", "s3:UploadFile": "s3:PutObject",
    "s3:UploadFileobj": "s3:PutObject", "s3:ListObjectVersions": "s3:ListBucketVersions", "s3:ListObjects": "s3:ListBucket",
    "s3:DeleteObjects": "s3:DeleteObjectVersion", "s3:PutBucketEncryption": "s3:PutEncryptionConfiguration",
}  # fmt: skip


def config_of(recipe: str) -> tuple[Config, Inputs]:
    config = load(Settings(FOLDER / f"{recipe}.yaml"), terms_of)[0]
    scheduler = {"ec2": "", "slurm": CLUSTER}.get(config.fleet.backend, config.fleet.backend)
    region = config.fleet.aws.region or INPUTS.region
    return config, replace(
        INPUTS, scheduler=scheduler, region=region, tokenizing="ami-0123456789abcdef0"
    )


@functools.cache
def cluster() -> dict[str, Any]:
    """What ParallelCluster itself says of the recipe's cluster (pcluster_stack.py)."""
    script, file = (
        Path(__file__).with_name("pcluster_stack.py"),
        Path(__file__).parent / "cluster-of-the-recipe.yaml",
    )
    try:
        file.write_text(cluster_file.artifacts(config_of(ARTICLES[0])[0])[0].text)
        said = subprocess.run(
            [python(), str(script), str(file), str(TYPES)],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        file.unlink()
    return dict(json.loads(said.stdout))


def made(config: Config, inputs: Inputs) -> set[str]:
    """The types of all resources that CloudFormation makes of a config."""
    text = (
        template.render(config, inputs)
        if not inputs.scheduler
        else scheduler_template.render(config, inputs, inputs.scheduler)
    )
    kinds = {resource["Type"] for resource in json.loads(text)["Resources"].values()}
    return kinds | set(cluster()["types"] if inputs.scheduler == CLUSTER else ())


def places(config: Config, inputs: Inputs, kind: str, action: str) -> Iterator[str]:
    """The ARNs on which CloudFormation does it for a resource of this type."""
    service, operation = action.split(":")
    here, iam = f"arn:aws:%s:{inputs.region}:{inputs.account}:%s", f"arn:aws:iam::{inputs.account}:"
    name, theirs = stack_name(config), cluster_name(config)
    own = inputs.scheduler == CLUSTER
    if fnmatchcase(operation, "Describe*") and service in ("ec2", "fsx", "logs", "cloudwatch"):
        yield "*"
    elif service == "iam" and kind.startswith("AWS::FSx"):
        yield f"{iam}role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/AWSServiceRoleForFSxS3Access_fs-01"
    elif service == "iam":
        what, plain = (
            ("instance-profile", [f"/{theirs}/Head-1"])
            if "InstanceProfile" in operation
            else (
                "role",
                [f"/{theirs}/RoleHeadNode-1", f"/{theirs}-CleanupResourcesFunctionExec-1"],
            )
        )
        yield from (
            (f"{iam}{what}/parallelcluster{end}" for end in plain)
            if own
            else [f"{iam}{what}/{name}-NodeRole-1"]
        )
    elif service == "cloudformation":
        yield from (here % (service, f"stack/{theirs}{end}/0-1") for end in ("", "-ComputeFleet-1"))
    elif service == "dynamodb":
        yield from (
            here % (service, f"table/parallelcluster-{slurm}{theirs}") for slurm in ("", "slurm-")
        )
    elif service == "lambda":
        yield here % (service, "function:pcluster-CleanupResources-0-1")
    elif service == "logs":
        groups = [
            f"/aws/parallelcluster/{theirs}-202611251200",
            "/aws/lambda/pcluster-CleanupRoute53-0-1",
        ]
        yield from (
            here % (service, f"log-group:{group}")
            for group in (groups if own else [log_group(config)])
        )
    elif service == "cloudwatch":
        board = f"arn:aws:cloudwatch::{inputs.account}:dashboard/{theirs}-{inputs.region}"
        yield (
            board
            if "Dashboard" in operation
            else here % (service, f"alarm:{theirs}-HeadNode-Health")
        )
    elif service == "s3":
        bucket = (
            "parallelcluster-00-v1-do-not-delete"
            if kind.startswith("AWS::Lambda")
            else bucket_of(config, inputs)
        )
        yield f"arn:aws:s3:::{bucket}{'/x' if 'Object' in operation else ''}"
    else:
        yield "*"


@pytest.mark.timeout(280)
@pytest.mark.parametrize("recipe", SOME)
def test_cloudformation_may_make_and_remove_every_resource_by_the_policy(recipe: str) -> None:
    config, inputs = config_of(recipe)
    asked = []
    for kind in sorted(made(config, inputs)):
        for action in sorted({*identity.done(kind, "create"), *identity.done(kind, "delete")}):
            named = (
                {"iam:AWSServiceName": "s3.data-source.lustre.fsx.amazonaws.com"}
                if action.endswith("LinkedRole")
                else {}
            )
            asked += [Asked(action, where, named) for where in places(config, inputs, kind, action)]
    assert len(asked) > (10 if inputs.scheduler == "sagemaker" else 80)
    said = judged(policy(config, inputs), asked)
    assert not [one for one, answer in zip(asked, said, strict=True) if answer != "Allowed"]


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_a_cluster_in_several_zones_has_no_other_kinds_of_resources() -> None:
    """So its policy is enough: what setup makes in the network's stack then, ParallelCluster makes otherwise."""
    config, inputs = config_of(ARTICLES[0])
    aws = replace(config.fleet.aws, zones=(inputs.zone, f"{inputs.region}d"))
    several = replace(config, fleet=replace(config.fleet, aws=aws))
    assert "AWS::FSx::FileSystem" in scheduler_template.render(several, inputs, CLUSTER)
    assert made(several, inputs) == made(config, inputs)
    assert policy(several, inputs) == policy(config, inputs)


@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_pcluster_may_ask_what_it_asks_for_a_cluster() -> None:
    config, inputs = config_of(ARTICLES[0])
    asked = []
    for one in cluster()["requests"]:
        if any(fnmatchcase(one, name) for name in NOT_OURS):
            continue
        client, _, operation = one.partition(":")
        action = f"{client.replace('_', '-')}:{re.sub('(?:^|_)([a-z])', lambda match: match[1].upper(), operation)}"
        action = SAME.get(action, action)
        if not action.startswith("s3:"):
            asked += [Asked(action, where) for where in places(config, inputs, "", action)]
        else:
            inside = "/parallelcluster/3.16.1/clusters/x" if "Object" in action else ""
            asked.append(Asked(action, f"arn:aws:s3:::parallelcluster-00-v1-do-not-delete{inside}"))
    assert len(asked) > 40
    said = judged(policy(config, inputs), asked)
    assert not [one for one, answer in zip(asked, said, strict=True) if answer != "Allowed"]


@pytest.mark.parametrize("recipe", ARTICLES)
def test_each_document_is_one_that_a_managed_policy_holds_and_together_they_are_the_policy(
    recipe: str,
) -> None:
    whole = policy(*config_of(recipe))
    parts = list(documents(whole))
    assert [statement for part in parts for statement in part["Statement"]] == whole["Statement"]
    assert (
        all(len(json.dumps(part, separators=(",", ":"))) <= LARGEST + 44 for part in parts)
        and LARGEST + 44 <= 6144
    )
    assert len(parts) == (2 if "parallelcluster" in recipe else 1)


def test_a_cluster_s_policy_allows_nothing_to_another_cluster() -> None:
    config, inputs = config_of(ARTICLES[0])
    here, iam = (
        f"arn:aws:%s:{inputs.region}:{inputs.account}:%s",
        f"arn:aws:iam::{inputs.account}:role/",
    )
    others = [
        Asked("iam:DeleteRole", f"{iam}parallelcluster/another/RoleHeadNode-1"), Asked("iam:PassRole", f"{iam}Admin"),
        Asked("dynamodb:DeleteTable", here % ("dynamodb", "table/parallelcluster-another")),
        Asked("cloudformation:DeleteStack", here % ("cloudformation", "stack/another/0-1")),
        Asked("cloudformation:DeleteStack", here % ("cloudformation", f"stack/{cluster_name(config)}2/0-1")),
        Asked("logs:DeleteLogGroup", here % ("logs", "log-group:/aws/parallelcluster/another-2026")),
        Asked("s3:DeleteObject", "arn:aws:s3:::somebody-s/x"), Asked("lambda:InvokeFunction", here % ("lambda", "function:pay")),
        Asked("iam:PutRolePolicy", f"{iam}Admin"),
    ]  # fmt: skip
    said = judged(policy_of(policy(config, inputs)["Statement"]), others)
    assert not [one for one, answer in zip(others, said, strict=True) if answer == "Allowed"]
