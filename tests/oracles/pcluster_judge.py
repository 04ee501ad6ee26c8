"""Runs in an environment of its own that has aws-parallelcluster: `python pcluster_judge.py FOLDER` judges every .yaml in it.

Prints a JSON object: file → what ParallelCluster has against it. Its schema loads the file, and each validator that asks AWS nothing
is executed as pcluster itself does it; what would ask AWS is passed over, and counted under "".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    AWS_DEFAULT_REGION="us-east-1",
    AWS_ACCESS_KEY_ID="x",
    AWS_SECRET_ACCESS_KEY="x",
    AWS_MAX_ATTEMPTS="1",
)

import yaml
from marshmallow import ValidationError
from pcluster.aws.aws_api import AWSApi
from pcluster.config.cluster_config import SharedFsxLustre
from pcluster.config.common import Resource
from pcluster.schemas.cluster_schema import ClusterSchema
from pcluster.validators.cluster_validators import ManagedFsxMultiAzValidator
from pcluster.validators.common import AsyncValidator


class Offline(Exception):
    """AWS would be asked."""


class Nobody:
    """AWS, whom nobody asks: but for the reservations that the file names, which the file's own class wants before anything else."""

    @property
    def ec2(self) -> Nobody:
        return self

    def describe_capacity_reservations(self, ids: object) -> list[object]:
        return []

    def __getattr__(self, name: str) -> Any:
        raise Offline(name)


AWSApi.instance = staticmethod(Nobody)


def resources(one: Resource) -> list[Resource]:
    return [one, *(other for child in one._nested_resources() for other in resources(child))]


def judge(path: Path) -> tuple[list[str], int, int]:
    """What is wrong; validators that were executed, and that would ask AWS."""
    try:
        cluster = ClusterSchema(cluster_name="t").load(yaml.safe_load(path.read_text()))
    except ValidationError as error:
        return [f"schema: {error.messages}"], 0, 0
    wrong, ran, asked = [], 0, 0
    # Its class asks AWS before it comes to this validator.
    made = sum(
        not one.is_unmanaged
        for one in cluster.shared_storage or ()
        if isinstance(one, SharedFsxLustre)
    )
    found = ManagedFsxMultiAzValidator().execute(cluster.compute_subnet_ids, {"fsx": made})
    wrong += [f"ManagedFsxMultiAzValidator: {result.message}" for result in found]
    for one in resources(cluster):
        one._validators.clear()
        try:
            one._register_validators(None)
        except Exception:  # it asks AWS on the way: those that it came to are executed
            asked += 1
        for kind, words in one._validators:
            if issubclass(kind, AsyncValidator):
                asked += 1
                continue
            try:
                found = kind().execute(**words)
            except Exception:
                asked += 1
                continue
            if any(
                "endpoint URL" in result.message for result in found or ()
            ):  # AWS again, by a way of its own
                asked += 1
                continue
            ran += 1
            wrong += [
                f"{kind.__name__}: {result.message}"
                for result in found or ()
                if result.level.name == "ERROR"
            ]
    return wrong, ran, asked


if __name__ == "__main__":
    told: dict[str, Any] = {"": {"ran": 0, "asked": 0}}
    for path in sorted(Path(sys.argv[1]).glob("*.yaml")):
        told[path.name], ran, asked = judge(path)
        told[""]["ran"] += ran
        told[""]["asked"] += asked
    print(json.dumps(told))
