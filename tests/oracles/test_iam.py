"""What the roles of our templates allow, by an evaluator of IAM that is not ours (iam/judge.mjs).

Each role may do what a run does by it; without any one of its statements it may not; and it may do nothing to what is another's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aws.fleets import INPUTS
from oracles.iam_judge import Asked, judged, judged_each, policy_of
from trainfleet.backends import terms_of
from trainfleet.cloud import scheduler_template, template
from trainfleet.cloud.permissions import policy
from trainfleet.cloud.scheduler_template import NETWORK as CLUSTER
from trainfleet.cloud.template_inputs import Inputs, bucket_of
from trainfleet.config import Config, Settings, load
from trainfleet.config.tables import read_table
from trainfleet.recipes import FOLDER

ROOT = Path(__file__).parents[2]
HOME, CORPUS = "arn:aws:{}:us-east-1:123456789012:", "corpus-of-mine"
KEY = "0123abcd-0123-0123-0123-0123456789ab"
ROOT_MAY = {  # the policy that AWS gives a new key: the account's own policies decide
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"AWS": "arn:aws:iam::123456789012:root"},
            "Action": "kms:*",
            "Resource": "*",
        }
    ],
}


def buckets(own: str) -> Iterator[Asked]:
    """What nodes do with the run's bucket, and with one that they only read."""
    for action in (
        "GetObject",
        "PutObject",
        "DeleteObject",
        "AbortMultipartUpload",
        "ListMultipartUploadParts",
    ):
        yield Asked(f"s3:{action}", f"arn:aws:s3:::{own}/a-run/runs/a/metrics.jsonl")
    for bucket in (own, CORPUS):
        yield Asked("s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": "web/"})
        yield Asked("s3:GetBucketLocation", f"arn:aws:s3:::{bucket}")
    yield Asked("s3:GetObject", f"arn:aws:s3:::{CORPUS}/web/0.jsonl")


def pulls() -> Iterator[Asked]:
    yield Asked("ecr:GetAuthorizationToken", "*")
    for action in ("BatchGetImage", "GetDownloadUrlForLayer", "BatchCheckLayerAvailability"):
        yield Asked(f"ecr:{action}", f"{HOME.format('ecr')}repository/trainfleet")


def logs(config: Config) -> Iterator[Asked]:
    for action in ("CreateLogStream", "PutLogEvents"):
        yield Asked(
            f"logs:{action}",
            f"{HOME.format('logs')}log-group:/trainfleet/{config.name}:log-stream:node-0",
        )


def secrets(config: Config) -> Iterator[Asked]:
    yield Asked(
        "ssm:GetParameters", f"{HOME.format('ssm')}parameter/trainfleet/{config.name}/HF_TOKEN"
    )
    yield Asked(
        "secretsmanager:GetSecretValue", f"{HOME.format('secretsmanager')}secret:wandb-Ab1Cd2"
    )


def of_sagemaker() -> Iterator[Asked]:
    for action in ("CreateLogStream", "PutLogEvents"):
        yield Asked(
            f"logs:{action}",
            f"{HOME.format('logs')}log-group:/aws/sagemaker/TrainingJobs:log-stream:a",
        )
    yield Asked("cloudwatch:PutMetricData", "*")
    yield Asked("ssmmessages:OpenDataChannel", "*")
    for action in ("CreateNetworkInterface", "DescribeSubnets"):
        yield Asked(
            f"ec2:{action}",
            "*"
            if action.startswith("Describe")
            else f"{HOME.format('ec2')}subnet/subnet-0123456789abcdef0",
        )
    key = f"{HOME.format('kms')}key/{KEY}"
    named = {"kms:ResourceAliases": ["alias/training"]}
    for action in ("Encrypt", "GenerateDataKey", "Decrypt"):
        yield Asked(f"kms:{action}", key, named, ROOT_MAY)
    yield Asked("kms:CreateGrant", key, named | {"kms:GrantIsForAWSResource": "true"}, ROOT_MAY)


def config_of(recipe: str) -> Config:
    config = load(Settings(FOLDER / f"{recipe}.yaml"), terms_of)[0]
    fleet = replace(
        config.fleet,
        secret_arns=(f"WANDB_API_KEY={HOME.format('secretsmanager')}secret:wandb-Ab1Cd2",),
    )
    if fleet.backend == "sagemaker":
        vpc = {
            "subnets": ("subnet-0123456789abcdef0",),
            "security_groups": ("sg-0123456789abcdef0",),
        }
        fleet = replace(
            fleet,
            sagemaker=replace(fleet.sagemaker, kms_key="alias/training", remote_debug=True, **vpc),
        )  # type: ignore[arg-type]
    config = replace(
        config, fleet=fleet, train=replace(config.train, init_from=f"s3://{CORPUS}/model")
    )
    image = "none" if fleet.backend == "slurm" else "build"
    return replace(config, fleet=replace(config.fleet, container=image))


def roles(config: Config) -> dict[str, list[dict[str, Any]]]:
    """The statements of each role of the config's template, with the ARNs that CloudFormation would put into them."""
    backend = config.fleet.backend
    found = (
        template.render(config, INPUTS)
        if backend == "ec2"
        else scheduler_template.render(config, INPUTS, backend)
    )
    group = f"{HOME.format('logs')}log-group:/trainfleet/{config.name}:*"
    text = found.replace('{"Fn::GetAtt":["Log","Arn"]}', json.dumps(group))
    kinds = {
        name: made
        for name, made in json.loads(text)["Resources"].items()
        if made["Type"] == "AWS::IAM::Role"
    }
    return {
        name: [
            statement
            for policy in made["Properties"].get("Policies", ())
            for statement in policy["PolicyDocument"]["Statement"]
        ]
        for name, made in kinds.items()
    }


def done_by(config: Config, role: str) -> list[Asked]:
    """All that a run does by a role of its stack, beside AWS's own policies."""
    own = bucket_of(config, INPUTS)
    return {
        ("ec2", "NodeRole"): [*buckets(own), *pulls(), *logs(config)],
        ("batch", "JobRole"): [*buckets(own), *logs(config)],
        ("batch", "ExecutionRole"): [*secrets(config)],
        ("sagemaker", "JobRole"): [
            *buckets(own),
            *pulls(),
            *logs(config),
            *secrets(config),
            *of_sagemaker(),
        ],
    }.get((config.fleet.backend, role), [])


CASES = [("roberta-large-p3dn-ec2", "NodeRole"), ("llama-2-7b-trn1-batch", "JobRole"), ("llama-2-7b-trn1-batch", "ExecutionRole"),
         ("llama-2-7b-p4d-sagemaker", "JobRole")]  # fmt: skip


@pytest.mark.parametrize("recipe, role", CASES)
def test_a_role_may_do_what_a_run_does_by_it(recipe: str, role: str) -> None:
    config = config_of(recipe)
    asked = done_by(config, role)
    said = judged(policy_of(roles(config)[role]), asked)
    assert not [one for one, answer in zip(asked, said, strict=True) if answer != "Allowed"]


@pytest.mark.parametrize("recipe, role", CASES)
def test_no_statement_of_a_role_is_for_nothing(recipe: str, role: str) -> None:
    config = config_of(recipe)
    statements, asked = roles(config)[role], done_by(config, role)
    cases = [
        (policy_of(statements[:number] + statements[number + 1 :]), asked)
        for number in range(len(statements))
    ]
    for statement, said in zip(statements, judged_each(cases), strict=True):
        assert "ImplicitlyDenied" in said, f"nothing needs {statement}"


@pytest.mark.parametrize("recipe, role", CASES)
def test_a_role_may_do_nothing_to_what_is_another_s(recipe: str, role: str) -> None:
    config = config_of(recipe)
    others = [
        Asked("s3:GetObject", "arn:aws:s3:::another-bucket/a"),
        Asked("s3:PutObject", f"arn:aws:s3:::{CORPUS}/web/0.jsonl"),
        Asked("s3:DeleteBucket", f"arn:aws:s3:::{bucket_of(config, INPUTS)}"),
        Asked("ecr:PutImage", f"{HOME.format('ecr')}repository/trainfleet"),
        Asked("ecr:BatchGetImage", f"{HOME.format('ecr')}repository/payroll"),
        Asked("ssm:GetParameter", f"{HOME.format('ssm')}parameter/trainfleet/another/HF_TOKEN"),
        Asked(
            "secretsmanager:GetSecretValue", f"{HOME.format('secretsmanager')}secret:another-Ab1Cd2"
        ),
        Asked(
            "kms:Decrypt",
            f"{HOME.format('kms')}key/{KEY}",
            {"kms:ResourceAliases": ["alias/another"]},
            ROOT_MAY,
        ),
        Asked(
            "kms:CreateGrant",
            f"{HOME.format('kms')}key/{KEY}",
            {"kms:ResourceAliases": ["alias/training"]},
            ROOT_MAY,
        ),
        Asked("iam:PassRole", "arn:aws:iam::123456789012:role/Admin"),
        Asked("logs:DeleteLogGroup", f"{HOME.format('logs')}log-group:/trainfleet/{config.name}"),
    ]
    said = judged(policy_of(roles(config)[role]), others)
    assert not [one for one, answer in zip(others, said, strict=True) if answer == "Allowed"]


ACTIONS = {  # what IAM calls an operation by another name, or checks as several
    "s3:ListBuckets": ["s3:ListAllMyBuckets"], "s3:HeadBucket": ["s3:ListBucket"], "s3:ListObjectVersions": ["s3:ListBucketVersions"],
    "s3:DeleteObjects": ["s3:DeleteObject", "s3:DeleteObjectVersion"], "s3:ListMultipartUploads": ["s3:ListBucketMultipartUploads"],
    "resourcegroupstaggingapi:GetResources": ["tag:GetResources"], 
    **{f"service-quotas:{name}": [f"servicequotas:{name}"] for name in ("ListServiceQuotas", "GetServiceQuota", "GetAWSDefaultServiceQuota")},
}  # fmt: skip
NOT_NEEDED = {"ssm:SendCommand", "ssm:GetCommandInvocation",  # where no console tells a host key
              "sts:GetCallerIdentity"}  # fmt: skip  # which anybody may
ARTICLES = (
    "roberta-large-p3dn-ec2", "trn1-single-node", "llama-2-7b-trn1-batch", "llama-2-7b-p4d-sagemaker",
    "bert-large-trn1-parallelcluster",
)  # fmt: skip
SOME = [ARTICLES[0], *(pytest.param(name, marks=[pytest.mark.thorough]) for name in ARTICLES[1:])]


def operations() -> set[str]:
    """Every operation of AWS that our code names, as `service:Operation`."""
    pattern = re.compile(r"(?:calls|pages)\(\s*\"([a-z0-9-]+)\", \"([A-Z]\w+)\"")
    texts = [path.read_text() for path in (ROOT / "python/trainfleet").rglob("*.py")]
    said = [f"{service}:{name}" for text in texts for service, name in pattern.findall(text)]
    kinds = of_kinds() | of_kinds("scheduler_kinds.yaml")
    return {*said, *(one for names in kinds.values() for one in names)}


def of_kinds(table: str = "kinds.yaml") -> dict[str, set[str]]:
    """kind of resource → what `make clean` asks to find and to remove it, by a table."""
    rows = read_table(ROOT / "python/trainfleet/cloud" / table)
    return {
        row["kind"]: {
            f"{row['service']}:{name}"
            for name in (row.get("find"), row.get("remove"), row.get("first", {}).get("call"))
            if name
        }
        for row in rows
        if "service" in row
    }


@pytest.mark.parametrize("recipe", ARTICLES)
def test_clean_may_find_everything_and_remove_what_a_setup_may_have_left(recipe: str) -> None:
    """What no setup of the recipe makes is looked for alone."""
    named = {
        action for statement in written_for(recipe)["Statement"] for action in statement["Action"]
    }
    kinds = of_kinds()
    assert len(kinds) > 15
    unmade = set(kinds) if "ec2:RunInstances" not in named else set()
    unmade |= set() if "fsx:CreateFileSystem" in named else {"file system", "association", "backup"}
    unmade |= set() if "ec2:CreateImage" in named else {"snapshot", "AMI"}
    wanted = {
        one
        for kind, asked in kinds.items()
        for one in asked
        if ":Describe" in one or kind not in unmade
    }
    assert not wanted - named


def test_the_policies_that_a_plan_writes_name_every_operation_that_we_send() -> None:
    named = {
        action
        for name in ARTICLES
        for statement in written_for(name)["Statement"]
        for action in statement["Action"]
    }
    asked = operations()
    assert len(asked) > 70
    missing = {action for one in asked - NOT_NEEDED for action in ACTIONS.get(one, [one])} - named
    assert not missing


def written_for(recipe: str) -> dict[str, Any]:
    return policy(*asked_by(recipe))


def asked_by(recipe: str) -> tuple[Config, Inputs]:
    config = config_of(recipe)
    ahead = replace(config.fleet.aws, block_hours=20.0 if config.fleet.backend == "ec2" else None)
    plans = replace(
        config.fleet.sagemaker, plan_hours=20.0 if config.fleet.backend == "sagemaker" else None
    )
    config = replace(
        config, fleet=replace(config.fleet, secrets=("HF_TOKEN",), aws=ahead, sagemaker=plans)
    )
    return config, replace(
        INPUTS,
        scheduler={"ec2": "", "slurm": CLUSTER}.get(config.fleet.backend, config.fleet.backend),
    )


@pytest.mark.parametrize("recipe", SOME)
def test_the_policy_that_a_plan_writes_is_one_that_iam_takes_and_each_statement_counts(
    recipe: str,
) -> None:
    whole = written_for(recipe)["Statement"]
    asked = [of_statement(statement) for statement in whole]
    without = [
        (policy_of(whole[:number] + whole[number + 1 :]), one) for number, one in enumerate(asked)
    ]
    with_all, with_less = (
        judged_each(cases) for cases in ([(policy_of(whole), one) for one in asked], without)
    )
    assert not [
        statement
        for statement, said in zip(whole, with_all, strict=True)
        if set(said) != {"Allowed"}
    ]
    assert not [
        statement for statement, said in zip(whole, with_less, strict=True) if "Allowed" in said
    ], "it is there twice"


def of_statement(statement: dict[str, Any]) -> list[Asked]:
    """What a statement allows, on the first of its resources."""
    resource = statement["Resource"][0]
    context = {"iam:AWSServiceName": resource.split("/")[2]} if "Condition" in statement else {}
    where = resource if resource == "*" else resource.replace("*", "x")
    return [Asked(action, where, context) for action in statement["Action"]]
